"""A small transformer learns with attention, forward and backward, by each of some recipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import eight_bit_tensors
import tandem
import torch
from eight_bit_gradients import Attention, Recipe
from eight_bit_tables import spikes
from eight_bit_tensors import heads_in_rows
from loss_curves import Attend, Shape, Transformer
from torch import Tensor, nn

SHAPE = Shape(width=128, heads=2, heads_kv=1, rotary=True)
BATCH, EVERY = 8, 50  # texts of a step; steps between two looks at the held-out texts
CHUNK = 256  # rows whose P and dS are in memory: keys that none of them sees are not computed


@dataclass(frozen=True)
class Task:
    """What is learned. Linear layers and attention's q, k and v are in f32, on a GPU in bf16."""

    steps: int = 300
    shape: Shape = SHAPE
    text: str = "manual"  #: or a package, whose Python files are read
    device: str = "cpu"

    def rate(self, step: int) -> float:
        """Rises in a tenth of the steps, and falls in the second half; a wider model has a lower one."""
        top = 1e-3 * (SHAPE.width / self.shape.width) ** 0.5
        return top * min(1.0, 10 * step / self.steps, max(0.1, 2 * (1 - step / self.steps)))

    def texts(self) -> tuple[Tensor, Tensor]:
        """Bytes to learn from, and bytes held out."""
        named = self.text
        return eight_bit_tensors.manual() if named == "manual" else eight_bit_tensors.sources(named)


class ByRecipe(torch.autograd.Function):
    """Attention of (batch, tokens, heads, channels) in f32; sums are f32 ones, too."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, window: tuple[int, int]) -> Tensor:
        heads, heads_kv = q.shape[2], k.shape[2]
        ctx.heads = heads
        ctx.attention = Attention(*(heads_in_rows(x, heads_kv) for x in (q, k, v)), recipe, window)
        return tokens_first(ctx.attention.out(CHUNK), heads)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        attention = ctx.attention
        heads_kv = attention.k.shape[1]
        dq, dk, dv = attention.gradients(heads_in_rows(dout, heads_kv), CHUNK)
        return tokens_first(dq, ctx.heads), tokens_first(dk, heads_kv), tokens_first(dv, heads_kv), None, None


def tokens_first(x: Tensor, heads: int) -> Tensor:
    """(batch, KV heads, rows, channels) as (batch, tokens, heads, channels): undoes heads_in_rows."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2).transpose(1, 2)


def by_recipe(recipe: Recipe) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        on_gpu = q.device.type == "cuda"
        with torch.autocast(q.device.type, enabled=False):  # sums of attention are f32 ones
            read = [(x.bfloat16() if on_gpu else x).float() for x in (q, k, v)]
            out: Tensor = ByRecipe.apply(*read, recipe, (window, 0))
        return out

    return attend


def by_kernels(precision: str) -> Attend:
    """Tandem's own call, "int8" forward and backward, or "bf16"."""
    options = {} if precision == "bf16" else {"precision": precision, "backward_precision": precision}

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        read = (x.bfloat16() for x in (q, k, v))
        return tandem.attention(*read, causal=True, window=(window, -1), **options).to(q.dtype)

    return attend


def learn(attend: Attend, seed: int, task: Task) -> dict[str, Any]:
    """Loss and gradient norm of every step, and the loss of held-out texts, the same for all seeds."""
    shape, device = task.shape, task.device

    def places(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(len(values) - shape.context - 1, (count, 1), generator=generator)

    def loss_at(starts: Tensor, values: Tensor) -> Tensor:
        batch = values[starts + torch.arange(shape.context + 1)].to(device).long()
        return model.loss(batch, attend, in_bf16=device == "cuda")

    torch.manual_seed(seed)
    model, (text, held_out) = Transformer(shape).to(device), task.texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate(1), weight_decay=0.1)
    batches = torch.Generator().manual_seed(seed)
    looks = places(held_out, 4 * BATCH, torch.Generator().manual_seed(0))
    losses, norms, held = [], [], []
    for step in range(1, task.steps + 1):
        optimizer.param_groups[0]["lr"] = task.rate(step)
        loss = loss_at(places(text, BATCH, batches), text)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        optimizer.step()
        losses.append(loss.detach())
        if step % EVERY == 0 or step == task.steps:
            with torch.no_grad():
                held.append(loss_at(looks, held_out))
    return {
        name: [round(x, 5) for x in torch.stack(values).tolist()]
        for name, values in (("losses", losses), ("norms", norms), ("held_out", held))
    }


def describe(task: Task) -> dict[str, Any]:
    """What a record says of a task."""
    parameters = sum(p.numel() for p in Transformer(task.shape).parameters())
    text = len(task.texts()[0])
    return {**asdict(task.shape), "parameters": parameters, "text": task.text, "bytes": text, "batch": BATCH}


def measure(
    attentions: dict[str, Attend],
    seeds: int,
    task: Task,
    budget: float,
    kept: list[dict[str, Any]],
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Trains by each of `attentions` from each seed, but for `kept` runs. `keep` gets all runs after each.
    A run that would end after `budget` seconds, as the longest so far took, is not begun. `exact` comes
    last."""
    begin, longest = time.perf_counter(), 0.0
    pairs = [(seed, name) for seed in range(seeds) for name in attentions if name != "exact"]
    pairs += [(seed, "exact") for seed in range(seeds) if "exact" in attentions]
    runs = list(kept)
    for seed, name in pairs:
        if any((run["seed"], run["recipe"]) == (seed, name) for run in kept):
            continue
        start = time.perf_counter()
        if start - begin + longest > budget:
            print(f"{name}, seed {seed}: left out, {start - begin:.0f} s are over", file=sys.stderr)
            continue
        learned = learn(attentions[name], seed, task)
        seconds = time.perf_counter() - start
        longest = max(longest, seconds)
        runs.append({"recipe": name, "seed": seed, "seconds": round(seconds, 1), **learned})
        keep(runs)
        print(
            f"{name}, seed {seed}: held-out loss {learned['held_out'][-1]:.4f}, "
            f"{spikes(learned['norms'])} spikes, {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
