"""Appending to a cache of keys and values before it is read, with a rotary embedding of what is appended and
of the queries: FlashAttention's flash_attn_with_kvcache with `k` and `v`. By PyTorch's indexing, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem import _derivatives
from tandem._errors import InvalidArgumentError, UnsupportedError


@dataclass(slots=True)
class New:
    """What is appended, by FlashAttention's names."""

    k: Any
    v: Any
    cu_seqlens_k_new: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    rotary_seqlens: Any = None
    rotary_interleaved: bool = True

    def given(self) -> bool:
        """Whether there is something to append. Options of what is not appended are an error."""
        if self.k is not None and self.v is not None:
            return True
        for name in ("k", "v", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_seqlens"):
            if getattr(self, name) is not None:
                raise InvalidArgumentError(
                    f"{name} is given without {'v' if name == 'k' else 'k'}; pass what is appended to the "
                    "cache, k and v, or leave it out: without it q is rotated before the call"
                )
        return False


@dataclass(slots=True)
class Places:
    """Where the rows of `sequence` begin in the cache, and how many there are of each."""

    #: of each new row, its sequence and its place among that one's new rows
    sequence: Tensor
    order: Tensor
    #: of each sequence, the rows in the cache before
    begin: Tensor
    #: of each sequence, its new rows
    count: Tensor


def places(new: New, begin: Tensor) -> Places:
    """Of the rows of `new`, which go behind `begin` rows of each sequence."""
    batch = len(begin)
    begin = begin.long()
    if new.cu_seqlens_k_new is None:
        if new.k.ndim != 4 or new.k.shape[0] != batch:
            raise InvalidArgumentError(
                f"k has shape {tuple(new.k.shape)}; pass ({batch}, seqlen_new, heads_kv, head_dim), or "
                "(total_new, heads_kv, head_dim) and cu_seqlens_k_new"
            )
        rows = new.k.shape[1]
        sequence = torch.arange(batch).repeat_interleave(rows)
        return Places(sequence, torch.arange(rows).repeat(batch), begin, torch.full_like(begin, rows))
    cu = new.cu_seqlens_k_new.long()
    if cu.shape != (batch + 1,) or new.k.ndim != 3:
        raise InvalidArgumentError(
            f"cu_seqlens_k_new has shape {tuple(cu.shape)} and k {tuple(new.k.shape)}; pass ({batch + 1},) "
            "and (total_new, heads_kv, head_dim)"
        )
    count = cu.diff()
    if cu[0] != 0 or (count < 0).any() or cu[-1] > new.k.shape[0]:
        raise InvalidArgumentError(
            f"cu_seqlens_k_new is {cu.tolist()}; offsets ascend from 0 to at most {new.k.shape[0]}, k's rows"
        )
    sequence = torch.arange(batch).repeat_interleave(count)
    return Places(sequence, torch.arange(len(sequence)) - cu[sequence], begin, count)


def judge(new: New, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """The errors of what is appended, before anything is written."""
    if not k_cache.is_cpu:
        raise UnsupportedError(
            f"k is given to be appended to a cache on {k_cache.device}, but Tandem appends on the CPU alone; "
            "write k and v into the caches before, and count them in cache_seqlens"
        )
    if _derivatives.is_recorded(q, new.k, new.v, k_cache, v_cache):
        raise InvalidArgumentError(
            "k is appended to a cache, and one of q, k, v and the caches requires a gradient, which a cache "
            "has not; call under torch.no_grad()"
        )
    for name, t, cache in (("k", new.k, k_cache), ("v", new.v, v_cache)):
        if t.dtype != cache.dtype:
            raise InvalidArgumentError(
                f"{name} is {t.dtype} but {name}_cache is {cache.dtype}; convert {name}"
            )
        if t.ndim < 3 or t.shape[:-2] != new.k.shape[:-2] or t.shape[-2:] != cache.shape[-2:]:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(t.shape)}, k {tuple(new.k.shape)} and {name}_cache "
                f"{tuple(cache.shape)}; pass as many rows of k and v, with the heads and dimensions of the "
                "caches"
            )


