"""Keys and values on their way to a rank, and their gradients on the way back: of the strategy "gather".

What a call allocates is allocated once, for all of its chunks of heads, and does not depend on when messages
arrive. Of K and V it is less than two chunks (`Keys`), of gradients less than three in f32 (`Sums`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.distributed import _calls, _parts, _routes
from tandem.distributed._comm import GRADIENTS, KEYS, Ranks, Waiting
from tandem.distributed._job import apart, put_rows
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._mask import Mask


@dataclass(frozen=True)
class Route:
    """What a rank sends and receives, the same for each chunk of heads."""

    groups: list[_calls.Group]
    exact: bool
    sends: slice  #: rows of the shard: all that go to other ranks are among them
    sends_to: list[Tensor | slice]  #: of each rank those that go there
    send_rows: list[int]
    receive_rows: list[int]
    own: Tensor | slice  #: where the rank's own rows are among the keys that it needs, by their places
    came: Tensor  #: where those are that arrive, by rank
    rows: int  #: of the keys that it needs
    silent: bool  #: no rank needs another's keys, so that none has to send

    @property
    def alone(self) -> bool:
        """The rank needs its own keys, as they lie, and no others."""
        return not len(self.came) and isinstance(self.own, slice)

    @property
    def direct(self) -> bool:
        """It alone needs them, in one call, which can write their gradients where they belong."""
        return self.alone and not any(self.send_rows) and len(self.groups) == 1


@kept_with_layout
def route_of(layout: Layout, mask: Mask, rank: int, device: torch.device) -> Route:
    arrived = _routes.arrivals(layout, mask, rank)
    groups = _calls.groups(_routes.pieces(layout, rank), arrived.keys, mask, layout.packed, [])
    others = [r for r in range(layout.ranks) if r != rank]
    to = {r: _routes.route(layout, mask, rank, r) for r in others}
    come = {r: _routes.rows_of(_routes.route(layout, mask, r, rank)) for r in others}
    sends = [_routes.index_of(to.get(r, ())) for r in range(layout.ranks)]
    sent = [rows for rows in sends if len(rows)]
    place = torch.arange(arrived.rows) if arrived.order is None else _routes.inverse_of(arrived.order)
    before = sum(come[r] for r in others if r < rank)
    after = before + layout.rows(rank)
    return Route(
        groups,
        _parts.is_exact(groups, layout.rows(rank)),
        slice(min(int(rows.min()) for rows in sent), max(int(rows.max()) for rows in sent) + 1)
        if sent
        else slice(0, 0),
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


class _Chunks:
    """Rows of K and V side by side, (rows, batch, heads, head_dim_qk + head_dim_v), some heads at a time."""

    def __init__(
        self, route: Route, ranks: Ranks, k: Tensor, v: Tensor, heads: Sequence[tuple[int, int]]
    ) -> None:
        self.route, self.ranks, self.k, self.v, self.heads = route, ranks, k, v, heads

    def memory(self, rows: int, dtype: torch.dtype) -> Tensor:
        """For so many rows of any chunk."""
        return self.k.new_empty(math.prod(self.shape(rows, max(b - a for a, b in self.heads))), dtype=dtype)

    def shape(self, rows: int, heads: int) -> tuple[int, ...]:
        return rows, self.k.shape[0], heads, self.k.shape[-1] + self.v.shape[-1]

    def of(self, memory: Tensor, rows: int, i: int) -> Tensor:
        """So many rows of the i-th chunk, in this memory."""
        a, b = self.heads[i]
        shape = self.shape(rows, b - a)
        return memory[: math.prod(shape)].view(shape)


class Keys(_Chunks):
    """The keys and values that a rank needs, a chunk at a time, and the next one on its way.

    Its memory is that of one chunk, of what arrives of another, and of the rank's own rows that it sends: if
    every rank needs all keys, two chunks. Rows for one rank that are not side by side come on top.
    """

    def __init__(
        self, route: Route, ranks: Ranks, k: Tensor, v: Tensor, heads: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(route, ranks, k, v, heads)
        first = route.sends.start
        #: Of each rank the rows of what is sent, and where those begin that have to be picked for it.
        self.parts: list[tuple[Tensor | slice, int]] = []
        picked = 0
        for rows, count in zip(route.sends_to, route.send_rows, strict=True):
            if isinstance(rows, slice):
                self.parts.append((slice(rows.start - first, rows.stop - first) if count else slice(0), 0))
            else:
                self.parts.append((rows - first, picked))
                picked += count
        self.held = self.memory(0 if route.alone else route.rows, k.dtype)
        self.arriving = self.memory(len(route.came), k.dtype)
        self.sent = self.memory(route.sends.stop - first, k.dtype)
        self.picked = self.memory(picked, k.dtype)
        self.coming = self._send(0)

    def take(self, i: int) -> tuple[Tensor, Tensor]:
        """Those of the i-th chunk, (batch, rows, heads, head_dim), in the order of their places. The next one
        is sent for: before kernels that would hold all SMs are launched."""
        if self.coming is not None:
            self.coming.wait()
        found = self._assembled(i)
        if i + 1 < len(self.heads):
            self.coming = self._send(i + 1)
        return found

    def _assembled(self, i: int) -> tuple[Tensor, Tensor]:
        """A rank's own keys are among those that it needs, since every query sees its own place."""
        route = self.route
        k, v = (t[:, :, slice(*self.heads[i])] for t in (self.k, self.v))
        if route.alone:
            return k, v
        whole = self.of(self.held, route.rows, i)
        if len(route.came):
            put_rows(whole, route.came, self.of(self.arriving, len(route.came), i))
        keys, values = apart(whole, k.shape[-1])
        for place, own in ((keys, k), (values, v)):
            if isinstance(route.own, slice):
                place[:, route.own] = own
            else:
                place.index_copy_(1, route.own, own)
        return keys, values

    def _send(self, i: int) -> Waiting | None:
        route = self.route
        if route.silent:
            return None
        sent = self.of(self.sent, route.sends.stop - route.sends.start, i)
        for place, t in zip(apart(sent, self.k.shape[-1]), (self.k, self.v), strict=True):
            place.copy_(t[:, route.sends, slice(*self.heads[i])])
        sends = []
        for rows, begin in self.parts:
            if isinstance(rows, slice):
                sends.append(sent[rows])
            else:
                part = self.of(self.picked, begin + len(rows), i)[begin:]
                sends.append(torch.index_select(sent, 0, rows, out=part))
        receives = torch.split(self.of(self.arriving, len(route.came), i), route.receive_rows)
        return self.ranks.exchange(sends, receives, KEYS)


