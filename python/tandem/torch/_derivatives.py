"""The derivatives of the operators of torch.ops.tandem, and the errors of those that they lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tandem import _arrays, _call
from tandem._errors import InvalidArgumentError, UnsupportedError


def is_recorded(*tensors: Any) -> bool:
    """Whether autograd follows one of these."""
    for t in tensors:  # any() of a generator takes three times as long
        if t is not None and isinstance(t, Tensor) and t.requires_grad:
            return torch.is_grad_enabled()
    return False


def validate_out(name: str, out: Tensor, recorded: bool) -> None:
    """An error where the argument `name`, which the caller wants written, cannot be. `recorded`: autograd
    follows an input."""
    if recorded:
        raise InvalidArgumentError(
            f"{name}= cannot be combined with inputs that require gradients: autograd owns the result; "
            f"leave {name} unset, or call under torch.no_grad()"
        )
    if is_recorded(out):
        raise InvalidArgumentError(
            f"{name} requires a gradient, and autograd cannot record what is written to it; "
            f"pass {name}.detach(), or call under torch.no_grad()"
        )
    # Dynamo cannot trace the question. The operator asks it, which runs with fake tensors beside the tracing.
    if not torch.compiler.is_dynamo_compiling() and out.is_neg():
        raise _arrays.negated(name, True)


def validate_metadata(metadata: Sequence[Any], recorded: bool) -> None:
    """An error where a gradient is wanted of one of _call.METADATA, of which there is none: it would be
    dropped. And where autograd follows an input, as `recorded` says, of a call that has none: with a cache,
    or with a mask by sequence."""
    for name, t in zip(_call.METADATA, metadata, strict=True):
        if t is None:
            continue
        if name != "gate" and is_recorded(t):
            raise InvalidArgumentError(
                f"{name} requires a gradient, but Tandem has none for it; pass {name}.detach(), "
                "or call under torch.no_grad()"
            )
        if recorded and name in _call.FORWARD_ONLY:
            lack, remedy = "a cache has none", "pass k and v as they were computed"
            if name == "causal_by_sequence":
                lack = "a mask by sequence has none"
                remedy = "pass the causal sequences and the others in calls of their own"
            raise InvalidArgumentError(
                f"{name} is given with inputs that require gradients, but {lack}; "
                f"call under torch.no_grad(), or {remedy}"
            )


def save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """Saves for `differentiate`: for torch.ops.tandem.attention, whose last argument is out_dtype, and for
    attention_with_functions, whose last three are functions."""
    first = 4 + _call.FLAT_OPTIONS
    last = first + len(_call.METADATA)
    rest = inputs[last:]
    ctx.texts, read = (rest[:2], rest[2]) if len(rest) == 3 else ((), ())
    ctx.options = inputs[4:first]
    ctx.set_materialize_grads(False)
    out, lse, max_logits = output
    ctx.mark_non_differentiable(max_logits)
    is_saved = _call.Call.of_flat(inputs[4:last]).saves_max_logits
    results = (out, lse, max_logits if is_saved else None)
    ctx.save_for_backward(*inputs[:4], *results, *inputs[first:last], *read)


def differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None = None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    count = 7 + len(_call.METADATA)
    metadata, read = saved[7:count], saved[count:]
    needed = [*ctx.needs_input_grad[:4]]
    if ctx.texts:  # what masks read has no gradient
        needed += [is_needed and ctx.texts[0] is not None for is_needed in ctx.needs_input_grad[-1]]
    gradients: Sequence[Any] = [None] * len(needed)
    of_metadata: list[Any] = [None] * len(metadata)
    if dout is not None or dlse is not None:
        dout = torch.zeros_like(saved[4]) if dout is None else dout
        functions = (*ctx.texts, read) if ctx.texts else ()
        if any(needed):
            gradients = by_operator((*ctx.options, *metadata), functions, needed, dout, dlse, *saved[:7])
        if ctx.needs_input_grad[4 + len(ctx.options) + _call.GATE]:
            of_metadata[_call.GATE] = gate_gradient(dout, saved[4], metadata[_call.GATE])
    none = (*(None,) * len(ctx.options), *of_metadata)
    rest = (None, None, list(gradients[4:])) if ctx.texts else (None,)
    return (*gradients[:4], *none, *rest)


def gate_gradient(dout: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    """The gradient of an output gate by PyTorch's operators, which a compiler makes one kernel of."""
    found = dout.float() * out.float() * torch.sigmoid(-gate.float())
    return torch.where(out == 0, 0.0, found).to(gate.dtype)  # 0 of a query that sees no key


def by_operator(
    flat: Sequence[Any], functions: Sequence[Any], needed: Sequence[bool], *tensors: Any
) -> tuple[Tensor | None, ...]:
    """_direct.backward through the dispatcher. `flat` and `functions`: _operators.arguments of the call."""
    if functions:
        operator, more = torch.ops.tandem.attention_with_functions_backward, (*functions, needed[4:])
    else:
        operator, more = torch.ops.tandem.attention_backward, ()
    gradients = operator(*tensors, *flat, *more, *needed[:4])
    wanted = zip(gradients, needed, strict=True)
    return tuple(gradient if is_needed else None for gradient, is_needed in wanted)


