"""How a call over ranks begins: what it asks for is judged, compared with the other ranks, and planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tandem
from tandem import _call, _derivatives
from tandem._errors import InvalidArgumentError
from tandem.distributed import _agree, _cost, _parts
from tandem.distributed._comm import Ranks
from tandem.distributed._job import Job
from tandem.distributed._layout import Layout
from tandem.distributed._machine import Links, Shape
from tandem.distributed._mask import Mask


@dataclass(frozen=True)
class Asked:
    """The options of `context_parallel_attention`, as the caller gave them."""

    layout: Any
    cu_seqlens: Any
    causal: Any
    window: Any
    softcap: Any
    scale: Any
    deterministic: Any
    strategy: Any
    check: Any


def begin(
    asked: Asked, ranks: Ranks, q: Any, k: Any, v: Any, sink: Any, followed: bool | None = None
) -> tuple[Job, str]:
    """The job of a call and its strategy; an error on every rank where one of them has passed something wrong
    or two disagree. ``followed``: whether gradients are wanted, where the tensors don't tell."""
    device = getattr(q, "device", torch.device("cpu"))
    hosts = ranks.hosts(device)  # before anything can be wrong: the other ranks ask too
    error: Exception | None = None
    same: dict[str, Any] = {"call": "context_parallel_attention"}
    try:
        if followed is None:
            followed = _derivatives.is_recorded(q, k, v, sink)
        options = _options(asked)
        same |= _judge(ranks, asked, options, q, k, v, sink, followed)
        _judge_lengths(asked.layout, asked.cu_seqlens)
        mask = Mask.of(same["causal"], same["window"])
        links = Links.of(device.type, hosts, ranks.levels[1].size if ranks.levels else 0)
        chosen = _cost.choose(asked.layout, mask, _shape(q, k, v, asked.layout), links, asked.strategy)
        same["strategy chosen"] = chosen
    except Exception as found:  # whatever it is, the other ranks wait to be told
        error = found
    if asked.check and ranks.size > 1:
        _agree.agree(ranks, same, error, device)
    if error is not None:
        raise error
    return Job(ranks, asked.layout, mask, options, links.far), chosen


def _options(asked: Asked) -> _parts.Options:
    deterministic = _call.flag("deterministic", asked.deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return _parts.Options(asked.scale, asked.softcap, deterministic)


def _judge(
    ranks: Ranks, asked: Asked, options: _parts.Options, q: Any, k: Any, v: Any, sink: Any, followed: bool
) -> dict[str, Any]:
    """What has to be the same on every rank; an error where this rank's arguments break a rule."""
    layout = asked.layout
    judge_layout(layout, ranks)
    for name, t in (("q", q), ("k", k), ("v", v)):
        judge_tensor(name, t, ranks)
        if t.ndim != (3 if layout.packed else 4):
            shape = "(rows, heads, head_dim)" if layout.packed else "(batch, rows, heads, head_dim)"
            raise InvalidArgumentError(f"{name} has shape {tuple(t.shape)}; the layout's tensors are {shape}")
        judge_rows(name, t, layout, ranks, layout.dim)
    same = {
        "scale": options.scale,
        "softcap": options.softcap,
        "deterministic": options.deterministic,
        "causal": _call.flag("causal", asked.causal),
        "window": _call.pair("window", asked.window),
    }
    four = [t.unsqueeze(0) if layout.packed else t for t in _derivatives.autocast(q, k, v)]
    _judge_call(layout, four, sink, followed, same)
    return {
        **same,
        "dtype": str(four[0].dtype).removeprefix("torch."),
        "device": q.device.type,
        "shape of q but rows": without_rows(q, layout.dim),
        "shape of k but rows": without_rows(k, layout.dim),
        "shape of v but rows": without_rows(v, layout.dim),
        "sink": sink is not None,
        "whether gradients are wanted": followed,
        "layout": f"{layout.kind} {layout.digest}",
        "strategy": asked.strategy,
    }


def _judge_call(
    layout: Layout, tensors: list[Tensor], sink: Any, followed: bool, options: dict[str, Any]
) -> None:
    """What a call of one device would raise, of this rank's rows alone. A layout remembers what was right: it
    serves many layers and the steps that follow."""
    like = [
        (type(t), t.dtype, t.device, t.shape, t.stride()) if isinstance(t, Tensor) else t
        for t in (*tensors, sink)
    ]
    key = ("judged", followed, *options.values(), *like)
    if key not in layout.judged:
        tandem.explain(*tensors, sink=sink, backward=followed, **options)
        layout.judged.add(key)


def judge_layout(layout: Any, ranks: Ranks) -> None:
    """An error where it is none, or one of other ranks."""
    if not isinstance(layout, Layout):
        raise InvalidArgumentError(f"layout is {layout!r}; make one with tandem.distributed.Layout")
    if layout.ranks != ranks.size:
        raise InvalidArgumentError(f"layout is for {layout.ranks} ranks, but the group has {ranks.size}")


def judge_tensor(name: str, t: Any, ranks: Ranks) -> None:
    """An error where it is none, or is not where the group sends from."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}; pass a torch.Tensor")
    if t.device.type not in ranks.devices:
        raise InvalidArgumentError(
            f"{name} is on {t.device}, but the group sends from {', '.join(sorted(ranks.devices))}; move it, "
            "or make a group of another backend"
        )


def judge_rows(name: str, t: Tensor, layout: Layout, ranks: Ranks, dim: int) -> None:
    """An error where it has not the rows that the layout gives this rank."""
    rows = layout.rows(ranks.rank)
    if t.shape[dim] != rows:
        raise InvalidArgumentError(
            f"{name} has {t.shape[dim]} rows, but the layout gives rank {ranks.rank} {rows}; pass "
            "layout.shard of the whole tensor"
        )


def _judge_lengths(layout: Layout, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is None:
        return
    lengths = tuple(cu_seqlens.diff().tolist())
    if lengths != layout.lengths or not layout.packed:
        raise InvalidArgumentError(
            f"cu_seqlens has sequences of {lengths} rows, but the layout of {layout.lengths}; make the "
            "layout of cu_seqlens.diff()"
        )


def without_rows(t: Tensor, dim: int) -> tuple[int, ...]:
    """The shape without the dimension that rows are in."""
    shape = list(t.shape)
    del shape[dim]
    return tuple(shape)


def _shape(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Shape:
    batch = 1 if layout.packed else q.shape[0]
    sizes = (batch, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.element_size())
    return Shape(*sizes)
