"""How a call over ranks begins: what it asks for is validated, compared with the other ranks, and planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tandem import _call, _plans
from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.distributed import _agree, _cost, _parts
from tandem.distributed._calls import Group
from tandem.distributed._comm import Ranks
from tandem.distributed._job import Job
from tandem.distributed._layout import Layout
from tandem.distributed._machine import Links, Shape
from tandem.distributed._mask import Mask
from tandem.distributed._pairs import Pairs
from tandem.functions import _functions
from tandem.torch import _derivatives, _with_functions


@dataclass(frozen=True)
class Asked:
    """What `context_parallel_attention` is asked for, as the caller gave it."""

    call: _call.Call  #: its options; ``check`` tells whether ranks are compared
    layout: Any
    cu_seqlens: Any
    strategy: Any
    functions: tuple[Any, ...] = (None,) * len(_functions.NAMES)  #: in their order

    @property
    def asks_pairs(self) -> Any:
        """Whether something is asked of every pair of query and key."""
        return self.has_functions or self.call.dropout_p != 0

    @property
    def has_functions(self) -> bool:
        return any(x is not None for x in self.functions)


def begin(
    asked: Asked, ranks: Ranks, q: Any, k: Any, v: Any, sink: Any, followed: bool | None = None
) -> tuple[Job, str]:
    """The job of a call and its strategy; an error on every rank where one of them has passed something wrong
    or two disagree. ``followed``: whether gradients are wanted, where the tensors don't tell."""
    device = getattr(q, "device", torch.device("cpu"))
    hosts = ranks.hosts()  # before anything can be wrong: the other ranks ask too
    with _agree.agreed(ranks, "context_parallel_attention", asked.call.check) as same:
        same |= _validate(ranks, asked, q, k, v, sink)
        four = [t.unsqueeze(0) if asked.layout.packed else t for t in _derivatives.autocast(q, k, v)]
        options = _options(asked, four[0])
        read = () if options.pairs is None else options.pairs.captured
        if followed is None:
            followed = _derivatives.is_recorded(q, k, v, sink, *read)
        same |= _agree.options_of(options.call) | {"whether gradients are wanted": followed}
        same |= {} if options.pairs is None else options.pairs.told()
        _validate_call(asked.layout, four, sink, followed, options)
        _validate_lengths(asked.layout, asked.cu_seqlens)
        mask = Mask.of(options.call.causal, options.call.window)
        links = Links.of(device.type, hosts, ranks.levels[1].size if ranks.levels else 0)
        chosen = _cost.choose(asked.layout, mask, Shape.of(*four), links, asked.strategy)
        same["strategy chosen"] = chosen
    return Job(ranks, asked.layout, mask, _seeded(options, ranks), links.far), chosen


def settled(call: _call.Call) -> _call.Call:
    """The options of the calls that make up this one: of Python's own types, deterministic where PyTorch
    wants it, and without a check, which is for the metadata of packed tensors here."""
    call = call.plain()
    call.check = False
    call.deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return call


def _options(asked: Asked, q: Tensor) -> _parts.Options:
    call, pairs, layout, heads = settled(asked.call), None, asked.layout, q.shape[2]
    if asked.has_functions:
        batch = len(layout.lengths) if layout.packed else q.shape[0]
        pairs = Pairs.of(asked.functions, q, (batch, heads, layout.total, layout.total), layout.packed)
    return _parts.Options(call, pairs, heads)


def _seeded(options: _parts.Options, ranks: Ranks) -> _parts.Options:
    """The options with a seed of dropout, where there is none that of the first rank: one more exchange."""
    if options.call.dropout_p == 0 or options.call.dropout_seed is not None:
        return options
    own = int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu"))
    seed = ranks.gather_small([own])[0][0]
    return replace(options, call=replace(options.call, dropout_seed=seed))


