"""Tandem as an implementation of PyTorch's scaled_dot_product_attention (torch.nn.attention).

The operators here are PyTorch's flash attention's; their tensors are (batch, heads, seqlen, head_dim), and
their causal mask is aligned to the top left corner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays, _call
from tandem._errors import UnsupportedError

_arrays.meet_torch()

_MAX_HEAD_DIM = 256  # tandem.attention's


class Handle:
    """Keeps the operators registered; `remove` gives PyTorch its own back."""

    def __init__(self) -> None:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        cpu: dict[str, Callable[..., Any]] = {
            "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
            "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
        }
        cuda: dict[str, Callable[..., Any]] = {
            "_scaled_dot_product_flash_attention": _cuda_forward,
            "_scaled_dot_product_flash_attention_backward": _cuda_backward,
        }
        for name, function in cpu.items():
            library.impl(name, _or_pytorchs(name, function), "CPU", with_keyset=True, allow_override=True)
        for name, function in cuda.items():
            library.impl(name, function, "CUDA", allow_override=True)
        self._library: Any = library

    def remove(self) -> None:
        self._library._destroy()


def _or_pytorchs(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, or PyTorch's own where Tandem lacks the dtype or the head dimension.

    PyTorch's flash attention takes float64 and any head dimension on the CPU; on a GPU it takes none of what
    Tandem lacks, so that PyTorch sends such calls elsewhere.
    """
    theirs = torch.library.get_kernel(f"aten::{name}", "CPU")

    def function(keys: Any, *tensors: Any, **options: Any) -> Any:
        # q, k and v, or dout, q and k: both head dimensions are among theirs
        if all(t.dtype != torch.float64 and t.shape[-1] <= _MAX_HEAD_DIM for t in tensors[:3]):
            return ours(*tensors, **options)
        return theirs.call_boxed(keys, *tensors, **options)

    return function


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[_call.Call, Tensor, Tensor, Tensor]:
    """The call that means this, and its tensors, heads third."""
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p is {dropout_p}, but Tandem has no dropout; pass 0")
    if mask is not None:
        raise UnsupportedError(
            "attn_mask is given, but Tandem takes masks as causal, windows and lengths; call it under "
            "sdpa_kernel(SDPBackend.MATH), or call tandem.attention"
        )
    rows, keys = q.shape[2], k.shape[2]
    if is_causal and keys > rows:  # the top left triangle: later keys are seen by nobody
        k, v, keys = k[:, :, :rows], v[:, :, :rows], rows
    window = (-1, rows - keys) if is_causal else (-1, -1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    call = _call.Call(scale=scale, window=window, deterministic=deterministic, pad=True)
    return call, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _cpu_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    call, *tensors = _problem(q, k, v, dropout_p, is_causal, attn_mask, scale)
    out, lse = _call.forward(call, *tensors, None, return_lse=True)
    return out.transpose(1, 2), lse


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    call, *tensors = _problem(q, k, v, dropout_p, is_causal, attn_mask, scale)
    dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    seen = tensors[1].shape[1]
    gradients = tuple(torch.empty_like(t) for t in tensors)
    if seen < k.shape[2]:
        gradients = (gradients[0], *(torch.zeros_like(t).transpose(1, 2) for t in (k, v)))
    written = (gradients[0], gradients[1][:, :seen], gradients[2][:, :seen], None)
    _call.backward(call, dout, *tensors, out, lse, None, None, written)
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    return dq, dk, dv


def _cuda_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    call, *tensors = _problem(q, k, v, dropout_p, is_causal, None, scale)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    _, lse = _call.forward(call, *tensors, None, return_lse=True, out=out.transpose(1, 2))
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout that there is not
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, offset, q.new_empty(0)


def _cuda_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _cpu_backward(dout, q, k, v, out, lse, dropout_p, is_causal, scale=scale)
