"""FlashAttention-3's function names on Tandem, for CPU and CUDA tensors.

from tandem.flash_attn import flash_attn_func

The parameters and their meaning are those of FlashAttention-3's ``flash_attn_interface``. Beyond it, every
function takes ``sink`` (a learnable logit per head that joins the softmax's denominator) and gives an LSE
that gradients flow through. What Tandem cannot do is an error that says so, never something else computed
quietly: ``qv``, ``attention_chunk``, and scales without float8 inputs.

`serve` makes ``import flash_attn_interface`` find this module; importing this module does not.
"""

from __future__ import annotations

import sys
from numbers import Integral
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tandem import _call, _torch
from tandem._errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "register_with_torch",
    "serve",
]

_SERVED = "flash_attn_interface"


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
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
) -> Any:
    """Attention of a batch of equally long sequences.

    Args:
      q: ``(batch, seqlen_q, heads_q, head_dim_qk)``, float16, bfloat16 or float8_e4m3fn; float32 on the CPU.
        Head dimensions are any up to 256.
      k, v: ``(batch, seqlen_k, heads_kv, head_dim)``; heads_kv divides heads_q (GQA, MQA).
      softmax_scale: default ``head_dim_qk ** -0.5``.
      causal: query i sees keys up to ``i + seqlen_k - seqlen_q``.
      qv: an error unless None; Tandem has no second query product.
      q_descale, k_descale, v_descale: scales of float8 inputs, ``(batch, heads_kv)`` float32. k and v may be
        float8 beside a q that is not.
      window_size: ``(left, right)``, inclusive on both sides of that diagonal; -1 is unbounded.
      attention_chunk: an error unless 0.
      softcap: scores become ``softcap * tanh(scores / softcap)``; 0 is off.
      num_splits, pack_gqa, sm_margin: hints that change no result; Tandem plans for itself.
      deterministic: gradients are bitwise reproducible.
      return_attn_probs: also return the LSE (FlashAttention-3's name for that).
      sink: ``(heads_q,)`` float32, differentiable.

    Returns:
      out ``(batch, seqlen_q, heads_q, head_dim_v)``; with ``return_attn_probs`` a pair of it and the LSE,
      ``(batch, heads_q, seqlen_q)`` float32, natural logarithm, differentiable.

    Raises:
      As `tandem.attention`.
    """
    _refuse(qv, attention_chunk)
    metadata = (None, None, None, None, q_descale, k_descale, v_descale)
    call = _problem(softmax_scale, causal, window_size, softcap, deterministic, metadata)
    return _run(call, q, k, v, sink, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
) -> Any:
    """Attention of sequences of different lengths, packed end to end. As `flash_attn_func`, and:

    Args:
      q: ``(total_q, heads_q, head_dim_qk)``; k and v ``(total_k, heads_kv, head_dim)``.
      cu_seqlens_q, cu_seqlens_k: ``(batch + 1,)`` int32 or int64: sequence b is rows ``cu[b]:cu[b + 1]``.
      max_seqlen_q, max_seqlen_k: not needed and never read, so a tensor costs no synchronisation.
      seqused_q, seqused_k: ``(batch,)``: only so many first rows of each sequence take part.

    Returns:
      out ``(total_q, heads_q, head_dim_v)``; the LSE is ``(heads_q, total_q)``.
    """
    _refuse(qv, attention_chunk)
    metadata = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_descale, k_descale, v_descale)
    call = _problem(softmax_scale, causal, window_size, softcap, deterministic, metadata)
    return _run(call, q, k, v, sink, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
) -> Any:
    """Attention of Q, K and V in one tensor, read where they lie. As `flash_attn_func`, and:

    Args:
      qkv: ``(batch, seqlen, 3, heads, head_dim)``; or, with ``num_heads_q``, ``(batch, seqlen, heads_q + 2 *
        heads_kv, head_dim)``.
    """
    _only_tensors(qkv=qkv)
    if qkv.is_nested:
        raise InvalidArgumentError(
            "qkv is a nested tensor; pass q, k and v of all its sequences to flash_attn_varlen_func"
        )
    if qkv.layout is not torch.strided:
        raise InvalidArgumentError(f"qkv is not a plain strided tensor (layout {qkv.layout}); make it dense")
    if num_heads_q is not None and not isinstance(num_heads_q, (Integral, torch.SymInt)):
        raise InvalidArgumentError(
            f"num_heads_q is {num_heads_q!r}; pass an integer, or None for qkv of five dimensions"
        )
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif (
        qkv.ndim == 4
        and num_heads_q is not None
        and 0 < num_heads_q < qkv.shape[2]
        and (qkv.shape[2] - num_heads_q) % 2 == 0
    ):
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = torch.split(qkv, [num_heads_q, heads_kv, heads_kv], dim=2)
    else:
        raise InvalidArgumentError(
            f"qkv has shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}; pass (batch, seqlen, 3, "
            "heads, head_dim), or (batch, seqlen, heads_q + 2 * heads_kv, head_dim) and num_heads_q"
        )
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        sink=sink,
    )


