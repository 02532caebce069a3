"""Tandem as an implementation of PyTorch's scaled_dot_product_attention (torch.nn.attention).

The operators here are PyTorch's flash attention's; their tensors are (batch, heads, seqlen, head_dim), and
their causal mask is aligned to the top left corner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem import _call, _dropout
from tandem._errors import UnsupportedError
from tandem.functions import _functions
from tandem.torch import _calls


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
        instead = [(_MATH, "AutogradCPU"), (_MATH, "CPU")]
        if torch.version.cuda is not None:
            instead += [(name, "AutogradCUDA") for name in _ON_GPUS]
            instead += [(name, "CUDA") for name in _ON_GPUS[:3]]  # of the last, _cuda_forward is there
        for name, key in instead:
            library.impl(name, _masked_or_dropping(name, key), key, with_keyset=True, allow_override=True)
        self._library: Any = library

    def remove(self) -> None:
        self._library._destroy()


def register_with_torch() -> None:
    """Registers Tandem as the implementation "tandem" of PyTorch's flash attention.

    ``torch.nn.attention.activate_flash_attention_impl("tandem")`` then makes scaled_dot_product_attention run
    on Tandem wherever PyTorch picks flash attention, on CPU and CUDA tensors, and
    ``restore_flash_attention_impl()`` gives PyTorch's own back. That includes calls with a mask tensor or
    dropout; docs/guides/from-sdpa.md lists what stays PyTorch's.

    Raises:
      UnsupportedError: the installed PyTorch has no registry of such implementations.
    """
    from torch.nn import attention as registry

    if not hasattr(registry, "register_flash_attention_impl"):
        raise UnsupportedError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; update it"
        )
    registry.register_flash_attention_impl("tandem", register_fn=Handle)


#: What PyTorch computes in place of flash attention where there is dropout or a mask: on the CPU its formula,
#: for dropout and masks that require a gradient; on a GPU the others, for whatever has a mask, and dropout.
_MATH = "_scaled_dot_product_attention_math"
_ON_GPUS = (
    _MATH,
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
)


def _masked_or_dropping(name: str, key: str) -> Callable[..., Any]:
    """Tandem's attention with a mask or dropout in place of PyTorch's operator `name`, where flash attention
    is allowed; else PyTorch's own."""
    theirs = torch.library.get_kernel(f"aten::{name}", key)
    schema = getattr(torch.ops.aten, name).default._schema
    parameters = [argument.name for argument in schema.arguments]
    # PyTorch's operators call themselves by this key, and would take our LSE for theirs in the backward pass.
    in_inference = key == "CUDA"

    def function(keys: Any, *arguments: Any, **options: Any) -> Any:
        given = dict(zip(parameters, arguments, strict=False)) | options
        q, k, v = arguments[:3]
        mask = given.get("attn_mask", given.get("attn_bias"))
        dropout_p = given.get("dropout_p", 0.0)
        masked = mask is not None and (q.is_cuda or mask.requires_grad)
        if (
            not (masked or 0.0 < dropout_p < 1.0)
            or given.get("dropout_mask") is not None
            or (in_inference and not torch.is_inference_mode_enabled())
            or not _is_flash_allowed(q, k, v, mask)
            # Keys for several queries, which PyTorch's formula expands or refuses.
            or not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3])
            or not (q.shape[1] == k.shape[1] or given.get("enable_gqa", name != _MATH))
            or not _is_mask_of(mask, (*q.shape[:3], k.shape[2]))
        ):
            return theirs.call_boxed(keys, *arguments, **options)
        is_causal, scale = given.get("is_causal", False), given.get("scale")
        call, *three = _problem(q, k, v, is_causal, scale, mask, detached=False)
        _dropout.add(call, dropout_p, None, 0)
        call.formula = functools.partial(_formula, is_causal)
        q_rows, k_rows, v_rows = (t if t.stride(-1) == 1 else t.contiguous() for t in three)
        out, lse = _calls.in_full(
            call, q_rows, k_rows, v_rows, None, return_lse=True, out=None, out_dtype=None
        )
        return _results(len(schema.returns), out.transpose(1, 2), lse, q, k)

    return function