class Sums(_Chunks):
    """Gradients of these keys and values in f32, a chunk at a time: their owners add them by ascending rank.

    Its memory is that of a chunk's gradients as they are made, of those of other ranks' rows on their way
    back, of those that arrive for the rank's own rows, and of their sum: if every rank needs all keys, less
    than three chunks in f32.
    """

    def __init__(
        self, route: Route, ranks: Ranks, k: Tensor, v: Tensor, heads: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(route, ranks, k, v, heads)
        self.own_rows = k.shape[1]
        counts = (route.rows, len(route.came), sum(route.send_rows), self.own_rows)
        self.made, self.sent, self.arriving, self.own = (self.memory(n, torch.float32) for n in counts)
        self.coming: Waiting | None = None

    def start(self, i: int) -> tuple[Tensor, Tensor]:
        """Where calls write those of the i-th chunk, the first of them, and add them, the others."""
        made = self.of(self.made, self.route.rows, i)
        groups = self.route.groups
        if not groups or groups[0].keys != (0, self.route.rows):  # the first call does not write them all
            made.zero_()
        return apart(made, self.k.shape[-1])

    def send(self, i: int) -> None:
        """Sends those of other ranks' rows there."""
        route = self.route
        made, own = self.of(self.made, route.rows, i), self.of(self.own, self.own_rows, i)
        if isinstance(route.own, slice):
            own.copy_(made[route.own])
        else:
            torch.index_select(made, 0, route.own, out=own)
        if route.silent:
            return
        sent = self.of(self.sent, len(route.came), i)
        if len(route.came):
            torch.index_select(made, 0, route.came, out=sent)
        receives = torch.split(self.of(self.arriving, sum(route.send_rows), i), route.send_rows)
        self.coming = self.ranks.exchange(torch.split(sent, route.receive_rows), receives, GRADIENTS)

    def total(self, i: int) -> tuple[Tensor, Tensor]:
        """Those of the shard, (batch, rows, heads, head_dim), of the i-th chunk, which was sent last: the
        rank's own part, then those of the others by ascending rank."""
        total = self.of(self.own, self.own_rows, i)
        if self.coming is not None:
            for rows, part in zip(self.route.sends_to, self.coming.wait(), strict=True):
                if isinstance(rows, slice):
                    total[rows] += part
                else:
                    total.index_add_(0, rows, part)
            self.coming = None
        return apart(total, self.k.shape[-1])
