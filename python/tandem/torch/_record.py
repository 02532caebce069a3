"""The recorded way of a call: one function of autograd's, past the dispatcher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem import _call, _core
from tandem._errors import UnsupportedError
from tandem.torch import _derivatives, _direct, _operators

#: Whether a gradient stands for several, as is_grads_batched=True and jacobian(vectorize=True) make them.
_is_batched: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda t: False)


class TandemAttention(torch.autograd.Function):
    """Out, or out and lse, of the `output` (out, lse, max_logits, whether the caller gets the LSE) of a call
    that has run, and the gradients of q, k, v, sink and what the call's functions read. Profiles show the
    name."""

    forward = staticmethod(_core.record)

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, saved: Any = None
    ) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needed)
        saved = saved or ctx.saved_tensors  # once: each reading may recompute them
        call = _of_saved(ctx.call, saved[6 : len(needed)], saved[len(needed) + 1 :])
        if torch.are_deterministic_algorithms_enabled():
            call = replace(call, deterministic=True)
        tensors = saved[: len(needed)]  # the inputs, and (out, lse) in place of (call, output)
        max_logits = saved[len(needed)]
        dout = torch.zeros_like(tensors[4]) if dout is None else dout
        if call.formula is not None and torch.is_grad_enabled():
            return (None, None, *_by_formula(call, needed[2:], dout, *tensors))
        others = (*tensors[:6], max_logits, *tensors[6:])
        return (None, None, *_gradients(call, needed[2:], dout, dlse, *others))


def _of_saved(call: _call.Call, read: Any, metadata: Any) -> _call.Call:
    """The call of what autograd has saved: hooks may have made copies, and the tensors have changed since."""
    given, functions = iter(metadata), call.functions
    if read:
        functions = functions.reading(list(read))
        functions.differentiated = call.functions.differentiated
    saved = tuple(None if t is None else next(given) for t in call.metadata)
    return replace(call, metadata=saved, functions=functions)


class TandemGatedAttention(torch.autograd.Function):
    """TandemAttention of a call whose gate has a gradient."""

    @staticmethod
    def forward(ctx: Any, call: _call.Call, output: Any, *inputs: Any) -> Any:
        out, lse, _, return_lse = output
        q, k, v, sink, _, *read = inputs
        metadata = (t for t in call.metadata if t is not None)
        ctx.call, ctx.read = call, len(read)
        ctx.save_for_backward(q, k, v, sink, out, lse, *read, *metadata)
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needed)
        if any(t is not None and _is_batched(t) for t in (dout, dlse)):
            raise UnsupportedError(
                "gate requires a gradient, and is_grads_batched asks for several at once; ask for one after "
                "the other"
            )
        first = 6 + ctx.read
        inputs, read, metadata = (saved := ctx.saved_tensors)[:6], saved[6:first], saved[first:]
        call = _of_saved(ctx.call, read, metadata)
        if torch.are_deterministic_algorithms_enabled():
            call = replace(call, deterministic=True)
        dout = torch.zeros_like(inputs[4]) if dout is None else dout
        record: Any = Gradients.apply
        tensors = (dout, dlse, *inputs, None, *read)
        *found, dgate = record(needed[6], call, (*needed[2:6], *needed[7:]), *tensors)
        return (None, None, *found[:4], dgate, *found[4:])


# What a record takes most of the time, without a step in Python: apply where no transform of torch.func is
# active, and the backward pass from the engine on, but with a gate.
_core.know_record(
    super(torch.autograd.Function, TandemAttention).apply,
    TandemAttention.backward,
    super(torch.autograd.Function, TandemGatedAttention).apply,
)
_node: Any = TandemAttention
_node._backward_cls.apply = _core.apply_backward


def quick(call: _call.Call, q: Any, k: Any, v: Any, sink: Any, return_lse: bool) -> Any:
    """The result, and what the call returns besides; None where a profiler or what _direct.is_watched names
    has a part in the call, or a tensor is unusual."""
    if torch.compiler.is_dynamo_compiling():
        return None
    if torch._C._is_any_autocast_enabled():
        if call.gate is not None or not _direct.is_possible(q, k, v):
            return None
        q, k, v = _derivatives.autocast(q, k, v)
    return _core.attend(call, q, k, v, sink, return_lse)


class Gradients(torch.autograd.Function):
    """The gradients of TandemAttention, of which there are none."""

    @staticmethod
    def forward(ctx: Any, gate: bool, *arguments: Any) -> tuple[Tensor | None, ...]:
        return _direct.backward(*arguments, gate=gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _derivatives.no_second_derivative(ctx, *gradients)


def _gradients(
    call: _call.Call, needed: Any, dout: Tensor, dlse: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs."""
    if _is_batched(dout) or (dlse is not None and _is_batched(dlse)):
        return _one_by_one(call, needed, dout, dlse, *others)
    if not call.asks_pairs and (_direct.is_profiled() or not _direct.is_possible(dout, beside=(dlse,))):
        return _derivatives.by_operator(_operators.flat(call), (), needed, dout, dlse, *others)
    if not torch.is_grad_enabled():
        return _direct.backward(call, needed, dout, dlse, *others)
    record: Any = Gradients.apply
    gradients: tuple[Tensor | None, ...] = record(False, call, needed, dout, dlse, *others)
    return gradients


def _one_by_one(
    call: _call.Call, needed: Any, dout: Tensor, dlse: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of a dout or dlse that stands for several."""
    unwrap: Any = torch._remove_batch_dim
    batched = dout if _is_batched(dout) else dlse
    level = next(n for n in range(1, 65) if not _is_batched(unwrap(batched, n, 1, 0)))
    size = unwrap(batched, level, 1, 0).shape[0]
    lists = ([t] * size if t is None else unwrap(t, level, size, 0) for t in (dout, dlse))
    found = [_gradients(call, needed, *pair, *others) for pair in zip(*lists, strict=True)]
    rewrap: Any = torch._add_batch_dim
    columns = zip(*found, strict=True)
    return tuple(None if c[0] is None else rewrap(torch.stack(c), 0, level) for c in columns)


def _by_formula(call: _call.Call, needed: Any, dout: Tensor, *tensors: Any) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs, which have gradients themselves."""
    q, k, v, sink, _, _, *read = tensors
    wanted = [t for t, is_needed in zip((q, k, v, sink, *read), needed, strict=True) if is_needed]
    gradients = iter(torch.autograd.grad(call.formula(call, q, k, v, *read), wanted, dout, create_graph=True))
    return tuple(next(gradients) if is_needed else None for is_needed in needed)