def save_nothing(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    pass


def no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(
        "tandem.attention has no second derivative; "
        "use torch's math attention where gradients of gradients are needed"
    )


#: What autograd saves and how it differentiates: of the forward operators, and of the backward ones.
RULES = ((save, differentiate), (save_nothing, no_second_derivative))


def unrecorded(name: str) -> Callable[..., Any]:
    """The autograd kernel of an operator that autograd cannot record: one that writes to the caller's
    tensors, which register_autograd has no word for, or one whose results have no derivative."""
    operator = getattr(torch.ops.tandem, name).default
    written = [(i, a.name) for i, a in enumerate(operator._schema.arguments) if _is_written(a)]

    def kernel(keyset: Any, *arguments: Any) -> Any:
        first = written[0][0] if written else len(arguments)
        for i, argument in written:
            if arguments[i] is not None:
                validate_out(argument, arguments[i], is_recorded(*arguments[:first]))
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return kernel


def validate_unrecorded(function: str, arguments: dict[str, Any]) -> None:
    """An error where autograd follows one of the arguments of a function whose results have no derivative."""
    for name, argument in arguments.items():
        if is_recorded(*_tensors(argument)):
            raise InvalidArgumentError(
                f"{name} requires a gradient, but tandem.{function} has none; pass detached tensors, or call "
                "under torch.no_grad()"
            )


def refused(name: str) -> Callable[..., Any]:
    """The autograd kernel of an operator whose inputs may not require gradients."""
    operator = getattr(torch.ops.tandem, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(keyset: Any, *arguments: Any) -> Any:
        validate_unrecorded(name, dict(zip(names, arguments, strict=True)))
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return kernel


def _tensors(argument: Any) -> list[Any]:
    """The tensors of an argument: of a list, its elements."""
    found = argument if isinstance(argument, (list, tuple)) else (argument,)
    return [t for t in found if isinstance(t, Tensor)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def defaults_of(namespace: str, name: str) -> tuple[Any, ...]:
    """The defaults of the operator's arguments, None of one that has none."""
    operator = getattr(getattr(torch.ops, namespace), name).default
    return tuple(argument.default_value for argument in operator._schema.arguments)


def filled(namespace: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with all arguments of the operator: PyTorch leaves out last ones with their defaults."""
    defaults = defaults_of(namespace, name)

    def with_defaults(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, *defaults[len(arguments) :], **options)

    return with_defaults


_DIFFERENTIATED = ("attention", "attention_with_functions")


def without_tangents(namespace: str, name: str, kernel: Any) -> Any:
    """The autograd kernel of the operator `name`, and an error where forward mode wants a derivative of it,
    or reverse mode one of its metadata. PyTorch would take it for zero, without a word."""
    arguments_of = getattr(getattr(torch.ops, namespace), name).default._schema.arguments
    names = [argument.name for argument in arguments_of]
    first = names.index(_call.METADATA[0]) if _call.METADATA[0] in names else None

    def validated(keyset: Any, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            validate_tangents(name, dict(zip(names, arguments, strict=True)))
        if first is not None:
            metadata = arguments[first : first + len(_call.METADATA)]
            validate_metadata(metadata, name in _DIFFERENTIATED and is_recorded(*arguments[:first]))
        return kernel(keyset, *arguments)

    return validated


def validate_tangents(name: str, arguments: dict[str, Any]) -> None:
    """An error where one of the arguments of the operator `name` carries a tangent."""
    unpack: Any = forward_ad.unpack_dual
    for argument, value in arguments.items():
        if any(unpack(t).tangent is not None for t in _tensors(value)):
            raise no_forward_mode(name, argument)


def no_forward_mode(name: str, argument: str) -> UnsupportedError:
    """The error of a tangent that `argument` of the operator `name` carries."""
    return UnsupportedError(
        f"{argument} carries a tangent, but tandem.{name} has no forward-mode derivative; use reverse mode: "
        "backward(), torch.autograd.grad or torch.func.vjp"
    )


def transformed(
    name: str, setup: Callable[..., None], differentiate: Callable[..., Any]
) -> Callable[..., Any]:
    """The operator `name` under the transforms of torch.func, which follow a Function's rules at each of
    their levels. register_autograd makes a Function of a kind that they refuse."""
    operator = getattr(torch.ops.tandem, name).default

    def jvp(ctx: Any, *tangents: Any) -> Any:
        i = next(i for i, tangent in enumerate(tangents) if tangent is not None)
        raise no_forward_mode(name, operator._schema.arguments[i].name)

    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        """One call after another."""
        calls = []
        for i in range(info.batch_size):
            pairs = zip(arguments, in_dims, strict=True)
            calls.append(operator(*(a.select(dim, i) if isinstance(dim, int) else a for a, dim in pairs)))
        results = tuple(torch.stack(each) for each in zip(*calls, strict=True))
        return results, (0,) * len(results)

    rules = {"setup_context": setup, "backward": differentiate, "jvp": jvp, "vmap": vmap}
    methods = {name: staticmethod(rule) for name, rule in {"forward": operator.__call__, **rules}.items()}
    function: Any = type(f"tandem_{name}", (torch.autograd.Function,), methods)
    return lambda *arguments: function.apply(*arguments)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast, where it is on for their device, makes of q, k and v."""
    device = tensors[0].device.type
    # torch.compile of PyTorch 2.11 cannot trace the question whether there is autocast.
    has_autocast = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    if not (has_autocast and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype in _AUTOCAST else t for t in tensors)


# What autocast converts: float8 has scales of its own, and PyTorch leaves float64 alone.
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


def prepared(
    call: _call.Call, q: Tensor, k: Tensor, v: Tensor, others: Sequence[Any], out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """q, k and v as autocast has them, and whether autograd records the call by them or one of the `others`.
    The call's metadata, cache and out allow what is asked."""
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q, k, v)
        if call.gate is not None:
            (call.gate,) = autocast(call.gate)
    recorded = is_recorded(q, k, v, *others)
    validate_metadata(call.metadata, recorded)
    if out is not None:
        validate_out("out", out, recorded)
    return q, k, v, recorded
