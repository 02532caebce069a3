"""vLLM's flash attention functions on Tandem, for CPU and CUDA tensors.

from tandem.vllm_flash_attn import flash_attn_varlen_func

The parameters, their order, defaults and meaning are those of ``vllm.vllm_flash_attn``, which differ from
FlashAttention's: the maximum comes before ``cu_seqlens_q``, and lengths of keys may be ``seqused_k``. The
caches hold the new keys already: vLLM writes them before. What Tandem cannot do is an error that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem import flash_attn
from tandem._errors import InvalidArgumentError, named
from tandem.compat import _flash
from tandem.flash_attn import get_scheduler_metadata

__all__ = [
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]

_CODES = (torch.float8_e4m3fn, torch.int8)


@named(qv="q_v", causal_by_sequence="dynamic_causal")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    output_scale: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: Tensor | None = None,
) -> Any:
    """Attention of sequences packed end to end, to keys packed likewise or to a cache in pages.

    Args:
      q: ``(total_q, heads_q, head_dim_qk)``, float16, bfloat16 or float8_e4m3fn; float32 on the CPU.
      k, v: ``(total_k, heads_kv, head_dim)``; with ``block_table`` ``(pages, page_size, heads_kv,
        head_dim)``, with ``seqused_k`` alone ``(batch, seqlen_k, heads_kv, head_dim)``.
      cu_seqlens_q: ``(batch + 1,)``: sequence b is rows ``cu[b]:cu[b + 1]`` of q; some may be empty.
      cu_seqlens_k, seqused_k: one of them: likewise for k, or how many rows of each sequence take part.
      max_seqlen_q, max_seqlen_k: never read.
      softmax_scale: default ``head_dim_qk ** -0.5``.
      causal: query i sees keys up to ``i + seqlen_k - seqlen_q``.
      window_size: ``(left, right)``, inclusive on both sides of that diagonal; -1, or None, is unbounded.
      softcap: scores become ``softcap * tanh(scores / softcap)``; 0 is off.
      block_table: ``(batch, max_pages)``: row t of sequence b is row ``t % page_size`` of page
        ``block_table[b, t // page_size]``. Entries past a sequence's end may hold anything.
      return_softmax_lse: also return the LSE, ``(heads_q, total_q)`` float32, natural logarithm; it includes
        the sink.
      out: where to write the result, a slice of a larger tensor as well; made if None.
      q_descale, k_descale, v_descale: scales of float8 tensors, ``(batch, heads_kv)`` float32, expanded ones
        too. vLLM hands them over with every call; those of 16-bit tensors are not read.
      s_aux: ``(heads_q,)``: a logit per head that joins the softmax's denominator (a sink), bfloat16 as well.
      scheduler_metadata, num_splits, fa_version, deterministic, return_attn_probs: change no result.
      q_v: as ``qv`` of `tandem.flash_attn.flash_attn_func`.
      dynamic_causal: ``(batch,)`` int32 or booleans: which sequences are causal. ``causal`` is not read then.
      alibi_slopes: ``(heads_q,)`` or ``(batch, heads_q)`` float32: as of `tandem.attention`.
      dropout_p, output_scale, cp_world_size, mask_mod, block_sparse_tensors, aux_tensors: an error unless the
        default.

    Returns:
      out ``(total_q, heads_q, head_dim_v)``, or a pair of it and the LSE.

    Raises:
      As `tandem.attention`.
    """
    _flash.refuse(
        dropout_p=dropout_p,
        output_scale=output_scale,
        cp_world_size=None if cp_world_size == 1 else cp_world_size,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
    )
    if (cu_seqlens_k is None) == (seqused_k is None):
        which = "neither" if seqused_k is None else "both"
        raise InvalidArgumentError(f"cu_seqlens_k and seqused_k are {which} given; pass one of them")
    scales = ((q, q_descale), (k, k_descale), (v, v_descale))
    q_descale, k_descale, v_descale = (scale if t.dtype in _CODES else None for t, scale in scales)
    return flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal and dynamic_causal is None,
        qv=q_v,
        causal_by_sequence=dynamic_causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=(-1, -1) if window_size is None else tuple(window_size),  # type: ignore[arg-type]
        softcap=softcap,
        return_lse=return_softmax_lse,
        s_aux=s_aux,
        block_table=block_table,
        out=out,
        alibi_slopes=alibi_slopes,
    )


def is_fa_version_supported(fa_version: int) -> bool:
    """Whether calls with that ``fa_version`` run: those with 2, 3 and 4 do, all in the same way."""
    return fa_version_unsupported_reason(fa_version) is None


def fa_version_unsupported_reason(fa_version: int) -> str | None:
    """None, or an error of a version that vLLM does not have."""
    if fa_version not in (2, 3, 4):
        raise InvalidArgumentError(f"fa_version is {fa_version}; it must be 2, 3 or 4")
    return None