def slots(at: Places, k_cache: Tensor, page_table: Any, batch_idx: Any) -> tuple[Tensor, Tensor]:
    """The entry (or page) and the row in it of each new row; an error where the cache has no such row."""
    row = at.begin[at.sequence] + at.order
    per_page = max(k_cache.shape[1], 1)
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    after = at.begin + at.count
    for b in ((at.count > 0) & ((at.begin < 0) | (after > capacity))).nonzero()[:1].flatten().tolist():
        raise InvalidArgumentError(
            f"cache_seqlens[{b}] is {int(at.begin[b])}; {int(at.count[b])} rows more are rows "
            f"{int(at.begin[b])} to {int(after[b]) - 1}, and a sequence of this cache has rows 0 to "
            f"{capacity - 1}"
        )
    if page_table is not None:
        name, entry = "page_table", page_table[at.sequence, row // per_page].long()
    elif batch_idx is not None:
        name, entry = "cache_batch_idx", batch_idx[at.sequence].long()
    else:
        return at.sequence, row
    for i in ((entry < 0) | (entry >= k_cache.shape[0])).nonzero()[:1].flatten().tolist():
        b = int(at.sequence[i])
        place = f"{b}, {int(row[i]) // per_page}" if page_table is not None else f"{b}"
        raise InvalidArgumentError(
            f"{name}[{place}] is {int(entry[i])}; row {int(row[i])} of sequence {b} is appended there, and "
            f"k_cache has entries 0 to {k_cache.shape[0] - 1}"
        )
    return entry, row % per_page


def rotated(new: New, at: Places, q: Tensor, cu_seqlens_q: Any, by_row: bool) -> tuple[Tensor, Tensor]:
    """q and new.k under the rotary embedding. A new row has the position that it gets in the cache, and so
    have queries, from the first new row on; all of a sequence have that one unless `by_row`, which
    FlashAttention asks of causal and windowed calls alone."""
    cos, sin = new.rotary_cos, new.rotary_sin
    if cos is None and sin is None:
        return q, new.k
    if cos is None or sin is None or cos.ndim != 2 or cos.shape != sin.shape:
        raise InvalidArgumentError(
            "rotary_cos and rotary_sin belong together, both (positions, rotary_dim / 2); pass two of a shape"
        )
    if 2 * cos.shape[1] > q.shape[-1]:
        raise InvalidArgumentError(
            f"rotary_cos has {cos.shape[1]} columns, for {2 * cos.shape[1]} dimensions, but q has "
            f"{q.shape[-1]}; rotary_dim is at most head_dim"
        )
    begin = at.begin if new.rotary_seqlens is None else new.rotary_seqlens.long()
    if cu_seqlens_q is None:
        of_q = begin[:, None] + torch.arange(q.shape[1]) * by_row
    else:
        rows = torch.arange(q.shape[0])
        sequence = torch.bucketize(rows, cu_seqlens_q[1:].long(), right=True).clamp(
            max=max(len(begin) - 1, 0)
        )
        of_q = begin[sequence] + (rows - cu_seqlens_q.long()[sequence]) * by_row
        of_q = torch.where(rows < cu_seqlens_q[-1], of_q, 0)  # rows past the last sequence
    of_k = begin[at.sequence] + at.order
    for name, positions in (("k", of_k), ("q", of_q)):
        if positions.numel() > 0 and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
            raise InvalidArgumentError(
                f"{name} has positions {int(positions.min())} to {int(positions.max())}, but rotary_cos has "
                f"{cos.shape[0]} rows; pass a table of all positions"
            )
    k = new.k.flatten(0, -3)[: len(of_k)]
    return _rotate(q, cos, sin, of_q, new.rotary_interleaved), _rotate(
        k, cos, sin, of_k, new.rotary_interleaved
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """The first dimensions of each row by the angles of its position, in float32."""
    c, s = (t[positions].float().unsqueeze(-2) for t in (cos, sin))
    turned, rest = x[..., : 2 * cos.shape[1]].float(), x[..., 2 * cos.shape[1] :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * c - b * s, a * s + b * c)
    whole = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([whole.to(x.dtype), rest], -1)


def write(cache: Tensor, entry: Tensor, row: Tensor, new: Tensor) -> None:
    cache[entry, row] = new.flatten(0, -3)[: len(entry)]
