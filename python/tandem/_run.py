"""What the package hands to the library besides attention: new rows of caches, merged results and 8-bit
values. Arguments have been checked; no autograd here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem import _arrays, _call, _core
from tandem._core import DType
from tandem._errors import InvalidArgumentError

#: Rows of a scale's block; docs/numerics.md says why.
BLOCK = 128
_INPUTS = len(_core.APPEND_INPUTS)


def append_kv(*arguments: Any) -> Any:
    """The embedded queries, or None, of what `append_kv` has checked: its arrays in the order of the C++
    side, the caches with their scales, and the options."""
    inputs, caches = arguments[:_INPUTS], arguments[_INPUTS:-3]
    interleaved, check, threads = arguments[-3:]
    k_new, q = inputs[0], inputs[-1]
    library = _arrays.library_of("k_new", k_new)
    threads = _call.Call(threads=threads).options().threads  # an error unless it is an integer
    embedded = None if q is None else library.empty(q, q.shape, _arrays.dtype_of("q", q))
    outputs = (*caches, embedded)

    def views(names: Sequence[str], arrays: Sequence[Any], writable: bool) -> list[_core.Tensor | None]:
        pairs = zip(names, arrays, strict=True)
        return [None if a is None else library.view(name, a, writable=writable) for name, a in pairs]

    _core.append_kv(
        views(_core.APPEND_INPUTS, inputs, False),
        views(_core.APPEND_OUTPUTS, outputs, True),
        interleaved,
        check,
        threads,
        library.stream(k_new),
    )
    return embedded


def merge(outs: Sequence[Any], lses: Sequence[Any], dtype: DType | None, threads: int) -> tuple[Any, Any]:
    """(out, lse) of what `merge` has checked."""
    library = _arrays.library_of("outs", outs[0])
    threads = _call.Call(threads=threads).options().threads
    out = library.empty(outs[0], outs[0].shape, dtype or _arrays.dtype_of("outs[0]", outs[0]))
    lse = library.empty(outs[0], merged_lse_shape(outs[0].shape), DType.f32)
    _core.merge(
        [library.view(f"outs[{i}]", a) for i, a in enumerate(outs)],
        [library.view(f"lses[{i}]", a) for i, a in enumerate(lses)],
        library.view("out", out, writable=True),
        library.view("lse", lse, writable=True),
        threads,
        library.stream(outs[0]),
    )
    return out, lse


def merged_lse_shape(out: Sequence[int]) -> tuple[int, ...]:
    """The shape of the LSE of a result of this shape."""
    if len(out) not in (3, 4):
        raise InvalidArgumentError(
            f"outs[0] has {len(out)} dimensions; it must be (batch, seqlen_q, heads_q, head_dim_v) or "
            "(total_q, heads_q, head_dim_v)"
        )
    *batch, rows, heads, _ = out
    return (*batch, heads, rows)


def quantized_shapes(x: Sequence[int], granularity: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the scales and of the mean of an array of shape `x`."""
    *batch, seqlen, heads, head_dim = x
    scales = {
        "tensor": (1,),
        "head": (*batch, heads),
        "block": (*batch, heads, -(-seqlen // BLOCK)),
        "row": (*batch, heads, seqlen),
    }
    return scales[granularity], (*batch, heads, head_dim)


def quantize(
    x: Any,
    dtype: str,
    granularity: str,
    hadamard: bool,
    smooth: bool,
    threads: int,
) -> tuple[Any, Any, Any]:
    """(values, scales, mean) of what `quantize` has checked; the mean is None unless `smooth`."""
    library = _arrays.library_of("x", x)
    threads = _call.Call(threads=threads).options().threads  # an error unless it is an integer
    of_scales, of_mean = quantized_shapes(x.shape, granularity)
    values = library.empty(x, x.shape, DType[dtype])
    scales = library.empty(x, of_scales, DType.f32)
    mean = library.empty(x, of_mean, DType.f32) if smooth else None

    _core.quantize(
        library.view("x", x),
        library.view("codes", values, writable=True),
        library.view("scales", scales, writable=True),
        None if mean is None else library.view("mean", mean, writable=True),
        _core.Granularity[granularity],
        hadamard,
        threads,
        library.stream(x),
    )
    return values, scales, mean
