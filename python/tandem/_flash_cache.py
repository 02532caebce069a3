"""FlashAttention's calls on a cache of keys and values: contiguous or in pages, appended to first or not."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem import _append, _call, _chunks, _flash, _latent, _plans
from tandem._errors import InvalidArgumentError, UnsupportedError


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
) -> Any:
    """Attention to rows `leftpad` to `cache_seqlens` of caches (entries, seqlen, heads, head_dim), or (pages,
    page_size, heads, head_dim), behind which `new` is written first."""
    given = {"page_table": page_table, "cache_leftpad": leftpad, "cache_batch_idx": batch_idx}
    _flash.only_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    _flash.only_tensors(**{name: t for name, t in given.items() if t is not None})
    if k_cache.ndim != 4:
        raise InvalidArgumentError(
            f"k_cache has shape {tuple(k_cache.shape)}; pass (batch, seqlen_cache, heads_kv, head_dim), or "
            "(pages, page_size, heads_kv, head_dim) and page_table"
        )
    of_batch = "k_cache"
    for name, dimensions, shape in (
        ("cache_batch_idx", 1, "(batch,)"),
        ("page_table", 2, "(batch, max_pages)"),
    ):
        if given[name] is None:
            continue
        if given[name].ndim != dimensions:
            raise InvalidArgumentError(f"{name} has shape {tuple(given[name].shape)}; pass {shape}")
        of_batch = name
    batch = k_cache.shape[0] if of_batch == "k_cache" else given[of_batch].shape[0]
    rows = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    owner = "k_cache" if page_table is None else "a sequence of page_table"
    used = _lengths(cache_seqlens, batch, rows, of_batch, owner, k_cache.device)
    metadata = dict(zip(_call.METADATA, call.metadata, strict=True))
    metadata |= {"page_table": page_table, "leftpad_k": leftpad, "cache_batch_idx": batch_idx}
    sink = _flash.plain(sink)
    q = _flash.gathered(q)
    if not new.given():
        call.metadata = tuple((metadata | {"seqused_k": used}).values())
        _flash.add_alibi(call, q, k_cache, alibi_slopes)
        return attend(*one_product(call, q, k_cache, v_cache, qv), sink, return_lse, chunk)
    if used is None:
        raise InvalidArgumentError("k is given without cache_seqlens; pass how many rows there are before it")
    _flash.only_tensors(k=new.k, v=new.v)
    _append.judge(new, q, k_cache, v_cache)
    count = _append.counts(new, used)
    call.metadata = tuple((metadata | {"seqused_k": used + count}).values())
    _flash.add_alibi(call, q, k_cache, alibi_slopes)
    # What the call would raise comes before the caches are written.
    _plans.check(*one_product(replace(call), q, k_cache, v_cache, qv), sink, None)
    if k_cache.is_cpu:
        _append.check_places(used, count, k_cache, page_table, batch_idx)
    q = _append.write(
        new,
        used,
        count,
        q,
        k_cache,
        v_cache,
        page_table=page_table,
        batch_idx=batch_idx,
        cu_seqlens_q=metadata["cu_seqlens_q"],
        by_row=call.causal or tuple(call.window) != (-1, -1),
    )
    return attend(*one_product(call, q, k_cache, v_cache, qv), sink, return_lse, chunk)


def one_product(call: _call.Call, q: Any, k: Any, v: Any, qv: Any) -> tuple[_call.Call, Any, Any, Any]:
    """The call with `qv`, if it is given, joined to q, and v to k. Of pages that have no room for v beside k
    those that the call reads are copied."""
    if qv is None:
        return call, q, k, v
    metadata = dict(zip(_call.METADATA, call.metadata, strict=True))
    scales = {name.replace("scale", "descale"): metadata[name] for name in ("q_scale", "k_scale", "v_scale")}
    _latent.judge(q, k, v, qv, **scales)
    if not _latent.side_by_side(k, v):
        call, k, v = dense(call, k, v)
    return call, *_latent.joined(q, k, v, qv)


def _lengths(
    cache_seqlens: Any, batch: int, rows: int, of_batch: str, owner: str, device: torch.device
) -> Tensor | None:
    """(batch,) rows in use; None for all."""
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.shape != (batch,):
            raise InvalidArgumentError(
                f"cache_seqlens has shape {tuple(cache_seqlens.shape)}; pass ({batch},), one number for each "
                f"sequence of {of_batch}, or an integer"
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
    return torch.full((batch,), used, dtype=torch.int32, device=device)


def attend(
    call: _call.Call,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    sink: Any,
    return_lse: bool,
    chunk: Any,
    out: Any = None,
) -> Any:
    """As _flash.run, of a call that may have a cache."""
    if _chunks.length(chunk) > 0:
        if call.metadata[_call.METADATA.index("leftpad_k")] is not None:
            raise UnsupportedError(
                "attention_chunk is given with cache_leftpad, but Tandem has no chunks of padded sequences; "
                "let sequences begin at row 0 of the cache"
            )
        call, k_cache, v_cache = dense(call, k_cache, v_cache)
    return _flash.run(call, q, k_cache, v_cache, sink, return_lse, chunk, out)


def dense(call: _call.Call, k_cache: Tensor, v_cache: Tensor) -> tuple[_call.Call, Tensor, Tensor]:
    """The same call with a copy of the pages or entries that it reads, in the order of its sequences."""
    given = dict(zip(_call.METADATA, call.metadata, strict=True))
    table, index = given["page_table"], given["cache_batch_idx"]
    if table is not None:
        chosen = table.long().clamp(0, max(k_cache.shape[0] - 1, 0))
        k_cache, v_cache = (t[chosen].flatten(1, 2) for t in (k_cache, v_cache))
    elif index is not None:
        k_cache, v_cache = k_cache[index.long()], v_cache[index.long()]
    call.metadata = tuple((given | {"page_table": None, "cache_batch_idx": None}).values())
    return call, k_cache, v_cache