def _validate(ranks: Ranks, asked: Asked, q: Any, k: Any, v: Any, sink: Any) -> dict[str, Any]:
    """What has to be the same on every rank; an error where this rank's arguments break a rule."""
    layout = asked.layout
    validate_layout(layout, ranks)
    for name, t in (("q", q), ("k", k), ("v", v)):
        validate_tensor(name, t, ranks)
        if t.ndim != (3 if layout.packed else 4):
            shape = "(rows, heads, head_dim)" if layout.packed else "(batch, rows, heads, head_dim)"
            raise InvalidArgumentError(f"{name} has shape {tuple(t.shape)}; the layout's tensors are {shape}")
        validate_rows(name, t, layout, ranks, layout.dim)
    return {
        "dtype": str(_derivatives.autocast(q)[0].dtype).removeprefix("torch."),
        "device": q.device.type,
        "shape of q but rows": without_rows(q, layout.dim),
        "shape of k but rows": without_rows(k, layout.dim),
        "shape of v but rows": without_rows(v, layout.dim),
        "sink": sink is not None,
        "layout": f"{layout.kind} {layout.digest}",
        "strategy": asked.strategy,
    }


def _validate_call(
    layout: Layout, tensors: list[Tensor], sink: Any, followed: bool, options: _parts.Options
) -> None:
    """What a call of one device would raise, of this rank's rows alone. A layout remembers what was right: it
    serves many layers and the steps that follow."""
    q, k, v = tensors
    call, pairs, key = options.call, options.pairs, None
    if pairs is None and call.dropout_p == 0:
        like = [
            (type(t), t.dtype, t.device, t.shape, t.stride()) if isinstance(t, Tensor) else t
            for t in (*tensors, sink)
        ]
        key = (followed, *(getattr(call, name) for name in _call.OPERATOR), *like)
        if key in layout.validated:
            return
    else:
        read: Sequence[Tensor] = ()
        if pairs is not None:
            of_rows = Group.of_rows(max(1, q.shape[1]), max(1, q.shape[0]))  # an array has one row at least
            call = replace(call, functions=pairs.of_call(of_rows, 0, q.shape[2], q.device))
            read = pairs.captured
        _with_functions.validate_call(call, q, k, v, sink, read)
    _plans.check(call, q, k, v, sink, backward=followed)
    if key is not None:
        layout.validated.add(key)


def validate_layout(layout: Any, ranks: Ranks) -> None:
    """An error where it is none, or one of other ranks."""
    if not isinstance(layout, Layout):
        raise InvalidArgumentError(f"layout is {layout!r}; make one with tandem.distributed.Layout")
    if layout.ranks != ranks.size:
        raise InvalidArgumentError(f"layout is for {layout.ranks} ranks, but the group has {ranks.size}")


def validate_tensor(name: str, t: Any, ranks: Ranks) -> None:
    """An error where it is none, or is not where the group sends from."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}; pass a torch.Tensor")
    if t.is_nested:
        raise InvalidArgumentError(
            f"{name} is a nested tensor; pass its values, with a layout of its lengths"
        )
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            f"{name} is under a transform of torch.func, which calls over ranks do not follow; pass whole "
            "batches in place of vmap, and differentiate by torch.autograd"
        )
    if t.device.type not in ranks.devices:
        raise InvalidArgumentError(
            f"{name} is on {t.device}, but the group sends from {', '.join(sorted(ranks.devices))}; move it, "
            "or make a group of another backend"
        )


def validate_rows(name: str, t: Tensor, layout: Layout, ranks: Ranks, dim: int) -> None:
    """An error where it has not the rows that the layout gives this rank."""
    rows = layout.rows(ranks.rank)
    if t.shape[dim] != rows:
        raise InvalidArgumentError(
            f"{name} has {t.shape[dim]} rows, but the layout gives rank {ranks.rank} {rows}; pass "
            "layout.shard of the whole tensor"
        )


def _validate_lengths(layout: Layout, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise InvalidArgumentError(f"cu_seqlens is a {type(cu_seqlens).__name__}; pass a torch.Tensor")
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
