"""Into how many chunks of heads the strategy "gather" divides K and V."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.distributed import _routes
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._machine import Machine, Shape
from tandem.distributed._mask import Mask

#: Rows of a tile of queries, or of keys in a backward pass; tiles of packed keys are computed in pairs.
_ROWS, _PAIR = 128, 256
#: A backward pass over a forward pass: work, and what the host takes to launch it.
WORK, _LAUNCHES = 2.5, 1.5
_CLOSE = 1.02  #: times the quickest that is about as quick: what rounds differ by


@kept_with_layout
def chunk_heads(
    layout: Layout, mask: Mask, shape: Shape, machine: Machine, backward: bool
) -> tuple[int, ...]:
    """Heads of K and V of each chunk, with which the busiest rank is done first, by `seconds`: many hide what
    is sent, few leave the kernels more tiles and the host less to launch. Of those about as quick the
    smallest, which take the least memory. As many as ranks at most, so that two of them are about as large as
    two ranks' K and V. The same on every rank."""
    most = min(shape.heads_kv, layout.ranks)
    ways = [_even(shape.heads_kv, count) for count in range(1, most + 1)]
    found = [seconds(layout, mask, shape, machine, backward, way) for way in ways]
    close = [way for way, each in zip(ways, found, strict=True) if each <= _CLOSE * min(found)]
    return min(close, key=lambda way: (max(way), len(way)))


def _even(heads: int, count: int) -> tuple[int, ...]:
    ends = [heads * i // count for i in range(count + 1)]
    return tuple(after - before for before, after in itertools.pairwise(ends))


@kept_with_layout
def seconds(
    layout: Layout, mask: Mask, shape: Shape, machine: Machine, backward: bool, way: tuple[int, ...]
) -> float:
    """Seconds of a pass in chunks of so many heads, on the rank that takes longest: the first chunk of keys
    and the last one of gradients are waited for, the others are on their way while kernels run, and hold
    these up by a share of the time that they take."""
    kernels = {heads: _kernels(layout, mask, shape, machine, backward, heads) for heads in set(way)}
    if layout.ranks == 1:
        return float(sum(kernels[heads] for heads in way).max())
    rows = max(max(_routes.received(layout, mask)), max(_routes.sent(layout, mask)))
    head = rows * shape.kv / shape.heads_kv / machine.link
    keys = [head * shape.itemsize * heads for heads in way]
    gradients = [head * 4 * heads for heads in way]  # in f32
    found: Any = keys[0] + len(way) * machine.latency
    if backward:
        found += gradients[-1] + len(way) * machine.latency
    for i, heads in enumerate(way):
        sending = sum(keys[i + 1 : i + 2]) + (sum(gradients[:i][-1:]) if backward else 0.0)
        found = found + np.maximum(kernels[heads] + machine.held_up * sending, sending)
    launching = len(way) * machine.host * (_LAUNCHES if backward else 1.0)
    return max(float(found.max()), launching)


def _kernels(layout: Layout, mask: Mask, shape: Shape, machine: Machine, backward: bool, heads: int) -> Any:
    """Seconds of each rank's kernels over so many heads of K and V: calls have whole turns of tiles, and take
    no less than their longest tile."""
    rank, tiles, pairs, longest = _calls(layout, mask, backward)
    work = (WORK if backward else 1.0) * shape.flops(1) / shape.heads_kv / machine.flops
    group = 1 if backward else shape.heads_q // shape.heads_kv  # tiles of keys take all heads of a group
    turns = last_turn(tiles * shape.batch * heads * group, machine)
    least = longest * machine.units / group / max(shape.batch, 1)  # a batch of 0 is no work at all
    of_calls = np.maximum(pairs * heads * turns, least) * work
    found = np.zeros(layout.ranks)
    np.add.at(found, rank, of_calls)
    return found


@kept_with_layout
def _calls(layout: Layout, mask: Mask, backward: bool) -> Any:
    """For each call its rank, its tiles, of queries or of keys, its pairs and those of the longest tile: a
    row each. Runs of packed sequences are one call, and so are runs of which one follows the other."""
    calls: dict[tuple[int, int], tuple[int, int, int]] = {}
    width = sys.maxsize if min(mask.left, mask.right) < 0 else mask.left + mask.right + 1
    for rank, runs in enumerate(layout.runs):
        number = 0
        for i, run in enumerate(runs):
            length = layout.lengths[run.sequence]
            begin, end = mask.keys(run.start, run.last, length)
            rows, others = (end - begin, run.count) if backward else (run.count, end - begin)
            size = tile_rows(layout, backward)
            tiles, pairs = -(-rows // size), int(mask.pairs(run.start, run.count, run.step, length))
            longest = min(size, rows) * min(others, width)
            if not layout.packed and not (i and runs[i - 1].last + 1 == run.start):
                number = i
            before = calls.get((rank, number), (0, 0, 0))
            calls[rank, number] = (before[0] + tiles, before[1] + pairs, max(before[2], min(longest, pairs)))
    return np.array([(key[0], *of_call) for key, of_call in calls.items()], dtype=np.int64).reshape(-1, 4).T


def tile_rows(layout: Layout, backward: bool) -> int:
    """Rows of queries, or of keys, that are dealt to the kernels' units together."""
    return _PAIR if backward and layout.packed else _ROWS


def last_turn(tiles: Any, machine: Machine) -> Any:
    """How much longer so many tiles take than if those of the last turn kept all units busy."""
    turns = np.maximum(tiles, 1) / machine.units
    return np.ceil(turns) / turns if machine.units > 1 else 1.0


def bounds(way: Sequence[int]) -> list[tuple[int, int]]:
    """The heads of K and V of each chunk: first and last + 1."""
    return list(itertools.pairwise(itertools.accumulate(way, initial=0)))
