"""A small transformer learns the demonstration's text twice: on Tandem and on PyTorch's math attention.

    python bench loss-curves [--device cuda] [--steps 400] [--json FILE] [--plot FILE]
    python bench loss-curves --from FILE --plot FILE

Both start from the same weights and read the same batches, for two seeds; what is compared is the distance of
the two curves of one seed, which should be less than that of one implementation's curves of two seeds. The
exit status is 1 if it is not. Causal, grouped queries, a window in every other layer, bf16 on a GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness
import tandem
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CONTEXT, BATCH = 256, 16
SMOOTH = 20  # steps that a point of a compared curve is the mean of


@dataclass(frozen=True)
class Shape:
    width: int = 256
    heads: int = 4
    heads_kv: int = 2
    layers: int = 4
    context: int = CONTEXT
    window: int = 63  # of every other layer
    qk_norm: bool = False  # RMSNorm of each query and key, with learned weights
    rotary: bool = False  # rotary embeddings of queries and keys in place of learned positions


Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def on_tandem(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return tandem.attention(q, k, v, causal=True, window=(window, -1))


def on_math(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    rows = torch.arange(q.shape[1], device=q.device)
    distance = rows[:, None] - rows[None, :]
    mask = (distance >= 0) & ((distance <= window) | (window < 0))
    group = q.shape[2] // k.shape[2]
    heads_first = (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    with sdpa_kernel(SDPBackend.MATH):
        out = nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in heads_first), attn_mask=mask
        )
    return out.transpose(1, 2)


def rotary(x: Tensor) -> Tensor:
    """Turns the pairs of channels (i, i + half) of (batch, tokens, heads, channels) by the token's angle."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = (torch.arange(x.shape[1], device=x.device)[:, None] * rate)[:, None]
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Block(nn.Module):
    def __init__(self, shape: Shape, window: int) -> None:
        super().__init__()
        self.shape, self.window, width = shape, window, shape.width
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, width + 2 * width * shape.heads_kv // shape.heads)
        self.out = nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        if shape.qk_norm:
            self.qk_norms = nn.ModuleList(nn.RMSNorm(width // shape.heads) for _ in range(2))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        heads, heads_kv = self.shape.heads, self.shape.heads_kv
        every = self.qkv(self.norms[0](x)).unflatten(-1, (heads + 2 * heads_kv, -1))
        q, k, v = every.split([heads, heads_kv, heads_kv], dim=2)
        if self.shape.qk_norm:
            q, k = self.qk_norms[0](q), self.qk_norms[1](k)
        if self.shape.rotary:
            q, k = rotary(q), rotary(k)
        x = x + self.out(attend(q, k, v, self.window).flatten(2))
        return x + self.wide(self.norms[1](x))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.bytes, self.places = (nn.Embedding(n, shape.width) for n in (256, shape.context))
        self.shape = shape
        self.blocks = nn.ModuleList(
            Block(shape, shape.window if layer % 2 else -1) for layer in range(shape.layers)
        )
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, 256)

    def forward(self, text: Tensor, attend: Attend) -> Tensor:
        x = self.bytes(text)
        if not self.shape.rotary:
            x = x + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))

    def loss(self, text: Tensor, attend: Attend, in_bf16: bool) -> Tensor:
        """The mean loss of predicting each byte of (batch, tokens) but the first."""
        with torch.autocast(text.device.type, torch.bfloat16, enabled=in_bf16):
            logits = self(text[:, :-1], attend)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())


def train(attend: Attend, seed: int, steps: int, device: str) -> list[float]:
    """The loss at every step."""
    torch.manual_seed(seed)
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    text = torch.frombuffer(
        bytearray((harness.ROOT / "data" / "alice.txt").read_bytes()), dtype=torch.uint8
    ).long()
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
        batch = text[starts + torch.arange(CONTEXT + 1)].to(device)
        loss = model.loss(batch, attend, in_bf16=device == "cuda")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def smooth(losses: list[float]) -> Tensor:
    return torch.tensor(losses, dtype=torch.float64).unfold(0, min(SMOOTH, len(losses)), 1).mean(-1)


def distance(a: list[float], b: list[float]) -> float:
    """How far two smoothed curves are apart, in the mean over the steps."""
    return (smooth(a) - smooth(b)).abs().mean().item()


def measure(device: str, steps: int) -> dict:
    runs, seconds = {}, {}
    for name, attend in (("tandem", on_tandem), ("math", on_math)):
        start = time.perf_counter()
        runs[name] = [train(attend, seed, steps, device) for seed in (0, 1)]
        seconds[name] = time.perf_counter() - start
    return {**harness.origin(harness.device_name(device)), "seconds": seconds, "losses": runs}


def report(document: dict) -> bool:
    runs = document["losses"]
    implementations = [distance(a, b) for a, b in zip(runs["tandem"], runs["math"], strict=True)]
    seeds = [distance(*runs[name]) for name in ("tandem", "math")]
    print(f"{document['device']}, PyTorch {document['torch']}, commit {document['commit']}")
    print(f"{len(runs['math'][0])} steps; mean distance of curves smoothed over {SMOOTH} steps, in nats:")
    for seed, value in enumerate(implementations):
        print(f"  Tandem and math, seed {seed}: {value:.5f}")
    for name, value in zip(("Tandem", "math"), seeds, strict=True):
        print(f"  seeds 0 and 1, {name}: {value:.5f}")
    for name, curves in runs.items():
        print(f"  last loss, {name}: " + ", ".join(f"{smooth(curve)[-1]:.4f}" for curve in curves))
    return max(implementations) < min(seeds)


def plot(document: dict, path: Path) -> None:
    figure, axes = harness.pyplot().subplots(figsize=(7, 4))
    for name, style in (("math", "-"), ("tandem", ":")):
        for seed, curve in enumerate(document["losses"][name]):
            points = smooth(curve)
            axes.plot(
                range(len(curve) - len(points), len(curve)),
                points,
                style,
                color=f"C{seed}",
                linewidth=3 if name == "tandem" else 1.2,
                label=f"{'Tandem' if name == 'tandem' else 'PyTorch, math'}, seed {seed}",
            )
    axes.set(xlabel="step", ylabel=f"loss, nats a byte (mean of {SMOOTH} steps)", title=document["device"])
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> int:
    parser = harness.parser(__doc__, "json", "plot", "from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    document = json.loads(args.source.read_text()) if args.source else measure(args.device, args.steps)
    agree = report(document)
    harness.write_json(document, args.json)
    if args.plot:
        plot(document, args.plot)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
