"""Attention as PyTorch operators: ``torch.ops.tandem.attention``, ``attention_out``, ``attention_backward``.

Imported when a tensor first comes in. Each operator has a schema, an implementation for CPU and CUDA tensors
and a fake one that tells shapes alone, so that torch.compile and torch.export see through a call without a
graph break. Nothing here reads a tensor's contents or synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tandem import _arrays, _call, _core
from tandem._errors import InvalidArgumentError, UnsupportedError

_arrays.meet_torch()

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sink"
_OPTIONS = (
    ", ".join(f"Tensor? {name}" for name in _call.METADATA)
    + ", float? scale, bool causal, SymInt window_left, SymInt window_right, float softcap,"
    " bool deterministic, bool pad, bool check, SymInt threads, str precision, bool strict"
)

_BACKWARD = f"Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}, bool[4] needed"
_SCHEMAS = (
    f"attention({_INPUTS}, {_OPTIONS}, ScalarType? out_dtype) -> (Tensor out, Tensor lse)",
    f"attention_out({_INPUTS}, {_OPTIONS}, Tensor(a!) out) -> Tensor lse",
    f"attention_backward({_BACKWARD}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
)


def attention(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any, *, return_lse: bool, out: Any, out_dtype: Any
) -> Any:
    """As tandem.attention, for tensors."""
    if out is None and out_dtype is None:
        results = quick(call, q, k, v, sink, return_lse)
        if results is not None:
            return results
    if q.is_nested or getattr(k, "is_nested", False) or getattr(v, "is_nested", False):
        raise _nested(q=q, k=k, v=v)
    direct = _direct(q, k, v)
    if not direct:
        metadata = dict(zip(_call.METADATA, call.metadata, strict=True))
        _only_tensors(q, k, v, sink=sink, out=out, **metadata)
        if not torch.compiler.is_compiling():
            call.options()  # its errors, before the dispatcher's
    if torch._C._is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    recorded = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or getattr(sink, "requires_grad", False)
    )
    if out is not None and recorded:
        raise InvalidArgumentError(_OUT_RECORDED)
    if direct and not recorded and out is None:
        result, lse = _run(call, q, k, v, sink, out_dtype, return_lse)
    elif direct and not recorded:
        result, lse = _call.forward(call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=out_dtype)
    elif out is not None:
        lse = torch.ops.tandem.attention_out(q, k, v, sink, *_flat(call), out)
        result = out
    else:
        dtype = None if out_dtype is None else _arrays.torch_dtype(_arrays.dtype_named(out_dtype))
        if direct:
            record: Any = _Recorded.apply
            result, lse = record(call, dtype, q, k, v, sink)
        else:
            result, lse = torch.ops.tandem.attention(q, k, v, sink, *_flat(call), dtype)
    return (result, lse) if return_lse else result


def _is_watched() -> bool:
    """Whether a compiler, torch.jit.trace, forward mode, a mode or a transform follows what is called."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() != 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def quick(call: _call.Call, q: Any, k: Any, v: Any, sink: Any, return_lse: bool) -> Any:
    """The result, or it and the LSE, by the shortest way; None where somebody watches the call (autograd,
    autocast, a compiler, torch.jit.trace, forward mode, a transform) or a tensor is unusual."""
    if _is_watched() or torch._C._is_any_autocast_enabled():
        return None
    inputs = (q, k, v, sink, *call.metadata)
    recording = torch.is_grad_enabled()
    results = _core.forward_tensors(inputs, call.options(), bool(return_lse), recording)
    return results if return_lse or results is None else results[0]


def _nested(**tensors: Any) -> InvalidArgumentError:
    """The error of the first of q, k and v that is a nested tensor."""
    name, t = next((name, t) for name, t in tensors.items() if getattr(t, "is_nested", False))
    cu = f"cu_seqlens_{'q' if name == 'q' else 'k'}"
    remedy = f"{name}.values() with {cu}={name}.offsets()"
    if t.layout is not torch.jagged:
        remedy = f"torch.cat({name}.unbind()) with the offsets of its sequences as {cu}"
    return InvalidArgumentError(f"{name} is a nested tensor; pass {remedy}")


def _only_tensors(q: Any, k: Any, v: Any, **optional: Any) -> None:
    library = _arrays.library_of("q", q)
    given = {name: array for name, array in optional.items() if array is not None}
    for name, array in {"k": k, "v": v, **given}.items():
        _arrays.expect(name, array, library)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast, where it is on for their device, makes of q, k and v."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype in _AUTOCAST else t for t in tensors)


# What autocast converts: float8 has scales of its own, and PyTorch leaves float64 alone.
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
_OUT_RECORDED = (
    "out= cannot be combined with inputs that require gradients: autograd owns the result; "
    "leave out unset, or call under torch.no_grad()"
)
_CODES = (torch.float8_e4m3fn, torch.int8)
_PLAIN = (Tensor, torch.nn.Parameter)


def _direct(q: Any, k: Any, v: Any) -> bool:
    """Whether nobody watches the call (autograd apart), so that the dispatcher can be passed by: it takes
    150 us of a call that autograd records, for operators written in Python."""
    return not _is_watched() and type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN


