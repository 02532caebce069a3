"""What a mask of Transformers means to Tandem: causal or not, a window, and which rows belong together.

Transformers describes a mask as a function of (batch, head, query, key), built by a handful of makers in
`transformers.masking_utils`. `read` calls it with places that note what is asked of them; a function that
asks anything else is an error, so that no model quietly gets another mask than it asked for. No (query, key)
matrix is ever made, and torch.compile follows it all but packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils as makers

from tandem._errors import UnsupportedError


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees by position alone, and for packed sequences which each token belongs to."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)  # as tandem.attention's
    packed: Tensor | None = None  # (batch, seqlen), ascending numbers of the sequences


class _Seen:
    """Which keys are seen by what has been asked so far: what a mask function gets for a boolean."""

    device = None

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def to(self, device: Any) -> _Seen:
        return self

    def __and__(self, other: _Seen) -> _Seen:
        a, b = self.pattern, other.pattern
        (left, right), (left_b, right_b) = a.window, b.window
        window = (_narrower(left, left_b), _narrower(right, right_b))
        return _Seen(Pattern(a.causal or b.causal, window))

    def __bool__(self) -> bool:
        raise TypeError("a mask function must not branch on places")


def _narrower(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)  # -1 is unbounded


class _Place:
    """Stands for the place of a query, the one of a key, or a query's shifted to the left."""

    def __init__(self, of_query: bool, shift: int = 0) -> None:
        self.of_query = of_query
        self.shift = shift

    def new_ones(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Seen:
        return _Seen(Pattern())

    def __sub__(self, other: int | _Place) -> _Place | _Distance:
        if isinstance(other, _Place):
            return _Distance()
        return _Place(self.of_query, self.shift + other)

    def __le__(self, query: _Place) -> _Seen:  # key <= query
        self._is_key_before(query)
        if query.shift != 0:
            raise TypeError("a shifted diagonal")
        return _Seen(Pattern(causal=True))

    def __gt__(self, query: _Place) -> _Seen:  # key > query - W: the token itself and W - 1 to its left
        self._is_key_before(query)
        return _Seen(Pattern(window=(query.shift - 1, -1)))

    def __ge__(self, zero: int) -> _Seen:  # query >= 0: every key
        if isinstance(zero, _Place) or zero != 0:
            raise TypeError("a bound that is not the first place")
        return _Seen(Pattern())

    def _is_key_before(self, query: _Place) -> None:
        if self.of_query or self.shift != 0 or not query.of_query:
            raise TypeError("not a key against a query")


class _Distance:
    """Stands for a query's place less a key's."""

    def __abs__(self) -> _Distance:
        return self

    def __le__(self, window: int) -> _Seen:  # abs(query - key) <= W: inclusive on both sides, there as here
        return _Seen(Pattern(window=(window, window)))


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


_AND = _code(makers.and_masks(makers.causal_mask_function))
_SAME_SEQUENCE = _code(makers.packed_sequence_mask_function(torch.zeros(1, 1)))
# Not in every Transformers 5.
_remap: Any = getattr(makers, "remap_positions_for_packed_sequence", None)
_REMAPPED = _code(_remap(makers.causal_mask_function, torch.zeros(1, 1))) if _remap else object()


def read(function: Callable[..., Any]) -> Pattern:
    """The pattern that `function` describes. Raises UnsupportedError where it is none."""
    if not torch.compiler.is_compiling():  # which does not follow the reading of closures
        code = _code(function)
        if code is _AND:
            return _all([read(part) for part in _held(function, "mask_functions")])
        if code is _SAME_SEQUENCE:
            return Pattern(packed=_held(function, "packed_sequence_mask"))
        if code is _REMAPPED:  # places count from each sequence's start, as they do in packed sequences here
            return read(_held(function, "mask_function"))
    try:
        seen = function(_Place(False), _Place(False), _Place(True), _Place(False))
    except (TypeError, AttributeError, IndexError):
        seen = None
    if isinstance(seen, _Seen):
        return seen.pattern
    name = getattr(function, "__qualname__", "a function that cannot be named")
    raise UnsupportedError(
        f"this model's mask is built by {name}, but Tandem takes causal masks, sliding windows, padding and "
        'packed sequences; load the model with attn_implementation="sdpa"'
    )


def _held(function: Any, name: str) -> Any:
    """The variable called `name` that `function` closes over."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _all(patterns: list[Pattern]) -> Pattern:
    seen, packed = _Seen(Pattern()), None
    for pattern in patterns:
        seen = seen & _Seen(pattern)
        packed = packed if pattern.packed is None else pattern.packed
    return replace(seen.pattern, packed=packed)


@dataclass(frozen=True)
class Rows:
    """How the rows of (batch, seqlen) tensors make sequences, once flattened to (batch * seqlen)."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    chosen_q: Tensor | None = None  # indices: only these rows take part, in this order
    chosen_k: Tensor | None = None


def packed_rows(packed: Tensor) -> Rows:
    """Every run of equal numbers in a row of `packed` is a sequence; so is every row's start."""
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    cu_seqlens = pad(starts.flatten().nonzero().flatten(), (0, 1), value=packed.numel())
    return Rows(cu_seqlens, cu_seqlens)


def padded_rows(valid: Tensor, begin: Tensor, end: Tensor, queries: int, offset: Any, causal: bool) -> Rows:
    """Rows of padded sequences whose valid keys are `begin` to `end` (each (batch,)) of valid's seqlen.

    Query row i stands at key `offset` + i. The rows before the first begin are a sequence of their own, and
    what follows a sequence's end is past its seqused, so padding neither sees nor is seen, without a copy.
    """
    batch, keys = valid.shape
    numbers = torch.arange(batch, device=valid.device)
    if causal:  # the queries that are tokens; their last stands at the last valid key
        begin_q, end_q = ((t - offset).clamp(0, queries) for t in (begin, end))
    else:
        begin_q, end_q = torch.zeros_like(begin), torch.full_like(end, queries)

    def bounds(starts: Tensor, seqlen: int) -> Tensor:
        return pad(pad(starts + numbers * seqlen, (1, 0)), (0, 1), value=batch * seqlen)

    def used(length: Tensor) -> Tensor:
        return pad(length, (1, 0))

    return Rows(bounds(begin_q, queries), bounds(begin, keys), used(end_q - begin_q), used(end - begin))


def chosen_rows(valid: Tensor, queries: int, offset: Any, causal: bool) -> Rows:
    """Rows of sequences with padding inside them: the valid rows are gathered, and the rest left out."""
    batch, _ = valid.shape
    asks = torch.ones(batch, queries, dtype=torch.bool, device=valid.device)
    if causal:
        asks = valid[:, torch.arange(queries, device=valid.device) + offset]

    def ends(mask: Tensor) -> Tensor:
        return pad(mask.sum(1).cumsum(0), (1, 0))

    return Rows(
        ends(asks),
        ends(valid),
        chosen_q=asks.flatten().nonzero().flatten(),
        chosen_k=valid.flatten().nonzero().flatten(),
    )
