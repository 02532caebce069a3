"""The operators of torch.ops.tandem: ``attention``, ``attention_backward``, both with results of the caller's
(``attention_out``, ``attention_backward_out``), and with functions as text (``attention_with_functions``,
``attention_with_functions_backward``), ``quantize``, ``append_kv``, which writes to the caches that
it is given, and ``merge``.

Each has a schema, an implementation for CPU and CUDA tensors and a fake one that tells shapes alone, so that
torch.compile and torch.export see through a call without a graph break. Nothing here reads a tensor's
contents or synchronises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays, _call, _core, _run
from tandem._errors import UnsupportedError
from tandem.functions import _functions
from tandem.torch import _derivatives, _direct, _flops

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sink"
_OPTIONS = ", ".join((_call.schema(), *(f"Tensor? {name}" for name in _call.METADATA)))
# PyTorch leaves out last arguments that have their defaults on the way to a kernel and in the graphs that it
# traces, where each takes 0.2 us of a call.
_DEFAULTS = ", ".join(
    (_call.schema(with_defaults=True), *(f"Tensor? {name}=None" for name in _call.METADATA))
)
_RESULTS = "(Tensor out, Tensor lse, Tensor max_logits)"  # the last is empty where a call finds none
_SAVED = f"Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, Tensor? max_logits"
_BACKWARD = f"{_SAVED}, {_OPTIONS}"
_TENSORS = 9  # of _BACKWARD, before the options
_NEEDED = "bool need_dq, bool need_dk, bool need_dv, bool need_dsink"  # torch.jit.trace takes no bool[4]
_FUNCTIONS = "str? score, str? mask, Tensor[] read"  # of a _functions.Functions
_GRADIENTS = "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dsink"
_APPENDED = ", ".join(f"Tensor{'' if name == 'k_new' else '?'} {name}" for name in _core.APPEND_INPUTS)
_SCHEMAS = (
    f"attention({_INPUTS}, {_DEFAULTS}, ScalarType? out_dtype=None) -> {_RESULTS}",
    f"attention_out({_INPUTS}, {_OPTIONS}, Tensor(a!) out) -> (Tensor lse, Tensor max_logits)",
    f"attention_backward({_SAVED}, {_DEFAULTS}, bool need_dq=True, bool need_dk=True, bool need_dv=True,"
    " bool need_dsink=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    f"attention_backward_out({_BACKWARD}, {_GRADIENTS}) -> ()",
    f"attention_with_functions({_INPUTS}, {_OPTIONS}, {_FUNCTIONS}) -> {_RESULTS}",
    f"attention_with_functions_backward({_BACKWARD}, {_FUNCTIONS}, bool[] need_read, {_NEEDED}) -> Tensor[]",
    "quantize(Tensor x, str dtype, str granularity, bool hadamard, bool smooth, SymInt threads)"
    " -> (Tensor values, Tensor scales, Tensor mean)",
    f"append_kv({_APPENDED}, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor(c!)? k_scale_cache,"
    " Tensor(d!)? v_scale_cache, bool rotary_interleaved, bool check,"
    " SymInt threads) -> Tensor q_out",
    "merge(Tensor[] outs, Tensor[] lses, ScalarType? out_dtype, SymInt threads) -> (Tensor out, Tensor lse)",
)
_CODES = (torch.float8_e4m3fn, torch.int8)


def way_on(call: _call.Call, is_direct: bool = True) -> Callable[..., Any]:
    """How the results of a call are made: directly, but by an operator where the call `is_direct` not, or a
    profiler is to see it."""
    if is_direct and (not _direct.is_profiled() or call.asks_pairs):
        return _direct.forward
    return forward


def forward(
    call: _call.Call,
    q: Any,
    k: Any,
    v: Any,
    sink: Any,
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = True,
) -> Any:
    """_direct.forward through the dispatcher."""
    if out is not None:
        return out, *torch.ops.tandem.attention_out(q, k, v, sink, *flat(call), out)
    options, functions = arguments(call)
    if functions:
        return torch.ops.tandem.attention_with_functions(q, k, v, sink, *options, *functions)
    dtype = None if out_dtype is None else _arrays.torch_dtype(_arrays.dtype_named(out_dtype))
    return torch.ops.tandem.attention(q, k, v, sink, *options, dtype)


def are_in_graph(call: _call.Call) -> bool:
    """Whether a call has functions that go into a graph of torch.compile, by an operator that takes text."""
    return torch.compiler.is_dynamo_compiling() and call.functions is not None and call.dropout_p == 0


def flat(call: _call.Call) -> tuple[Any, ...]:
    """A call as the arguments that _OPTIONS names."""
    if call.asks_pairs:
        raise UnsupportedError(
            "functions of scores are not part of torch.ops.tandem; call tandem.attention outside of "
            "profilers, compilers and transforms, or leave the function out"
        )
    return call.flat()


def arguments(call: _call.Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A call as the arguments that _OPTIONS names, and those that _FUNCTIONS does, or none of these."""
    if not are_in_graph(call):
        return flat(call), ()
    functions: _functions.Functions = call.functions
    return call.flat(), (functions.score, functions.mask, functions.arrays)


