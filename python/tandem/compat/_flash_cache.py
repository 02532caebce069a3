"""FlashAttention's calls on a cache of keys and values: contiguous or in pages, appended to first or not."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays, _call, _plans
from tandem._errors import InvalidArgumentError
from tandem.compat import _append, _flash, _latent


def cached(
    call: _call.Call,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    sink: Any,
    return_lse: bool,
    chunk: Any = 0,
    *,
    new: _append.New,
    page_table: Any = None,
    leftpad: Any = None,
    batch_idx: Any = None,
    qv: Any = None,
    alibi_slopes: Any = None,
    out: Any = None,
) -> Any:
    """Attention to rows `leftpad` to `cache_seqlens` of caches (entries, seqlen, heads, head_dim), or (pages,
    page_size, heads, head_dim), behind which `new` is written first."""
    metadata = dict(zip(_call.METADATA, call.metadata, strict=True))
    _flash.only_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    given = {"page_table": page_table, "cache_leftpad": leftpad, "cache_batch_idx": batch_idx}
    if k_cache.ndim != 4:
        raise InvalidArgumentError(
            f"k_cache has shape {tuple(k_cache.shape)}; pass (batch, seqlen_cache, heads_kv, head_dim), or "
            "(pages, page_size, heads_kv, head_dim) and page_table"
        )
    for name, t, shape in (
        ("page_table", page_table, ("batch", "max_pages")),
        ("cache_leftpad", leftpad, ("batch",)),
        ("cache_batch_idx", batch_idx, ("batch",)),
        ("cu_seqlens_q", metadata["cu_seqlens_q"], ("batch + 1",)),
    ):
        if t is not None:
            _arrays.validate_tensor(name, t, q, shape, *_arrays.INTEGERS)
    of_batch = "k_cache" if page_table is None else "page_table"
    of_batch = of_batch if batch_idx is None else "cache_batch_idx"
    batch = (given | {"k_cache": k_cache})[of_batch].shape[0]
    if page_table is not None and batch_idx is not None:
        page_table, batch_idx = _chosen_rows(page_table, batch_idx), None
    rows = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    owner = "k_cache" if page_table is None else "a sequence of page_table"
    used = _lengths(cache_seqlens, batch, rows, owner, q)
    metadata |= {"page_table": page_table, "leftpad_k": leftpad, "cache_batch_idx": batch_idx}
    sink = _flash.plain(sink)
    q = _flash.gathered(q)
    before, count = used, None
    if new.given():
        if used is None:
            raise InvalidArgumentError(
                "k_new is given without cache_seqlens; pass how many rows there are before it"
            )
        _append.validate(new, q, k_cache, v_cache)
        count = _append.counts(new, used)
        used = used + count
    metadata["seqused_k"] = used
    call.metadata = tuple(metadata.values())
    _flash.add_alibi(call, q, k_cache, alibi_slopes)
    if before is not None and count is not None:
        # What the call would raise comes before the caches are written.
        if not torch.compiler.is_compiling():
            described = _latent.one_product(replace(call), q, k_cache, v_cache, qv, described=True)
            _plans.check(*described, sink, None)
        if _flash.is_readable(k_cache):
            _append.check_places(before, count, k_cache, page_table, batch_idx)
        q = _append.write(
            new,
            before,
            count,
            q,
            k_cache,
            v_cache,
            page_table=page_table,
            batch_idx=batch_idx,
            cu_seqlens_q=metadata["cu_seqlens_q"],
            by_row=call.causal or tuple(call.window) != (-1, -1),
        )
    return _flash.run(*_latent.one_product(call, q, k_cache, v_cache, qv), sink, return_lse, chunk, out)


def _chosen_rows(table: Tensor, index: Tensor) -> Tensor:
    """The rows of a page table that `index` names, with no page where there is none."""
    rows = torch.nn.functional.pad(table, (0, 0, 0, 1), value=-1)
    return rows[torch.where((index >= 0) & (index < len(table)), index, len(table)).long()]


def _lengths(cache_seqlens: Any, batch: int, rows: int, owner: str, q: Tensor) -> Tensor | None:
    """(batch,) rows in use; None for all. What a tensor on a GPU holds is not looked at."""
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, Tensor):
        _arrays.validate_tensor("cache_seqlens", cache_seqlens, q, (batch,), *_arrays.INTEGERS)
        if _flash.is_readable(cache_seqlens):
            for b in ((cache_seqlens < 0) | (cache_seqlens > rows)).nonzero()[:1].flatten().tolist():
                raise InvalidArgumentError(
                    f"cache_seqlens[{b}] is {int(cache_seqlens[b])}, but {owner} has {rows} rows; pass 0 to "
                    f"{rows}"
                )
        return cache_seqlens
    try:
        used = operator.index(cache_seqlens)
    except TypeError:
        raise InvalidArgumentError(
            f"cache_seqlens is {cache_seqlens!r}; pass an integer, a tensor of shape ({batch},), or None "
            "for the whole cache"
        ) from None
    if not 0 <= used <= rows:
        raise InvalidArgumentError(f"cache_seqlens is {used}, but {owner} has {rows} rows; pass 0 to {rows}")
    return torch.full((batch,), used, dtype=torch.int32, device=q.device)