def _flat(call: _call.Call) -> tuple[Any, ...]:
    """A call as the arguments that _OPTIONS names."""
    window = _call.pair("window", call.window)
    options = (call.scale, call.causal, *window, call.softcap, call.deterministic, call.pad, call.check)
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


def _run(call: _call.Call, q: Any, k: Any, v: Any, sink: Any, out_dtype: Any, return_lse: bool) -> Any:
    """(out, lse), results made here; by the quick way of plain tensors where it goes."""
    if out_dtype is None:
        inputs = (q, k, v, sink, *call.metadata)
        results = _core.forward_tensors(inputs, call.options(), bool(return_lse), False)
        if results is not None:
            return results
    return _call.forward(call, q, k, v, sink, return_lse=return_lse, out_dtype=out_dtype)


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> Any:
    *flat, out_dtype = rest
    return _run(_unflat(flat), q, k, v, sink, out_dtype, True)


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
) -> tuple[Tensor, ...]:
    *flat, needed = rest
    gradients = _gradients(_unflat(flat), dout, dlse, q, k, v, sink, out, lse, needed)
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _gradients(
    call: _call.Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsink), None of those that are not needed."""
    dout, dlse = _rows_contiguous(dout), None if dlse is None else _rows_contiguous(dlse)
    # torch.empty_like is the quickest way to a contiguous tensor.
    made = [
        torch.empty_like(t, memory_format=torch.contiguous_format) if wanted else None
        for t, wanted in zip((q, k, v), needed, strict=False)
    ]
    return _call.backward(call, dout, q, k, v, out, lse, sink, dlse, (*made, None), needed=needed)


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
    wanted = zip((q, k, v, sink), rest[-1], strict=True)
    return tuple(q.new_empty(0) if t is None or not needed else t.new_empty(t.shape) for t, needed in wanted)


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
    flat = (*metadata, *ctx.options)
    return (*_by_operator(dout, dlse, q, k, v, sink, out, lse, flat, ctx.needs_input_grad[:4]), *none)


def _by_operator(*arguments: Any) -> tuple[Tensor | None, ...]:
    """_gradients through the dispatcher; the options flat before `needed`."""
    *tensors, flat, needed = arguments
    gradients = torch.ops.tandem.attention_backward(*tensors, *flat, needed)
    wanted = zip(gradients, needed, strict=True)
    return tuple(gradient if is_needed else None for gradient, is_needed in wanted)


#: Whether a gradient stands for several, as is_grads_batched=True and jacobian(vectorize=True) make them. The
#: operator then runs once for each.
_is_batched: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda t: False)


class _Recorded(torch.autograd.Function):
    """torch.ops.tandem.attention with its gradient, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, call: _call.Call, out_dtype: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, sink = inputs
        output: tuple[Tensor, Tensor] = _run(call, q, k, v, sink, out_dtype, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output, *call.metadata)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: each reading may recompute them
        q, k, v, sink, out, lse = saved[:6]
        call: _call.Call = ctx.call  # its tensors are the saved ones, which no one has changed since
        if dout is None and dlse is None:
            return (None,) * 6
        dout = torch.zeros_like(out) if dout is None else dout
        needed = ctx.needs_input_grad[2:]
        batched = _is_batched(dout) or (dlse is not None and _is_batched(dlse))
        if _direct(q, k, v) and not batched and not torch.is_grad_enabled():
            if torch.are_deterministic_algorithms_enabled():
                call = replace(call, deterministic=True)
            return (None, None, *_gradients(call, dout, dlse, q, k, v, sink, out, lse, needed))
        recorded = _by_operator(dout, dlse, q, k, v, sink, out, lse, _flat(call), needed)
        return (None, None, *recorded)


def _no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(
        "tandem.attention has no second derivative; "
        "use torch's math attention where gradients of gradients are needed"
    )


def _forward_out_unrecorded(keyset: Any, *arguments: Any) -> Tensor:
    """attention_out where autograd looks on, which register_autograd has no word for."""
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments[:4]):
        raise InvalidArgumentError(_OUT_RECORDED)
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        lse: Tensor = torch.ops.tandem.attention_out.default.redispatch(below, *arguments)
    return lse


def _without_tangents(name: str, kernel: Any) -> Any:
    """The autograd kernel of the operator `name`, and an error where forward mode wants a derivative of it.
    PyTorch would take it for zero, without a word."""

    unpack: Any = forward_ad.unpack_dual

    def judged(keyset: Any, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            for i, t in enumerate(arguments):
                if isinstance(t, Tensor) and unpack(t).tangent is not None:
                    argument = getattr(torch.ops.tandem, name).default._schema.arguments[i].name
                    raise UnsupportedError(
                        f"{argument} carries a tangent, but tandem.{name} has no forward-mode derivative; "
                        "use reverse mode: backward(), torch.autograd.grad or torch.autograd.functional.vjp"
                    )
        return kernel(keyset, *arguments)

    return judged


class _Library(torch.library.Library):
    """A library whose operators refuse tangents."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        if dispatch_key == "Autograd":
            fn = _without_tangents(op_name, fn)
        super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]


_library: Any = _Library("tandem", "DEF")  # type: ignore[no-untyped-call]
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
_library.impl("attention_out", _forward_out_unrecorded, "Autograd", with_keyset=True)
