"""The functions of the package for PyTorch's tensors: by the shortest way where nobody watches a call, by the
operators of torch.ops.tandem otherwise. Imported when a tensor first comes in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tandem import _arrays, _call, _core, _plans, _run
from tandem._errors import InvalidArgumentError
from tandem.torch import _derivatives, _operators, _with_functions

_arrays.meet_torch()


def attention(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any, *, return_lse: bool, out: Any, out_dtype: Any
) -> Any:
    """As tandem.attention, for tensors."""
    if out is None and out_dtype is None and (not call.asks_pairs or _with_functions.is_plain(call)):
        results = quick(call, q, k, v, sink, return_lse)
        if results is not None:
            return results
    if out is out_dtype is None and _are_in_graph(call):
        read = call.functions.arrays
        _with_functions.validate_call(call, q, k, v, sink, read)
        q, k, v, _ = _derivatives.prepared(call, q, k, v, (sink, *read), None)
        flat = _operators.flat_with_functions(call)
        result, lse = torch.ops.tandem.attention_with_functions(q, k, v, sink, *flat)
        return (result, lse) if return_lse else result
    if call.asks_pairs:
        return _with_functions.attention(
            call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=out_dtype
        )
    if q.is_nested or getattr(k, "is_nested", False) or getattr(v, "is_nested", False):
        raise _nested(q=q, k=k, v=v)
    direct = _is_plain(q, k, v) and not q.is_meta and not _any_negated(q, k, v, sink, *call.metadata)
    if not direct:
        _validate(call, q, k=k, v=v, sink=sink, out=out)
        # A call without memory, of which the operator tells the shapes.
        if type(q) in _with_functions.PLAIN and q.is_meta:
            _plans.check(call, q, k, v, sink, out)
    q, k, v, recorded = _derivatives.prepared(call, q, k, v, sink, out)
    if direct and not recorded and out is None:
        result, lse = _forward(call, q, k, v, sink, out_dtype, return_lse)
    elif direct and not recorded and not _is_profiled():
        result, lse = _call.forward(call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=out_dtype)
    elif out is not None:
        lse = torch.ops.tandem.attention_out(q, k, v, sink, *_operators.flat(call), out)
        result = out
    else:
        dtype = None if out_dtype is None else _arrays.torch_dtype(_arrays.dtype_named(out_dtype))
        if direct:
            record: Any = TandemAttention.apply
            result, lse = record(call, dtype, q, k, v, sink)
        else:
            result, lse = torch.ops.tandem.attention(q, k, v, sink, *_operators.flat(call), dtype)
    return (result, lse) if return_lse else result


def _are_in_graph(call: _call.Call) -> bool:
    """Whether a call has functions that go into a graph of torch.compile, by an operator that takes text."""
    return torch.compiler.is_dynamo_compiling() and call.functions is not None and call.dropout_p == 0


def attention_backward(
    call: _call.Call,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sink: Any,
    dlse: Any,
    written: tuple[Any, Any, Any, Any],
) -> tuple[Any, ...]:
    """(dq, dk, dv, dsink), those in `written` where given, as tandem.attention_backward for tensors."""
    inputs = (dout, dlse, q, k, v, sink, out, lse)
    named = dict(zip(("dq", "dk", "dv", "dsink"), written, strict=True))
    direct = (
        _is_plain(dout, q, k, v, out, lse) and not q.is_meta and not _any_negated(*inputs, *call.metadata)
    )
    if not direct:
        others = {"dout": dout, "dlse": dlse, "k": k, "v": v, "sink": sink, "out": out, "lse": lse}
        _validate(call, q, **others, **named)
    recorded = _derivatives.is_recorded(*inputs)
    for name, t in named.items():
        if t is not None:
            _derivatives.validate_out(name, t, recorded)
    if direct and not recorded and (call.asks_pairs or not _is_profiled()):
        gradients = _call.backward(call, dout, q, k, v, out, lse, sink, dlse, written)
        _arrays.wrote(*written)
        return gradients
    if _are_in_graph(call) and all(t is None for t in written):
        arguments = (*inputs, *_operators.flat_with_functions(call))
        of_read = [False] * len(call.functions.arrays)
        needed = (True, True, True, sink is not None)
        return tuple(_derivatives.by_operator_with_functions(arguments, of_read, needed)[:4])
    flat = _operators.flat(call)
    if all(t is None for t in written):
        return _derivatives.by_operator(*inputs, flat, (True, True, True, sink is not None))
    pairs = zip(written, (q, k, v, sink), strict=True)
    made = tuple(_like(t) if given is None and t is not None else given for given, t in pairs)
    torch.ops.tandem.attention_backward_out(*inputs, *flat, *made)
    return made


def quantize(x: Any, *options: Any) -> tuple[Any, Any, Any]:
    """As _run.quantize, for tensors."""
    *_, cos, sin, _, _ = options
    if _is_plain(x) and not x.is_meta and not _any_negated(x, cos, sin) and not _is_profiled():
        return _run.quantize(x, *options)
    values, scales, mean = torch.ops.tandem.quantize(x, *options)
    return values, scales, mean


def append_kv(*arguments: Any) -> Any:
    """As _run.append_kv, for tensors."""
    tensors = [t for t in arguments if isinstance(t, Tensor)]
    if _is_direct(tensors):
        names = (*_core.APPEND_INPUTS, *_core.APPEND_OUTPUTS)
        _derivatives.validate_unrecorded("append_kv", dict(zip(names, arguments, strict=False)))
        embedded = _run.append_kv(*arguments)
        _arrays.wrote(*(t for t in arguments[len(_core.APPEND_INPUTS) :][:4] if t is not None))
        return embedded
    return torch.ops.tandem.append_kv(*arguments)


def merge(outs: Any, lses: Any, dtype: Any, threads: Any) -> Any:
    """As _run.merge, for tensors."""
    if _is_direct([*outs, *lses]):
        _derivatives.validate_unrecorded("merge", {"outs": outs, "lses": lses})
        return _run.merge(outs, lses, dtype, threads)
    return torch.ops.tandem.merge(outs, lses, None if dtype is None else _arrays.torch_dtype(dtype), threads)


def _is_direct(tensors: Any) -> bool:
    """Whether a call of these goes past the dispatcher."""
    plain = _is_plain(*tensors) and not any(t.is_meta for t in tensors)
    return plain and not _any_negated(*tensors) and not _is_profiled()


def _like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


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
    autocast, a profiler, a compiler, torch.jit.trace, forward mode, a transform) or a tensor is unusual."""
    if _is_watched() or torch._C._is_any_autocast_enabled() or _is_profiled():
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


