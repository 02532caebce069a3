"""Into how many chunks of heads the strategy "gather" divides K and V."""

from __future__ import annotations

import math

from tandem.distributed import _routes
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._machine import Machine, Shape
from tandem.distributed._mask import Mask

#: Of a tile of queries, or of keys in a backward pass; of packed sequences those are computed in pairs.
_ROWS, _PAIR = 128, 256
#: A backward pass over a forward pass: work, and what the host takes to launch it.
WORK, _LAUNCHES = 2.5, 1.5
_CLOSE = 1.01  #: times the quickest that is about as quick


@kept_with_layout
def chunk_count(layout: Layout, mask: Mask, shape: Shape, machine: Machine, backward: bool) -> int:
    """The number with which the busiest rank is done first, by `seconds`: many hide what is sent, few leave
    the kernels more tiles and the host less to launch. Of those about as quick the largest, which takes the
    least memory. As many as ranks at most, so that two of them are about as large as two ranks' K and V. The
    same on every rank."""
    most = min(shape.heads_kv, layout.ranks)
    counts = [count for count in range(1, most + 1) if count == most or shape.heads_kv % count == 0]
    found = [seconds(layout, mask, shape, machine, backward, count) for count in counts]
    return max(count for count, each in zip(counts, found, strict=True) if each <= _CLOSE * min(found))


@kept_with_layout
def seconds(layout: Layout, mask: Mask, shape: Shape, machine: Machine, backward: bool, count: int) -> float:
    """Of a pass in so many chunks, on the rank that takes longest: the first chunk of keys and the last one
    of gradients are waited for, the others are on their way while kernels run."""
    rows = max(max(_routes.received(layout, mask)), max(_routes.sent(layout, mask)))
    row = shape.kv * (shape.itemsize + (4 if backward else 0))  # gradients are sent in f32
    sending = rows * row / machine.link
    computing = max(_computing(layout, mask, shape, machine, backward, count))
    if layout.ranks == 1:
        return computing
    turns = 2 * count if backward else count
    waiting = sending / count + turns * machine.latency
    launching = count * machine.host * (_LAUNCHES if backward else 1.0)
    return max(computing + waiting, launching)


@kept_with_layout
def _computing(
    layout: Layout, mask: Mask, shape: Shape, machine: Machine, backward: bool, count: int
) -> tuple[float, ...]:
    """Seconds of each rank's kernels: calls have whole turns of tiles, of queries or of keys. Runs of packed
    sequences are one call, and so are runs of which one follows the other."""
    heads = shape.batch * (shape.heads_kv if backward else shape.heads_q) / count
    found = [0.0] * layout.ranks
    calls: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, runs in enumerate(layout.runs):
        number = 0
        for i, run in enumerate(runs):
            length = layout.lengths[run.sequence]
            begin, end = mask.keys(run.start, run.last, length)
            rows = end - begin if backward else run.count
            tiles = -(-rows // tile_rows(layout, backward))
            pairs = int(mask.pairs(run.start, run.count, run.step, length))
            if not layout.packed and not (i and runs[i - 1].last + 1 == run.start):
                number = i
            call = (rank, number)
            before = calls.get(call, (0, 0))
            calls[call] = (before[0] + tiles, before[1] + pairs)
    work = WORK if backward else 1.0
    for (rank, _), (tiles, pairs) in calls.items():
        found[rank] += work * shape.flops(pairs) / machine.flops * last_turn(tiles * heads, machine)
    return tuple(found)


def tile_rows(layout: Layout, backward: bool) -> int:
    """Rows of queries, or of keys, that are dealt to the kernels' units together."""
    return _PAIR if backward and layout.packed else _ROWS


def last_turn(tiles: float, machine: Machine) -> float:
    """How much longer so many tiles take than if those of the last turn kept all units busy."""
    turns = tiles / machine.units
    return math.ceil(turns) / turns if turns and machine.units > 1 else 1.0


def chunks(count: int, heads_kv: int) -> list[tuple[int, int]]:
    """The heads of K and V of each chunk."""
    bounds = [heads_kv * i // count for i in range(count + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))
