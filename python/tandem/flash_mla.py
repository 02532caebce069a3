"""FlashMLA's decoding on Tandem: latent attention to a cache in pages, for CPU and CUDA tensors.

from tandem.flash_mla import flash_mla_with_kvcache, get_mla_metadata

The parameters, their order, defaults and meaning are those of ``flash_mla``: caches of 16 bits or of FP8
records, all keys of a request or those that ``indices`` choose. Values are the first columns of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem import _flash
from tandem._api import attention
from tandem._cache import merge
from tandem._errors import InvalidArgumentError

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

#: A row of an FP8 cache: so many e4m3 values, an f32 scale for each 128 of them, and bf16 values.
_QUANTIZED, _GROUP, _PLAIN = 512, 128, 64
_SCALES = 4 * (_QUANTIZED // _GROUP)
_RECORD = _QUANTIZED + _SCALES + 2 * _PLAIN
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def get_mla_metadata(*_: Any, **__: Any) -> tuple[None, None]:
    """What FlashMLA schedules by. Tandem needs nothing of the kind, in any call or CUDA graph."""
    return None, None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *,
    split_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of a few queries a request to its cached keys, whose first columns are the values.

    Args:
      q: ``(batch, seqlen_q, heads_q, head_dim)``, float16 or bfloat16; float32 on the CPU.
      k_cache: ``(blocks, block_size, heads_kv, head_dim)`` in q's dtype, blocks of any size. With
        ``is_fp8_kvcache`` ``(blocks, block_size, 1, 656)`` of one-byte values, each row 512 float8_e4m3fn,
        four float32 scales for 128 of them each, and 64 bfloat16. Those that a call reads become q's dtype
        first, in memory of their own.
      block_table: ``(batch, max_blocks)``: row t of request b is row ``t % block_size`` of block
        ``block_table[b, t // block_size]``. Not read with ``indices``.
      cache_seqlens: ``(batch,)``: rows of each request, new ones included. Not read with ``indices``.
      head_dim_v: columns of a key that are its value.
      softmax_scale: default ``head_dim ** -0.5``.
      causal: query i sees rows up to ``i + cache_seqlens - seqlen_q``. Not with ``indices``.
      indices: ``(batch, seqlen_q, topk)``: the rows that each query sees, as ``block * block_size + row in
        the block``. Others than rows of the cache, such as -1, stand for none.
      attn_sink: ``(heads_q,)`` float32: results are multiplied by ``exp(lse) / (exp(lse) + exp(attn_sink))``.
      extra_k_cache, extra_indices_in_kvcache, extra_topk_length: a second cache and its ``indices``, whose
        rows are seen as well.
      topk_length: ``(batch,)``: only so many first ones of ``indices`` count.
      tile_scheduler_metadata, num_splits: change no result.
      split_size: as of `tandem.attention`.

    Returns:
      out ``(batch, seqlen_q, heads_q, head_dim_v)``, and the LSE ``(batch, heads_q, seqlen_q)`` float32,
      natural logarithm, without the sink. A query that sees no row has 0 and, as FlashMLA has it, +inf.

    Raises:
      As `tandem.attention`.
    """
    _flash.only_tensors(q=q, k_cache=k_cache)
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise InvalidArgumentError(
            "extra_k_cache and extra_indices_in_kvcache go together; pass both, or neither"
        )
    options = {"scale": softmax_scale, "split_size": split_size, "return_lse": True}
    if indices is None:
        out, lse = _dense(
            q, k_cache, block_table, cache_seqlens, head_dim_v, is_fp8_kvcache, options | {"causal": causal}
        )
    else:
        if causal:
            raise InvalidArgumentError(
                "causal is given with indices, which say what a query sees; leave it out"
            )
        out, lse = _sparse(q, k_cache, indices, topk_length, head_dim_v, is_fp8_kvcache, options)
    if extra_k_cache is not None:
        extra = _sparse(
            q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, head_dim_v, is_fp8_kvcache, options
        )
        out, lse = merge((out, extra[0]), (lse, extra[1]))
    if attn_sink is not None:
        share = torch.sigmoid(lse - attn_sink[:, None]).masked_fill(lse == -torch.inf, 0.0)
        out = (out * share.transpose(1, 2)[..., None]).to(out.dtype)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def _dense(
    q: Tensor,
    k_cache: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    head_dim_v: int,
    fp8: bool,
    options: dict[str, Any],
) -> Any:
    """Attention to all rows of each request."""
    if table is None or lengths is None:
        missing = "block_table" if table is None else "cache_seqlens"
        raise InvalidArgumentError(
            f"{missing} is missing; pass it, or indices, which say what each query sees"
        )
    if not fp8:
        return attention(
            q, k_cache, _values(k_cache, head_dim_v), page_table=table, seqused_k=lengths, **options
        )
    _judge_records(k_cache, head_dim_v)
    chosen = table.long().clamp(0, max(k_cache.shape[0] - 1, 0))
    keys = _converted(k_cache[chosen].flatten(1, 2), q.dtype)
    return attention(q, keys, _values(keys, head_dim_v), seqused_k=lengths, **options)


