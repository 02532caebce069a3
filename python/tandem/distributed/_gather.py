"""The strategy "gather": each rank receives the keys and values that its queries see, and computes at once.

Some heads of K and V at a time: while attention over one chunk of heads runs, the next chunk is on its way.
Heads are problems of their own, so that nothing is merged where a rank's queries are consecutive rows or two
runs of them. A rank sends another the rows that it needs and no others: under a mask or with packed sequences
that is less than an all-gather sends. In the backward pass the gradients of K and V go back the same way, in
f32, and their owner adds them by ascending rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.distributed import _calls, _parts, _routes
from tandem.distributed._chunks import chunk_count, chunks
from tandem.distributed._comm import Ranks, Waiting
from tandem.distributed._job import Gradients, Job, Result, Saved, apart, finished, side_by_side
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._machine import Shape
from tandem.distributed._mask import Mask


@dataclass(frozen=True)
class Route:
    """What a rank sends and receives, the same for each chunk of heads."""

    groups: list[_calls.Group]
    exact: bool
    sends: Tensor  #: rows of the shard that go to other ranks, by rank
    sends_to: list[Tensor | slice]  #: of each rank the same
    send_rows: list[int]
    receive_rows: list[int]
    own: Tensor | slice  #: where the rank's own rows are among the keys that it needs, by their places
    came: Tensor  #: where those are that arrive, by rank
    rows: int  #: of the keys that it needs
    silent: bool  #: no rank needs another's keys, so that none has to send

    @property
    def direct(self) -> bool:
        """The rank alone needs its keys, as they lie, in one call, which can write their gradients where they
        belong."""
        alone = not len(self.sends) and not len(self.came) and isinstance(self.own, slice)
        return alone and len(self.groups) == 1

    def exchange(self, ranks: Ranks, k: Tensor, v: Tensor) -> Waiting | None:
        if self.silent:
            return None
        sends = (t.index_select(1, self.sends) if len(self.sends) else t[:, :0] for t in (k, v))
        return ranks.exchange(side_by_side(*sends), self.send_rows, self.receive_rows)

    def assemble(self, coming: Waiting | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that the rank needs, in the order of their places. Its own are among them,
        since every query sees its own place."""
        came = None if coming is None else coming.wait()
        if not len(self.came) and isinstance(self.own, slice):
            return k, v
        whole = k.new_empty((self.rows, k.shape[0], k.shape[2], k.shape[3] + v.shape[3]))
        if came is not None and len(self.came):
            _wide(whole).index_copy_(0, self.came, _wide(came))
        keys, values = apart(whole, k.shape[-1])
        for place, own in ((keys, k), (values, v)):
            if isinstance(self.own, slice):
                place[:, self.own] = own
            else:
                place.index_copy_(1, self.own, own)
        return keys, values

    def send_back(self, ranks: Ranks, gradients: Tensor) -> tuple[Waiting | None, Tensor]:
        """Sends gradients to the rows' owners."""
        own = gradients[self.own] if isinstance(self.own, slice) else gradients.index_select(0, self.own)
        if self.silent:
            return None, own
        sends = gradients.index_select(0, self.came) if len(self.came) else gradients[:0]
        return ranks.exchange(sends, self.receive_rows, self.send_rows), own

    def total(self, returning: tuple[Waiting | None, Tensor]) -> Tensor:
        """The gradients of the shard: the rank's own part, then those of the others by ascending rank."""
        waiting, total = returning
        if waiting is None:
            return total
        came = waiting.wait()
        for rows, part in zip(self.sends_to, came.split(self.send_rows), strict=True):
            if isinstance(rows, slice):
                total[rows] += part
            else:
                total.index_add_(0, rows, part)
        return total


@kept_with_layout
def route_of(layout: Layout, mask: Mask, rank: int, device: torch.device) -> Route:
    arrived = _routes.arrivals(layout, mask, rank)
    groups = _calls.groups(_routes.pieces(layout, rank), arrived.keys, mask, layout.packed, [])
    others = [r for r in range(layout.ranks) if r != rank]
    to = {r: _routes.route(layout, mask, rank, r) for r in others}
    come = {r: _routes.rows_of(_routes.route(layout, mask, r, rank)) for r in others}
    sends = [_routes.index_of(to.get(r, ())) for r in range(layout.ranks)]
    place = torch.arange(arrived.rows) if arrived.order is None else _routes.inverse_of(arrived.order)
    before = sum(come[r] for r in others if r < rank)
    after = before + layout.rows(rank)
    return Route(
        groups,
        _parts.is_exact(groups, layout.rows(rank)),
        torch.cat(sends).to(device),
        [_rows(rows, device) for rows in sends],
        [_routes.rows_of(to.get(r, ())) for r in range(layout.ranks)],
        [come.get(r, 0) for r in range(layout.ranks)],
        _rows(place[before:after], device),
        torch.cat([place[:before], place[after:]]).to(device),
        arrived.rows,
        not any(_routes.received(layout, mask)),
    )


