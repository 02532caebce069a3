"""FlashAttention-2's function names on Tandem, for CPU and CUDA tensors.

from tandem.flash_attn2 import flash_attn_func

The parameters, their order, defaults and meaning are those of FlashAttention-2's ``flash_attn`` (2.1 and
later: masks are aligned to the bottom right corner). What Tandem cannot do is an error that says so.

`serve` makes ``import flash_attn`` find this module; importing this module does not. `tandem.flash_attn` has
FlashAttention-3's functions, and sinks.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import Tensor

from tandem import _call, _dropout
from tandem._errors import InvalidArgumentError, named
from tandem.compat import _append, _flash, _flash_cache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "serve",
]

_NAMES = _flash.NAMES | {"page_table": "block_table", "seqused_k": "cu_seqlens_k"}


@named(**_NAMES)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of a batch of equally long sequences.

    Args:
      q: ``(batch, seqlen_q, heads_q, head_dim_qk)``, float16 or bfloat16; float32 on the CPU. Head dimensions
        are any up to 256, on the CPU up to 1024; on a GPU without gradients up to 576 of q and k, and 512
        of v.
      k, v: ``(batch, seqlen_k, heads_kv, head_dim)``; heads_kv divides heads_q (GQA, MQA).
      dropout_p: each entry of the softmax becomes 0 with this probability, and the others are divided by
        ``1 - dropout_p``; ``torch.manual_seed`` starts the random numbers.
      softmax_scale: default ``head_dim_qk ** -0.5``.
      causal: query i sees keys up to ``i + seqlen_k - seqlen_q``.
      window_size: ``(left, right)``, inclusive on both sides of that diagonal; -1 is unbounded.
      softcap: scores become ``softcap * tanh(scores / softcap)``; 0 is off.
      alibi_slopes: ``(heads_q,)`` or ``(batch, heads_q)`` float32: ``slope * abs(i + seqlen_k -
        seqlen_q - j)`` is taken off the score of query i and key j.
      deterministic: gradients are bitwise reproducible.
      return_attn_probs: also return the LSE, and None where FlashAttention-2 has the pattern of dropout.

    Returns:
      out ``(batch, seqlen_q, heads_q, head_dim_v)``; with ``return_attn_probs`` a triple of it, the LSE,
      ``(batch, heads_q, seqlen_q)`` float32, natural logarithm, differentiable, and None.

    Raises:
      As `tandem.attention`.
    """
    call = _flash.problem(softmax_scale, causal, window_size, (), softcap, deterministic)
    return _attend(call, q, k, v, return_attn_probs, dropout_p, alibi_slopes)


@named(**_NAMES)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As `flash_attn_func`, with q, k and v in one tensor, ``(batch, seqlen, 3, heads, head_dim)``."""
    q, k, v = _parts(3, "(batch, seqlen, 3, heads, head_dim)", qkv=qkv)
    call = _flash.problem(softmax_scale, causal, window_size, (), softcap, deterministic)
    return _attend(call, q, k, v, return_attn_probs, dropout_p, alibi_slopes)


@named(**_NAMES)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As `flash_attn_func`, with k and v in one tensor, ``(batch, seqlen_k, 2, heads_kv, head_dim)``."""
    k, v = _parts(2, "(batch, seqlen_k, 2, heads_kv, head_dim)", kv=kv)
    call = _flash.problem(softmax_scale, causal, window_size, (), softcap, deterministic)
    return _attend(call, q, k, v, return_attn_probs, dropout_p, alibi_slopes)


