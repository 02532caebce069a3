"""A small transformer learns with attention, forward and backward, by each of some recipes."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from eight_bit_gradients import Attention, Recipe
from eight_bit_tables import spikes
from eight_bit_tensors import heads_in_rows, manual
from loss_curves import Shape, Transformer
from torch import Tensor, nn

SHAPE = Shape(width=128, heads=2, heads_kv=1, rotary=True)
BATCH, EVERY = 8, 50  # texts of a step; steps between two looks at the held-out text


class ByRecipe(torch.autograd.Function):
    """Attention of (batch, tokens, heads, channels) in f32; sums are f32 ones, too."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, window: tuple[int, int]) -> Tensor:
        heads, heads_kv = q.shape[2], k.shape[2]
        ctx.heads = heads
        ctx.attention = Attention(*(heads_in_rows(x, heads_kv) for x in (q, k, v)), recipe, window)
        return tokens_first(ctx.attention.out(q.shape[1]), heads)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        attention = ctx.attention
        heads_kv = attention.k.shape[1]
        dq, dk, dv = attention.gradients(heads_in_rows(dout, heads_kv), dout.shape[1])
        return tokens_first(dq, ctx.heads), tokens_first(dk, heads_kv), tokens_first(dv, heads_kv), None, None


def tokens_first(x: Tensor, heads: int) -> Tensor:
    """(batch, KV heads, rows, channels) as (batch, tokens, heads, channels): undoes heads_in_rows."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2).transpose(1, 2)


def learn(recipe: Recipe, seed: int, steps: int, shape: Shape = SHAPE, device: str = "cpu") -> dict[str, Any]:
    """Loss and gradient norm of every step, and the held-out text's loss. Linear layers are in f32, on a GPU
    in bf16."""

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        with torch.autocast(device, enabled=False):  # sums of attention are f32 ones
            out: Tensor = ByRecipe.apply(q.float(), k.float(), v.float(), recipe, (window, 0))
        return out

    def loss_at(starts: Tensor, values: Tensor) -> Tensor:
        batch = values[starts + torch.arange(shape.context + 1)].to(device)
        return model.loss(batch, attend, in_bf16=device == "cuda")

    torch.manual_seed(seed)
    model, (text, held_out) = Transformer(shape).to(device), manual()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batches = torch.Generator().manual_seed(seed)
    looks = torch.randint(len(held_out) - shape.context - 1, (4 * BATCH, 1), generator=batches)
    losses, norms, held = [], [], []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, step / 20, max(0.1, 2 * (1 - step / steps)))
        loss = loss_at(torch.randint(len(text) - shape.context - 1, (BATCH, 1), generator=batches), text)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        optimizer.step()
        losses.append(loss.detach())
        if step % EVERY == 0 or step == steps:
            with torch.no_grad():
                held.append(loss_at(looks, held_out))
    return {
        name: [round(x, 5) for x in torch.stack(values).tolist()]
        for name, values in (("losses", losses), ("norms", norms), ("held_out", held))
    }


def measure(
    recipes: dict[str, Recipe], seeds: int, steps: int, shape: Shape = SHAPE, device: str = "cpu"
) -> list[dict[str, Any]]:
    runs = []
    for seed in range(seeds):
        for name, recipe in recipes.items():
            start = time.perf_counter()
            run = {"recipe": name, "seed": seed, **learn(recipe, seed, steps, shape, device)}
            runs.append(run)
            print(
                f"{name}, seed {seed}: held-out loss {run['held_out'][-1]:.4f}, "
                f"{spikes(run['norms'])} spikes, {time.perf_counter() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return runs
