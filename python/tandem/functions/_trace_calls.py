"""What operators, PyTorch's functions and methods, and NumPy's functions make of the values of a traced
function (_trace)."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tandem.functions._trace import FUNCTIONS, Value, kind_of, untraceable
from tandem.functions._trace_functions import COMPOSED
from tandem.functions._trace_ops import (
    apply,
    clamp,
    convert,
    divide,
    floor_divide,
    fmod,
    lifted,
    masked_fill,
    power,
    remainder,
    shift,
    sign,
    stop,
    where,
    whole,
)


def _scaled(op: str) -> Callable[..., Value]:
    """Sums and differences, whose second operand may have a factor."""

    def function(a: Any, b: Any, *, alpha: Any = 1) -> Value:
        return apply(op, a, b if isinstance(alpha, int) and alpha == 1 else apply("mul", b, alpha))

    return function


def _binary(op: str, **kwargs: Any) -> Callable[[Any, Any], Value]:
    return lambda a, b: apply(op, a, b, **kwargs)


def _flipped(op: str, **kwargs: Any) -> Callable[[Any, Any], Value]:
    return lambda a, b: apply(op, b, a, **kwargs)


def _unary(op: str, **kwargs: Any) -> Callable[[Any], Value]:
    return lambda a: apply(op, a, **kwargs)


def _logical(op: str) -> Callable[..., Value]:
    return lambda *operands: apply(op, *(convert(v, "bool") for v in lifted(*operands)))


def to(x: Value, *args: Any, **kwargs: Any) -> Value:
    """Another dtype; devices are ignored."""
    for wanted in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if hasattr(wanted, "dtype"):
            return convert(x, kind_of(wanted.dtype))
        if isinstance(wanted, (type, np.dtype)) or str(wanted).startswith("torch."):
            with_kind = kind_of(wanted) if "_format" not in str(wanted) else x.kind
            return convert(x, with_kind)
    return x


_COMPARE = {"result": "bool"}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
#: By the names that PyTorch's functions, its methods and the operators have.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _scaled("add"),
    "sub": _scaled("sub"),
    "rsub": lambda a, b, *, alpha=1: _scaled("sub")(b, a, alpha=alpha),
    "mul": _binary("mul"),
    "div": divide,
    "floor_divide": floor_divide,
    "remainder": remainder,
    "fmod": fmod,
    "pow": power,
    "bitwise_left_shift": functools.partial(shift, left=True),
    "bitwise_right_shift": functools.partial(shift, left=False),
    "sign": sign,
    "square": lambda x: apply("mul", x, x),
    "neg": _unary("neg"),
    "abs": _unary("abs"),
    "minimum": _binary("min"),
    "maximum": _binary("max"),
    "clamp": clamp,
    "clamp_max": lambda x, max: clamp(x, max=max),
    "floor": lambda x: whole("floor", x),
    "ceil": lambda x: whole("ceil", x),
    "trunc": lambda x: whole("trunc", x),
    **{name: _unary(name, real=True) for name in "cos erf exp log log1p log2 sigmoid sin sqrt tanh".split()},
    "exp2": lambda x: apply("exp", apply("mul", x, math.log(2.0), real=True), real=True),
    "where": where,
    "masked_fill": masked_fill,
    "lt": _binary("lt", **_COMPARE),
    "le": _binary("le", **_COMPARE),
    "gt": _flipped("lt", **_COMPARE),
    "ge": _flipped("le", **_COMPARE),
    "eq": _binary("eq", **_COMPARE),
    "ne": _binary("ne", **_COMPARE),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "bitwise_and": _binary("and"),
    "bitwise_or": _binary("or"),
    "bitwise_xor": _binary("xor"),
    "bitwise_not": _unary("not"),
    **{
        name: functools.partial(convert, kind=kind)
        for kind, names in (
            ("real", "float half bfloat16 double"),
            ("wide", "long"),
            ("int", "int"),
            ("int16", "short"),
            ("int8", "char"),
            ("uint8", "byte"),
            ("bool", "bool"),
        )
        for name in names.split()
    },
    "to": to,
    "clone": lambda x: x,
    "detach": stop,
    **COMPOSED,
}

#: Other names of these.
_ALIASES = dict(
    pair.split("=")
    for pair in (
        "subtract=sub multiply=mul divide=div true_divide=div negative=neg absolute=abs positive=clone "
        "max=maximum min=minimum clip=clamp clamp_min=clamp less=lt less_equal=le greater=gt "
        "greater_equal=ge not_equal=ne type=to type_as=to astype=to"
    ).split()
)
_FUNCTIONS |= {alias: _FUNCTIONS[name] for alias, name in _ALIASES.items()}

#: Python's operators, by the functions that they are.
_OPERATORS = {name: name for name in ("add", "sub", "mul", "pow", *_COMPARISONS)} | {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
_SIGNS = {"neg": "neg", "abs": "abs", "invert": "bitwise_not"}
_OF_PYTHON = _OPERATORS | _SIGNS


def define() -> None:
    """Gives values their operators, functions and methods."""
    FUNCTIONS.update(_FUNCTIONS, __torch_function__=call_torch, __numpy_function__=call_numpy, __call__=call)
    FUNCTIONS.update(convert=convert)
    for name, function in _OPERATORS.items():
        f = _FUNCTIONS[function]
        setattr(Value, f"__{name}__", lambda a, b, f=f: f(a, b))
        if function not in _COMPARISONS:
            setattr(Value, f"__r{name}__", lambda a, b, f=f: f(b, a))
    for name, function in _SIGNS.items():
        f = _FUNCTIONS[function]
        setattr(Value, f"__{name}__", lambda a, f=f: f(a))


_signature = functools.cache(inspect.signature)


def call(library: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function or method of that name makes of values."""
    function = FUNCTIONS.get(name)
    if function is None:
        raise untraceable(
            f"{library}.{name} is called on a score or a position",
            f"known are {', '.join(sorted(known_names()))}",
        )
    given = {
        n: x for n, x in kwargs.items() if n not in ("out", "inplace") or (x is not None and x is not False)
    }
    try:
        _signature(function).bind(*args, **given)
    except TypeError as error:
        raise untraceable(
            f"{library}.{name} is called with arguments that are not known here ({error})",
            "leave them out, or write what they do with operators",
        ) from None
    return function(*args, **given)


def known_names() -> list[str]:
    return [name for name in FUNCTIONS if not name.startswith("_") and name != "convert"]


def call_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of PyTorch makes of values."""
    name = getattr(func, "__name__", str(func))
    if name.endswith("_") and not name.startswith("__"):
        raise untraceable(f"torch.{name} changes a tensor in place", f"use torch.{name.strip('_')}")
    plain = name.strip("_").removeprefix("special_")
    reflected = plain.startswith("r") and plain[1:] in _OPERATORS
    if reflected:
        args, plain = args[::-1], plain[1:]
    plain = _OF_PYTHON.get(plain, plain) if name.startswith("__") else plain
    if plain == "getitem":
        array, index = args
        indices = index if isinstance(index, tuple) else (index,)
        trace = next(i.trace for i in indices if isinstance(i, Value))
        return trace.read(array, indices)
    return call("torch", plain, args, kwargs)


#: NumPy's names of what PyTorch calls otherwise.
_NUMPY_NAMES = {
    "invert": "bitwise_not",
    "left_shift": "bitwise_left_shift",
    "right_shift": "bitwise_right_shift",
    "power": "pow",
    "rint": "round",
    "amax": "max",
    "amin": "min",
}


def call_numpy(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of NumPy makes of values."""
    return call("np", _NUMPY_NAMES.get(name, name), args, kwargs)
