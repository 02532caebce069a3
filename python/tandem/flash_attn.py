"""FlashAttention-3's function names on Tandem, for CPU and CUDA tensors.

from tandem.flash_attn import flash_attn_func

The parameters and their meaning are those of FlashAttention-3's ``flash_attn_interface``. Beyond it, every
function takes ``sink`` (a learnable logit per head that joins the softmax's denominator), gives an LSE that
gradients flow through, and knows FlashAttention-4's spellings: ``learnable_sink``, ``return_lse`` and None
for an unbounded side of a window. Caches of keys and values are read contiguous or in pages. What Tandem
cannot do is an error that says so, never something else computed quietly: scales without float8 inputs.

`serve` makes ``import flash_attn_interface`` find this module; importing this module does not.
`tandem.flash_attn2` has FlashAttention-2's functions, `tandem.vllm_flash_attn` vLLM's.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tandem import _cache, _call
from tandem._errors import InvalidArgumentError, named
from tandem.compat import _append, _flash, _flash_cache, _latent
from tandem.compat._sdpa import register_with_torch

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "register_with_torch",
    "serve",
]


@named(_flash.SINKS, validate=_flash.without_dropout(3, "softmax_scale"), **_flash.NAMES)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    split_size: int = 0,
) -> Any:
    """Attention of a batch of equally long sequences.

    Args:
      q: ``(batch, seqlen_q, heads_q, head_dim_qk)``, float16, bfloat16 or float8_e4m3fn; float32 on the CPU.
        Head dimensions are any up to 256, on the CPU up to 1024; without gradients, on a GPU, up to 576.
      k, v: ``(batch, seqlen_k, heads_kv, head_dim)``; heads_kv divides heads_q (GQA, MQA).
      softmax_scale: default ``head_dim_qk ** -0.5``.
      causal: query i sees keys up to ``i + seqlen_k - seqlen_q``.
      qv: q's shape with v's head dimension: scores are ``q k + qv v`` (MLA), times ``(head_dim_qk +
        head_dim_v) ** -0.5``. k and v that lie side by side in one tensor are read there; others are copied.
        Without descales.
      q_descale, k_descale, v_descale: scales of float8 inputs, ``(batch, heads_kv)`` float32. k and v may be
        float8 beside a q that is not.
      window_size: ``(left, right)``, inclusive on both sides of that diagonal; -1 or None is unbounded.
      attention_chunk: a query sees the keys of its own chunk alone, chunks of that many from the first key on
        (beside ``causal`` and ``window_size``); 0 is off. Tensors that are not contiguous are copied.
      softcap: scores become ``softcap * tanh(scores / softcap)``; 0 is off.
      num_splits, pack_gqa, sm_margin: hints that change no result; Tandem plans for itself.
      deterministic: gradients are bitwise reproducible.
      return_attn_probs, return_lse: also return the LSE (FlashAttention-3's and 4's names for that).
      sink, learnable_sink: ``(heads_q,)`` float32, float16 or bfloat16, differentiable; two names of one.
      split_size: a multiple of 128: a sequence's bits then do not depend on the batch, as `tandem.attention`
        has it; 0 is off.

    Returns:
      out ``(batch, seqlen_q, heads_q, head_dim_v)``; with ``return_attn_probs`` or ``return_lse`` a pair of
      it and the LSE, ``(batch, heads_q, seqlen_q)`` float32, natural logarithm, differentiable.

    Raises:
      As `tandem.attention`.
    """
    metadata = (None, None, None, None, q_descale, k_descale, v_descale)
    call = _flash.problem(softmax_scale, causal, window_size, metadata, softcap, deterministic, split_size)
    if learnable_sink is not None:
        sink = _flash.one_of(_flash.SINKS, sink, learnable_sink)
    if qv is not None:
        call, q, k, v = _latent.one_product(call, q, k, v, qv)
    return _flash.run(call, q, k, v, sink, return_lse or return_attn_probs, attention_chunk)


@named(_flash.SINKS, _flash.TABLES, validate=_flash.without_dropout(7, "seqused_q"), **_flash.NAMES)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    s_aux: Tensor | None = None,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    split_size: int = 0,
    causal_by_sequence: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    page_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    ver: int = 3,
) -> Any:
    """Attention of sequences of different lengths, packed end to end. As `flash_attn_func`, and:

    Args:
      q: ``(total_q, heads_q, head_dim_qk)``; k and v ``(total_k, heads_kv, head_dim)``.
      cu_seqlens_q, cu_seqlens_k: ``(batch + 1,)`` int32 or int64: sequence b is rows ``cu[b]:cu[b + 1]``.
      max_seqlen_q, max_seqlen_k: not needed and never read, so a tensor costs no synchronisation.
      seqused_q, seqused_k: ``(batch,)``: only so many first rows of each sequence take part.
      page_table, block_table: ``(batch, max_pages)``, two names of one: k and v are a cache in pages,
        ``(pages, page_size, heads_kv, head_dim)``, as with `tandem.attention`'s ``page_table``. ``seqused_k``
        has the lengths, ``cu_seqlens_k`` is None. No gradients.
      s_aux, sinks: more names of ``sink``.
      return_softmax_lse: a third name of ``return_lse``.
      ver: SGLang's choice between FlashAttention-3 and 4; changes no result.
      out: where to write the result, a slice of a larger tensor as well; made if None. Without gradients.
      causal_by_sequence (in place of ``causal``), alibi_slopes (without chunks): as of `tandem.attention`.

    Returns:
      out ``(total_q, heads_q, head_dim_v)``; the LSE is ``(heads_q, total_q)``.
    """
    table = _flash.one_of(_flash.TABLES, page_table, block_table)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_descale, k_descale, v_descale)
    metadata = (*lengths, *(None,) * 3, table, None, None, _call.integers(causal_by_sequence))
    call = _flash.problem(softmax_scale, causal, window_size, metadata, softcap, deterministic, split_size)
    sink = _flash.one_of(_flash.SINKS, sink, learnable_sink, s_aux, sinks)
    if table is not None and seqused_k is None:
        raise InvalidArgumentError("page_table is given without seqused_k, its lengths; pass both")
    _flash.add_alibi(call, q, k, alibi_slopes, attention_chunk)
    with_lse = return_lse or return_attn_probs or return_softmax_lse
    if qv is not None:
        call, q, k, v = _latent.one_product(call, q, k, v, qv)
    return _flash.run(call, q, k, v, sink, with_lse, attention_chunk, out)


@named(_flash.SINKS, validate=_flash.without_dropout(1, "softmax_scale"), **_flash.NAMES)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of Q, K and V in one tensor, read where they lie. As `flash_attn_func`, and:

    Args:
      qkv: ``(batch, seqlen, 3, heads, head_dim)``; or, with ``num_heads_q``, ``(batch, seqlen, heads_q + 2 *
        heads_kv, head_dim)``.
    """
    q, k, v = _flash.three_in_one(qkv, num_heads_q)
    metadata = (None, None, None, None, q_descale, k_descale, v_descale)
    call = _flash.problem(softmax_scale, causal, window_size, metadata, softcap, deterministic)
    sink = _flash.one_of(_flash.SINKS, sink, learnable_sink)
    return _flash.run(call, q, k, v, sink, return_lse or return_attn_probs, attention_chunk)


