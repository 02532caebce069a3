"""Calls with functions of the user's own, or with dropout, on PyTorch's tensors, and their gradient."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem import _arrays, _call, _dropout
from tandem._errors import UnsupportedError
from tandem.functions import _functions
from tandem.torch import _derivatives, _graph

#: Types of tensors whose memory is their numbers.
PLAIN = (Tensor, torch.nn.Parameter)


#: Whether a gradient stands for several, as is_grads_batched=True and jacobian(vectorize=True) make them.
is_batched: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda t: False)


def validate(name: str, tensors: dict[str, Any]) -> None:
    """An error where one of the tensors is none that a call with the argument `name` takes."""
    transformed = torch._C._are_functorch_transforms_active()
    for what, t in tensors.items():
        if isinstance(t, Tensor) and (type(t) not in PLAIN or t.is_meta or transformed):
            found = (
                "under a transform of torch.func" if transformed else f"a {type(t).__name__} on {t.device}"
            )
            raise UnsupportedError(
                f"{name} is given, and {what} is {found}, but calls with functions or dropout take "
                "plain tensors; differentiate them by torch.autograd, leave them out of what torch.export "
                "traces, or take PyTorch's scaled_dot_product_attention there"
            )


def validate_call(call: _call.Call, q: Any, k: Any, v: Any, sink: Any, captured: Any) -> None:
    """Errors of what calls with functions, which read the `captured` tensors, or dropout do not do."""
    named = {"q": q, "k": k, "v": v, "sink": sink}
    named |= {f"tensor {i} that it reads": t for i, t in enumerate(captured)}
    validate("dropout_p" if call.functions is None else "a function", named)


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
    validate_call(call, q, k, v, sink, captured)
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


def of_call(call: _call.Call, q: Any, k: Any, *functions: Any) -> Any:
    given = {name: f for name, f in zip(_functions.NAMES, functions, strict=True) if f is not None}
    validate(next(iter(given)), {"q": q, "k": k, **given})
    return next(_found(call, q, k, functions))


def _found(call: _call.Call, q: Any, k: Any, functions: Any) -> Iterator[Any]:
    """A generator, since torch.compile follows those, but does not compile them for themselves: where it
    cannot follow a function of the user's, the graph breaks here, and what is called runs uncompiled."""
    if torch.compiler.is_dynamo_compiling():
        yield _graph.of_call(call, q, k, *functions)
    else:
        yield _of_call(call, q, k, *functions)


_of_call: Any = torch.compiler.disable(_functions.of_call)  # type: ignore[no-untyped-call]


#: What torch.compile tells of the graph break, from PyTorch 2.7 on.
_WHY = "no part of a graph: leave fullgraph=True out, or dropout, or out= and out_dtype= beside functions"
_disable: Any = torch.compiler.disable
attention: Any = _disable(
    _attention, **({"reason": _WHY} if "reason" in inspect.signature(_disable).parameters else {})
)


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
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        if dout is None and dlse is None:
            return (None,) * (1 + len(needed))
        saved = ctx.saved_tensors  # once: each reading may recompute them
        call = ctx.call
        if torch.are_deterministic_algorithms_enabled():
            call = replace(call, deterministic=True)
        dout = torch.zeros_like(saved[4]) if dout is None else dout
        read = saved[6 + len(call.metadata) :]
        if call.formula is not None and torch.is_grad_enabled():
            return (None, *_by_formula(call, needed, dout, *saved[:4], *read))
        return (None, *_batched_gradients(call, needed, dout, dlse, *saved[:6], *read))


class FunctionGradients(torch.autograd.Function):
    """The gradients of FunctionAttention, of which there are none."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        return gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _derivatives.no_second_derivative(ctx, *gradients)


def _batched_gradients(call: _call.Call, needed: Any, *tensors: Any) -> tuple[Tensor | None, ...]:
    """As gradients; of a dout or dlse that stands for several, as is_grads_batched=True and
    jacobian(vectorize=True) make them, one after another."""
    dout, dlse, *others = tensors
    batched = [t for t in (dout, dlse) if t is not None and is_batched(t)]
    if not batched:
        record: Any = FunctionGradients.apply
        gradients: tuple[Tensor | None, ...] = record(call, needed, *tensors)
        return gradients
    unwrap: Any = torch._remove_batch_dim
    level = next(n for n in range(1, 65) if not is_batched(unwrap(batched[0], n, 1, 0)))
    size = unwrap(batched[0], level, 1, 0).shape[0]
    each = zip(*([t] * size if t is None else unwrap(t, level, size, 0) for t in (dout, dlse)), strict=True)
    found = [_batched_gradients(call, needed, *pair, *others) for pair in each]
    rewrap: Any = torch._add_batch_dim
    columns = zip(*found, strict=True)
    return tuple(None if c[0] is None else rewrap(torch.stack(c), 0, level) for c in columns)


def gradients(call: _call.Call, needed: Any, *tensors: Any) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the sink, and of the arrays that functions read; None where not `needed`."""
    dout, dlse, q, k, v, sink, out, lse, *arrays = tensors
    dout, dlse = (
        _derivatives.rows_contiguous(dout),
        None if dlse is None else _derivatives.rows_contiguous(dlse),
    )
    wanted = () if call.functions is None else call.functions.differentiated
    made = [
        torch.empty(t.shape, dtype=torch.float32, device=t.device) if i in wanted and is_needed else None
        for i, (t, is_needed) in enumerate(zip(arrays, needed[4:], strict=True))
    ]
    captured = made if any(t is not None for t in made) else ()
    gradients = _call.backward(
        call, dout, q, k, v, out, lse, sink, dlse, needed=needed[:4], captured=captured
    )
    of_arrays = (g if g is None else g.to(t.dtype) for g, t in zip(made, arrays, strict=True))
    return (*gradients, *of_arrays)


def _by_formula(call: _call.Call, needed: Any, dout: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs, which have gradients themselves."""
    wanted = [t for t, is_needed in zip(inputs, needed, strict=True) if is_needed]
    q, k, v, _, *read = inputs
    gradients = iter(torch.autograd.grad(call.formula(call, q, k, v, *read), wanted, dout, create_graph=True))
    return tuple(next(gradients) if is_needed else None for is_needed in needed)


_arrays.meet_torch()
