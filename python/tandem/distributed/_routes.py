"""Which rows of K and V go from rank to rank, and where they lie on arrival."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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
        if begin <= self.start and self.last < end:
            return self
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
    """For each sequence the places of keys that a rank's queries see, as disjoint ranges in order."""
    every, ranges = _all_needed(layout, mask), defaultdict(list)
    for _, sequence, begin, end in every[every[:, 0] == rank].tolist():
        ranges[sequence].append((begin, end))
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


def index_of(begins: Sequence[int], counts: Sequence[int]) -> Tensor:
    """The rows of runs that begin there and have so many rows, run by run; int64, on the CPU."""
    first, many = (np.array(numbers, dtype=np.int64) for numbers in (begins, counts))
    return torch.from_numpy(np.arange(many.sum()) + np.repeat(first - np.cumsum(many) + many, many))


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation, without sorting it."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return inverse


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
    order = index_of([piece.offset for _, piece in came], [piece.count for _, piece in came])
    same = torch.equal(order, torch.arange(rows))
    return Arrivals(tuple(keys), None if same else order, rows)


@kept_with_layout
def received(layout: Layout, mask: Mask) -> list[int]:
    """Rows of K and V that each rank receives if no row is sent that is not needed."""
    rank, _, begin, end = _all_needed(layout, mask).T
    rows = -_rows(layout)  # a query's own place is among those that it sees
    np.add.at(rows, rank, end - begin)
    found: list[int] = rows.tolist()
    return found


@kept_with_layout
def sent(layout: Layout, mask: Mask) -> list[int]:
    """Rows of K and V that each rank sends then."""
    needed = _all_needed(layout, mask)
    rank, sequence, start, count, step = layout.table.T
    times = np.zeros(len(rank), dtype=np.int64)  # how often each run's rows are needed, on all ranks
    dense = step == 1
    times[dense] = _times(layout, needed, sequence[dense], start[dense], (start + count)[dense])
    for each in np.unique(sequence[~dense]):
        runs = np.flatnonzero(~dense & (sequence == each))
        bounds = needed[needed[:, 1] == each][:, 2:]
        apart = bounds[None] - start[runs][:, None, None]
        before = np.clip(-(-apart // step[runs][:, None, None]), 0, count[runs][:, None, None])
        times[runs] = (before[..., 1] - before[..., 0]).sum(1)
    rows = -_rows(layout)
    np.add.at(rows, rank, times)
    found: list[int] = rows.tolist()
    return found


def _rows(layout: Layout) -> Any:
    rows = np.zeros(layout.ranks, dtype=np.int64)
    np.add.at(rows, layout.table[:, 0], layout.table[:, 3])
    return rows


@kept_with_layout
def _all_needed(layout: Layout, mask: Mask) -> Any:
    """`needed` of all ranks, as rows of (rank, sequence, begin, end)."""
    if not len(layout.table):
        return np.empty((0, 4), dtype=np.int64)
    rank, sequence, start, count, step = layout.table.T
    lengths = np.array(layout.lengths, dtype=np.int64)
    begin, end = mask.keys(start, start + (count - 1) * step, lengths[sequence])
    # One line of numbers has the places of every rank and sequence, each with a gap behind it.
    room = max(layout.lengths) + 1
    first = (rank * len(lengths) + sequence) * room
    order = np.argsort(first + begin)
    begins, reached = (first + begin)[order], np.maximum.accumulate((first + end)[order])
    apart = np.flatnonzero(begins[1:] > reached[:-1])
    begins, ends = begins[np.r_[0, apart + 1]], reached[np.r_[apart, -1]]
    which = begins // room
    return np.stack([which // len(lengths), which % len(lengths), begins % room, ends - which * room], 1)


def _times(layout: Layout, needed: Any, sequence: Any, start: Any, end: Any) -> Any:
    """How many times the rows [start, end) of these sequences are in a range of ``needed``."""
    first = np.r_[0, np.cumsum(layout.lengths, dtype=np.int64)]
    bounds = [np.sort(first[needed[:, 1]] + needed[:, i]) for i in (2, 3)]
    sums = [np.r_[0, np.cumsum(bound)] for bound in bounds]

    def before(place: Any) -> Any:
        """Rows before this place, once for each range that they are in."""
        counts = [np.searchsorted(bound, place) for bound in bounds]
        begun, ended = (place * n - total[n] for n, total in zip(counts, sums, strict=True))
        return begun - ended

    return before(first[sequence] + end) - before(first[sequence] + start)