def _sparse(
    q: Tensor,
    k_cache: Tensor,
    indices: Any,
    topk_length: Tensor | None,
    head_dim_v: int,
    fp8: bool,
    options: dict[str, Any],
) -> Any:
    """Attention of each query, as a sequence of its own, to the rows that it names: pages of one row."""
    _flash.only_tensors(indices=indices)
    if indices.shape[:-1] != q.shape[:2]:
        raise InvalidArgumentError(
            f"indices have shape {tuple(indices.shape)}; pass {(*q.shape[:2], 'topk')}, those of each query"
        )
    rows = k_cache.reshape(-1, 1, *k_cache.shape[2:])
    named = (indices >= 0) & (indices < rows.shape[0])
    if topk_length is not None:
        places = torch.arange(indices.shape[-1], device=indices.device)
        named &= places < topk_length[:, None, None]
    named = named.flatten(0, 1)
    order = named.int().argsort(dim=-1, descending=True, stable=True)
    table = indices.flatten(0, 1).gather(-1, order)
    each = q.flatten(0, 1)[:, None]
    where: dict[str, Any] = {"seqused_k": named.sum(-1, dtype=torch.int32)}
    if fp8:
        _judge_records(k_cache, head_dim_v)
        rows = _converted(rows[table.long().clamp(0, max(rows.shape[0] - 1, 0))].flatten(1, 2), q.dtype)
    else:
        where["page_table"] = table
    out, lse = attention(each, rows, _values(rows, head_dim_v), **where, **options)
    return out.view(*q.shape[:-1], head_dim_v), lse.view(*q.shape[:-1]).transpose(1, 2)


def _values(keys: Tensor, head_dim_v: int) -> Tensor:
    if not 0 < head_dim_v <= keys.shape[-1]:
        raise InvalidArgumentError(
            f"head_dim_v is {head_dim_v}; values are the first columns of keys that have {keys.shape[-1]}"
        )
    return keys[..., :head_dim_v]


def _judge_records(cache: Tensor, head_dim_v: int) -> None:
    if cache.dtype not in _BYTES or cache.ndim != 4 or cache.shape[2:] != (1, _RECORD):
        raise InvalidArgumentError(
            f"k_cache is {cache.dtype} of shape {tuple(cache.shape)}; with is_fp8_kvcache pass (blocks, "
            f"block_size, 1, {_RECORD}) of bytes"
        )
    if head_dim_v != _QUANTIZED:
        raise InvalidArgumentError(f"head_dim_v is {head_dim_v}; with is_fp8_kvcache it is {_QUANTIZED}")


def _converted(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys of `dtype` from rows of an FP8 cache."""
    parts = records.view(torch.uint8).split([_QUANTIZED, _SCALES, 2 * _PLAIN], -1)
    values = parts[0].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, _GROUP))
    scales = parts[1].view(torch.float32)[..., None]
    return torch.cat(((values * scales).flatten(-2).to(dtype), parts[2].view(torch.bfloat16).to(dtype)), -1)
