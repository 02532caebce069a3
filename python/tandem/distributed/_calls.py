"""The calls of Tandem that attention between pieces of queries and pieces of keys is made of.

A call of Tandem aligns its mask to the bottom right corner: of n queries and m keys, query i sees keys
``i + m - n - left`` to ``i + m - n + right``. Between two pieces of one step, query i sees key j where
``low <= j - i <= high``. Without the queries that see none and the keys that none sees, that is a call: its
last query sees its last key, so that left and right are not negative.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.distributed._layout import used_here
from tandem.distributed._mask import Mask
from tandem.distributed._routes import Piece

#: (first and last + 1 of the queries, first and last + 1 of the keys), rows of the tensors that hold them
Pair = tuple[int, int, int, int]
#: (sequence, place in it of the first query, of the first key, step of both)
Place = tuple[int, int, int, int]


@dataclass
class Group:
    """One call: pairs with one window, in the order of their queries and of their keys.

    Attributes:
      places: where the pairs lie in their sequences.
      new_queries: no row between the first and the last query is in a group before.
      new_keys: likewise for keys.
    """

    left: int
    right: int
    pairs: list[Pair]
    places: list[Place]
    new_queries: bool = False
    new_keys: bool = False
    lengths: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tables: dict[torch.device, Tensor] = field(default_factory=dict)
    dropped: dict[Any, Tensor] = field(default_factory=dict)

    @staticmethod
    @functools.lru_cache(64)
    def of_rows(rows: int, sequences: int) -> Group:
        """A call of the first rows of a sequence, and of so many sequences in all."""
        empty = [(rows, rows, rows, rows)] * (sequences - 1)
        return Group(-1, -1, [(0, rows, 0, rows), *empty], [(0, 0, 0, 1)] * sequences, True, True)

    @property
    def queries(self) -> tuple[int, int]:
        return self.pairs[0][0], self.pairs[-1][1]

    @property
    def keys(self) -> tuple[int, int]:
        return self.pairs[0][2], self.pairs[-1][3]

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cu_seqlens of queries and keys, of several pairs: rows between two pairs are sequences of their
        own, those of queries without keys and those of keys without queries."""
        if device not in self.lengths:
            first, _, first_key, _ = self.pairs[0]
            cu_q, cu_k = [0], [0]
            for (begin, end, begin_key, end_key), apart in zip(self.pairs, self._apart(), strict=True):
                if apart:
                    for rows, keys in ((begin - first, cu_k[-1]), (begin - first, begin_key - first_key)):
                        cu_q.append(rows)
                        cu_k.append(keys)
                cu_q.append(end - first)
                cu_k.append(end_key - first_key)
            pair = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in (cu_q, cu_k))
            self.lengths[device] = tuple(pair)  # type: ignore[assignment]
        of_q, of_k = self.lengths[device]
        return used_here(of_q), used_here(of_k)

    def table(self, device: torch.device) -> Tensor:
        """The places of the call's sequences, as `cu_seqlens` counts them; int32, a row of each."""
        if device not in self.tables:
            self.tables[device] = torch.tensor(self._rows(), dtype=torch.int32, device=device)
        return used_here(self.tables[device])

    def dropout_places(self, device: torch.device, batch: int, heads: int, first_head: int) -> Tensor:
        """The call's ``dropout_places``, of tensors with so many batch entries and the heads from this one
        on, of so many in all. A call of one pair has a batch of them; one of several pairs is packed."""
        key = device, batch, heads, first_head
        if key not in self.dropped:
            rows = self._rows()
            if len(self.pairs) == 1:
                rows = [(rows[0][0] + b, *rows[0][1:]) for b in range(batch)]
            places = [(sequence * heads + first_head, *place) for sequence, *place in rows]
            self.dropped[key] = torch.tensor(places, dtype=torch.int32, device=device).view(-1, 4)
        return used_here(self.dropped[key])

    def _rows(self) -> list[Place]:
        """The place of each of the call's sequences."""
        rows: list[Place] = []
        for place, apart in zip(self.places, self._apart(), strict=True):
            rows += [(0, 0, 0, 1)] * (2 * apart) + [place]
        return rows

    def of_sequence(self) -> tuple[slice, slice]:
        """Which queries and keys of their sequences the pairs have, where all have the same ones."""
        pairs = zip(self.pairs, self.places, strict=True)
        pair, place = next(((p, at) for p, at in pairs if p[0] < p[1]), (self.pairs[0], self.places[0]))
        _, first, first_key, step = place
        rows, keys = pair[1] - pair[0], pair[3] - pair[2]
        return slice(first, first + rows * step, step), slice(first_key, first_key + keys * step, step)

    def _apart(self) -> list[bool]:
        """For each pair whether there are rows between it and the pair before."""
        before = [(0, self.pairs[0][0], 0, self.pairs[0][2]), *self.pairs[:-1]]
        return [
            (end, end_key) != (begin, begin_key)
            for (_, end, _, end_key), (begin, _, begin_key, _) in zip(before, self.pairs, strict=True)
        ]


