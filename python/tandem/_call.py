"""One call of the library: arrays of one library in, arrays of the same library out. No autograd here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from tandem import _arrays, _core
from tandem._core import DType
from tandem._errors import InvalidArgumentError


@dataclass(slots=True)  # frozen would make making one three times as slow
class Call:
    """Everything of a call but the tensors that gradients flow through (q, k, v and the sink)."""

    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    deterministic: bool = False
    pad: bool = False
    check: bool = False
    threads: int = 0
    #: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_scale, k_scale, v_scale; None where not given
    metadata: dict[str, Any] = field(default_factory=dict)
    precision: str = "exact"
    strict: bool = False

    def options(self) -> _core.Options:
        window_left, window_right = self.window
        return _core.Options(
            scale=self.scale,
            causal=self.causal,
            window_left=window_left,
            window_right=window_right,
            softcap=self.softcap,
            deterministic=self.deterministic,
            pad=self.pad,
            check=self.check,
            precision=self.precision_code(),
            strict=self.strict,
        )

    def precision_code(self) -> _core.Precision:
        return _precision(str(self.precision))


@functools.cache
def _precision(precision: str) -> _core.Precision:
    name = precision.replace("-", "_")
    if name not in _core.Precision.__members__:
        names = ", ".join(p.replace("_", "-") for p in _core.Precision.__members__)
        raise InvalidArgumentError(f"precision is {precision!r}; it must be one of {names}")
    return _core.Precision[name]


def lse_shape(q: Any) -> tuple[int, ...]:
    """(batch, heads, seqlen_q), or (heads, total_q) for packed queries."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3]) if q.ndim >= 3 else tuple(q.shape)


def forward_tensors(
    call: Call, q: Any, k: Any, v: Any, sink: Any, *, return_lse: bool, out: Any = None, out_dtype: Any = None
) -> tuple[dict[str, _core.Tensor], Any, Any]:
    """The views of a forward call, and its outputs: `out` (made if None) and the LSE (None if not wanted)."""
    library = _arrays.library_of("q", q)
    tensors = dict(_arrays.views(library, {"q": q, "k": k, "v": v, "sink": sink, **call.metadata}))
    if out is None:
        dtype = _arrays.dtype_of("q", q)
        if out_dtype is not None:
            dtype = _arrays.dtype_named(out_dtype)
        elif dtype is DType.e4m3:
            dtype = DType.bf16
        out = library.empty(q, (*q.shape[:-1], *v.shape[-1:]), dtype)
    lse = library.empty(q, lse_shape(q), DType.f32) if return_lse else None
    tensors.update(_arrays.views(library, {"out": out, "lse": lse}, writable=True))
    return tensors, out, lse


def forward(call: Call, *args: Any, **outputs: Any) -> tuple[Any, Any]:
    """(out, lse); `lse` is None unless return_lse. Arguments as for forward_tensors."""
    tensors, out, lse = forward_tensors(call, *args, **outputs)
    stream = _arrays.library_of("out", out).stream(out)
    _core.forward(tensors, call.options(), call.threads, stream)
    return out, lse


def backward_tensors(
    call: Call,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sink: Any,
    dlse: Any,
    gradients: tuple[Any, Any, Any, Any] = (None, None, None, None),
    *,
    need_dsink: bool = True,
) -> tuple[dict[str, _core.Tensor], tuple[Any, Any, Any, Any]]:
    """The views of a backward call, and dq, dk, dv, dsink: those in `gradients`, made where None.

    The sink's gradient costs a sum over all rows, and is left out unless `need_dsink`.
    """
    library = _arrays.library_of("q", q)
    inputs = {"q": q, "k": k, "v": v, "sink": sink, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    tensors = dict(_arrays.views(library, {**inputs, **call.metadata}))

    def like(name: str, array: Any, given: Any) -> Any:
        if given is not None or array is None:
            return given
        return library.empty(array, array.shape, _arrays.dtype_of(name, array))

    wanted = {"q": q, "k": k, "v": v, "sink": sink if need_dsink else None}
    dq, dk, dv, dsink = (
        like(name, array, given) for (name, array), given in zip(wanted.items(), gradients, strict=True)
    )
    results = {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
    tensors.update(_arrays.views(library, results, writable=True))
    return tensors, (dq, dk, dv, dsink)


def backward(call: Call, *args: Any, need_dsink: bool = True) -> tuple[Any, Any, Any, Any]:
    """(dq, dk, dv, dsink); dsink is None without a sink. Arguments as for backward_tensors."""
    tensors, gradients = backward_tensors(call, *args, need_dsink=need_dsink)
    dq = gradients[0]
    _core.backward(tensors, call.options(), call.threads, _arrays.library_of("dq", dq).stream(dq))
    return gradients
