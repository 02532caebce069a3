"""The functions of the package for PyTorch's tensors. A call goes one of three ways: directly (_direct) where
nobody follows it, as one record (_record) where autograd alone does, and by the operators of torch.ops.tandem
(_operators) for dispatchers, graphs and subclasses. Imported when a tensor first comes in.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays, _call, _core, _dropout, _plans, _run
from tandem._errors import InvalidArgumentError
from tandem.torch import _derivatives, _direct, _operators, _record, _with_functions

functions_of_call = _with_functions.of_call


def attention(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any, *, return_lse: bool, out: Any, out_dtype: Any
) -> Any:
    """As tandem.attention, for tensors."""
    if out is None and out_dtype is None and _reads_plain(call):
        results = _record.quick(call, q, k, v, sink, return_lse)
        if results is not None:
            return results
    return in_full(call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=out_dtype)


def in_full(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any, *, return_lse: bool, out: Any, out_dtype: Any
) -> Any:
    """As attention, of what _record.quick leaves."""
    goes_on = not call.asks_pairs or (out is out_dtype is None and _operators.are_in_graph(call))
    attend = _attend if goes_on else _outside_graphs
    return attend(call, q, k, v, sink, return_lse, out, out_dtype)


def _attend(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any, return_lse: bool, out: Any, out_dtype: Any
) -> Any:
    read = () if call.functions is None else call.functions.arrays
    if call.asks_pairs:
        _with_functions.validate_call(call, q, k, v, sink, read)
        _dropout.draw(call, q)
        is_direct = not _operators.are_in_graph(call)
    else:
        if q.is_nested or getattr(k, "is_nested", False) or getattr(v, "is_nested", False):
            raise _nested(q=q, k=k, v=v)
        is_direct = _direct.is_possible(q, k, v, beside=(sink, *call.metadata))
        if not is_direct:
            _validate(call, q, k=k, v=v, sink=sink, out=out)
            # A call without memory, of which the operator tells the shapes.
            if type(q) in _direct.PLAIN and q.is_meta:
                _plans.check(call, q, k, v, sink, out)
    q, k, v, recorded = _derivatives.prepared(call, q, k, v, (sink, call.gate, *read), out)
    if is_direct and recorded:
        if call.functions is not None and call.functions.score is not None:
            wanted = (i for i, t in enumerate(read) if _derivatives.is_recorded(t))
            call.functions.differentiated = tuple(wanted)
        with torch.no_grad():
            *output, max_logits = _operators.way_on(call)(call, q, k, v, sink, None, out_dtype)
        saved = max_logits if call.saves_max_logits else None
        inputs = (call, (*output, saved, return_lse), q, k, v, sink)
        if _derivatives.is_recorded(call.gate):
            followed = _apply_gated(*inputs, call.gate, *read)
        else:
            followed = _apply(*inputs, *read)
        results = (*(followed if return_lse else (followed, None)), max_logits)
    else:
        way_on = _operators.way_on(call, is_direct)
        results = way_on(call, q, k, v, sink, out, out_dtype, return_lse)
    return _call.returned(call, results, return_lse)


_apply: Any = _record.TandemAttention.apply
_apply_gated: Any = _record.TandemGatedAttention.apply

#: What torch.compile tells of the graph break, from PyTorch 2.7 on.
_WHY = "no part of a graph: leave fullgraph=True out, or dropout, or out= and out_dtype= beside functions"
_disable: Any = torch.compiler.disable
_outside_graphs: Any = _disable(
    _attend, **({"reason": _WHY} if "reason" in inspect.signature(_disable).parameters else {})
)


def _reads_plain(call: _call.Call) -> bool:
    """Whether a call has no dropout, and its functions read plain tensors that autograd does not follow."""
    if call.dropout_p != 0:
        return False
    if call.functions is None:
        return True
    for t in call.functions.arrays:
        if type(t) not in _direct.PLAIN or t.is_meta or t.requires_grad:
            return False
    return True


def attention_backward(call: _call.Call, tensors: Any, written: Any) -> tuple[Any, ...]:
    """As _call.backward, for tensors."""
    dout, dlse, q, k, v, sink, out, lse, max_logits = tensors
    named = dict(zip(("dq", "dk", "dv", "dsink", "dgate"), written, strict=True))
    is_direct = _direct.is_possible(q, k, v, dout, out, lse, beside=(dlse, max_logits, sink, *call.metadata))
    if not is_direct:
        others = {"dout": dout, "dlse": dlse, "k": k, "v": v, "sink": sink, "out": out, "lse": lse}
        _validate(call, q, **others, max_logits=max_logits, **named)
    recorded = _derivatives.is_recorded(*tensors)
    for name, t in named.items():
        if t is not None:
            _derivatives.validate_out(name, t, recorded)
    if is_direct and not recorded and (call.asks_pairs or not _direct.is_profiled()):
        gradients = _call.backward(call, tensors, written)
        _arrays.wrote(*written)
        return gradients
    dgate = None if call.gate is None else _derivatives.gate_gradient(dout, out, call.gate)
    if written[4] is not None:
        dgate = written[4].copy_(dgate)
    if all(t is None for t in written[:4]):
        flat, functions = _operators.arguments(call)
        needed = (True, True, True, sink is not None, *([False] * len(functions[2]) if functions else ()))
        return (*_derivatives.by_operator(flat, functions, needed, *tensors)[:4], dgate)
    pairs = zip(written, (q, k, v, sink), strict=False)
    made = tuple(_like(t) if given is None and t is not None else given for given, t in pairs)
    torch.ops.tandem.attention_backward_out(*tensors, *_operators.flat(call), *made)
    return (*made, dgate)


def quantize(x: Any, *options: Any) -> tuple[Any, Any, Any]:
    """As _run.quantize, for tensors."""
    if _direct.is_possible(x) and not _direct.is_profiled():
        return _run.quantize(x, *options)
    values, scales, mean = torch.ops.tandem.quantize(x, *options)
    return values, scales, mean


def append_kv(*arguments: Any) -> Any:
    """As _run.append_kv, for tensors."""
    tensors = [t for t in arguments if isinstance(t, Tensor)]
    if _direct.is_possible(*tensors) and not _direct.is_profiled():
        names = (*_core.APPEND_INPUTS, *_core.APPEND_OUTPUTS)
        _derivatives.validate_unrecorded("append_kv", dict(zip(names, arguments, strict=False)))
        embedded = _run.append_kv(*arguments)
        _arrays.wrote(*(t for t in arguments[len(_core.APPEND_INPUTS) :][:4] if t is not None))
        return embedded
    return torch.ops.tandem.append_kv(*arguments)


def merge(outs: Any, lses: Any, dtype: Any, threads: Any) -> Any:
    """As _run.merge, for tensors."""
    if _direct.is_possible(*outs, *lses) and not _direct.is_profiled():
        _derivatives.validate_unrecorded("merge", {"outs": outs, "lses": lses})
        return _run.merge(outs, lses, dtype, threads)
    return torch.ops.tandem.merge(outs, lses, None if dtype is None else _arrays.torch_dtype(dtype), threads)


def _like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


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