def _rows(index: Tensor, device: torch.device) -> Tensor | slice:
    """These rows, as a range where they are one."""
    first = int(index[0]) if len(index) else 0
    after = first + len(index)
    return slice(first, after) if torch.equal(index, torch.arange(first, after)) else index.to(device)


def _wide(t: Tensor) -> Tensor:
    """Rows as elements of 16 bytes, where they are so long: a copy by index takes a thread for each."""
    flat = t.view(len(t), -1)
    return flat.view(torch.complex128) if flat.shape[1] * t.element_size() % 16 == 0 and len(t) else flat


def _heads_of_chunks(job: Job, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> list[tuple[int, int]]:
    shape = Shape(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size())
    return chunks(chunk_count(job.layout, job.mask, shape, job.machine, backward), k.shape[2])


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Result:
    route = route_of(job.layout, job.mask, job.ranks.rank, q.device)
    rows = _parts.Rows.of(q, v.shape[-1], route.exact)
    group = q.shape[2] // k.shape[2]
    todo = _heads_of_chunks(job, q, k, v, False)
    parts = [(k[:, :, a:b], v[:, :, a:b]) for a, b in todo]
    coming = route.exchange(job.ranks, *parts[0])
    for i, (a, b) in enumerate(todo):
        now = coming
        if i + 1 < len(todo):  # before kernels that would hold all SMs are launched
            coming = route.exchange(job.ranks, *parts[i + 1])
        keys = route.assemble(now, *parts[i])
        heads = slice(a * group, b * group)
        part = _parts.Rows(rows.out[:, :, heads], rows.lse[:, heads])
        inside = sink[heads] if sink is not None and route.exact else None
        for call in route.groups:
            _parts.forward(call, job.options.at(a * group), q[:, :, heads], *keys, part, inside)
    return finished(rows, q, sink, route.exact)


def backward(
    job: Job, saved: Saved, k: Tensor, v: Tensor, kept: None, dtype: torch.dtype | None = None
) -> Gradients:
    """``dtype``: of dk and dv, where it is not theirs."""
    q = saved.q
    route = route_of(job.layout, job.mask, job.ranks.rank, q.device)
    dq = _parts.gradient_of(q, route.exact)
    covered = route.direct and route.groups[0].keys == (0, route.rows)
    make = torch.empty_like if covered or not route.direct else torch.zeros_like
    dk, dv = (make(t, dtype=dtype or t.dtype) for t in (k, v))
    group = q.shape[2] // k.shape[2]
    todo = _heads_of_chunks(job, q, k, v, True)
    parts = [(k[:, :, a:b], v[:, :, a:b]) for a, b in todo]

    def finish(i: int, returning: tuple[Waiting | None, Tensor]) -> None:
        total = route.total(returning)
        if not route.direct:
            for place, part in zip((dk, dv), apart(total, k.shape[-1]), strict=True):
                place[:, :, slice(*todo[i])] = part

    coming = route.exchange(job.ranks, *parts[0])
    returning: tuple[Waiting | None, Tensor] | None = None
    for i, (a, b) in enumerate(todo):
        now = coming
        if i + 1 < len(todo):  # before kernels that would hold all SMs are launched
            coming = route.exchange(job.ranks, *parts[i + 1])
        keys = route.assemble(now, *parts[i])
        heads = slice(a * group, b * group)
        some = Saved(
            q[:, :, heads],
            saved.out[:, :, heads],
            saved.lse[:, heads],
            saved.dout[:, :, heads],
            None if saved.dlse is None else saved.dlse[:, heads],
        )
        if route.direct:
            sums = q.new_empty((0, q.shape[0], b - a, k.shape[-1] + v.shape[-1]), dtype=torch.float32)
            gradients = dk[:, :, a:b], dv[:, :, a:b]
        else:
            sums = _parts.sums_of(*keys, route.groups)
            gradients = apart(sums, k.shape[-1])
        for call in route.groups:
            _parts.backward(call, job.options.at(a * group), some, *keys, dq[:, :, heads], *gradients)
        if returning is not None:
            finish(i - 1, returning)
        returning = route.send_back(job.ranks, sums)
    assert returning is not None  # there is one chunk at least
    finish(len(todo) - 1, returning)
    return dq.to(q.dtype), dk, dv
