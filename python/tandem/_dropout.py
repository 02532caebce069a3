"""Attention dropout: where a call's seed comes from."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tandem import _arrays, _call
from tandem._errors import InvalidArgumentError
from tandem.functions import _functions


def add(call: _call.Call, dropout_p: Any, seed: Any, offset: Any) -> None:
    """Gives the call its dropout. Where there is no seed, `draw` finds one once the call runs."""
    if isinstance(dropout_p, (int, float)) and dropout_p == 0:
        return
    call.dropout_p, call.dropout_seed, call.dropout_offset = dropout_p, seed, offset


def expect_seed(call: _call.Call) -> None:
    """An error where a backward call has dropout but not the forward call's seed."""
    if call.dropout_p != 0 and call.dropout_seed is None:
        raise InvalidArgumentError(
            f"dropout_p is {call.dropout_p!r} but dropout_seed is missing; pass the seed that the forward "
            "call had"
        )


def draw(call: _call.Call, q: Any) -> None:
    """Takes a seed of the random numbers that torch.manual_seed, or numpy.random.seed, has started, where the
    call has dropout and no seed."""
    if call.dropout_p == 0 or call.dropout_seed is not None:
        return
    call.options()  # the errors of other arguments come first
    if _arrays.is_torch(q):
        torch = sys.modules["torch"]
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            call.dropout_places = _drawn_places(call, q)
        call.dropout_seed = int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu"))
    else:
        call.dropout_seed = int(np.random.randint(0, 2**63 - 1, dtype=np.int64))  # noqa: NPY002


def _drawn_places(call: _call.Call, q: Any) -> Any:
    """Where a whole sequence may lie such that the call keeps other entries each time that this runs: from a
    random query and head on, of 2^62 pairs. A captured graph draws them anew in each replay, where the seed,
    which is drawn on the host, stays that of the capture."""
    torch = sys.modules["torch"]
    (batch, heads, _, _), _ = _functions.pairs_of(call.metadata, q, q)
    query, head = torch.empty(2, dtype=torch.int32, device=q.device).random_().unbind()
    places = torch.zeros(batch, 4, dtype=torch.int32, device=q.device)
    places[:, 0] = head + torch.arange(batch, dtype=torch.int32, device=q.device) * heads
    places[:, 1] = query
    places[:, 3] = 1
    return places
