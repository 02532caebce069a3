"""Q, K, V and dO for the study of gradients in 8 bits: random ones, and those of models trained here.

The models are those of bench/loss_curves.py. They learn the reference manual that Python ships
(`pydoc_data.topics`) byte by byte, in bf16 on this CPU; its last tenth is held out, and captured tensors are
those of held-out text.
"""

from __future__ import annotations

import functools
import importlib.util
import pydoc_data.topics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import harness
import loss_curves
import torch
from loss_curves import Shape, Transformer
from torch import Tensor


class Tensors(NamedTuple):
    """Of a layer, in f64 that bf16 has: (batch, KV heads, rows, channels)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    window: tuple[int, int]


MODELS = {
    "plain": Shape(rotary=True),
    "QK-norm": Shape(rotary=True, qk_norm=True),
}


@dataclass(frozen=True)
class Schedule:
    """`steps` of eight texts of `length`, then `long_steps` of one of `long_length`."""

    steps: int = 800
    length: int = 512
    long_steps: int = 100
    long_length: int = 8192
    captures: tuple[int, ...] = (50, 800)  # after which steps
    capture_length: int = 1024


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def manual() -> tuple[Tensor, Tensor]:
    """Bytes to learn from, and bytes held out."""
    topics = pydoc_data.topics.topics
    values = as_tensor("\n".join(topics[name] for name in sorted(topics)).encode()).long()
    cut = len(values) * 9 // 10
    return values[:cut], values[cut:]


@functools.cache
def sources(package: str) -> tuple[Tensor, Tensor]:
    """Bytes of an installed package's Python files: those to learn from, and of every tenth, held out."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"--text: there is no package {package}")
    (folder,) = map(Path, found.submodule_search_locations)
    texts = [path.read_bytes() for path in sorted(folder.rglob("*.py"))]
    return as_tensor(b"".join(t for i, t in enumerate(texts) if i % 10)), as_tensor(b"".join(texts[::10]))


def heads_in_rows(x: Tensor, heads_kv: int) -> Tensor:
    """(batch, tokens, heads, channels) as (batch, KV heads, rows, channels), rows of all heads of a group."""
    return x.unflatten(2, (heads_kv, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def on_tandem(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return loss_curves.on_tandem(q.bfloat16(), k.bfloat16(), v.bfloat16(), window)


def capture(model: Transformer, text: Tensor) -> list[Tensors]:
    """What each layer's attention and its backward pass get on this text."""
    found: list[list[Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        out = on_tandem(q, k, v, window)
        layer = [x.detach().bfloat16() for x in (q, k, v)]
        found.append(layer)
        out.register_hook(layer.append)
        windows.append(window)
        return out

    windows: list[int] = []
    model.loss(text, attend, in_bf16=True).backward()
    model.zero_grad()
    heads_kv = model.shape.heads_kv
    return [
        Tensors(*(heads_in_rows(x.double(), heads_kv) for x in layer), (window, 0))
        for layer, window in zip(found, windows, strict=True)
    ]


def trained(shape: Shape, schedule: Schedule) -> dict[str, list[Tensors]]:
    """The layers' tensors of a model, by when they were captured."""
    torch.manual_seed(0)
    model, (text, held_out) = Transformer(shape), manual()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    captured = {}
    for step in range(1, schedule.steps + schedule.long_steps + 1):
        short = step <= schedule.steps
        batch, length = (8, schedule.length) if short else (1, schedule.long_length)
        starts = torch.randint(len(text) - length - 1, (batch, 1))
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, step / 20)
        loss = model.loss(text[starts + torch.arange(length + 1)], on_tandem, in_bf16=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
        if step in schedule.captures:
            part = held_out[None, : schedule.capture_length + 1]
            captured[f"step {step}"] = capture(model, part)
    part = held_out[None, : schedule.long_length + 1]
    captured[f"{schedule.long_length} tokens"] = [first_head(layer) for layer in capture(model, part)]
    return captured


def first_head(layer: Tensors) -> Tensors:
    """The first KV head and its query heads."""
    return Tensors(*(x[:, :1].clone() for x in layer[:4]), layer.window)


def encoder() -> list[Tensors]:
    """Layers of a real sentence encoder, without a mask (data/README.md)."""
    header, data = harness.safetensors(harness.ROOT / "data" / "minilm.safetensors")
    names = ("q", "k", "v", "dout")
    layers, tokens, heads, head_dim = header["q"]["shape"]
    of = {
        name: torch.frombuffer(bytearray(data[slice(*header[name]["data_offsets"])]), dtype=torch.float16)
        .reshape(layers, 1, tokens, heads, head_dim)
        .bfloat16()
        .double()
        for name in names
    }
    return [
        Tensors(*(of[name][layer].transpose(1, 2).contiguous() for name in names), (-1, -1))
        for layer in range(layers)
    ]


def random(tokens: int) -> dict[str, list[Tensors]]:
    """Numbers as docs/results/low-precision-accuracy.md has them: normal, with outliers, with means."""
    torch.manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(1, 2, tokens, 64, dtype=torch.float64)

    def outliers() -> Tensor:
        return normal() + 10 * normal() * (torch.rand(1, 2, tokens, 64) < 0.001)

    def biased(deviation: float) -> Tensor:
        return normal() + deviation * torch.randn(1, 2, 1, 64)

    made = {
        "normal": [normal() for _ in range(4)],
        "outliers": [outliers() for _ in range(4)],
        "biased": [normal(), biased(8), biased(2), normal()],
    }
    return {name: [Tensors(*(x.bfloat16().double() for x in each), (-1, 0))] for name, each in made.items()}
