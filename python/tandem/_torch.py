"""Attention as PyTorch operators: ``torch.ops.tandem.attention``, ``attention_out``, ``attention_backward``.

Imported when a tensor first comes in. Each operator has a schema, an implementation for CPU and CUDA tensors
and a fake one that tells shapes alone, so that torch.compile and torch.export see through a call without a
graph break. Nothing here reads a tensor's contents or synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays, _call
from tandem._errors import InvalidArgumentError, UnsupportedError

_arrays.meet_torch()

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sink"
_OPTIONS = (
    ", ".join(f"Tensor? {name}" for name in _call.METADATA)
    + ", float? scale, bool causal, SymInt window_left, SymInt window_right, float softcap,"
    " bool deterministic, bool pad, bool check, SymInt threads, str precision, bool strict"
)

_BACKWARD = f"Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}, bool need_dsink"
_SCHEMAS = (
    f"attention({_INPUTS}, {_OPTIONS}, ScalarType? out_dtype) -> (Tensor out, Tensor lse)",
    f"attention_out({_INPUTS}, {_OPTIONS}, Tensor(a!) out) -> Tensor lse",
    f"attention_backward({_BACKWARD}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
)


def attention(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any, *, return_lse: bool, out: Any, out_dtype: Any
) -> Any:
    """As tandem.attention, for tensors."""
    direct = _direct(q, k, v)
    if not direct:
        metadata = dict(zip(_call.METADATA, call.metadata, strict=True))
        _only_tensors(k=k, v=v, sink=sink, out=out, **metadata)
    if torch._C._is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    recorded = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or getattr(sink, "requires_grad", False)
    )
    if out is not None and recorded:
        raise InvalidArgumentError(
            "out= cannot be combined with inputs that require gradients: autograd owns the result; "
            "leave out unset, or call under torch.no_grad()"
        )
    if direct and not recorded:
        if out is None and out_dtype is None:
            out = _like(q, v)
        result, lse = _call.forward(call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=out_dtype)
    elif out is not None:
        lse = torch.ops.tandem.attention_out(q, k, v, sink, *_flat(call), out)
        result = out
    else:
        dtype = None if out_dtype is None else _arrays.torch_dtype(_arrays.dtype_named(out_dtype))
        run: Any = _Recorded.apply if direct else torch.ops.tandem.attention
        result, lse = run(q, k, v, sink, *_flat(call), dtype)
    return (result, lse) if return_lse else result


def _like(q: Tensor, v: Tensor) -> Tensor | None:
    """The result's tensor, by the quickest way where that is a contiguous one like q; None elsewhere."""
    if q.is_contiguous() and q.dim() >= 3 and v.dim() >= 3 and q.size(-1) == v.size(-1):
        return None if q.dtype in _CODES else torch.empty_like(q)
    return None


def _only_tensors(**arrays: Any) -> None:
    for name, array in arrays.items():
        if array is not None and not isinstance(array, Tensor):
            raise TypeError(_arrays.mixed(name, array, "torch"))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast, where it is on for their device, makes of q, k and v."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype in _AUTOCAST else t for t in tensors)


# What autocast converts: float8 has scales of its own, and PyTorch leaves float64 alone.
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
_CODES = (torch.float8_e4m3fn, torch.int8)
_PLAIN = (Tensor, torch.nn.Parameter)


def _direct(q: Any, k: Any, v: Any) -> bool:
    """Whether nobody watches the call (autograd apart), so that the dispatcher can be passed by: it takes
    150 us of a call that autograd records, for operators written in Python."""
    return (
        not torch.compiler.is_compiling()
        and type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )


def _flat(call: _call.Call) -> tuple[Any, ...]:
    """A call as the arguments that _OPTIONS names."""
    options = (call.scale, call.causal, *call.window, call.softcap, call.deterministic, call.pad, call.check)
    return (*call.metadata, *options, call.threads, call.precision, call.strict)


def _unflat(flat: Sequence[Any]) -> _call.Call:
    """The inverse of _flat. Called as an operator runs, when PyTorch's wish for determinism counts."""
    count = len(_call.METADATA)
    scale, causal, left, right, softcap, deterministic, pad, check, threads, precision, strict = flat[count:]
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    metadata = tuple(flat[:count])
    return _call.Call(
        scale, causal, (left, right), softcap, deterministic, pad, check, threads, metadata, precision, strict
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    *flat, out_dtype = rest
    out, lse = _call.forward(_unflat(flat), q, k, v, sink, return_lse=True, out_dtype=out_dtype)
    return out, lse


def _forward_out(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> Tensor:
    *flat, out = rest
    lse: Tensor = _call.forward(_unflat(flat), q, k, v, sink, return_lse=True, out=out)[1]
    return lse


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *flat, need_dsink = rest
    dout, dlse = _rows_contiguous(dout), None if dlse is None else _rows_contiguous(dlse)
    # torch.empty_like is the quickest way to a contiguous tensor.
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    dq, dk, dv, dsink = _call.backward(
        _unflat(flat), dout, q, k, v, out, lse, sink, dlse, (*made, None), need_dsink=need_dsink
    )
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink


def _rows_contiguous(t: Tensor) -> Tensor:
    """Autograd hands over expanded gradients (of a sum, for one); the last dimension must be dense."""
    return t if t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


def _fake_lse(q: Tensor) -> Tensor:
    return q.new_empty(_call.lse_shape(q), dtype=torch.float32)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = rest[-1] or (torch.bfloat16 if q.dtype in _CODES else q.dtype)
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype), _fake_lse(q)


def _fake_forward_out(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> Tensor:
    return _fake_lse(q)


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    dsink = sink.new_empty(sink.shape) if sink is not None and rest[-1] else q.new_empty(0)
    return (*(t.new_empty(t.shape) for t in (q, k, v)), dsink)


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    q, k, v, sink, *flat, _ = inputs
    count = len(_call.METADATA)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sink, *output, *flat[:count])
    ctx.options = flat[count:]


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, sink, out, lse, *metadata = ctx.saved_tensors
    none = (None,) * (len(metadata) + len(ctx.options) + 1)
    if dout is None and dlse is None:
        return (None, None, None, None, *none)
    dout = torch.zeros_like(out) if dout is None else dout
    need_dsink = ctx.needs_input_grad[3]
    direct = _direct(q, k, v) and not torch.is_grad_enabled()  # else the gradient is itself recorded
    gradients = (_backward if direct else torch.ops.tandem.attention_backward)(
        dout, dlse, q, k, v, sink, out, lse, *metadata, *ctx.options, need_dsink
    )
    wanted = zip(gradients, ctx.needs_input_grad, strict=False)
    return (*(gradient if needed else None for gradient, needed in wanted), *none)


class _Recorded(torch.autograd.Function):
    """torch.ops.tandem.attention with its gradient, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return _differentiate(ctx, *gradients)


def _no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(
        "tandem.attention has no second derivative; "
        "use torch's math attention where gradients of gradients are needed"
    )


_library: Any = torch.library.Library("tandem", "DEF")  # type: ignore[no-untyped-call]
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
for _device in ("CPU", "CUDA"):
    _library.impl("attention", _forward, _device)
    _library.impl("attention_out", _forward_out, _device)
    _library.impl("attention_backward", _backward, _device)
torch.library.register_fake("tandem::attention", _fake_forward, lib=_library)
torch.library.register_fake("tandem::attention_out", _fake_forward_out, lib=_library)
torch.library.register_fake("tandem::attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd("tandem::attention", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("tandem::attention_backward", _no_second_derivative, lib=_library)
