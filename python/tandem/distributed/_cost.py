"""What each strategy costs on a machine, and which one is chosen.

The model is small on purpose: a forward and a backward pass, the rate of the kernels, what a rank sends, what
runs at the same time. docs/guides/context-parallel.md states it; `explain` prints what it makes of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem._errors import InvalidArgumentError
from tandem.distributed import _heads, _routes
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._mask import Mask

STRATEGIES = ("gather", "ring", "heads")


@dataclass(frozen=True)
class Machine:
    """Rates of one rank, per second.

    Attributes:
      flops: of the attention kernels, forward and backward alike.
      link: bytes that a rank sends while it receives as many.
      latency: seconds that a collective or a step takes whatever its size.
      memory: bytes that are read or written where results are merged.
    """

    flops: float
    link: float
    latency: float
    memory: float


#: An H200 among others behind one NVLink switch: 600 TFLOP/s, 450 GB/s of which collectives reach 0.75.
H200 = Machine(600e12, 340e9, 20e-6, 3.5e12)
#: The same over a network of 400 Gbit/s a GPU, of which collectives reach 0.9.
H200_HOSTS = replace(H200, link=45e9)
#: A process of a few cores among others of one host.
CPU = Machine(2e11, 2e9, 100e-6, 5e9)


@dataclass(frozen=True)
class Shape:
    """The sizes of a call, the same on every rank."""

    batch: int
    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    itemsize: int  #: bytes of an element of q, k and v

    @property
    def kv(self) -> int:
        """Numbers in a row of K and V of all heads."""
        return self.batch * self.heads_kv * (self.head_dim_qk + self.head_dim_v)


@dataclass(frozen=True)
class Estimate:
    """One strategy: seconds of a forward and a backward pass, and bytes that the busiest rank receives."""

    strategy: str
    seconds: float = float("inf")
    bytes: int = 0
    unavailable: str = ""


@kept_with_layout
def estimates(layout: Layout, mask: Mask, shape: Shape, machine: Machine) -> tuple[Estimate, ...]:
    """Of every strategy."""
    ways: tuple[Callable[..., Estimate], ...] = (_gather, _ring, _with_heads)
    return tuple(way(layout, mask, shape, machine) for way in ways)


@kept_with_layout
def choose(layout: Layout, mask: Mask, shape: Shape, machine: Machine, wanted: str) -> str:
    """The strategy that is asked for, or the quickest by the model."""
    if wanted != "auto" and wanted not in STRATEGIES:
        names = ", ".join(repr(name) for name in ("auto", *STRATEGIES))
        raise InvalidArgumentError(f"strategy is {wanted!r}; it must be one of {names}")
    found = estimates(layout, mask, shape, machine)
    if wanted == "auto":
        return min(found, key=lambda estimate: estimate.seconds).strategy
    estimate = next(e for e in found if e.strategy == wanted)
    if estimate.unavailable:
        raise InvalidArgumentError(f"strategy is {wanted!r}, but {estimate.unavailable}; take 'gather'")
    return wanted


def _compute(pairs: int, heads: int, shape: Shape, machine: Machine) -> float:
    """A forward and a backward pass, which has 2.5 times the work."""
    flops = 2 * pairs * shape.batch * heads * (shape.head_dim_qk + shape.head_dim_v)
    return 3.5 * flops / machine.flops


def _pairs(layout: Layout, mask: Mask) -> list[int]:
    return layout.pairs(window=(mask.left, mask.right))


def _gather(layout: Layout, mask: Mask, shape: Shape, machine: Machine) -> Estimate:
    rows = max(max(_routes.received(layout, mask)), max(_routes.sent(layout, mask)))
    size = rows * shape.kv * (2 * shape.itemsize + 4)  # keys twice, their gradients once in f32
    chunks = min(shape.heads_kv, layout.ranks)
    link = size / machine.link
    compute = _compute(max(_pairs(layout, mask)), shape.heads_q, shape, machine)
    # The first chunk of keys and the last one of gradients are waited for.
    seconds = max(compute, link) + (link / chunks + 3 * chunks * machine.latency if layout.ranks > 1 else 0)
    return Estimate("gather", seconds, size)


def _ring(layout: Layout, mask: Mask, shape: Shape, machine: Machine) -> Estimate:
    rows = max(layout.rows(r) for r in range(layout.ranks))
    steps = layout.ranks - 1
    size = rows * shape.kv * (2 * steps * shape.itemsize + 4 * layout.ranks * (steps > 0))
    merged = 6 * 4 * steps * rows * shape.batch * shape.heads_q * shape.head_dim_v / machine.memory
    compute = _compute(max(_pairs(layout, mask)), shape.heads_q, shape, machine)
    seconds = max(compute, size / machine.link) + merged + 3 * steps * machine.latency
    return Estimate("ring", seconds, size)


def _with_heads(layout: Layout, mask: Mask, shape: Shape, machine: Machine) -> Estimate:
    shares = _heads.shares(shape.heads_q, shape.heads_kv, layout.ranks)
    if isinstance(shares, str):
        return Estimate("heads", unavailable=shares)
    most = max(b - a for (a, b), _ in shares)
    rows = max(layout.rows(r) for r in range(layout.ranks))
    per_row = shape.batch * shape.heads_q * (shape.head_dim_qk + shape.head_dim_v)
    keys = shape.kv * (max(1, layout.ranks // shape.heads_kv))
    gradients = 4 if _heads.are_shared(shares) else shape.itemsize
    size = 2 * (per_row + keys) * rows * (layout.ranks - 1) // layout.ranks
    size = size * (shape.itemsize + gradients) // 2
    compute = _compute(sum(_pairs(layout, mask)), most, shape, machine)
    seconds = compute + size / machine.link + 8 * machine.latency * (layout.ranks > 1)
    return Estimate("heads", seconds, size)
