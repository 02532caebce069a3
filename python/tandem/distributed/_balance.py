"""Dividing packed sequences of any lengths among ranks: even work, few rows sent.

A sequence on one rank sends nothing. One with more work than a rank may have, ``cap``, has to be cut, and of
all ways to cut it under a causal mask one sends the least: parts of work ``cap`` off its end, and what is
left at its start. `least_rows` says why. `divide` cuts so, packs what is left as whole sequences, the most
work first, and cuts again only what fits nowhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tandem.distributed._mask import Mask

#: (sequence, begin, end): rows of a sequence
Part = tuple[int, int, int]

#: The busiest rank over the mean that `divide` may go up to, from the evenest on.
_CAPS = (1.0, 1.0025, 1.005, 1.01, 1.015, 1.02, 1.03, 1.04, 1.06, 1.08, 1.1)
#: The first of them is taken that sends at most so many times what cutting as little as the last allows does.
_MOST_ROWS = 1.1
#: The fewest rows that a sequence which fits nowhere is cut into: a tile of the kernels, whose calls and
#: partial results cost as much for fewer. Of short sequences one in so many of a rank's rows.
_ROWS, _PARTS = 128, 64


class Work:
    """What rows of these sequences cost: their visible pairs, and ``row_pairs`` a row."""

    def __init__(self, lengths: Sequence[int], mask: Mask, row_pairs: float = 0.0) -> None:
        self.lengths, self.mask, self.row_pairs = lengths, mask, row_pairs

    def of(self, sequence: int, begin: int, end: int) -> float:
        pairs = self.mask.pairs(begin, end - begin, 1, self.lengths[sequence])
        cost: float = pairs + self.row_pairs * (end - begin)
        return cost

    def cut(self, sequence: int, begin: int, end: int, work: float) -> int:
        """The first row of the longest end of the rows [begin, end) that costs at most this."""
        low, high = begin, end
        while low < high:
            middle = (low + high) // 2
            if self.of(sequence, middle, end) <= work:
                high = middle
            else:
                low = middle + 1
        return low

    def ends(self, sequence: int, cap: float) -> list[Part]:
        """The parts of a sequence of at most ``cap`` each, off its end; the last one has what is left."""
        parts, end = [], self.lengths[sequence]
        while end > 0:
            begin = min(self.cut(sequence, 0, end, cap), end - 1)
            parts.append((sequence, begin, end))
            end = begin
        return parts

    def received(self, parts: Sequence[Part]) -> int:
        """Rows of keys that ranks receive of sequences in these parts, each on a rank of its own."""
        rows = 0
        for sequence, begin, end in parts:
            low, high = self.mask.keys(begin, end - 1, self.lengths[sequence])
            rows += high - low - (end - begin)
        return rows


def least_rows(work: Work, cap: float) -> int:
    """Rows of keys that are received in all at least, whatever the layout, if no rank has more work than cap.

    Order the ranks by their last row of a sequence. The j with the latest ones have work ``j cap`` at most,
    so that the next rank's last row is no earlier than where so much work ends, counted from the sequence's
    end. A rank receives the keys that its last row sees but for those it holds, and all hold the sequence
    once. Under a causal mask without a window consecutive parts receive just that, up to rounding to rows.
    """
    return sum(_least_of(work, sequence, cap) for sequence in range(len(work.lengths)))


def least_rows_of_equal_shards(length: int, ranks: int) -> int:
    """`least_rows` of one sequence under a causal mask, if ranks have equal rows and equal work besides.

    The j ranks with the latest last rows hold the last T rows and j length / ranks - T others, which cost as
    much as the first ones of the sequence at least. All of it is their share of the work if T is
    j length / (2 ranks): no layout can have more, and `Layout.zigzag` has just that. For many ranks that is
    9/8 of what shards of any size have to receive.
    """
    return sum(length - j * length // (2 * ranks) for j in range(ranks)) - length


def _least_of(work: Work, sequence: int, cap: float) -> int:
    length = work.lengths[sequence]

    def seen(row: int) -> int:
        begin, end = work.mask.keys(row, row, length)
        return int(end - begin)

    rows, end, ranks = 0, length, 0
    while end > 0:
        rows += min(seen(end - 1), seen(length - 1))  # as few as any row from that one on sees
        ranks += 1
        end = work.cut(sequence, 0, length, ranks * cap) if cap > 0 else 0
    return max(0, rows - length)


def divide(lengths: Sequence[int], ranks: int, mask: Mask, row_pairs: float) -> list[list[Part]]:
    """For each rank the parts that it holds."""
    work = Work(lengths, mask, row_pairs)
    mean = sum(work.of(s, 0, n) for s, n in enumerate(lengths)) / ranks
    least = sum(work.received(work.ends(s, mean * _CAPS[-1])) for s in range(len(lengths)))
    best: tuple[int, list[list[Part]]] | None = None
    for factor in _CAPS:
        held = _pack(work, ranks, mean * factor)
        rows = work.received([part for parts in held for part in parts])
        if best is None or rows < best[0]:
            best = rows, held
        if rows <= _MOST_ROWS * least:
            break
    assert best is not None  # there are caps
    return best[1]


def _pack(work: Work, ranks: int, cap: float) -> list[list[Part]]:
    held: list[list[Part]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    sizes: dict[Part, float] = {}
    full: list[Part] = []
    for sequence in range(len(work.lengths)):
        *ends, rest = work.ends(sequence, cap) or [(sequence, 0, 0)]
        full += ends
        sizes[rest] = work.of(*rest)

    def place(rank: int, part: Part) -> None:
        held[rank].append(part)
        load[rank] += work.of(*part)

    for rank, part in enumerate(full):
        place(rank % ranks, part)
    left = []
    for part in sorted(sizes, key=lambda part: (-sizes[part], part)):
        rank = min(range(ranks), key=lambda r: load[r])
        if load[rank] + sizes[part] <= cap:
            place(rank, part)
        else:
            left.append(part)
    least = max(1, min(_ROWS, sum(work.lengths) // (_PARTS * ranks)))
    for sequence, begin, end in left:
        while begin < end:
            rank = min(range(ranks), key=lambda r: load[r])
            first = work.cut(sequence, begin, end, cap - load[rank])
            # The least loaded rank has a little more than the cap before a part becomes a sliver.
            first = min(first, max(begin, end - least))
            if first - begin < least:
                first = begin
            place(rank, (sequence, first, end))
            end = first
    return _neighbours([_joined(parts) for parts in held])


def _neighbours(held: list[list[Part]]) -> list[list[Part]]:
    """The ranks in another order: those of one sequence side by side, as far as can be, where links are
    quicker."""
    of_sequence: dict[int, list[int]] = defaultdict(list)
    for rank, parts in enumerate(held):
        for sequence in {sequence for sequence, _, _ in parts}:
            of_sequence[sequence].append(rank)
    order: dict[int, None] = {}
    for _, ranks in sorted(of_sequence.items(), key=lambda item: (-len(item[1]), item[0])):
        order.update(dict.fromkeys(ranks))
    order.update(dict.fromkeys(range(len(held))))
    return [held[rank] for rank in order]


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Joins parts that are neighbours, so that each part's keys are counted once."""
    by_sequence: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for sequence, begin, end in sorted(parts):
        ranges = by_sequence[sequence]
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], end)
        elif begin < end:
            ranges.append((begin, end))
    return [(s, begin, end) for s, ranges in by_sequence.items() for begin, end in ranges]
