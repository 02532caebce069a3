"""What a mask of Transformers means to Tandem: causal or not, a window, and which rows belong together.

Transformers describes a mask as a function of (batch, head, query, key), built by a handful of makers in
`transformers.masking_utils`. `read` takes such a function apart; one that it does not know is an error, so
that no model quietly gets another mask than it asked for. No (query, key) matrix is ever made.
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


def _code(function: Callable[..., Any]) -> Any:
    return function.__code__


_AND = _code(makers.and_masks(makers.causal_mask_function))
_WINDOW = _code(makers.sliding_window_overlay(1))
_WINDOW_BOTH = _code(makers.sliding_window_bidirectional_overlay(1))
_SAME_SEQUENCE = _code(makers.packed_sequence_mask_function(torch.zeros(1, 1)))
_REMAPPED = _code(makers.remap_positions_for_packed_sequence(makers.causal_mask_function, torch.zeros(1, 1)))


def read(function: Callable[..., Any], pattern: Pattern | None = None) -> Pattern:
    """The pattern that `function` describes, which narrows `pattern`. Raises UnsupportedError for others."""
    pattern = pattern or Pattern()
    if function is makers.causal_mask_function:
        return replace(pattern, causal=True)
    if function is makers.bidirectional_mask_function:
        return pattern
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    held = dict(zip(getattr(code, "co_freevars", ()), (cell.cell_contents for cell in cells), strict=True))
    if code is _AND:
        for part in held["mask_functions"]:
            pattern = read(part, pattern)
        return pattern
    if code is _WINDOW:  # a window of W there is the token itself and W - 1 to its left
        return replace(pattern, window=(held["sliding_window"] - 1, pattern.window[1]))
    if code is _WINDOW_BOTH:  # inclusive on both sides, there as here
        return replace(pattern, window=(held["sliding_window"], held["sliding_window"]))
    if code is _SAME_SEQUENCE:
        return replace(pattern, packed=held["packed_sequence_mask"])
    if code is _REMAPPED:  # positions count from each sequence's start, as they do in packed sequences here
        return read(held["mask_function"], pattern)
    name = getattr(function, "__qualname__", repr(function))
    raise UnsupportedError(
        f"this model's mask is built by {name}, but Tandem takes causal masks, sliding windows, padding and "
        'packed sequences; load the model with attn_implementation="sdpa"'
    )


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
