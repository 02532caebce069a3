"""Appending to a cache of keys and values before it is read, with a rotary embedding of what is appended and
of the queries: FlashAttention's flash_attn_with_kvcache with `k` and `v`, by append_kv. On the CPU what the
integers hold is checked first; on a GPU that would wait for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays, _cache
from tandem._errors import InvalidArgumentError
from tandem.compat import _flash
from tandem.torch import _derivatives


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
        """Whether there is something to append. A rotary embedding without it is an error; lengths of what is
        not appended count for nothing, as FlashAttention and the engines that call it have it."""
        if self.k is not None and self.v is not None:
            return True
        given = {
            "k_new": self.k,
            "v_new": self.v,
            "rotary_cos": self.rotary_cos,
            "rotary_sin": self.rotary_sin,
        }
        for name, t in given.items():
            if t is not None:
                raise InvalidArgumentError(
                    f"{name} is given without {'v_new' if name == 'k_new' else 'k_new'}; pass what is "
                    "appended to the cache, k_new and v_new, or leave it out: without it q is rotated before "
                    "the call"
                )
        return False


def validate(new: New, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """The errors of the tensors that are appended."""
    if _derivatives.is_recorded(q, new.k, new.v, k_cache, v_cache):
        raise InvalidArgumentError(
            "k_new is appended to a cache, and one of q, k_new, v_new and the caches requires a gradient, "
            "which a cache has not; call under torch.no_grad()"
        )
    for name, t, cache in (("k", new.k, k_cache), ("v", new.v, v_cache)):
        if t.dtype != cache.dtype:
            _arrays.dtype_of(f"{name}_cache", cache)  # an error of one that Tandem lacks
            raise InvalidArgumentError(
                f"{name}_new is {t.dtype} but {name}_cache is {cache.dtype}; convert {name}_new"
            )
        if t.ndim < 3 or t.shape[:-2] != new.k.shape[:-2] or t.shape[-2:] != cache.shape[-2:]:
            raise InvalidArgumentError(
                f"{name}_new has shape {tuple(t.shape)}, k_new {tuple(new.k.shape)} and {name}_cache "
                f"{tuple(cache.shape)}; pass as many rows of k_new and v_new, with the heads and dimensions "
                "of the caches"
            )
    cos, sin = new.rotary_cos, new.rotary_sin
    if (cos is None) != (sin is None) or (cos is not None and (cos.ndim != 2 or cos.shape != sin.shape)):
        raise InvalidArgumentError(
            "rotary_cos and rotary_sin belong together, both (positions, rotary_dim / 2); pass two of a shape"
        )
    if cos is not None and not (len(cos) > 0 and 0 < 2 * cos.shape[1] <= k_cache.shape[-1]):
        raise InvalidArgumentError(
            f"rotary_cos has shape {tuple(cos.shape)}; pass one position at least, and a rotary_dim from 2 "
            f"to head_dim {k_cache.shape[-1]}"
        )


def counts(new: New, begin: Tensor) -> Tensor:
    """How many rows of `new` go behind the `begin` rows of each sequence."""
    batch, cu, rotary = len(begin), new.cu_seqlens_k_new, new.rotary_seqlens
    if rotary is not None:
        _arrays.validate_tensor("rotary_seqlens", rotary, new.k, (batch,), *_arrays.INTEGERS)
    if cu is None:
        if new.k.ndim != 4 or new.k.shape[0] != batch:
            raise InvalidArgumentError(
                f"k_new has shape {tuple(new.k.shape)}; pass ({batch}, seqlen_new, heads_kv, head_dim), or "
                "(total_new, heads_kv, head_dim) and cu_seqlens_k_new"
            )
        return torch.full_like(begin, new.k.shape[1], dtype=torch.int64)
    _arrays.validate_tensor("cu_seqlens_k_new", cu, new.k, (batch + 1,), *_arrays.INTEGERS)
    if new.k.ndim != 3:
        raise InvalidArgumentError(
            f"k_new has shape {tuple(new.k.shape)}, and cu_seqlens_k_new is given; pass (total_new, "
            "heads_kv, head_dim)"
        )
    count: Tensor = cu.long().diff()
    if _flash.is_readable(cu) and (cu[0] != 0 or (count < 0).any() or cu[-1] > new.k.shape[0]):
        raise InvalidArgumentError(
            f"cu_seqlens_k_new is {cu.tolist()}; offsets ascend from 0 to at most {new.k.shape[0]}, the rows "
            "of k_new"
        )
    return count


def check_places(begin: Tensor, count: Tensor, k_cache: Tensor, page_table: Any, batch_idx: Any) -> None:
    """An error where the cache has no row for a new one: CPU tensors alone."""
    per_page = max(k_cache.shape[1], 1)
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    begin, after = begin.long(), begin + count
    for b in ((count > 0) & ((begin < 0) | (after > capacity))).nonzero()[:1].flatten().tolist():
        raise InvalidArgumentError(
            f"cache_seqlens[{b}] is {int(begin[b])}; {int(count[b])} rows more are rows "
            f"{int(begin[b])} to {int(after[b]) - 1}, and a sequence of this cache has rows 0 to "
            f"{capacity - 1}"
        )
    sequence = torch.arange(len(begin)).repeat_interleave(count)
    row = torch.arange(len(sequence)) + (begin - count.cumsum(0) + count)[sequence]
    if page_table is not None:
        name, entry = "page_table", page_table[sequence, row // per_page].long()
    elif batch_idx is not None:
        name, entry = "cache_batch_idx", batch_idx[sequence].long()
    else:
        return
    for i in ((entry < 0) | (entry >= k_cache.shape[0])).nonzero()[:1].flatten().tolist():
        b = int(sequence[i])
        place = f"{b}, {int(row[i]) // per_page}" if page_table is not None else f"{b}"
        raise InvalidArgumentError(
            f"{name}[{place}] is {int(entry[i])}; row {int(row[i])} of sequence {b} is appended there, and "
            f"k_cache has entries 0 to {k_cache.shape[0] - 1}"
        )


def positions(new: New, begin: Tensor, count: Tensor, q: Tensor, cu_seqlens_q: Any, by_row: bool) -> Tensor:
    """The position of each query in the rotary embedding: a new row has the one that it gets in the cache,
    and queries begin where new rows do. All of a sequence have that first one unless `by_row`, which
    FlashAttention asks of causal and windowed calls alone."""
    begin = (begin if new.rotary_seqlens is None else new.rotary_seqlens).long()
    of_q = _from(begin, q, cu_seqlens_q, by_row)
    if _flash.is_readable(begin):
        table = len(new.rotary_cos)
        some = count > 0
        for name, first, last in (
            ("k_new", begin[some], (begin + count - 1)[some]),
            ("q", of_q, of_q),
        ):
            if first.numel() > 0 and not 0 <= int(first.min()) <= int(last.max()) < table:
                raise InvalidArgumentError(
                    f"{name} has positions {int(first.min())} to {int(last.max())}, but rotary_cos has "
                    f"{table} rows; pass a table of all positions"
                )
    return of_q


def _from(begin: Tensor, x: Tensor, cu_seqlens: Any, by_row: bool) -> Tensor:
    """The number of each row of x in its sequence (0 unless `by_row`), counted from where that begins."""
    if cu_seqlens is None:
        return begin[:, None] + torch.arange(x.shape[1], device=begin.device) * by_row
    rows, cu = torch.arange(x.shape[0], device=begin.device), cu_seqlens.long()
    if len(begin) == 0:
        return torch.zeros_like(rows)
    sequence = torch.bucketize(rows, cu[1:], right=True).clamp(max=len(begin) - 1)
    # 0 of rows past the last sequence
    return torch.where(rows < cu[-1], begin[sequence] + (rows - cu[sequence]) * by_row, 0)


def write(
    new: New,
    begin: Tensor,
    count: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Any,
    batch_idx: Any,
    cu_seqlens_q: Any,
    by_row: bool,
) -> Tensor:
    """Writes the rows of `new` to the caches, and returns the queries, embedded if they are to be."""
    embedding: dict[str, Any] = {}
    k_new, is_embedded = new.k, new.rotary_cos is not None
    # What the launch that appends can embed: whole units of pairs, and queries of the new tokens themselves.
    in_units = is_embedded and 2 * new.rotary_cos.shape[1] % 16 == 0
    together = (
        by_row and cu_seqlens_q is new.cu_seqlens_k_new and q.shape[:-2] == new.k.shape[:-2] and in_units
    )
    if is_embedded and (not together or _flash.is_readable(begin)):
        of_q = positions(new, begin, count, q, cu_seqlens_q, by_row)
    if in_units:
        embedding = {
            "rotary_cos": new.rotary_cos,
            "rotary_sin": new.rotary_sin,
            "rotary_interleaved": new.rotary_interleaved,
            "rotary_offsets": new.rotary_seqlens,
            "q": q if together else None,
        }
    elif is_embedded:
        first = begin if new.rotary_seqlens is None else new.rotary_seqlens
        k_new = _rotate(k_new, new, _from(first.long(), k_new, new.cu_seqlens_k_new, True))
    embedded: Tensor | None = _cache.append_kv(
        _flash.gathered(k_new),
        _flash.gathered(new.v),
        k_cache,
        v_cache,
        cache_seqlens=begin,
        cu_seqlens_new=new.cu_seqlens_k_new,
        page_table=page_table,
        cache_batch_idx=batch_idx,
        **embedding,
    )
    if embedded is not None:
        return embedded
    return _rotate(q, new, of_q) if is_embedded else q


def _rotate(x: Tensor, new: New, positions: Tensor) -> Tensor:
    """The first dimensions of each row by the angles of its position, in float32. As append_kv has it, a
    position outside of the tables takes their nearest row."""
    positions = positions.clamp(0, len(new.rotary_cos) - 1)
    c, s = (t[positions].float().unsqueeze(-2) for t in (new.rotary_cos, new.rotary_sin))
    rotary_dim = 2 * new.rotary_cos.shape[1]
    turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    interleaved = new.rotary_interleaved
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * c - b * s, a * s + b * c)
    whole = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([whole.to(x.dtype), rest], -1)
