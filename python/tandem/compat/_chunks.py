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
from tandem._errors import InvalidArgumentError
from tandem.torch import _derivatives


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
    """The varlen call of a call in chunks, and its tensors. Nothing is read from the device, and a cache is
    read where it lies: a chunk is a sequence of the cache that has what is before the chunk as padding."""
    given = dict(zip(_call.METADATA, call.metadata, strict=True))
    begin_q, all_q, used_q = _sequences("q", q, given["cu_seqlens_q"], given["seqused_q"])
    is_cache = _is_cache(given, q, k, v)
    if is_cache:
        begin_k, used_k, rows_k = _cached_sequences(given, k, len(used_q))
    else:
        begin_k, all_k, used_k = _sequences("k", k, given["cu_seqlens_k"], given["seqused_k"])
        rows_k = k.shape[0] if given["cu_seqlens_k"] is not None else k.shape[1]
    if len(used_q) != len(used_k):
        raise InvalidArgumentError(f"q has {len(used_q)} sequences, but k has {len(used_k)}; pass as many")
    # The bounds of a sequence's parts: what is before the chunk of its first query, chunks, rows that are not
    # in use. A sequence has no more chunks than its keys have, and than its queries reach.
    chunk = min(chunk, max(rows_k, 1))
    rows_q = q.shape[0] if given["cu_seqlens_q"] is not None else q.shape[1]
    count = max(min(-(-rows_k // chunk), (rows_q + chunk - 2) // chunk + 1), 0)
    first = (used_k - used_q).clamp_min(0).div(chunk, rounding_mode="floor")
    places = (first[:, None] + torch.arange(count + 1, device=q.device)) * chunk
    ends_q = (places - (used_k - used_q)[:, None]).clamp_min(0).minimum(used_q[:, None])
    ends_q = torch.cat([ends_q, all_q[:, None]], 1)
    used = ends_q.diff(dim=1, prepend=torch.zeros_like(ends_q[:, :1]))
    used = torch.cat([used[:, :-1], torch.zeros_like(used[:, :1])], 1).flatten()
    parts = ends_q.shape[1]
    parted = dict.fromkeys(_call.METADATA) | {
        name: given[name].repeat_interleave(parts, 0) if _ndim(given[name]) == dimensions else given[name]
        for name, dimensions in (("q_scale", 2), ("k_scale", 2), ("v_scale", 2), ("causal_by_sequence", 1))
    }
    parted |= {"cu_seqlens_q": _offsets(begin_q, ends_q), "seqused_q": used}
    ends_k = places.minimum(used_k[:, None])
    if is_cache:
        parted |= _parts_of_cache(given, k, begin_k, ends_k, chunk)
    else:
        parted["cu_seqlens_k"] = _offsets(begin_k, torch.cat([ends_k, all_k[:, None]], 1))
        k, v = (t.flatten(0, 1) if t.ndim == 4 else t for t in (k, v))
    q = q.flatten(0, 1) if q.ndim == 4 else q
    return replace(call, metadata=tuple(parted.values())), q, k, v


def _ndim(t: Any) -> int:
    return t.ndim if isinstance(t, Tensor) else 0


def _is_cache(given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether k and v are to be read as a cache is, which has no gradients."""
    if any(given[name] is not None for name in ("page_table", "leftpad_k", "cache_batch_idx")):
        return True
    return k.ndim == 4 and given["seqused_k"] is not None and not _derivatives.is_recorded(q, k, v)


def _cached_sequences(given: dict[str, Any], k: Tensor, batch: int) -> tuple[Tensor, Tensor, int]:
    """How many rows of padding each sequence of a cache has and how many are in use behind them; and
    how many a sequence may have."""
    table, used, padding = given["page_table"], given["seqused_k"], given["leftpad_k"]
    if k.ndim != 4:
        raise InvalidArgumentError(
            f"k has shape {tuple(k.shape)}; pass (entries, rows, heads_kv, head_dim), or pages of rows"
        )
    rows = k.shape[1] * (1 if table is None else table.shape[1])
    zeros = torch.zeros(batch, dtype=torch.int64, device=k.device)
    for name in ("page_table", "seqused_k", "leftpad_k", "cache_batch_idx"):
        t = given[name]
        if t is not None and t.shape[:1] != zeros.shape:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(t.shape)}; its first size must be {batch}, the sequences of q"
            )
    used = zeros + rows if used is None else used.long().clamp(0, rows)
    padding = zeros if padding is None else padding.long().clamp_min(0).minimum(used)
    return padding, used - padding, rows


def _parts_of_cache(
    given: dict[str, Any], k: Tensor, padding: Tensor, ends: Tensor, chunk: int
) -> dict[str, Tensor]:
    """The lengths, padding and pages (or entries) of each part of each sequence. The first part and the last
    have no keys."""
    table, index, none = given["page_table"], given["cache_batch_idx"], torch.zeros_like(ends[:, :1])
    begin = torch.cat([none, ends[:, :-1] + padding[:, None], none], 1)
    end = torch.cat([none, ends[:, 1:] + padding[:, None], none], 1)
    if table is None:
        index = torch.arange(len(ends), device=k.device) if index is None else index
        index = index.repeat_interleave(begin.shape[1])
        return {"seqused_k": end.flatten(), "leftpad_k": begin.flatten(), "cache_batch_idx": index}
    size = max(k.shape[1], 1)
    page = begin.div(size, rounding_mode="floor")
    most = min((chunk + size - 2) // size + 1, table.shape[1])
    columns = (page[..., None] + torch.arange(most, device=k.device)).clamp_max(table.shape[1] - 1)
    pages = table[torch.arange(len(table), device=k.device)[:, None, None], columns]
    return {
        "seqused_k": (end - page * size).flatten(),
        "leftpad_k": (begin - page * size).flatten(),
        "page_table": pages.flatten(0, 1),
    }


def _offsets(begin: Tensor, ends: Tensor) -> Tensor:
    """cu_seqlens of the parts of sequences, from where these begin and where in them their parts end."""
    first = torch.cat([begin, begin.new_zeros(1)])[:1]
    return torch.cat([first, (begin[:, None] + ends).flatten()])


def _sequences(name: str, t: Tensor, cu_seqlens: Any, seqused: Any) -> tuple[Tensor, Tensor, Tensor]:
    """For each sequence its first row, counted through the tensor, how many rows it has, and how many of
    those are in use."""
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
