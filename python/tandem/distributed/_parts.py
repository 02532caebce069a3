"""Attention and its gradients between the rows of a rank and keys that are at hand, added up in f32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays, _call, _core, _run
from tandem.distributed._calls import Group
from tandem.distributed._pairs import Pairs


@dataclass(frozen=True)
class Options:
    """What all calls of an attention share.

    Attributes:
      call: the options, as of whole sequences.
      pairs: functions, masks and biases.
      heads: query heads of the whole attention.
      first_head: which of these is the first one of the tensors at hand.
    """

    call: _call.Call
    pairs: Pairs | None = None
    heads: int = 0
    first_head: int = 0

    def of(self, group: Group, q: Tensor) -> _call.Call:
        """The options of a group's call, whose window is the mask between its rows."""
        call = replace(self.call, causal=False, window=(group.left, group.right))
        if self.pairs is not None:
            call.functions = self.pairs.of_call(group, self.first_head, q.shape[2], q.device)
        if call.dropout_p != 0:
            call.dropout_places = group.dropout_places(q.device, q.shape[0], self.heads, self.first_head)
        return call

    def at(self, head: int) -> Options:
        """The options of tensors that begin with this one of these query heads."""
        return self if head == 0 else replace(self, first_head=self.first_head + head)


@dataclass
class Rows:
    """What the calls of a rank's queries have given so far."""

    out: Tensor  #: (batch, rows, heads_q, head_dim_v)
    lse: Tensor  #: (batch, heads_q, rows)

    @classmethod
    def of(cls, q: Tensor, head_dim_v: int, exact: bool) -> Rows:
        """Before the first call: out 0 and lse -inf, or anything where calls are final (`is_exact`)."""
        batch, rows, heads, _ = q.shape
        if exact:
            out = q.new_empty((batch, rows, heads, head_dim_v))
            return cls(out, q.new_empty((batch, heads, rows), dtype=torch.float32))
        out = q.new_zeros((batch, rows, heads, head_dim_v), dtype=torch.float32)
        return cls(out, out.new_full((batch, heads, rows), -torch.inf))


def gradient_of(q: Tensor, exact: bool) -> Tensor:
    """dq before the first call."""
    return torch.empty_like(q) if exact else torch.zeros_like(q, dtype=torch.float32)


def is_exact(groups: Sequence[Group], rows: int) -> bool:
    """Whether each of so many queries has one call, whose results are final."""
    covered = sum(end - begin for begin, end in (group.queries for group in groups))
    return covered == rows and all(group.new_queries for group in groups)


def _like(x: Tensor) -> Tensor:
    """Uninitialised f32 with the strides of ``x``: what is merged has one layout on a GPU."""
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.float32, device=x.device)


