"""FlashMLA's decoding on Tandem: latent attention to a cache in pages, for CPU and CUDA tensors.

from tandem.flash_mla import flash_mla_with_kvcache, get_mla_metadata

The parameters, their order, defaults and meaning are those of ``flash_mla``: caches of 16 bits or of FP8
records, all keys of a request or those that ``indices`` choose. Values are the first columns of the keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem import _arrays, _call
from tandem._api import attention
from tandem._cache import merge
from tandem._errors import InvalidArgumentError, named
from tandem.compat import _flash, _latent
from tandem.torch import _derivatives

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

#: A row of an FP8 cache: so many e4m3 values, an f32 scale for each 128 of them, and bf16 values.
_QUANTIZED, _GROUP, _PLAIN = 512, 128, 64
_SCALES = 4 * (_QUANTIZED // _GROUP)
_RECORD = _QUANTIZED + _SCALES + 2 * _PLAIN
_WIDE = ("float16", "bfloat16", "float32")
_BYTES = ("uint8", "int8", "float8_e4m3fn")
#: Records that are converted at a time: their values in f32 are 32 MB.
_PIECE = 2**14


def get_mla_metadata(*_: Any, **__: Any) -> tuple[None, None]:
    """What FlashMLA schedules by. Tandem needs nothing of the kind, in any call or CUDA graph."""
    return None, None


@named(scale="softmax_scale", k="k_cache", page_table="block_table", seqused_k="cache_seqlens")
@named(scale="softmax_scale", k="k_cache", v="k_cache", page_table="block_table", seqused_k="cache_seqlens")
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
        four float32 scales for 128 of them each, and 64 bfloat16, at addresses that are multiples of 4. The
        rows in use become q's dtype first, in memory of their own: on the CPU that of the blocks in use; on a
        GPU, where lengths are not read on the host, that of as many blocks as block_table has entries, or as
        the cache has, 1.76 times its size, where these are fewer.
      block_table: ``(batch, max_blocks)``: row t of request b is row ``t % block_size`` of block
        ``block_table[b, t // block_size]``. A number in use that no block has gives rows of zeros. Not read
        with ``indices``.
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
      As `tandem.attention`. There are no gradients.
    """
    _flash.only_tensors(q=q, k_cache=k_cache)
    _arrays.validate_tensor("q", q, q, ("batch", "seqlen_q", "heads_q", "head_dim"), *_WIDE)
    causal, fp8 = _call.flag("causal", causal), _call.flag("is_fp8_kvcache", is_fp8_kvcache)
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise InvalidArgumentError(
            "extra_k_cache and extra_indices_in_kvcache go together; pass both, or neither"
        )
    _validate_caches(q, head_dim_v, fp8, k_cache=k_cache, extra_k_cache=extra_k_cache)
    _validate_indices(q, indices=indices, topk_length=topk_length)
    _validate_indices(
        q, extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length
    )
    if attn_sink is not None:
        _arrays.validate_tensor("attn_sink", attn_sink, q, (q.shape[2],), "float32")
    options: dict[str, Any] = {"scale": softmax_scale, "split_size": split_size}
    options["return_lse"] = True
    if indices is None:
        _validate_table(q, block_table, cache_seqlens)
        of_rows = options | {"causal": causal}
        out, lse = _dense(q, k_cache, block_table, cache_seqlens, head_dim_v, fp8, of_rows)
    else:
        if causal:
            raise InvalidArgumentError(
                "causal is given with indices, which say what a query sees; leave it out"
            )
        out, lse = _sparse(q, k_cache, indices, topk_length, head_dim_v, fp8, options)
    if extra_k_cache is not None:
        rows = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
        extra = _sparse(q, *rows, head_dim_v, fp8, options)
        out, lse = merge((out, extra[0]), (lse, extra[1]))
    if attn_sink is not None:
        share = torch.sigmoid(lse - attn_sink[:, None]).masked_fill(lse == -torch.inf, 0.0)
        out = (out * share.transpose(1, 2)[..., None]).to(out.dtype)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def _validate_caches(q: Tensor, head_dim_v: Any, fp8: bool, **caches: Any) -> None:
    _derivatives.validate_unrecorded("flash_mla.flash_mla_with_kvcache", {"q": q, **caches})
    for name, cache in caches.items():
        if cache is None:
            continue
        if fp8:
            shape: tuple[int | str, ...] = ("blocks", "block_size", 1, _RECORD)
            _arrays.validate_tensor(name, cache, q, shape, *_BYTES)
            _validate_records(name, cache)
            columns = _QUANTIZED + _PLAIN
        else:
            _validate_plain(name, cache, q)
            columns = cache.shape[-1]
        if q.shape[-1] != columns:
            raise InvalidArgumentError(
                f"q has head_dim {q.shape[-1]}, but keys of {name} have {columns}; pass q as wide as keys"
            )
        if fp8 and head_dim_v != _QUANTIZED:
            raise InvalidArgumentError(f"head_dim_v is {head_dim_v}; with is_fp8_kvcache it is {_QUANTIZED}")
        if not isinstance(head_dim_v, (int, np.integer)) or not 0 < head_dim_v <= columns:
            raise InvalidArgumentError(
                f"head_dim_v is {head_dim_v}; values are the first columns of keys that have {columns}"
            )


