"""The derivatives of the operators of torch.ops.tandem, and the errors of those that they lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tandem import _call
from tandem._errors import InvalidArgumentError, UnsupportedError

OUT_RECORDED = (
    "out= cannot be combined with inputs that require gradients: autograd owns the result; "
    "leave out unset, or call under torch.no_grad()"
)


def save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    q, k, v, sink, *flat, _ = inputs
    count = len(_call.METADATA)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sink, *output, *flat[:count])
    ctx.options = flat[count:]


def differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, sink, out, lse, *metadata = ctx.saved_tensors
    none = (None,) * (len(metadata) + len(ctx.options) + 1)
    if dout is None and dlse is None:
        return (None, None, None, None, *none)
    dout = torch.zeros_like(out) if dout is None else dout
    flat = (*metadata, *ctx.options)
    return (*by_operator(dout, dlse, q, k, v, sink, out, lse, flat, ctx.needs_input_grad[:4]), *none)


def by_operator(*arguments: Any) -> tuple[Tensor | None, ...]:
    """_operators.gradients through the dispatcher; the options flat before `needed`."""
    *tensors, flat, needed = arguments
    gradients = torch.ops.tandem.attention_backward(*tensors, *flat, needed)
    wanted = zip(gradients, needed, strict=True)
    return tuple(gradient if is_needed else None for gradient, is_needed in wanted)


def no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(
        "tandem.attention has no second derivative; "
        "use torch's math attention where gradients of gradients are needed"
    )


def forward_out_unrecorded(keyset: Any, *arguments: Any) -> Tensor:
    """attention_out where autograd looks on, which register_autograd has no word for."""
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments[:4]):
        raise InvalidArgumentError(OUT_RECORDED)
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        lse: Tensor = torch.ops.tandem.attention_out.default.redispatch(below, *arguments)
    return lse


def without_tangents(name: str, kernel: Any) -> Any:
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
