"""Tandem as an implementation of PyTorch's scaled_dot_product_attention (torch.nn.attention).

The operators here are PyTorch's flash attention's; their tensors are (batch, heads, seqlen, head_dim), and
their causal mask is aligned to the top left corner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays, _call, _dropout, _functions, _torch_functions

_arrays.meet_torch()


class Handle:
    """Keeps the operators registered; `remove` gives PyTorch its own back."""

    def __init__(self) -> None:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        operators: list[tuple[str, str, Callable[..., Any]]] = [
            ("CPU", "_scaled_dot_product_flash_attention_for_cpu", _cpu_forward),
            ("CPU", "_scaled_dot_product_flash_attention_for_cpu_backward", _cpu_backward),
        ]
        if torch.version.cuda is not None:  # else PyTorch has no such operators to hand a call back to
            operators += [
                ("CUDA", "_scaled_dot_product_flash_attention", _cuda_forward),
                ("CUDA", "_scaled_dot_product_flash_attention_backward", _cuda_backward),
            ]
        for device, name, function in operators:
            function = _or_pytorchs(device, name, function)
            library.impl(name, function, device, with_keyset=True, allow_override=True)
        for key in ("AutogradCPU", "CPU"):
            library.impl(_MATH, _math_or_pytorchs(key), key, with_keyset=True, allow_override=True)
        self._library: Any = library

    def remove(self) -> None:
        self._library._destroy()


#: What PyTorch computes in place of flash attention on the CPU: dropout, and masks that require a gradient.
_MATH = "_scaled_dot_product_attention_math"


def _math_or_pytorchs(key: str) -> Callable[..., Any]:
    """Tandem's attention for what PyTorch's formula has on the CPU and its flash attention has not, where
    flash attention is allowed; else PyTorch's own. The weights, a second result that no public function hands
    on, are left empty."""
    theirs = torch.library.get_kernel(f"aten::{_MATH}", key)

    def function(
        keys: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        dropout_mask: Tensor | None = None,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        wanted = 0.0 < dropout_p < 1.0 or (attn_mask is not None and attn_mask.requires_grad)
        if not (wanted and dropout_mask is None and _is_flash_allowed(q, k, v, attn_mask)):
            given = (q, k, v, attn_mask, dropout_p, is_causal, dropout_mask)
            return theirs.call_boxed(keys, *given, scale=scale, enable_gqa=enable_gqa)
        call, *tensors = _problem(q, k, v, is_causal, scale, attn_mask, detached=False)
        _dropout.add(call, dropout_p, None, 0)
        tensors = [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]
        out = _torch_functions.attention(call, *tensors, None, return_lse=False, out=None, out_dtype=None)
        return out.transpose(1, 2), q.new_empty(0)

    return function


def _is_flash_allowed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch may pick flash attention, and these are plain tensors that Tandem takes."""
    for t in (q, k, v, mask):
        plain = t is None or type(t) in (Tensor, torch.nn.Parameter)
        if not plain or (t is not None and (t.is_nested or t.is_neg() or t.dtype == torch.float64)):
            return False
    return (
        bool(torch._C._get_flash_sdp_enabled())
        and all(t.ndim == 4 and t.numel() > 0 and _is_ours(t) for t in (q, k, v))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def _or_pytorchs(device: str, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, or PyTorch's own operator for what Tandem lacks here: dropout, float64, masks of float64,
    and head dimensions above 256 on a GPU or 1024 on the CPU.

    PyTorch picks flash attention for these on the CPU (dropout apart), and for dropout on a GPU. A backward
    call goes where its forward went, since both have the same dtype, head dimension and options.
    """
    theirs = torch.library.get_kernel(f"aten::{name}", device)
    parameters = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
    dropout = parameters.index("dropout_p")

    def function(keys: Any, *arguments: Any, **options: Any) -> Any:
        # Defaults at the end are left out. The first three are q, k and v, or dout, q and k.
        dropout_p = arguments[dropout] if dropout < len(arguments) else 0.0
        mask = options.get("attn_mask")
        ours_too = all(map(_is_ours, arguments[:3])) and (mask is None or mask.dtype != torch.float64)
        if dropout_p == 0.0 and ours_too:
            return ours(*arguments, **options)
        return theirs.call_boxed(keys, *arguments, **options)

    return function


def _is_ours(t: Tensor) -> bool:
    return t.dtype != torch.float64 and t.shape[-1] <= _call.widest_head(t.device.type)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
    *,
    detached: bool = True,
) -> tuple[_call.Call, Tensor, Tensor, Tensor]:
    """The call that means this, and its tensors, heads third. PyTorch has made numbers of a boolean mask."""
    rows, keys = q.shape[2], k.shape[2]
    if is_causal and keys > rows:  # the top left triangle: later keys are seen by nobody
        k, v, keys = k[:, :, :rows], v[:, :, :rows], rows
    window = (-1, rows - keys) if is_causal else (-1, -1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    call = _call.Call(scale=scale, window=window, deterministic=deterministic, pad=True)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if mask is not None and mask.numel() > 0:
        mask = mask.detach() if detached else mask
        pair = (None, mask) if mask.dtype == torch.bool else (mask, None)  # seen, or added
        call.functions = _functions.of_call(call, q, k, None, pair[0], None, None, pair[1])
    return call, q, k, v


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
    call, *tensors = _problem(q, k, v, is_causal, scale, attn_mask)
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
    call, *tensors = _problem(q, k, v, is_causal, scale, attn_mask)
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
    call, *tensors = _problem(q, k, v, is_causal, scale)
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