@named(_flash.SINKS, _flash.TABLES, **_flash.CACHE_NAMES)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sink: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    s_aux: Tensor | None = None,
    block_table: Tensor | None = None,
    split_size: int = 0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    ver: int = 3,
) -> Any:
    """Attention to a cache of keys and values, contiguous or in pages. As `flash_attn_func`, and:

    Args:
      q: ``(batch, seqlen_q, heads_q, head_dim_qk)``, or with ``cu_seqlens_q`` ``(total_q, heads_q,
        head_dim_qk)``.
      k_cache, v_cache: ``(batch, seqlen_cache, heads_kv, head_dim)``; with ``page_table`` ``(pages,
        page_size, heads_kv, head_dim)``, pages of any size.
      k, v: rows that are written to the caches first, behind ``cache_seqlens`` rows of each sequence, and
        take part: ``(batch, seqlen_new, heads_kv, head_dim)``, or with ``cu_seqlens_k_new`` ``(total_new,
        heads_kv, head_dim)``. Without gradients. Where two sequences share an entry that both write, the
        last one wins. What the integers hold is not checked on a GPU and in compiled calls: a row without a
        place is left out.
      rotary_cos, rotary_sin: ``(positions, rotary_dim / 2)``, only with ``k``: a rotary embedding of what is
        appended, each row at its place in the cache, and of q: query i at ``cache_seqlens + i`` if ``causal``
        or windowed, else all at ``cache_seqlens``. ``rotary_seqlens`` ``(batch,)`` stands in for
        cache_seqlens there. Pairs are neighbours if ``rotary_interleaved``, else half of rotary_dim apart.
      cache_seqlens: how many first rows of each sequence are in the cache: an integer, or ``(batch,)`` int32
        or int64; None is all. Masks are aligned to them, and to what is appended.
      cache_batch_idx: ``(batch,)``: the entry of the caches that is each sequence's; they may repeat.
      cache_leftpad: ``(batch,)``: so many first rows of each sequence are padding.
      page_table, block_table: ``(batch, max_pages)`` int32 or int64, two names of one: row t of sequence b is
        row ``t % page_size`` of page ``page_table[b, t // page_size]``. Entries past a sequence's end may
        hold anything.
      scheduler_metadata, max_seqlen_q: change no result, and are not read.
      return_softmax_lse, return_lse: also return the LSE.
      s_aux: a third name of ``sink``.
    """
    new = _append.New(k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved)
    metadata = (cu_seqlens_q, None, None, None, q_descale, k_descale, v_descale)
    call = _flash.problem(softmax_scale, causal, window_size, metadata, softcap, split_size=split_size)
    return _flash_cache.cached(
        call,
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        _flash.one_of(_flash.SINKS, sink, learnable_sink, s_aux, sinks),
        return_lse or return_softmax_lse,
        attention_chunk,
        new=new,
        page_table=_flash.one_of(_flash.TABLES, page_table, block_table),
        leftpad=cache_leftpad,
        batch_idx=cache_batch_idx,
        qv=qv,
        out=out,
    )


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention of the same queries to disjoint sets of keys, joined by the parts' LSE: `tandem.merge` with
    FlashAttention's shapes.

    Args:
      out_partial: ``(parts, batch, seqlen, heads, head_dim)``, or packed ``(parts, total, heads, head_dim)``;
        float32, float16 or bfloat16.
      lse_partial: its shape without the last dimension; float32.
      out: where to write the result; made if None. ``out_dtype`` is that of a result made here, by default
        that of out_partial.

    Returns:
      The result, and its LSE, ``(batch, seqlen, heads)`` or ``(total, heads)``; None unless ``return_lse``.
    """
    _flash.only_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.ndim < 4 or lse_partial.shape != out_partial.shape[:-1]:
        raise InvalidArgumentError(
            f"lse_partial has shape {tuple(lse_partial.shape)} and out_partial {tuple(out_partial.shape)}; "
            "pass (parts, batch, seqlen, heads, head_dim), or packed, and that without head_dim"
        )
    if out is not None and out.shape != out_partial.shape[1:]:
        raise InvalidArgumentError(f"out has shape {tuple(out.shape)}; pass {tuple(out_partial.shape[1:])}")
    out_dtype = out_dtype if out is None else out.dtype
    lses = lse_partial.transpose(-1, -2).contiguous()
    result, lse = _cache.merge(_flash.gathered(out_partial), lses, out_dtype=out_dtype)
    result = result if out is None else out.copy_(result)
    return result, lse.transpose(-1, -2) if return_lse else None


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    """What FlashAttention-3 plans ahead for `flash_attn_with_kvcache`. Tandem plans in the call and needs
    nothing made before: this is an empty int32 tensor beside ``cache_seqlens``, and no argument but that is
    read."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def serve() -> ModuleType:
    """Makes ``import flash_attn_interface`` find this module, for programs written for FlashAttention-3.

    Call it before they import it. Never called at import. An installed FlashAttention-3 that was imported
    already stays, with an error: two of them in one process would be a riddle.

    Returns:
      This module.
    """
    return _flash.serve(sys.modules[__name__], "flash_attn_interface")