def unflat(flat: Sequence[Any]) -> _call.Call:
    """The inverse of flat. Called as an operator runs, when PyTorch's wish for determinism counts."""
    call = _call.Call.of_flat(flat)
    call.deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return call


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> Any:
    *flat, out_dtype = rest
    return _present(_direct.forward(unflat(flat), q, k, v, sink, None, out_dtype), q)


def _forward_out(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> Any:
    *flat, out = rest
    return _present(_call.forward(unflat(flat), q, k, v, sink, return_lse=True, out=out)[1:], q)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, flat, needed = arguments[:_TENSORS], arguments[_TENSORS:-4], arguments[-4:]
    return tuple(_present(_direct.backward(unflat(flat), needed, *tensors), tensors[2]))


def _present(results: Sequence[Tensor | None], q: Tensor) -> list[Tensor]:
    """Results as operators return them: empty in place of None."""
    return [q.new_empty(0) if result is None else result for result in results]


def _backward_out(*arguments: Any) -> None:
    (dout, dlse, *others), flat = arguments[:_TENSORS], arguments[_TENSORS:-4]
    written = arguments[-4:]
    dout, dlse = _direct.rows_contiguous(dout), _direct.rows_contiguous(dlse)
    _call.backward(unflat(flat), (dout, dlse, *others), (*written, None))
    _arrays.wrote(*written)


def _unflat_with_functions(q: Tensor, arguments: Sequence[Any]) -> _call.Call:
    """The call that `arguments` has made these of."""
    *flat, score, mask, read = arguments
    call = unflat(flat)
    call.functions = _functions.Functions(score, mask, read, _arrays.library_of("q", q))
    return call


def _functions_forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> Any:
    return _present(_direct.forward(_unflat_with_functions(q, rest), q, k, v, sink), q)


def _functions_backward(*arguments: Any) -> list[Tensor]:
    tensors, (*flat, need_read), needed = arguments[:_TENSORS], arguments[_TENSORS:-4], arguments[-4:]
    call = _unflat_with_functions(tensors[2], flat)
    call.functions.differentiated = tuple(i for i, is_needed in enumerate(need_read) if is_needed)
    found = _direct.backward(call, (*needed, *need_read), *tensors, *call.functions.arrays)
    return _present(found, tensors[2])


def _fake_rows(q: Tensor, flat: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """LSE and max_logits."""
    lse = q.new_empty(_call.lse_shape(q), dtype=torch.float32)
    finds = _call.Call.of_flat(flat).finds_max_logits
    return lse, torch.empty_like(lse) if finds else q.new_empty(0)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *flat, out_dtype = rest
    dtype = out_dtype or (torch.bfloat16 if q.dtype in _CODES else q.dtype)
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype), *_fake_rows(q, flat)


def _fake_forward_out(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> Any:
    return _fake_rows(q, rest[:-1])


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    pairs = zip(arguments[2:6], arguments[-4:], strict=True)
    gradients = [t.new_empty(t.shape) if needed and t is not None else None for t, needed in pairs]
    return tuple(_present(gradients, arguments[2]))


def _fake_functions_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _fake_forward(q, k, v, *rest[:-3], None)


def _fake_functions_backward(*arguments: Any) -> list[Tensor]:
    *others, read, need_read = arguments[:-4]
    gradients = _fake_backward(*others, *arguments[-4:])
    q: Tensor = arguments[2]
    of_read = [t.new_empty(t.shape) if needed else None for t, needed in zip(read, need_read, strict=True)]
    return [*gradients, *_present(of_read, q)]


def _fake_backward_out(*arguments: Any) -> None:
    return None


def _quantize_values(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    values, scales, mean = _run.quantize(x, *rest)
    return values, scales, x.new_empty(0, dtype=torch.float32) if mean is None else mean


def _fake_quantize(
    x: Tensor, dtype: str, granularity: str, hadamard: bool, smooth: bool, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    scales, mean = _run.quantized_shapes(x.shape, granularity)
    return (
        torch.empty(x.shape, dtype=_arrays.torch_dtype(_core.DType[dtype]), device=x.device),
        x.new_empty(scales, dtype=torch.float32),
        x.new_empty(mean if smooth else (0,), dtype=torch.float32),
    )


def _append(*arguments: Any) -> Tensor:
    embedded: Tensor | None = _run.append_kv(*arguments)
    _arrays.wrote(*(t for t in arguments[len(_core.APPEND_INPUTS) :][:4] if t is not None))
    k_new: Tensor = arguments[0]
    return k_new.new_empty(0) if embedded is None else embedded


def _fake_append(k_new: Tensor, *rest: Any) -> Tensor:
    q = rest[len(_core.APPEND_INPUTS) - 2]
    return k_new.new_empty(0 if q is None else q.shape)


def _merge(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: Any, threads: int) -> tuple[Tensor, Tensor]:
    return _run.merge(outs, lses, None if dtype is None else _arrays.dtype_named(dtype), threads)


def _fake_merge(
    outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: Any, threads: int
) -> tuple[Tensor, Tensor]:
    first = outs[0]
    lse = first.new_empty(_run.merged_lse_shape(first.shape), dtype=torch.float32)
    return first.new_empty(first.shape, dtype=dtype or first.dtype), lse


#: Operators whose kernels are C++ for what is usual. A compiled graph looks at every frame of Python.
_QUICK = ("tandem", "attention"), ("tandem", "attention_backward")


class _Library(torch.library.Library):
    """A library whose operators refuse tangents, and whose kernels get all arguments."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        for_autograd = dispatch_key == "Autograd"
        if for_autograd:
            fn = _derivatives.without_tangents(self.ns, op_name, fn)
        if (self.ns, op_name) in _QUICK and dispatch_key in ("CPU", "CUDA", "Autograd"):
            defaults = _derivatives.defaults_of(self.ns, op_name)
            fn = _core.operator_kernel(op_name == "attention_backward", for_autograd, fn, defaults)
        super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]


def fresh_library(name: str) -> Any:
    """A library without operators. Where the package is imported once more, PyTorch still has the operators
    of the first time, which hold on to modules that are no longer the package's."""
    namespace = vars(getattr(torch.ops, name))
    if "_library" in namespace:
        namespace.pop("_library")._destroy()
    library: Any = _Library(name, "DEF")  # type: ignore[no-untyped-call]
    namespace["_library"] = library
    return library


def library_of(name: str, schemas: Iterable[str], operators: Iterable[tuple[str, Any, Any]]) -> Any:
    """A fresh library of (name, kernel, fake kernel), whose kernels run on both kinds of device."""
    library = fresh_library(name)
    for schema in schemas:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for operator, kernel, fake in operators:
        library.impl(operator, kernel, "CPU")
        library.impl(operator, kernel, "CUDA")
        fake = _derivatives.filled(name, operator, fake)
        torch.library.register_fake(f"{name}::{operator}", fake, lib=library)
    return library


_library = library_of(
    "tandem",
    _SCHEMAS,
    (
        ("attention", _forward, _fake_forward),
        ("attention_out", _forward_out, _fake_forward_out),
        ("attention_backward", _backward, _fake_backward),
        ("attention_backward_out", _backward_out, _fake_backward_out),
        ("attention_with_functions", _functions_forward, _fake_functions_forward),
        ("attention_with_functions_backward", _functions_backward, _fake_functions_backward),
        ("quantize", _quantize_values, _fake_quantize),
        ("append_kv", _append, _fake_append),
        ("merge", _merge, _fake_merge),
    ),
)
for _name in (
    "attention",
    "attention_backward",
    "attention_with_functions",
    "attention_with_functions_backward",
):
    _rules = _derivatives.RULES[_name.endswith("_backward")]
    torch.library.register_autograd(f"tandem::{_name}", _rules[1], setup_context=_rules[0], lib=_library)
    if "functions" not in _name:
        _transformed = _derivatives.transformed(_name, *_rules)
        _transformed = _derivatives.filled("tandem", _name, _transformed)
        _library.impl(_name, _transformed, "FuncTorchDynamicLayerFrontMode")
for _name in ("attention_out", "attention_backward_out", "quantize"):
    _library.impl(_name, _derivatives.unrecorded(_name), "Autograd", with_keyset=True)
for _name in ("append_kv", "merge"):
    _library.impl(_name, _derivatives.refused(_name), "Autograd", with_keyset=True)
_flops.register()