def _formula(
    is_causal: bool, call: _call.Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    """PyTorch's formula with the entries that the call keeps."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    kept = torch.ones((), dtype=torch.bool, device=q.device) if call.dropout_p == 0 else _kept(call, q, k)
    # Given a mask of dropout, which counts only where there is dropout, this is PyTorch's own.
    options: Any = {"scale": call.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    weights = torch.ops.aten._scaled_dot_product_attention_math(
        q, k, v, mask, 0.0, is_causal, kept, **options
    )[1]
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out: Tensor = (weights * kept) @ values / (1 - call.dropout_p)
    return out.transpose(1, 2)


def _kept(call: _call.Call, q: Tensor, k: Tensor) -> Tensor:
    """The entries of P that dropout keeps, (batch, heads, queries, keys): what the rows of the identity, as
    values, leave of a P whose entries are all the same."""
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    alike = replace(call, functions=None, window=(-1, -1), scale=1.0)
    zeros = q.new_zeros(batch, max(rows, keys), heads, 8)
    values = torch.eye(keys, dtype=q.dtype, device=q.device).expand(batch, 1, keys, keys).transpose(1, 2)
    parts = [
        _call.forward(
            alike, zeros[:, :rows], zeros[:, :keys, :1], values[..., at : at + 256], None, return_lse=False
        )[0]
        for at in range(0, keys, 256)
    ]
    return (torch.cat(parts, -1) > 0).transpose(1, 2)


def _results(count: int, out: Tensor, lse: Tensor, q: Tensor, k: Tensor) -> Any:
    """As many results as PyTorch's operator has. Of those but out and lse no public function hands any on:
    the weights of the formula, and what dropout began with."""
    if count == 2:
        return out, q.new_empty(0)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    if count == 4:
        return out, lse, seed, offset
    return out, lse, None, None, q.shape[2], k.shape[2], seed, offset, q.new_empty(0)


def _is_mask_of(mask: Tensor | None, scores: tuple[int, ...]) -> bool:
    """Whether a mask broadcasts to scores of this shape. PyTorch's formula broadcasts scores, too."""
    if mask is None:
        return True
    sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
    return 1 <= mask.ndim <= 4 and all(size in (1, wanted) for size, wanted in sizes)


def _is_flash_allowed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch may pick flash attention, and these are plain tensors that Tandem takes."""
    for t in (q, k, v, mask):
        plain = t is None or type(t) in (Tensor, torch.nn.Parameter)
        if not plain or (t is not None and (t.is_nested or t.is_neg() or t.dtype == torch.float64)):
            return False
    if q.is_cuda:
        sixteen_bits = q.dtype in (torch.float16, torch.bfloat16)
        # Gradients of a mask have no fixed order on a GPU.
        ordered = torch.are_deterministic_algorithms_enabled() and mask is not None and mask.requires_grad
        if ordered or not sixteen_bits or (mask is not None and not mask.is_cuda):
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

    PyTorch picks flash attention for these on the CPU, dropout apart. With dropout this is called on a GPU in
    inference mode alone, else `_masked_or_dropping` is. A backward call goes where its forward went, since
    both have the same dtype, head dimension and options.
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
    call = _call.Call(scale=scale, window=window, deterministic=deterministic)
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
    call, q, k, v = _problem(q, k, v, is_causal, scale, attn_mask)
    out, lse, _ = _call.forward(call, q, k, v, None, return_lse=True)
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
    call, rows, keys, values = _problem(q, k, v, is_causal, scale, attn_mask)
    dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    seen = keys.shape[1]
    dq, dk, dv = (torch.empty_like(t) for t in (rows, keys, values))
    if seen < k.shape[2]:
        dk, dv = (torch.zeros_like(t).transpose(1, 2) for t in (k, v))
    written = (dq, dk[:, :seen], dv[:, :seen], None, None)
    _call.backward(call, (dout, None, rows, keys, values, None, out, lse, None), written)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


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
    call, rows, keys, values = _problem(q, k, v, is_causal, scale)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    _, lse, _ = _call.forward(call, rows, keys, values, None, return_lse=True, out=out.transpose(1, 2))
    results: tuple[Any, ...] = _results(9, out, lse, q, k)
    return results


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`rest`: offsets and lengths, which dense tensors do not have, then dropout_p, is_causal and a seed."""
    return _cpu_backward(dout, q, k, v, out, lse, *rest[4:6], scale=scale)