def _validate_records(name: str, cache: Tensor) -> None:
    """Their scales are float32 where they lie."""
    places = cache.storage_offset(), *cache.stride()[:2]
    if cache.stride(-1) != 1 or any(place % 4 for place in places):
        raise InvalidArgumentError(
            f"{name} begins at byte {places[0]} and has strides {tuple(cache.stride())}; records have "
            f"their bytes side by side and begin at multiples of 4: clone {name}"
        )


def _validate_plain(name: str, cache: Any, q: Tensor) -> None:
    dtype = str(q.dtype).removeprefix("torch.")
    try:
        _arrays.validate_tensor(name, cache, q, ("blocks", "block_size", "heads_kv", "head_dim"), dtype)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}, or with FP8 records is_fp8_kvcache=True") from None


def _validate_table(q: Tensor, table: Any, lengths: Any) -> None:
    for name, given, shape in (
        ("block_table", table, (q.shape[0], "max_blocks")),
        ("cache_seqlens", lengths, (q.shape[0],)),
    ):
        if given is None:
            raise InvalidArgumentError(
                f"{name} is missing; pass it, or indices, which say what each query sees"
            )
        _arrays.validate_tensor(name, given, q, shape, *_arrays.INTEGERS)


def _validate_indices(q: Tensor, **given: Any) -> None:
    """Validates indices and the number of them that count."""
    (name, indices), (of_length, length) = given.items()
    if indices is not None:
        _arrays.validate_tensor(name, indices, q, (*q.shape[:2], "topk"), *_arrays.INTEGERS)
    elif length is not None:
        raise InvalidArgumentError(f"{of_length} is given without {name}; pass both, or neither")
    if length is not None:
        _arrays.validate_tensor(of_length, length, q, (q.shape[0],), *_arrays.INTEGERS)


