"""What each strategy costs on a machine, and which one is chosen.

The model is small on purpose: a forward and a backward pass, the rate of the kernels, what a rank sends, what
runs at the same time. docs/guides/context-parallel.md states it; `explain` prints what it makes of a call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tandem._errors import InvalidArgumentError
from tandem.distributed import _chunks, _heads, _levels, _routes
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._machine import Links, Machine, Shape
from tandem.distributed._mask import Mask

#: How much longer kernels take for the same work in the steps of a ring, as measured on four H100s.
_IN_PARTS = 1.07
#: Pairs of runs that are looked at to find the slowest steps: some ten milliseconds.
_MOST_PAIRS = 100_000

STRATEGIES = ("gather", "ring", "heads", "heads+gather", "heads+ring")


@dataclass(frozen=True)
class Estimate:
    """One strategy: seconds of a forward and a backward pass, and bytes that the busiest rank receives."""

    strategy: str
    seconds: float = float("inf")
    bytes: int = 0
    unavailable: str = ""


@kept_with_layout
def estimates(layout: Layout, mask: Mask, shape: Shape, links: Links) -> tuple[Estimate, ...]:
    """An estimate for every strategy that a group of these links can take."""
    if links.within:
        return tuple(_with_levels(name, layout, mask, shape, links) for name in ("gather", "ring"))
    return tuple(way(layout, mask, shape, links.far) for way in (_gather, _ring, _with_heads))


@kept_with_layout
def choose(layout: Layout, mask: Mask, shape: Shape, links: Links, wanted: str) -> str:
    """The strategy that is asked for, or the quickest by the model."""
    if wanted != "auto" and wanted not in STRATEGIES:
        names = ", ".join(repr(name) for name in ("auto", *STRATEGIES))
        raise InvalidArgumentError(f"strategy is {wanted!r}; it must be one of {names}")
    found = estimates(layout, mask, shape, links)
    if wanted == "auto":
        best = min(found, key=lambda estimate: estimate.seconds)
        if best.unavailable:
            raise InvalidArgumentError(f"no strategy is available: {best.unavailable}")
        return best.strategy
    if wanted not in (e.strategy for e in found):
        levels = "a DeviceMesh of two dimensions" if "+" in wanted else "a group of one"
        raise InvalidArgumentError(
            f"strategy is {wanted!r}, which takes {levels}; this group has "
            + " or ".join(repr(e.strategy) for e in found)
        )
    estimate = next(e for e in found if e.strategy == wanted)
    if estimate.unavailable:
        instead = "" if links.within else "; take 'gather'"
        raise InvalidArgumentError(f"strategy is {wanted!r}, but {estimate.unavailable}{instead}")
    return wanted


@kept_with_layout
def _slowest_steps(layout: Layout, mask: Mask) -> int:
    """Pairs of each step of a ring on the rank that has most in it, all steps together: no rank begins a step
    before the one that sends its keys has begun it. Windows on the left are counted from their ends alone,
    and of very many runs the busiest rank."""
    table = layout.table[np.argsort(layout.table[:, 1], kind="stable")]
    _, first, runs = np.unique(table[:, 1], return_index=True, return_counts=True)
    if (runs**2).sum() > _MOST_PAIRS:
        return max(_pairs(layout, mask))
    of_queries = np.repeat(np.arange(len(table)), np.repeat(runs, runs))
    each = np.repeat(runs, runs)
    of_keys = (
        np.arange(len(of_queries))
        - np.repeat(np.cumsum(each) - each, each)
        + np.repeat(np.repeat(first, runs), each)
    )
    rank, _, start, count, step = table[of_queries].T
    rank_of_keys, _, begin, keys, apart = table[of_keys].T
    end = begin + keys * apart
    pairs = mask.pairs(start, count, step, end) - mask.pairs(start, count, step, begin)
    steps = np.zeros((layout.ranks, layout.ranks), dtype=np.int64)
    np.add.at(steps, ((rank - rank_of_keys) % layout.ranks, rank), np.maximum(pairs, 0) // apart)
    return int(steps.max(1).sum())


@kept_with_layout
def _pairs(layout: Layout, mask: Mask) -> list[int]:
    return layout.pairs(window=(mask.left, mask.right))


def _gather(layout: Layout, mask: Mask, shape: Shape, machine: Machine) -> Estimate:
    rows = max(max(_routes.received(layout, mask)), max(_routes.sent(layout, mask)))
    size = rows * shape.kv * (2 * shape.itemsize + 4)  # keys twice, their gradients once in f32
    seconds = 0.0
    for backward in (False, True):
        way = _chunks.chunk_heads(layout, mask, shape, machine, backward)
        seconds += _chunks.seconds(layout, mask, shape, machine, backward, way)
    return Estimate("gather", seconds, size)


def _ring(layout: Layout, mask: Mask, shape: Shape, machine: Machine) -> Estimate:
    rows = max(layout.rows(r) for r in range(layout.ranks))
    steps = layout.ranks - 1
    size = rows * shape.kv * (2 * steps * shape.itemsize + 4 * layout.ranks * (steps > 0))
    merged = 6 * 4 * steps * rows * shape.batch * shape.heads_q * shape.head_dim_v / machine.memory
    flops = (1 + _chunks.WORK) * shape.flops(_slowest_steps(layout, mask))
    compute = _IN_PARTS * flops / machine.flops
    seconds = max(compute, size / machine.link) + merged + 3 * steps * machine.latency
    return Estimate("ring", seconds, size)


def _with_heads(layout: Layout, mask: Mask, shape: Shape, machine: Machine) -> Estimate:
    shares = _heads.shares(shape.heads_q, shape.heads_kv, layout.ranks)
    if isinstance(shares, str):
        return Estimate("heads", unavailable=shares)
    most_q, most_kv = (max(b - a for a, b in each) for each in zip(*shares, strict=True))
    size = _turned(layout, shape, shares)
    seconds = _turning(size, machine, layout.ranks)
    flops = replace(shape, heads_q=most_q).flops(sum(_pairs(layout, mask)))
    for heads, backward, work in ((most_q, False, 1.0), (most_kv, True, _chunks.WORK)):
        tiles = sum(-(-length // _chunks.tile_rows(layout, backward)) for length in layout.lengths)
        tiles *= shape.batch * heads
        seconds += work * flops / machine.flops * _chunks.last_turn(tiles, machine)
    return Estimate("heads", seconds, size)


def _turning(size: int, machine: Machine, ranks: int) -> float:
    """Seconds until rows have been turned into heads and back: sending, and before and after it two copies
    each, which read and write."""
    if ranks == 1:
        return 0.0
    return size / machine.link + 8 * size * ranks / (ranks - 1) / machine.memory + 8 * machine.latency


def _turned(layout: Layout, shape: Shape, shares: _heads.Shares) -> int:
    """Bytes that a rank receives where rows are turned into the heads that some ranks share, and back."""
    ranks = len(shares)
    rows = max(layout.rows(r) for r in range(layout.ranks))
    per_row = shape.batch * shape.heads_q * (shape.head_dim_qk + shape.head_dim_v)
    keys = shape.kv * (max(1, ranks // shape.heads_kv))
    gradients = 4 if _heads.are_shared(shares) else shape.itemsize
    size = 2 * (per_row + keys) * rows * (ranks - 1) // ranks
    return size * (shape.itemsize + gradients) // 2


def _with_levels(inner: str, layout: Layout, mask: Mask, shape: Shape, links: Links) -> Estimate:
    """Heads within a node and one of the others across nodes, one after the other."""
    name = f"heads+{inner}"
    shares = _heads.shares(shape.heads_q, shape.heads_kv, links.within)
    if isinstance(shares, str):
        return Estimate(name, unavailable=shares)
    turned = _turned(layout, shape, shares)
    most_q, most_kv = (max(b - a for a, b in each) for each in zip(*shares, strict=True))
    of_rank = replace(shape, heads_q=most_q, heads_kv=most_kv)
    way = _gather if inner == "gather" else _ring
    across = way(_levels.of_nodes(layout, links.within), mask, of_rank, links.far)
    seconds = across.seconds + _turning(turned, links.near, links.within)
    return Estimate(name, seconds, turned + across.bytes)
