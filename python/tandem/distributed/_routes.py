"""Which rows of K and V go from rank to rank, and where they lie on arrival."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._mask import Mask


@dataclass(frozen=True)
class Piece:
    """A run of rows that lies at row ``offset`` of a tensor."""

    sequence: int
    start: int
    count: int
    step: int
    offset: int

    @property
    def last(self) -> int:
        return self.start + (self.count - 1) * self.step

    def between(self, begin: int, end: int) -> Piece | None:
        """Its rows of the places [begin, end) of the sequence; None if it has none."""
        first = max(0, -(-(begin - self.start) // self.step))
        last = min(self.count, -(-(end - self.start) // self.step))
        if first >= last:
            return None
        start = self.start + first * self.step
        return Piece(self.sequence, start, last - first, self.step, self.offset + first)


@kept_with_layout
def pieces(layout: Layout, rank: int) -> tuple[Piece, ...]:
    """A rank's shard."""
    found, offset = [], 0
    for run in layout.runs[rank]:
        found.append(Piece(run.sequence, run.start, run.count, run.step, offset))
        offset += run.count
    return tuple(found)


@kept_with_layout
def needed(layout: Layout, mask: Mask, rank: int) -> dict[int, list[tuple[int, int]]]:
    """Of each sequence the places of keys that a rank's queries see, as disjoint ranges in order."""
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for run in layout.runs[rank]:
        ranges[run.sequence].append(mask.keys(run.start, run.last, layout.lengths[run.sequence]))
    for sequence, found in ranges.items():
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(found):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        ranges[sequence] = merged
    return dict(ranges)


@kept_with_layout
def route(layout: Layout, mask: Mask, source: int, to: int) -> tuple[Piece, ...]:
    """The rows of the source's shard whose keys rank ``to`` needs, with their offsets in the shard."""
    wanted = needed(layout, mask, to)
    found = []
    for piece in pieces(layout, source):
        for begin, end in wanted.get(piece.sequence, ()):
            part = piece.between(begin, end)
            if part is not None:
                found.append(part)
    return tuple(found)


def rows_of(found: tuple[Piece, ...]) -> int:
    return sum(piece.count for piece in found)


def index_of(found: tuple[Piece, ...]) -> Tensor:
    """The rows of a shard that these pieces are; int64, on the CPU."""
    parts = [torch.arange(piece.offset, piece.offset + piece.count) for piece in found]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Arrivals:
    """The keys that a rank needs, in one tensor.

    They arrive by source rank, the rank's own among them. ``keys`` has them in the order of their sequences
    and places, as runs that are as long as can be; row i of that tensor is row ``order[i]`` of what arrives
    (None: the same order).
    """

    keys: tuple[Piece, ...]
    order: Tensor | None
    rows: int


@kept_with_layout
def arrivals(layout: Layout, mask: Mask, rank: int) -> Arrivals:
    """What a rank receives of the ranks' routes to it."""
    came: list[tuple[int, Piece]] = []
    rows = 0
    for source in range(layout.ranks):
        for piece in route(layout, mask, source, rank):
            came.append((source, Piece(piece.sequence, piece.start, piece.count, piece.step, rows)))
            rows += piece.count
    # Runs of every n-th row do not join: a call sees them by source.
    came.sort(key=lambda c: (c[1].sequence, c[0] if c[1].step > 1 else 0, c[1].start))
    keys: list[Piece] = []
    offset = 0
    for _, piece in came:
        before = keys[-1] if keys else None
        joins = before is not None and before.sequence == piece.sequence
        if before is not None and joins and piece.step == 1 and before.last + 1 == piece.start:
            keys[-1] = Piece(before.sequence, before.start, before.count + piece.count, 1, before.offset)
        else:
            keys.append(Piece(piece.sequence, piece.start, piece.count, piece.step, offset))
        offset += piece.count
    order = index_of(tuple(piece for _, piece in came))
    same = torch.equal(order, torch.arange(rows))
    return Arrivals(tuple(keys), None if same else order, rows)


def received(layout: Layout, mask: Mask) -> list[int]:
    """Rows of K and V that each rank receives if no row is sent that is not needed."""
    return [
        sum(rows_of(route(layout, mask, s, rank)) for s in range(layout.ranks) if s != rank)
        for rank in range(layout.ranks)
    ]


def sent(layout: Layout, mask: Mask) -> list[int]:
    """Rows of K and V that each rank sends then."""
    return [
        sum(rows_of(route(layout, mask, rank, to)) for to in range(layout.ranks) if to != rank)
        for rank in range(layout.ranks)
    ]