def _dense(
    q: Tensor, k_cache: Tensor, table: Any, lengths: Any, head_dim_v: int, fp8: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attention to all rows of each request."""
    if fp8:
        k_cache, table = _converted(q, k_cache, table, lengths)
    values = k_cache[..., :head_dim_v]
    results: tuple[Tensor, Tensor] = attention(
        q, k_cache, values, page_table=table, seqused_k=lengths, **options
    )
    return results


def _sparse(
    q: Tensor,
    k_cache: Tensor,
    indices: Any,
    topk_length: Tensor | None,
    head_dim_v: int,
    fp8: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Attention of each query, as a sequence of its own, to the rows that it names: pages of one row."""
    named = (indices >= 0) & (indices < k_cache.shape[:2].numel())
    places = torch.arange(indices.shape[-1], device=indices.device)
    if topk_length is not None:
        named &= places < topk_length[:, None, None]
    named = named.flatten(0, 1)
    order = named.int().argsort(dim=-1, descending=True, stable=True)
    table = indices.flatten(0, 1).gather(-1, order)
    lengths = named.sum(-1, dtype=torch.int32)
    if fp8 or k_cache.stride(0) != k_cache.shape[1] * k_cache.stride(1):
        keys, table = _copied(q, k_cache, table, places < lengths[:, None], fp8)
    else:
        keys = k_cache.flatten(0, 1)[:, None]
    each = q.flatten(0, 1)[:, None]
    values = keys[..., :head_dim_v]
    out, lse = attention(each, keys, values, page_table=table, seqused_k=lengths, **options)
    return out.view(*q.shape[:-1], head_dim_v), lse.view(*q.shape[:-1]).transpose(1, 2)


def _converted(q: Tensor, cache: Tensor, table: Any, lengths: Any) -> tuple[Tensor, Tensor]:
    """The rows in use of an FP8 cache in q's dtype, each once, and the table of their blocks."""
    found = _latent.in_use(cache, table, lengths)
    keys = q.new_empty((found.size, cache.shape[1], 1, q.shape[-1]))
    codes, scales, plain = _parts(cache[:, :, 0])
    # An append of four heads of 128, which have a scale each, and one of what is plain.
    heads = (_SCALES // 4, _GROUP)
    values, rope = keys[..., :_QUANTIZED], keys[..., _QUANTIZED:]
    read, written = (t.view(*t.shape[:2], *heads) for t in (codes, values[:, :, 0]))
    found.copy(read, None, written, None, scales.mT)
    found.copy(plain[:, :, None], None, rope, None)
    return keys, found.pages


def _copied(q: Tensor, cache: Tensor, table: Any, in_use: Tensor, fp8: bool) -> tuple[Tensor, Any]:
    """The rows of a cache that ``table`` names, in q's dtype, and the table of those, or None where each
    sequence has its rows side by side. On the CPU they are those in use, each once. On a GPU, where that is
    not known without waiting, they are as many as the table has entries, or the whole cache if that is
    less."""
    count = cache.shape[:2].numel()
    if _flash.is_readable(table):
        chosen, places = torch.unique(table[in_use], return_inverse=True)
        numbers = torch.full_like(table, -1).index_put_((in_use,), places.to(table.dtype))
        return _rows(q, cache, chosen, fp8), numbers
    if table.numel() >= count:
        return _rows(q, cache, torch.arange(count, device=table.device), fp8), table
    # What is not in use reads one row, again and again.
    keys = _rows(q, cache, torch.where(in_use, table, 0).flatten(), fp8)
    return keys.view(*table.shape, *keys.shape[2:]), None


def _rows(q: Tensor, cache: Tensor, chosen: Tensor, fp8: bool) -> Tensor:
    """These rows of a cache, as blocks of their own, in q's dtype."""
    size = max(cache.shape[1], 1)
    keys = q.new_empty((len(chosen), 1, cache.shape[2], q.shape[-1]))
    for first in range(0, len(chosen), _PIECE):
        piece = chosen[first : first + _PIECE]
        found = cache[piece // size, piece % size][:, None]
        keys[first : first + _PIECE] = _from_records(found) if fp8 else found
    return keys


def _parts(records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes, scales and plain values of rows of an FP8 cache."""
    parts = torch.split(records.view(torch.uint8), [_QUANTIZED, _SCALES, 2 * _PLAIN], -1)
    return (
        parts[0].view(torch.float8_e4m3fn),
        parts[1].view(torch.float32),
        parts[2].view(torch.bfloat16),
    )


def _from_records(records: Tensor) -> Tensor:
    """The keys that rows of an FP8 cache stand for, in f32."""
    codes, scales, plain = _parts(records)
    return torch.cat((codes.float() * scales.repeat_interleave(_GROUP, -1), plain.float()), -1)
