"""What a mask function of Transformers means to Tandem: causal or not, a window, which rows belong together.

Transformers describes a mask as a function of (batch, head, query, key), built by a handful of makers in
`transformers.masking_utils`. `read` calls it with places that note what is asked of them; a function that
asks anything else is an error, so that no model quietly gets another mask than it asked for. No (query, key)
matrix is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import masking_utils as makers

from tandem._errors import UnsupportedError

# What to do about an error, where another attention of Transformers can do what Tandem does not.
EAGER = 'load the model with attn_implementation="eager"'
SDPA = 'load the model with attn_implementation="sdpa", or register with unsupported="sdpa"'


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees by position alone, and for packed sequences which each token belongs to."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)  # as tandem.attention's
    packed: Tensor | None = None  # (batch, seqlen), ascending numbers of the sequences
    later: bool = False  # keys after the query's alone: none of them, under a causal mask

    @property
    def positional(self) -> bool:
        """Whether what a query sees depends on where it stands."""
        return self.causal or self.window != (-1, -1)


class _Opaque:
    """What a mask function may not compare, and may not branch on."""

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("not a comparison that a causal mask or a window makes")

    __eq__ = __ne__ = __bool__ = __index__ = _refuse


class _Seen(_Opaque):
    """Which keys are seen by what has been asked so far: what a mask function gets for a boolean."""

    device = None

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def to(self, device: Any) -> _Seen:
        return self

    def __and__(self, other: _Seen) -> _Seen:
        if not isinstance(other, _Seen):
            raise TypeError("not what a place was asked")
        a, b = self.pattern, other.pattern
        (left, right), (left_b, right_b) = a.window, b.window
        window = (_narrower(left, left_b), _narrower(right, right_b))
        return _Seen(Pattern(a.causal or b.causal, window, later=a.later or b.later))


def _narrower(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)  # -1 is unbounded


class _Place(_Opaque):
    """Stands for the place of a query, the one of a key, or a query's shifted to the left."""

    def __init__(self, of_query: bool, shift: int = 0) -> None:
        self.of_query = of_query
        self.shift = shift

    def new_ones(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Seen:
        return _Seen(Pattern())

    def __sub__(self, other: int | _Place) -> _Place | _Distance:
        if isinstance(other, _Place):
            if self.of_query == other.of_query or self.shift != 0 or other.shift != 0:
                raise TypeError("not a query against a key")
            return _Distance()
        if not isinstance(other, int):
            raise TypeError("a shift that is not a number")
        return _Place(self.of_query, self.shift + other)

    def __le__(self, query: _Place) -> _Seen:  # key <= query
        self._is_key_before(query)
        if query.shift != 0:
            raise TypeError("a shifted diagonal")
        return _Seen(Pattern(causal=True))

    def __gt__(self, query: _Place) -> _Seen:  # key > query - W: the token itself and W - 1 to its left
        self._is_key_before(query)
        if query.shift < 0:
            raise TypeError("a window without the token itself")
        if query.shift == 0:  # Qwen 2 MoE has a mask with W = 0, made and not used, where it has no window
            return _Seen(Pattern(later=True))
        return _Seen(Pattern(window=(query.shift - 1, -1)))

    def __ge__(self, zero: int) -> _Seen:  # query >= 0: every key
        if not isinstance(zero, int) or zero != 0 or self.shift != 0:
            raise TypeError("a bound that is not the first place")
        return _Seen(Pattern())

    def _is_key_before(self, query: Any) -> None:
        if not isinstance(query, _Place) or self.of_query or self.shift != 0 or not query.of_query:
            raise TypeError("not a key against a query")


class _Distance(_Opaque):
    """Stands for the distance of a query's place and a key's, whose sign is known once it is absolute."""

    def __init__(self, absolute: bool = False) -> None:
        self.absolute = absolute

    def __abs__(self) -> _Distance:
        return _Distance(absolute=True)

    def __le__(self, window: int) -> _Seen:  # abs(query - key) <= W: inclusive on both sides, there as here
        if not self.absolute or not isinstance(window, int) or window < 0:
            raise TypeError("a bound on one side, or below zero")
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
    pattern = _read(function)
    if pattern.later and not pattern.causal:
        _not_a_pattern(function)
    return pattern


def _read(function: Callable[..., Any]) -> Pattern:
    if not torch.compiler.is_compiling():  # which does not follow the reading of closures
        code = _code(function)
        if code is _AND:
            return _all([_read(part) for part in _held(function, "mask_functions")])
        if code is _SAME_SEQUENCE:
            return Pattern(packed=_held(function, "packed_sequence_mask"))
        if code is _REMAPPED:  # places count from each sequence's start, as they do in packed sequences here
            return _read(_held(function, "mask_function"))
    try:
        seen = function(_Opaque(), _Opaque(), _Place(True), _Place(False))
    except (TypeError, AttributeError, IndexError, RuntimeError):
        seen = None
    if isinstance(seen, _Seen):
        return seen.pattern
    _not_a_pattern(function)


def _not_a_pattern(function: Any) -> NoReturn:
    name = getattr(function, "__qualname__", "a function that cannot be named")
    raise UnsupportedError(
        f"this model's mask is built by {name}, but Tandem takes causal masks, sliding windows, padding and "
        f"packed sequences; {SDPA}"
    )


def may_be_packed(function: Callable[..., Any]) -> bool:
    """Whether a model that is compiled may have joined its mask with one for packed sequences."""
    return _code(function) is _AND


def assert_describes(
    function: Callable[..., Any], pattern: Pattern, batch: int, seqlen: int, device: Any
) -> None:
    """Checks as it runs that `function` is `pattern` over unpacked rows, at its diagonals' edges.

    A compiled model joins the mask for packed sequences to every mask (Transformers cannot tell as it
    traces whether there are any), and what was joined cannot be read then. So the pattern is what the maker
    says besides, and this asks `function` along diagonals: one pass over the tokens for each, not a matrix.
    """
    left = pattern.window[0]
    edges = {0, 1, 2} | ({left, left + 1} if left >= 0 else set())
    rows = torch.arange(batch, device=device)[:, None]
    places = torch.arange(seqlen, device=device)[None]
    same = torch.ones((), dtype=torch.bool, device=device)
    for edge in sorted(edges):  # how far before its query the key stands
        if edge >= seqlen:
            continue
        query, key = places[:, edge:], places[:, : seqlen - edge]
        seen = left < 0 or edge <= left
        same = same & (function(rows, 0, query, key) == seen).all()
        if edge > 0:  # and as far after it
            same = same & ~function(rows, 0, key, query).any()
    torch._assert_async(
        same,
        "position_ids divide a row into sequences, or the mask is no causal one, which a compiled model "
        "cannot tell in time; pass cu_seq_lens_q and cu_seq_lens_k, or do not compile",
    )


def _held(function: Any, name: str) -> Any:
    """The variable called `name` that `function` closes over."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _all(patterns: list[Pattern]) -> Pattern:
    seen, packed = _Seen(Pattern()), None
    for pattern in patterns:
        seen = seen & _Seen(pattern)
        if packed is not None and pattern.packed is not None:
            raise UnsupportedError(
                f"this model's mask divides its rows into sequences twice, which Tandem does not read; {SDPA}"
            )
        packed = packed if pattern.packed is None else pattern.packed
    return replace(seen.pattern, packed=packed)