@named(**_NAMES)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of sequences of different lengths, packed end to end. As `flash_attn_func`, and:

    Args:
      q: ``(total_q, heads_q, head_dim_qk)``; k and v ``(total_k, heads_kv, head_dim)``.
      cu_seqlens_q, cu_seqlens_k: ``(batch + 1,)`` int32 or int64: sequence b is rows ``cu[b]:cu[b + 1]``.
      max_seqlen_q, max_seqlen_k: not needed and never read, so a tensor costs no synchronisation.
      block_table: ``(batch, max_blocks)``: k and v are a cache in blocks, ``(blocks, block_size, heads_kv,
        head_dim)``, and ``cu_seqlens_k`` counts the rows of each sequence there. No gradients.

    Returns:
      out ``(total_q, heads_q, head_dim_v)``; the LSE is ``(heads_q, total_q)``.
    """
    lengths: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_k)
    if block_table is not None:
        _flash.only_tensors(cu_seqlens_k=cu_seqlens_k, block_table=block_table)
        lengths = (cu_seqlens_q, None, None, cu_seqlens_k.diff(), *(None,) * 6, block_table)
    call = _flash.problem(softmax_scale, causal, window_size, lengths, softcap, deterministic)
    return _attend(call, q, k, v, return_attn_probs, dropout_p, alibi_slopes)


@named(**_NAMES)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As `flash_attn_varlen_func`, with q, k and v in one tensor, ``(total, 3, heads, head_dim)``."""
    q, k, v = _parts(3, "(total, 3, heads, head_dim)", qkv=qkv)
    lengths = (cu_seqlens, cu_seqlens)
    call = _flash.problem(softmax_scale, causal, window_size, lengths, softcap, deterministic)
    return _attend(call, q, k, v, return_attn_probs, dropout_p, alibi_slopes)


@named(**_NAMES)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As `flash_attn_varlen_func`, with k and v in one tensor, ``(total_k, 2, heads_kv, head_dim)``."""
    k, v = _parts(2, "(total_k, 2, heads_kv, head_dim)", kv=kv)
    lengths = (cu_seqlens_q, cu_seqlens_k)
    call = _flash.problem(softmax_scale, causal, window_size, lengths, softcap, deterministic)
    return _attend(call, q, k, v, return_attn_probs, dropout_p, alibi_slopes)


@named(**_flash.CACHE_NAMES, page_table="block_table")
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention to a cache of keys and values, contiguous or in blocks. As `flash_attn_func`, and as
    `tandem.flash_attn.flash_attn_with_kvcache`, whose page_table is called ``block_table`` here:

    Args:
      k_cache, v_cache: ``(batch, seqlen_cache, heads_kv, head_dim)``, or with ``block_table`` ``(blocks,
        block_size, heads_kv, head_dim)``.
      k, v: rows that are written to the caches first.
      rotary_cos, rotary_sin, rotary_interleaved: a rotary embedding of k and q, only with ``k``.
      cache_seqlens: how many first rows of each sequence are in the cache: an integer, or ``(batch,)`` int32
        or int64; None is all. Masks are aligned to them.
      cache_batch_idx, cache_leftpad: the entry that is each sequence's, and its first rows that are padding.
      alibi_slopes: as of `flash_attn_func`; with rows that are written first they count, too.
      num_splits: a hint that changes no result; Tandem plans for itself.
      return_softmax_lse: also return the LSE.
    """
    new = _append.New(k, v, None, rotary_cos, rotary_sin, None, rotary_interleaved)
    call = _flash.problem(softmax_scale, causal, window_size, softcap=softcap)
    return _flash_cache.cached(
        call,
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        None,
        return_softmax_lse,
        new=new,
        page_table=block_table,
        leftpad=cache_leftpad,
        batch_idx=cache_batch_idx,
        alibi_slopes=alibi_slopes,
    )


def serve() -> ModuleType:
    """Makes ``import flash_attn`` find this module, for programs written for FlashAttention-2.

    Call it before they import it. Never called at import. An installed FlashAttention-2 that was imported
    already stays, with an error: two of them in one process would be a riddle.

    Returns:
      This module.
    """
    module = _flash.serve(sys.modules[__name__], "flash_attn", "flash_attn.flash_attn_interface")
    vars(module)["flash_attn_interface"] = module  # FlashAttention-2's module of functions in its package
    return module


def _attend(
    call: _call.Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    with_probabilities: bool,
    dropout_p: float,
    alibi_slopes: Tensor | None,
) -> Any:
    """The result of a call, as FlashAttention-2 returns it."""
    _flash.add_alibi(call, q, k, alibi_slopes)
    _dropout.add(call, dropout_p, None, 0)
    results = _flash.run(call, q, k, v, return_lse=with_probabilities)
    return (*results, None) if with_probabilities else results


def _parts(count: int, shape: str, **packed: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one of that shape, whose third dimension from the end counts them."""
    _flash.only_packed("pass the tensors of all its sequences to flash_attn_varlen_func", **packed)
    ((name, t),) = packed.items()
    if t.ndim != shape.count(",") + 1 or t.shape[-3] != count:
        raise InvalidArgumentError(f"{name} has shape {tuple(t.shape)}; pass {shape}")
    return t.unbind(-3)
