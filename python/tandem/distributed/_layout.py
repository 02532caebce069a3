"""Which rank holds which rows of the sequences."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from tandem._errors import InvalidArgumentError
from tandem.distributed import _balance
from tandem.distributed._mask import Mask

#: What makes layouts, as `code` numbers them.
KINDS = ("contiguous", "zigzag", "striped", "balanced", "of_ranges")
#: Layouts that there are, by their `code`.
_known: weakref.WeakValueDictionary[bytes, Layout] = weakref.WeakValueDictionary()

Found = TypeVar("Found")
Arguments = ParamSpec("Arguments")


def kept_with_layout(
    find: Callable[Concatenate[Layout, Arguments], Found],
) -> Callable[Concatenate[Layout, Arguments], Found]:
    """A function that finds something once for a layout and its other arguments. It is kept as long as the
    layout: in training, packed sequences have another one in every step."""

    @functools.wraps(find)
    def kept(layout: Layout, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Found:
        key = (find, args)
        if key not in layout._kept:
            layout._kept[key] = find(layout, *args, **kwargs)
        found: Found = layout._kept[key]
        return found

    return kept  # type: ignore[return-value]


def used_here(kept: Tensor) -> Tensor:
    """A tensor that outlives the call that made it, for work on the current stream. PyTorch would give its
    memory to the stream that it was allocated on once nothing holds it, while this one may still read it."""
    if kept.is_cuda:
        kept.record_stream(torch.cuda.current_stream(kept.device))
    return kept


@dataclass(frozen=True)
class Run:
    """Rows start, start + step, ... of a sequence, ``count`` of them."""

    sequence: int
    start: int
    count: int
    step: int = 1

    @property
    def last(self) -> int:
        """The last row of the run, which is not empty."""
        return self.start + (self.count - 1) * self.step


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rank holds which rows.

    A rank's shard is its runs, one behind the other in their order here. A shard may be empty, and shards
    need not have the same size. Make one with `contiguous`, `zigzag`, `striped`, `balanced` or `of_ranges`;
    the same on every rank.

    Attributes:
      lengths: rows of each sequence; of a batch of sequences of one length that length alone.
      runs: of each rank its runs.
      kind: what made it.
      packed: tensors are ``(total, heads, head_dim)``, sequences packed end to end; otherwise ``(batch,
        seqlen, heads, head_dim)``, and every sequence of the batch is divided in the same way.
      table: the runs of all ranks as rows of (rank, sequence, start, count, step); int64.
      code: all of it as one int64 tensor: what an operator takes in a layout's place.
    """

    lengths: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    kind: str
    packed: bool
    table: Any = dataclasses.field(init=False, repr=False)
    code: Tensor = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        runs = [
            (rank, run.sequence, run.start, run.count, run.step)
            for rank, held in enumerate(self.runs)
            for run in held
        ]
        table = np.array(runs, dtype=np.int64).reshape(-1, 5)
        head = (self.packed, KINDS.index(self.kind), self.ranks, len(self.lengths), *self.lengths)
        code = np.concatenate([np.array(head, dtype=np.int64), table.ravel()])
        for name, value in (("table", table), ("code", torch.from_numpy(code))):
            object.__setattr__(self, name, value)
        _known.setdefault(code.tobytes(), self)

    @classmethod
    def of_code(cls, code: Tensor) -> Layout:
        """The layout that has this `code`: one that there is, or another one like it."""
        numbers = code.numpy()
        found = _known.get(numbers.tobytes())
        if found is None:
            packed, kind, ranks, count = numbers[:4].tolist()
            runs: list[list[Run]] = [[] for _ in range(ranks)]
            for rank, *run in numbers[4 + count :].reshape(-1, 5).tolist():
                runs[rank].append(Run(*run))
            lengths = tuple(numbers[4 : 4 + count].tolist())
            found = cls(lengths, tuple(map(tuple, runs)), KINDS[kind], bool(packed))
        return found

    @classmethod
    def contiguous(cls, lengths: int | Iterable[int], ranks: int) -> Layout:
        """Rank r holds the r-th part of all rows, in their order. Sends the least; for masks without
        ``causal``, where it is balanced."""
        numbers, packed = _lengths(lengths, ranks)
        total = sum(numbers)
        bounds = [total * r // ranks for r in range(ranks + 1)]
        runs = [_runs_between(numbers, bounds[r], bounds[r + 1]) for r in range(ranks)]
        return cls(numbers, tuple(map(tuple, runs)), "contiguous", packed)

    @classmethod
    def zigzag(cls, lengths: int | Iterable[int], ranks: int) -> Layout:
        """Each sequence is cut into ``2 ranks`` parts, of which a rank holds the i-th from the start and the
        i-th from the end: balanced for causal masks. Of sequence s rank r has i = (r - s) % ranks, so that
        rows which are left over go around: use `shard` or `indices` to divide rows. Lengths need not divide
        evenly. A shard has the first parts of all sequences, then the second ones."""
        numbers, packed = _lengths(lengths, ranks)
        parts = 2 * ranks
        early: list[list[Run]] = [[] for _ in range(ranks)]
        late: list[list[Run]] = [[] for _ in range(ranks)]
        for sequence, length in enumerate(numbers):
            for part in range(parts):
                begin, end = length * part // parts, length * (part + 1) // parts
                if begin == end:
                    continue
                # Which rank is first changes from sequence to sequence: rows that are left over go around.
                rank = (min(part, parts - 1 - part) + sequence) % ranks
                (early if part < ranks else late)[rank].append(Run(sequence, begin, end - begin))
        runs = tuple(joined(a + b) for a, b in zip(early, late, strict=True))
        return cls(numbers, runs, "zigzag", packed)

    @classmethod
    def striped(cls, lengths: int | Iterable[int], ranks: int) -> Layout:
        """Rank r holds every ranks-th row from r on (Striped Attention, arXiv:2311.09431): balanced for
        causal masks and for windows."""
        numbers, packed = _lengths(lengths, ranks)
        runs: list[list[Run]] = [[] for _ in range(ranks)]
        begin = 0
        for sequence, length in enumerate(numbers):
            for rank in range(ranks):
                first = (rank - begin) % ranks
                if first < length:
                    runs[rank].append(Run(sequence, first, -(-(length - first) // ranks), ranks))
            begin += length
        return cls(numbers, tuple(map(tuple, runs)), "striped", packed)

    @classmethod
    def balanced(
        cls,
        lengths: int | Iterable[int],
        ranks: int,
        *,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        row_pairs: float = 0.0,
    ) -> Layout:
        """For packed sequences of any lengths: evens out the work under this mask while few rows are sent.
        Sequences are kept whole where they can be; one that is more than a rank's share is cut into
        consecutive parts, which are the longer the earlier they are. Shards differ in rows.

        Args:
          row_pairs: what a row costs besides its visible pairs, in pairs: what the model's other layers do
            for it. 0 evens out the pairs alone; large numbers even out the rows.
        """
        numbers, packed = _lengths(lengths, ranks)
        cuts = _balance.divide(numbers, ranks, Mask.of(causal, window), row_pairs)
        runs = (tuple(Run(s, a, b - a) for s, a, b in sorted(held)) for held in cuts)
        return cls(numbers, tuple(map(joined, runs)), "balanced", packed)

    @classmethod
    def of_ranges(cls, lengths: int | Iterable[int], ranges: Sequence[Sequence[tuple[int, int]]]) -> Layout:
        """Rank r holds the rows ``begin`` to ``end`` of each (begin, end) in ``ranges[r]``, counted through
        all sequences as ``cu_seqlens`` counts. Every row is in exactly one of them."""
        numbers, packed = _lengths(lengths, len(ranges))
        total, reached = sum(numbers), 0
        for begin, end in sorted(r for held in ranges for r in held if r[0] != r[1]):
            if begin != reached or end < begin:
                what = "in no range" if begin > reached else "in two ranges"
                raise InvalidArgumentError(
                    f"row {min(begin, reached)} is {what}; each of the {total} rows is in exactly one"
                )
            reached = end
        if reached != total:
            raise InvalidArgumentError(f"ranges end at row {reached}, but there are {total} rows")
        runs = (joined(run for a, b in held for run in _runs_between(numbers, a, b)) for held in ranges)
        return cls(numbers, tuple(runs), "of_ranges", packed)

    @property
    def ranks(self) -> int:
        """How many ranks share the rows."""
        return len(self.runs)

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.lengths)

    @property
    def dim(self) -> int:
        """The dimension of tensors that rows are in."""
        return 0 if self.packed else 1

    def rows(self, rank: int) -> int:
        """Rows of a rank's shard."""
        return sum(run.count for run in self.runs[rank])

    def indices(self, rank: int) -> Tensor:
        """The number of each row of the shard among the rows of all sequences; int64, on the CPU."""
        return _indices(self, rank, True)

    def positions(self, rank: int) -> Tensor:
        """The place of each row of the shard in its sequence, as rotary embeddings want it; int64, on the
        CPU."""
        return _indices(self, rank, False)

    def shard(self, x: Tensor, rank: int, dim: int | None = None) -> Tensor:
        """The rows of x that a rank holds; x has those of all ranks in dimension ``dim`` (default: 0 for
        packed tensors, else 1). Differentiable."""
        dim = self.dim if dim is None else dim
        if x.shape[dim] != self.total:
            raise InvalidArgumentError(
                f"x has {x.shape[dim]} rows in dimension {dim}, but the layout has {self.total}"
            )
        return x.index_select(dim, self.indices(rank).to(x.device))

    def unshard(self, shards: Sequence[Tensor], dim: int | None = None) -> Tensor:
        """The whole tensor of the shards of all ranks, in their order; the inverse of `shard`. See
        `tandem.distributed.gather` for shards that are on their ranks. Differentiable."""
        dim = self.dim if dim is None else dim
        held = [shard.shape[dim] for shard in shards]
        rows = [self.rows(rank) for rank in range(self.ranks)]
        if held != rows:
            raise InvalidArgumentError(f"shards have {held} rows, but the layout's have {rows}")
        order = torch.cat([self.indices(rank) for rank in range(self.ranks)]).argsort()
        return torch.cat(list(shards), dim).index_select(dim, order.to(shards[0].device))

    @functools.cached_property
    def digest(self) -> str:
        """A hash that is equal for layouts that divide the same rows in the same way."""
        rows = self.code.clone()
        rows[1] = 0  # whatever made it
        return hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:12]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    @functools.cached_property
    def validated(self) -> set[Any]:
        """What calls with this layout have been found right: never copied, nor part of its value."""
        return set()

    @functools.cached_property
    def _kept(self) -> dict[Any, Any]:
        """What functions of this layout have found (`kept_with_layout`)."""
        return {}

    def pairs(self, *, causal: bool = False, window: tuple[int, int] = (-1, -1)) -> list[int]:
        """Visible pairs of query and key of each rank, of one head: its work, exactly."""
        rank, sequence, start, count, step = self.table.T
        seqlen = np.array(self.lengths, dtype=np.int64)[sequence]
        found = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(found, rank, Mask.of(causal, window).pairs(start, count, step, seqlen))
        pairs: list[int] = found.tolist()
        return pairs


def _lengths(lengths: int | Iterable[int], ranks: int) -> tuple[tuple[int, ...], bool]:
    packed = not isinstance(lengths, (int, np.integer))
    try:
        numbers = tuple(map(int, lengths if packed else (lengths,)))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"lengths is {lengths!r}; pass an integer, or integers") from None
    if not isinstance(ranks, int):
        raise InvalidArgumentError(f"ranks is {ranks!r}; pass an integer")
    if ranks < 1:
        raise InvalidArgumentError(f"ranks is {ranks}; it must be at least 1")
    for i, length in enumerate(numbers):
        if length < 0:
            raise InvalidArgumentError(f"lengths[{i}] is {length}; it must be at least 0")
    return numbers, packed


def _runs_between(lengths: Sequence[int], first: int, last: int) -> list[Run]:
    """The rows [first, last) of all sequences."""
    runs, begin = [], 0
    for sequence, length in enumerate(lengths):
        low, high = max(first, begin), min(last, begin + length)
        if low < high:
            runs.append(Run(sequence, low - begin, high - low))
        begin += length
    return runs


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Joins runs that follow one another; the rows stay in order."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1].sequence == run.sequence and found[-1].last + 1 == run.start:
            found[-1] = Run(run.sequence, found[-1].start, found[-1].count + run.count)
        else:
            found.append(run)
    return tuple(found)


def _indices(layout: Layout, rank: int, through: bool) -> Tensor:
    begins = [0, *itertools.accumulate(layout.lengths)] if through else [0] * len(layout.lengths)
    _, sequence, start, count, step = layout.table[layout.table[:, 0] == rank].T
    first = np.array(begins, dtype=np.int64)[sequence] + start
    # The i-th row of each run, for all runs at once.
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return torch.from_numpy(np.repeat(first, count) + within * np.repeat(step, count))
