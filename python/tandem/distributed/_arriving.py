"""Keys and values on their way to a rank, and their gradients on the way back: of the strategy "gather".

What a call allocates is allocated once, for all of its chunks of heads, and does not depend on when messages
arrive. Of K and V it is two chunks (`Keys`), of gradients less than three in f32 (`Sums`).

Rows are sent from where they lie and received where they belong, in memory that has the keys that a rank
needs by their places: a run of rows is a message. Only where two ranks have many runs between them are these
picked into one message, and put in their places when it has come.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.distributed import _calls, _parts, _routes
from tandem.distributed._comm import GRADIENTS, KEYS, Ranks, Waiting
from tandem.distributed._job import apart, of_sixteen_bytes, put_rows
from tandem.distributed._layout import Layout, kept_with_layout, used_here
from tandem.distributed._mask import Mask

#: Runs of rows that are copied one by one, or are messages between two ranks: each takes the host some 10 us.
FEW = 8

Places = list[slice] | Tensor  #: of a few runs, or of each row


@dataclass(frozen=True)
class Link:
    """Rows of a rank that it sends to another, by where they lie among the keys that this rank needs."""

    rows: int
    places: Places

    @property
    def picked(self) -> int:
        """Rows of the message that is made of them, where they are not sent as they lie."""
        return self.rows if isinstance(self.places, Tensor) else 0

    @staticmethod
    def of(counts: Sequence[int], begins: Sequence[int], place: Tensor, device: torch.device) -> Link:
        """Runs of so many rows, from these on, of what ``place`` has the places of: one after another. No run
        at all is one without rows."""
        if len(counts) > FEW:
            index = place[_routes.index_of(begins, counts)]
            return Link(len(index), index.to(device))
        runs = list(zip(begins, counts, strict=True)) or [(0, 0)]
        firsts = [int(place[begin]) if count else 0 for begin, count in runs]
        places = [slice(first, first + n) for first, (_, n) in zip(firsts, runs, strict=True)]
        return Link(sum(counts), places)


@dataclass(frozen=True)
class Route:
    """What a rank sends and receives, the same for each chunk of heads."""

    groups: list[_calls.Group]
    exact: bool
    own: Link  #: the rank's own rows, in runs as long as can be
    shard: list[slice]  #: these runs in the shard
    going: list[Link]  #: those of them that each rank needs
    coming: list[Link]  #: what the rank needs of each rank
    rows: int  #: of the keys that it needs
    silent: bool  #: no rank needs another's keys, so that none has to send

    @property
    def sends(self) -> bool:
        return any(link.rows for link in self.going)

    @property
    def alone(self) -> bool:
        """The rank needs its own keys, as they lie, and no others."""
        return self.own.places == [slice(0, self.rows)]

    @property
    def direct(self) -> bool:
        """It alone needs them, in one call, which can write their gradients where they belong."""
        return self.alone and not self.sends and len(self.groups) == 1


@kept_with_layout
def route_of(layout: Layout, mask: Mask, rank: int, device: torch.device) -> Route:
    mine = _routes.pieces(layout, rank)
    arrived = _routes.arrivals(layout, mask, rank)
    groups = _calls.groups(mine, arrived.keys, mask, layout.packed, [])
    place = torch.arange(arrived.rows) if arrived.order is None else _routes.inverse_of(arrived.order)
    come = [_routes.route(layout, mask, r, rank) for r in range(layout.ranks)]
    first = [0, *itertools.accumulate(map(_routes.rows_of, come))]
    own = place[first[rank] : first[rank + 1]]  # every query sees its own place
    going, coming = [], []
    for r in range(layout.ranks):
        to = _routes.route(layout, mask, rank, r) if r != rank else ()
        going.append(Link.of([p.count for p in to], [p.offset for p in to], own, device))
        counts = [p.count for p in come[r]] if r != rank else []
        begins = itertools.accumulate(counts[:-1], initial=first[r]) if counts else ()
        coming.append(Link.of(counts, list(begins), place, device))
    bounds = [0, *(torch.diff(own) != 1).nonzero()[:, 0].add(1).tolist(), len(own)]
    return Route(
        groups,
        _parts.is_exact(groups, layout.rows(rank)),
        Link.of([b - a for a, b in itertools.pairwise(bounds)], bounds[:-1], own, device),
        [slice(a, b) for a, b in itertools.pairwise(bounds)],
        going,
        coming,
        arrived.rows,
        not any(_routes.received(layout, mask)),
    )


def _picked(links: Sequence[Link]) -> int:
    return sum(link.picked for link in links)


def _messages(links: Sequence[Link], whole: Tensor, picked: Tensor) -> list[list[Tensor]]:
    """For each rank: runs of rows as they lie in ``whole``, or what is picked of it, one after another."""
    parts = torch.split(picked, [link.picked for link in links])
    return [
        [part] if isinstance(link.places, Tensor) else [whole[run] for run in link.places]
        for link, part in zip(links, parts, strict=True)
    ]


def _pick(links: Sequence[Link], whole: Tensor, messages: Sequence[Sequence[Tensor]]) -> None:
    for link, parts in zip(links, messages, strict=True):
        if isinstance(link.places, Tensor):
            torch.index_select(whole, 0, link.places, out=parts[0])


class _Chunks:
    """Rows of K and V side by side, (rows, batch, heads, head_dim_qk + head_dim_v), some heads at a time."""

    def __init__(
        self, route: Route, ranks: Ranks, k: Tensor, v: Tensor, heads: Sequence[tuple[int, int]]
    ) -> None:
        self.route, self.ranks, self.k, self.v, self.heads = route, ranks, k, v, heads
        for link in (route.own, *route.going, *route.coming):
            if isinstance(link.places, Tensor):
                used_here(link.places)

    def memory(self, rows: int, dtype: torch.dtype, chunks: int = 2) -> list[Tensor]:
        """For so many rows of any chunk, of so many chunks at the same time."""
        widest = [max(b - a for a, b in self.heads[i::chunks]) for i in range(min(chunks, len(self.heads)))]
        return [self.k.new_empty(math.prod(self.shape(rows, each)), dtype=dtype) for each in widest]

    def shape(self, rows: int, heads: int) -> tuple[int, ...]:
        return rows, self.k.shape[0], heads, self.k.shape[-1] + self.v.shape[-1]

    def of(self, memory: list[Tensor], rows: int, i: int) -> Tensor:
        """So many rows of the i-th chunk, in its memory."""
        a, b = self.heads[i]
        shape = self.shape(rows, b - a)
        return memory[i % len(memory)][: math.prod(shape)].view(shape)


class Keys(_Chunks):
    """The keys and values that a rank needs, a chunk at a time, and the next one on its way: the memory of
    two chunks. Messages that are picked come on top, where they go and where they come."""

    def __init__(
        self, route: Route, ranks: Ranks, k: Tensor, v: Tensor, heads: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(route, ranks, k, v, heads)
        self.rows = 0 if route.alone and not route.sends else route.rows
        self.held = self.memory(self.rows, k.dtype)
        self.picked = self.memory(_picked(route.going), k.dtype)
        self.arriving = self.memory(_picked(route.coming), k.dtype)
        self.coming = self._send(0)

    def take(self, i: int) -> tuple[Tensor, Tensor]:
        """K and V of the i-th chunk, (batch, rows, heads, head_dim), in the order of their places. The
        next one is sent for: before kernels that would hold all SMs are launched."""
        coming = self.coming
        if i + 1 < len(self.heads):
            self.coming = self._send(i + 1)
        whole = self.of(self.held, self.rows, i)
        if coming is not None:
            for link, parts in zip(self.route.coming, coming.wait(), strict=True):
                if isinstance(link.places, Tensor):
                    put_rows(whole, link.places, parts[0])
        return self._own(i) if self.route.alone else apart(whole, self.k.shape[-1])

    def _own(self, i: int) -> tuple[Tensor, Tensor]:
        a, b = self.heads[i]
        return self.k[:, :, a:b], self.v[:, :, a:b]

    def _send(self, i: int) -> Waiting | None:
        """Puts the rank's own rows of the i-th chunk in their places, from where they are sent."""
        route, whole = self.route, self.of(self.held, self.rows, i)
        if self.rows:
            for place, t in zip(apart(whole, self.k.shape[-1]), self._own(i), strict=True):
                to, own = of_sixteen_bytes(place, t)
                if isinstance(route.own.places, Tensor):
                    to.index_copy_(1, route.own.places, own)
                else:
                    for run, rows in zip(route.own.places, route.shard, strict=True):
                        to[:, run] = own[:, rows]
        if route.silent:
            return None
        sends = _messages(route.going, whole, self.of(self.picked, _picked(route.going), i))
        _pick(route.going, whole, sends)
        receives = _messages(route.coming, whole, self.of(self.arriving, _picked(route.coming), i))
        return self.ranks.exchange(sends, receives, KEYS)


