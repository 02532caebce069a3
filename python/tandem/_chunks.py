"""FlashAttention-3's attention_chunk: queries see the keys of their own chunk of the sequence.

A chunk is a sequence of its own: a call in chunks is a varlen call, and no kernel knows of them. Query i has
the place ``i + seqlen_k - seqlen_q``, that of its key, and chunk c the places ``c * chunk`` up to
``(c + 1) * chunk``. A chunk's queries and keys end at the same place, so that its masks are aligned as the
whole's.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem import _call
from tandem._errors import InvalidArgumentError, UnsupportedError


def length(attention_chunk: Any) -> int:
    """The chunks' length, 0 if there are none."""
    if attention_chunk is None:
        return 0
    try:
        chunk = operator.index(attention_chunk)
    except TypeError:
        chunk = -1
    if chunk < 0:
        raise InvalidArgumentError(
            f"attention_chunk is {attention_chunk!r}; pass how many keys a chunk has, or 0 for none"
        )
    return chunk


def varlen(
    call: _call.Call, q: Tensor, k: Tensor, v: Tensor, chunk: int
) -> tuple[_call.Call, Tensor, Tensor, Tensor]:
    """The varlen call of a call in chunks, and its tensors. Nothing is read from the device."""
    given = dict(zip(_call.METADATA, call.metadata, strict=True))
    if given["causal_by_sequence"] is not None:
        raise UnsupportedError(
            "attention_chunk is given with causal_by_sequence, but Tandem has no chunks of such a mask; "
            "call once with causal sequences and once with others"
        )
    begin_q, all_q, used_q = _sequences("q", q, given["cu_seqlens_q"], given["seqused_q"])
    begin_k, all_k, used_k = _sequences("k", k, given["cu_seqlens_k"], given["seqused_k"])
    if len(used_q) != len(used_k):
        raise InvalidArgumentError(f"q has {len(used_q)} sequences, but k has {len(used_k)}; pass as many")
    # The bounds of a sequence's parts: queries before the first key, chunks, rows that are not in use. Of k's
    # rows no sequence has more than there are.
    rows_k = k.shape[0] if given["cu_seqlens_k"] is not None else k.shape[1]
    chunk = min(chunk, max(rows_k, 1))
    places = torch.arange(-(-rows_k // chunk) + 1, device=q.device) * chunk
    ends_q = (places - (used_k - used_q)[:, None]).clamp_min(0).minimum(used_q[:, None])
    ends_k = places.minimum(used_k[:, None])
    ends_q, ends_k = (torch.cat([a, b[:, None]], 1) for a, b in ((ends_q, all_q), (ends_k, all_k)))
    cu_q, cu_k = (
        torch.cat([torch.cat([begin, begin.new_zeros(1)])[:1], (begin[:, None] + ends).flatten()])
        for begin, ends in ((begin_q, ends_q), (begin_k, ends_k))
    )
    used = ends_q.diff(dim=1, prepend=torch.zeros_like(ends_q[:, :1]))
    used = torch.cat([used[:, :-1], torch.zeros_like(used[:, :1])], 1).flatten()
    parts = ends_q.shape[1]
    scales = (
        scale.repeat_interleave(parts, 0) if isinstance(scale, Tensor) else scale
        for scale in (given["q_scale"], given["k_scale"], given["v_scale"])
    )
    q, k, v = (t.flatten(0, 1) if t.ndim == 4 else t for t in (q, k, v))
    return replace(call, metadata=(cu_q, cu_k, used, None, *scales, *_call.NO_CACHE)), q, k, v


def _sequences(name: str, t: Tensor, cu_seqlens: Any, seqused: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sequence its first row, counted through the tensor, how many rows it has, and how many of those
    are in use."""
    dimensions = 3 if cu_seqlens is not None else 4
    if t.ndim != dimensions:
        shape = "(total, heads, head_dim)" if dimensions == 3 else "(batch, seqlen, heads, head_dim)"
        raise InvalidArgumentError(f"{name} has shape {tuple(t.shape)}; pass {shape}")
    if cu_seqlens is None:
        begin = torch.arange(t.shape[0], device=t.device) * t.shape[1]
        rows = torch.full_like(begin, t.shape[1])
    else:
        begin, rows = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    if seqused is None:
        return begin, rows, rows
    if seqused.shape != rows.shape:
        raise InvalidArgumentError(
            f"seqused_{name} has shape {tuple(seqused.shape)}; pass ({len(rows)},), one number a sequence"
        )
    return begin, rows, seqused.long().clamp_min(0).minimum(rows)
