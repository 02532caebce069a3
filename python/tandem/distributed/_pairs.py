"""Functions of scores, masks and biases over ranks: what is asked of every pair of query and key.

They are written down once, in places of whole sequences. A call of a rank has some rows of them: it reads
where these lie from a small table (`Group.table`), and its first head from one number, so that one text, on a
GPU one kernel, serves all calls. Of a bias, a mask and slopes a call is given the part of its rows and heads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays
from tandem.distributed._calls import Group
from tandem.distributed._layout import used_here
from tandem.functions import _functions
from tandem.functions._functions import Functions, Places
from tandem.torch import _derivatives

#: Arrays of a call before those that the caller's functions read: its table and its first head.
_OWN = 2
#: The dimensions, from the last one on, of what broadcasts to scores.
_AXES = ("b", "h", "q", "k")


@dataclass(frozen=True, eq=False)
class Pairs:
    """Functions over ranks, written down.

    Attributes:
      score, mask: their texts.
      captured: the arrays that they read, whole.
      axes: of each array what its dimensions are that a call is given a part of; "" of the others.
      differentiated: the numbers of the arrays whose gradients are wanted.
      sums: these gradients in a backward pass, in f32; None of the other arrays.
    """

    score: str | None
    mask: str | None
    captured: tuple[Tensor, ...]
    axes: tuple[tuple[str, ...], ...]
    differentiated: tuple[int, ...]
    sums: tuple[Tensor | None, ...] = field(default=())

    @classmethod
    def of(cls, given: Sequence[Any], q: Tensor, shape: tuple[int, ...], packed: bool) -> Pairs | None:
        """The functions of a call over ranks, in the order of _functions.NAMES, or None of one that has no
        pair. ``shape``: (batch, heads_q, rows, rows), of all ranks. ``packed``: of packed sequences."""
        named = dict(zip(_functions.NAMES, given, strict=True))
        # Tensors of their own: what a score function reads besides is not to be cut.
        whole = {name: x[...] if isinstance(x, Tensor) else x for name, x in named.items()}
        found = _functions.trace_functions(
            shape, _arrays.library_of("q", q), packed=packed, places=_places(packed, q.device), **whole
        )
        if found is None:
            return None
        captured = tuple(found.arrays[_OWN:])
        axes = tuple(_axes(array, whole) for array in captured)
        recorded = (
            [] if found.score is None else [i for i, t in enumerate(captured) if _derivatives.is_recorded(t)]
        )
        return cls(found.score, found.mask, captured, axes, tuple(recorded))

    def told(self) -> dict[str, Any]:
        """What has to be the same on every rank."""
        return {
            "score function": self.score,
            "mask function": self.mask,
            "arrays that functions read": [
                (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in self.captured
            ],
            "which of these want gradients": self.differentiated,
        }

    def of_call(self, group: Group, first_head: int, heads: int, device: torch.device) -> Functions:
        """As a call of these pairs takes them, of so many heads of q."""
        own = (group.table(device), used_here(_number(first_head, device)))
        parts = (self._part(i, t, group, first_head, heads) for i, t in enumerate(self.captured))
        found = Functions(self.score, self.mask, [*own, *parts], _arrays.library_of("q", own[0]))
        found.differentiated = tuple(i + _OWN for i in self.differentiated)
        return found

    def with_sums(self) -> Pairs:
        """These functions with gradients that are 0."""
        sums = (
            torch.zeros(t.shape, dtype=torch.float32, device=t.device) if i in self.differentiated else None
            for i, t in enumerate(self.captured)
        )
        return replace(self, sums=tuple(sums))

    def gradients_of(self, functions: Functions) -> list[Tensor | None]:
        """Where a backward call with these functions is to write the gradients of their arrays."""
        return [
            torch.empty(t.shape, dtype=torch.float32, device=t.device)
            if i in functions.differentiated
            else None
            for i, t in enumerate(functions.arrays)
        ]

    def add(self, made: Sequence[Tensor | None], group: Group, first_head: int, heads: int) -> None:
        """Adds a call's gradients to the sums."""
        for i in self.differentiated:
            total, part = self.sums[i], made[i + _OWN]
            assert total is not None and part is not None  # both are of what is differentiated
            self._part(i, total, group, first_head, heads).add_(part)

    def _part(self, i: int, t: Tensor, group: Group, first_head: int, heads: int) -> Tensor:
        """What a call reads of the i-th array, or of its gradient: a view."""
        if not any(self.axes[i]):
            return t
        rows, keys = group.of_sequence()
        of = {"h": slice(first_head, first_head + heads), "q": rows, "k": keys, "": slice(None)}
        return t[tuple(of[axis] for axis in self.axes[i])]


def _places(packed: bool, device: torch.device) -> Places:
    """In whole sequences, from a call's table. ``packed``: it has a row of each of the call's sequences;
    otherwise the call's sequences are a batch, which all have the places of its one row."""
    row = "b" if packed else "0"
    sequence = "t0[b, 0]" if packed else "b"
    q, k = (f"add(t0[{row}, {column}], mul(t0[{row}, 3], {leaf}))" for column, leaf in ((1, "q"), (2, "k")))
    own = (Group.of_rows(1, 1).table(device), used_here(_number(0, device)))  # of the kinds that calls have
    return Places(sequence, "add(t1[0], h)", q, k, f"sub({q}, {k})", own)


@functools.lru_cache(256)
def _number(value: int, device: torch.device) -> Tensor:
    """An array of this number: to copy it to a GPU anew in each call would wait for what runs there."""
    return torch.tensor([value], dtype=torch.int32, device=device)


def _axes(array: Tensor, whole: dict[str, Any]) -> tuple[str, ...]:
    """What the dimensions of an array are that a call is given a part of."""
    if array is whole["alibi_slopes"]:
        return ("", "h")[-array.ndim :]
    if array is whole["bias"] or array is whole["mask"]:
        named = zip(array.shape, _AXES[4 - array.ndim :], strict=True)
        return tuple(axis if size > 1 and axis != "b" else "" for size, axis in named)
    return ("",) * array.ndim