def between(queries: Piece, keys: Piece, mask: Mask) -> tuple[int, int, Pair, Place] | None:
    """(left, right, pair, place) of the call of two pieces of one sequence and one step; None if no query of
    these sees one of these keys."""
    step, apart = queries.step, queries.start - keys.start
    n, m = queries.count, keys.count
    # j - i is at most high and at least low; beyond the tensors' corners where the mask is unbounded.
    high = m if mask.right < 0 else (apart + mask.right) // step
    low = -n if mask.left < 0 else -(-(apart - mask.left) // step)
    if low > high:  # a narrow window between the rows of two stripes
        return None
    first, last = max(0, -high), min(n, m - low)
    first_key, last_key = max(0, first + low), min(m, last + high)
    if first >= last or first_key >= last_key:
        return None
    left = -1 if mask.left < 0 else last_key - last - low
    right = -1 if mask.right < 0 else high + last - last_key
    q, k = queries.offset, keys.offset
    place = (queries.sequence, queries.start + first * step, keys.start + first_key * step, step)
    return left, right, (q + first, q + last, k + first_key, k + last_key), place


def groups(
    queries: Sequence[Piece],
    keys: Sequence[Piece],
    mask: Mask,
    packed: bool,
    touched: list[tuple[int, int]],
) -> list[Group]:
    """The calls between all queries and all keys, few of them where tensors are ``packed``. ``touched`` are
    ranges of queries that calls before have written to; those of these calls are added."""
    by_sequence: dict[int, list[Piece]] = {}
    for piece in keys:
        by_sequence.setdefault(piece.sequence, []).append(piece)
    found: list[Group] = []
    for piece in queries:
        for key in by_sequence.get(piece.sequence, ()):
            call = between(_of_step(piece, key), _of_step(key, piece), mask)
            if call is not None:
                _add(found, call, packed)
    # The most keys first: later calls add to what is there, the first one writes.
    found.sort(key=lambda group: group.keys[0] - group.keys[1])
    touched_keys: list[tuple[int, int]] = []
    for group in found:
        group.new_queries = _is_new(group.queries, touched)
        group.new_keys = _is_new(group.keys, touched_keys)
    return found


def _of_step(piece: Piece, other: Piece) -> Piece:
    """A piece of one row has any step."""
    return Piece(piece.sequence, piece.start, 1, other.step, piece.offset) if piece.count == 1 else piece


def _add(found: list[Group], call: tuple[int, int, Pair, Place], packed: bool) -> None:
    left, right, pair, place = call
    for group in found if packed else ():
        _, last, _, last_key = group.pairs[-1]
        follows = last <= pair[0] and last_key <= pair[2]
        if (
            follows
            and _same(group.left, left, pair[3] - pair[2])
            and _same(group.right, right, pair[1] - pair[0])
        ):
            group.pairs.append(pair)
            group.places.append(place)
            return
    found.append(Group(left, right, [pair], [place]))


def _same(group: int, bound: int, rows: int) -> bool:
    """Whether a window's bound means the same as the group's for so many rows."""
    return group == bound or all(b < 0 or b >= rows - 1 for b in (group, bound))


def _is_new(rows: tuple[int, int], touched: list[tuple[int, int]]) -> bool:
    new = all(end <= rows[0] or rows[1] <= begin for begin, end in touched)
    touched.append(rows)
    return new