class Sums(_Chunks):
    """Gradients of these keys and values in f32, a chunk at a time: their owners add them by ascending rank.

    Its memory is that of two chunks' gradients as they are made, and of those that arrive for the rank's own
    rows: if every rank needs all keys, less than three chunks in f32. Messages that are picked come on top.
    """

    def __init__(
        self, route: Route, ranks: Ranks, k: Tensor, v: Tensor, heads: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(route, ranks, k, v, heads)
        self.made = self.memory(route.rows, torch.float32)
        self.picked = self.memory(_picked(route.coming), torch.float32)
        self.arriving = self.memory(sum(link.rows for link in route.going), torch.float32, 1)
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
        route, made = self.route, self.of(self.made, self.route.rows, i)
        if route.silent:
            return
        sends = _messages(route.coming, made, self.of(self.picked, _picked(route.coming), i))
        _pick(route.coming, made, sends)
        rows = [link.rows for link in route.going]
        receives = [
            [part] if isinstance(link.places, Tensor) else [*torch.split(part, _lengths(link.places))]
            for link, part in zip(
                route.going, torch.split(self.of(self.arriving, sum(rows), i), rows), strict=True
            )
        ]
        self.coming = self.ranks.exchange(sends, receives, GRADIENTS)

    def total(self, i: int, dk: Tensor, dv: Tensor) -> None:
        """Writes the shard's gradients of the i-th chunk, which was sent last: the rank's own part, and those
        of the others by ascending rank."""
        route, made = self.route, self.of(self.made, self.route.rows, i)
        if self.coming is not None:
            for link, parts in zip(route.going, self.coming.wait(), strict=True):
                if isinstance(link.places, Tensor):
                    made.index_add_(0, link.places, parts[0])
                else:
                    for run, part in zip(link.places, parts, strict=True):
                        made[run] += part
            self.coming = None
        for whole, t in zip((dk, dv), apart(made, self.k.shape[-1]), strict=True):
            place = whole[:, :, slice(*self.heads[i])]
            if isinstance(route.own.places, Tensor):
                place.copy_(t.index_select(1, route.own.places))
            else:
                for run, rows in zip(route.own.places, route.shard, strict=True):
                    place[:, rows] = t[:, run]


def _lengths(runs: Sequence[slice]) -> list[int]:
    return [run.stop - run.start for run in runs]