def serve() -> ModuleType:
    """Makes ``import flash_attn_interface`` find this module, for programs written for FlashAttention-3.

    Call it before they import it. Never called at import. An installed FlashAttention-3 that was imported
    already stays, with an error: two of them in one process would be a riddle.

    Returns:
      This module.
    """
    module = sys.modules[__name__]
    present = sys.modules.get(_SERVED)
    if present not in (None, module):
        raise InvalidArgumentError(
            f"{_SERVED} is imported already, from {getattr(present, '__file__', None)}; "
            "call serve() before that"
        )
    sys.modules[_SERVED] = module
    return module


def register_with_torch() -> None:
    """Registers Tandem as the implementation "tandem" of PyTorch's flash attention.

    ``torch.nn.attention.activate_flash_attention_impl("tandem")`` then makes scaled_dot_product_attention run
    on Tandem wherever PyTorch picks flash attention, on CPU and CUDA tensors, and
    ``restore_flash_attention_impl()`` gives PyTorch's own back. What Tandem lacks stays PyTorch's: calls with
    a mask tensor or dropout, in float64, or of head dimensions above 256.

    Raises:
      UnsupportedError: the installed PyTorch has no registry of such implementations.
    """
    from torch.nn import attention as registry

    if not hasattr(registry, "register_flash_attention_impl"):
        raise UnsupportedError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; update it"
        )
    from tandem import _sdpa

    registry.register_flash_attention_impl("tandem", register_fn=_sdpa.Handle)


def _refuse(qv: Tensor | None, attention_chunk: int) -> None:
    if qv is not None:
        raise UnsupportedError(
            "qv is given, but Tandem has no second query product; concatenate qv to q and v to k"
        )
    if attention_chunk != 0:
        raise UnsupportedError(
            f"attention_chunk is {attention_chunk}, but Tandem has no chunked mask; pass 0"
        )


def _problem(
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    metadata: tuple[Any, ...],
) -> _call.Call:
    """The call that means this. FlashAttention pads head dimensions itself: it has no option for that."""
    window = _call.pair("window_size", window_size)
    return _call.Call(scale, causal, window, softcap, deterministic, pad=True, metadata=metadata)


def _only_tensors(**arrays: Any) -> None:
    for name, array in arrays.items():
        if not isinstance(array, Tensor):
            raise TypeError(
                f"{name} is a {type(array).__module__}.{type(array).__qualname__}; pass a torch.Tensor"
            )


def _run(call: _call.Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, return_lse: bool) -> Any:
    results = _torch.quick(call, q, k, v, sink, return_lse)
    if results is not None:
        return results
    _only_tensors(q=q, k=k, v=v)
    # FlashAttention-3 copies tensors whose last dimension is not contiguous.
    q, k, v = (t.contiguous() if _is_spread(t) else t for t in (q, k, v))
    return _torch.attention(call, q, k, v, sink, return_lse=return_lse, out=None, out_dtype=None)


def _is_spread(t: Tensor) -> bool:
    """Whether a row's elements lie apart. What has no strides or no rows is for attention() to judge."""
    if t.layout is not torch.strided or t.is_nested or t.ndim == 0:
        return False
    return t.stride(-1) != 1 and t.shape[-1] != 1