def _validate(call: _call.Call, q: Any, **others: Any) -> None:
    """The errors of arguments that are no tensors and of options of another type, before the dispatcher's."""
    library = _arrays.library_of("q", q)
    for name, array in (*others.items(), *zip(_call.METADATA, call.metadata, strict=True)):
        if array is not None or name in ("k", "v", "dout", "lse"):
            _arrays.expect(name, array, library)
    if not torch.compiler.is_compiling():
        call.options()


def _is_plain(*tensors: Any) -> bool:
    """Whether nobody watches the call (autograd apart), so that the dispatcher can be passed by: it takes
    150 us of a call that autograd records, for operators written in Python."""
    for t in tensors:
        if type(t) not in _with_functions.PLAIN:
            return False
    return not _is_watched()


def _any_negated(*tensors: Any) -> bool:
    """Whether the memory of one of these holds the numbers with the other sign. PyTorch's dispatcher makes
    plain tensors of those."""
    for t in tensors:
        if t is not None and isinstance(t, Tensor) and t.is_neg():
            return True
    return False


#: Whether a profiler sees what is called: operators, and nothing that goes past them.
_is_profiled: Any = torch._C._autograd._profiler_enabled


def _forward(call: _call.Call, q: Any, k: Any, v: Any, sink: Any, out_dtype: Any, return_lse: bool) -> Any:
    """(out, lse) of a plain call."""
    if _is_profiled():
        dtype = None if out_dtype is None else _arrays.torch_dtype(_arrays.dtype_named(out_dtype))
        return torch.ops.tandem.attention(q, k, v, sink, *_operators.flat(call), dtype)
    return _operators.run(call, q, k, v, sink, out_dtype, return_lse)


def _gradients(call: _call.Call, *arguments: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsink) of a plain call."""
    if _is_profiled():
        *tensors, needed = arguments
        return _derivatives.by_operator(*tensors, _operators.flat(call), needed)
    return _operators.gradients(call, *arguments)


class TandemAttention(torch.autograd.Function):
    """torch.ops.tandem.attention with its gradient, past the dispatcher. Profiles show the name."""

    @staticmethod
    def forward(ctx: Any, call: _call.Call, out_dtype: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, sink = inputs
        output: tuple[Tensor, Tensor] = _forward(call, q, k, v, sink, out_dtype, True)
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
        # The operator runs once for each of those that a gradient stands for.
        is_batched = _with_functions.is_batched
        batched = is_batched(dout) or (dlse is not None and is_batched(dlse))
        plain = _is_plain(q, k, v) and not _any_negated(dout, dlse)
        if plain and not batched and not torch.is_grad_enabled():
            if torch.are_deterministic_algorithms_enabled():
                call = replace(call, deterministic=True)
            return (None, None, *_gradients(call, dout, dlse, q, k, v, sink, out, lse, needed))
        recorded = _derivatives.by_operator(
            dout, dlse, q, k, v, sink, out, lse, _operators.flat(call), needed
        )
        return (None, None, *recorded)
