"""Calls with functions of the user's own, or with dropout, on PyTorch's tensors: their gradient, and what
sees tensors indexed by proxies while a function is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tandem import _arrays, _call, _derivatives, _dropout
from tandem._errors import UnsupportedError
from tandem._trace import Value
from tandem._trace_ops import call_torch

#: What tells the dtype or the shape of a tensor, and none of its numbers.
_OF_SHAPES: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("dtype", "ndim", "shape")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
    )
)


#: Types of tensors whose memory is their numbers.
PLAIN = (Tensor, torch.nn.Parameter)


class Watching(TorchFunctionMode):
    """Sees what PyTorch's functions are called with while a function of the user's is traced."""

    def __init__(self) -> None:
        super().__init__()
        #: Whether one was called on tensors alone, whose numbers may be in the trace then.
        self.read_values = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(_has_value(a) for a in (*args, *kwargs.values())):
            return call_torch(func, args, kwargs)
        self.read_values |= func not in _OF_SHAPES
        return func(*args, **kwargs)


def _has_value(x: Any) -> bool:
    return isinstance(x, Value) or (isinstance(x, (tuple, list)) and any(isinstance(i, Value) for i in x))


def judge(captured: Sequence[Any], *tensors: Any) -> None:
    """Errors of what calls with functions do not do."""
    for t in (*tensors, *captured):
        if t is None:
            continue
        if type(t) not in PLAIN or t.is_meta or torch._C._are_functorch_transforms_active():
            raise UnsupportedError(
                "functions of scores and dropout take plain tensors outside of torch.func's transforms and "
                f"torch.compile; this call has a {type(t).__name__} on {t.device}: leave them out"
            )


def is_plain(call: _call.Call) -> bool:
    """Whether a call has functions alone, which read plain tensors that autograd does not follow."""
    if call.functions is None or call.dropout_p != 0:
        return False
    for t in call.functions.arrays:
        if type(t) not in PLAIN or t.is_meta or t.requires_grad:
            return False
    return True


def _attention(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any, *, return_lse: bool, out: Any, out_dtype: Any
) -> Any:
    """As tandem.attention with functions or dropout, for tensors."""
    captured = [] if call.functions is None else call.functions.arrays
    judge(captured, q, k, v, sink)
    _dropout.draw(call, q)
    q, k, v, recorded = _derivatives.prepared(call, q, k, v, (sink, *captured), out)
    if recorded:
        if call.functions is not None and call.functions.score is not None:
            wanted = (i for i, t in enumerate(captured) if _derivatives.is_recorded(t))
            call.functions.differentiated = tuple(wanted)
        record: Any = FunctionAttention.apply
        result, lse = record(call, q, k, v, sink, *captured)
    else:
        result, lse = _call.forward(call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=out_dtype)
    return (result, lse) if return_lse else result


#: A function of scores is traced as the call runs, which torch.compile does not follow.
attention: Any = torch.compiler.disable(_attention)  # type: ignore[no-untyped-call]


class FunctionAttention(torch.autograd.Function):
    """tandem.attention with functions or dropout, and the gradients of q, k, v, sink and what functions read.
    Profiles show the name."""

    @staticmethod
    def forward(ctx: Any, call: _call.Call, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, sink = inputs[:4]
        output: tuple[Tensor, Tensor] = _call.forward(call, q, k, v, sink, return_lse=True)
        ctx.set_materialize_grads(False)
        # What functions read, too: PyTorch then notices where it is changed before the backward pass.
        ctx.save_for_backward(*inputs[:4], *output, *call.metadata, *inputs[4:])
        ctx.call = call
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors[:6]
        needed = ctx.needs_input_grad[1:]
        if dout is None and dlse is None:
            return (None,) * (1 + len(needed))
        dout = torch.zeros_like(out) if dout is None else _rows_contiguous(dout)
        dlse = None if dlse is None else _rows_contiguous(dlse)
        call = ctx.call
        if torch.are_deterministic_algorithms_enabled():
            call = replace(call, deterministic=True)
        arrays = [] if call.functions is None else call.functions.arrays
        wanted = [] if call.functions is None else call.functions.differentiated
        made = [
            torch.empty(t.shape, dtype=torch.float32, device=t.device) if i in wanted and is_needed else None
            for i, (t, is_needed) in enumerate(zip(arrays, needed[4:], strict=True))
        ]
        captured = made if any(t is not None for t in made) else ()
        gradients = _call.backward(
            call, dout, q, k, v, out, lse, sink, dlse, needed=needed[:4], captured=captured
        )
        of_arrays = (g if g is None else g.to(t.dtype) for g, t in zip(made, arrays, strict=True))
        return (None, *gradients, *of_arrays)


def _rows_contiguous(t: Tensor) -> Tensor:
    return t if t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


_arrays.meet_torch()