def forward(
    group: Group, options: Options, q: Tensor, k: Tensor, v: Tensor, rows: Rows, sink: Tensor | None = None
) -> None:
    """Adds a call to ``rows``. The sink joins calls that are final (`is_exact`)."""
    begin, end = group.queries
    out, lse = rows.out[:, begin:end], rows.lse[:, :, begin:end]
    in_place = group.new_queries
    # On a GPU all that is merged has one layout. That of some heads of the rows would take the memory of all.
    like_rows = not in_place and out[:1].is_contiguous()
    part = out if in_place else _like(out) if like_rows else out.new_empty(out.shape, dtype=torch.float32)
    part_lse = lse if in_place else _like(lse)
    tensors, metadata = _of_group(group, (q,), (k, v))
    arrays = (*tensors, sink, *metadata, *_flat(group, part, part_lse), None)
    call = options.of(group, q)  # it holds what functions read
    _core.forward(arrays, call.options(), _stream(q))
    if not in_place:
        # A few rows at a time: what is merged takes memory of its own.
        size = max(1, -(-out.shape[1] // 32))
        both = zip(torch.split(out, size, 1), torch.split(part, size, 1), strict=True)
        lses = zip(torch.split(lse, size, 2), torch.split(part_lse, size, 2), strict=True)
        for outs_of_rows, lses_of_rows in zip(both, lses, strict=True):
            parts = outs_of_rows if like_rows else [x.contiguous() for x in outs_of_rows]
            whole, whole_lse = _run.merge(list(parts), list(lses_of_rows), None, 0)
            outs_of_rows[0].copy_(whole)
            lses_of_rows[0].copy_(whole_lse)


def add_sink(rows: Rows, sink: Tensor) -> None:
    """Lets the sink, a logit without a value, join the softmax of every row. Once for each row."""
    logit = sink.to(torch.float32)[None, :, None].expand_as(rows.lse)
    weight = torch.sigmoid(rows.lse - logit).masked_fill_(rows.lse == -torch.inf, 0.0)
    rows.out.mul_(weight.transpose(1, 2).unsqueeze(-1))
    rows.lse.copy_(torch.logaddexp(rows.lse, logit))


@dataclass
class Saved:
    """What a backward call of any part of the keys takes of the whole rows."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    def of_heads(self, heads: slice) -> Saved:
        """What a backward call takes of these query heads."""
        q, out, dout = (t[:, :, heads] for t in (self.q, self.out, self.dout))
        return Saved(q, out, self.lse[:, heads], dout, None if self.dlse is None else self.dlse[:, heads])


def backward(
    group: Group,
    options: Options,
    saved: Saved,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Adds the gradients of a call to dq, dk and dv. ``saved.out`` and ``saved.lse`` are of the whole rows,
    so that the probabilities and their sums over all keys are those of the whole."""
    places = (dq[:, slice(*group.queries)], dk[:, slice(*group.keys)], dv[:, slice(*group.keys)])
    new = (group.new_queries, group.new_keys, group.new_keys)
    # A call adds in f32 alone.
    parts = [
        place if first or place.dtype == torch.float32 else place.new_empty(place.shape, dtype=torch.float32)
        for place, first in zip(places, new, strict=True)
    ]
    of_queries = (saved.q, saved.out, saved.dout)
    (q, out, dout, k, v), metadata = _of_group(group, of_queries, (k, v))
    lse, dlse = (
        None if t is None else _flat_one(group, t[:, :, slice(*group.queries)])
        for t in (saved.lse, saved.dlse)
    )
    arrays = (q, k, v, None, *metadata, out, lse, dout, dlse, None, *_flat(group, *parts), None, None)
    call = options.of(group, saved.q)
    plain, pairs, made = call.options(), options.pairs, []
    adds = [place is part and not first for place, part, first in zip(places, parts, new, strict=True)]
    plain.set_accumulate(*adds[:2])
    if pairs is not None and pairs.differentiated:
        made = pairs.gradients_of(call.functions)
        call.functions.set_gradients(plain, made)
    _core.backward(arrays, plain, _stream(saved.q))
    if pairs is not None and made:
        pairs.add(made, group, options.first_head, saved.q.shape[2])
    for place, part in zip(places, parts, strict=True):
        if part is not place:
            place.add_(part)


def sink_gradient(sink: Tensor, saved: Saved) -> Tensor:
    """That of these rows: a sink has the probability exp(sink - lse) and no value."""
    delta = (saved.out.double() * saved.dout.double()).sum(-1).transpose(1, 2)
    if saved.dlse is not None:
        delta = delta - saved.dlse.double()
    logit = sink.double()[None, :, None]
    return (torch.exp(logit - saved.lse.double()) * -delta).sum((0, 2)).to(sink.dtype)


def _of_group(
    group: Group, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """The group's rows of these tensors as its call takes them, and the call's metadata."""
    slices = [t[:, slice(*group.queries)] for t in of_queries] + [t[:, slice(*group.keys)] for t in of_keys]
    if len(group.pairs) == 1:
        return tuple(slices), (None,) * len(_call.METADATA)
    return _flat(group, *slices), (
        *group.cu_seqlens(of_queries[0].device),
        *(None,) * (len(_call.METADATA) - 2),
    )


def _flat(group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(_flat_one(group, t) for t in tensors)


def _flat_one(group: Group, t: Tensor) -> Tensor:
    """A call of several pairs is of packed tensors."""
    return t if len(group.pairs) == 1 else t[0]


def _stream(q: Tensor) -> int:
    return _arrays.library_of("q", q).stream(q)
