"""Operators, and PyTorch's functions and methods, on the values of a traced function (_trace)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tandem._errors import InvalidArgumentError
from tandem._trace import FUNCTIONS, Value, untraceable, where_called


def _widest(*values: Value) -> str:
    order = ("bool", "int", "real")
    return max((v.kind for v in values), key=order.index)


def apply(op: str, *operands: Any, result: str | None = None, real: bool = False) -> Value:
    """The operation `op` of the text form. `result` is its kind; None: that of its widest operand."""
    trace = next(x.trace for x in operands if isinstance(x, Value))
    values = [trace.lift(x) for x in operands]
    kind = result or ("real" if real else _widest(*values))
    if op in ("and", "or", "xor", "not", "floordiv", "mod") and _widest(*values) == "real":
        raise InvalidArgumentError(f"{where_called()}: {op} takes integers or booleans, not reals")
    if result is None and kind == "bool" and op not in ("and", "or", "xor", "not"):
        kind = "int"
    return trace.value(f"{op}({', '.join(v.text for v in values)})", kind)


def convert(x: Value, kind: str) -> Value:
    return x if x.kind == kind else x.trace.value(f"{kind}({x.text})", kind)


def where(condition: Any, yes: Any, no: Any) -> Value:
    trace = next(x.trace for x in (condition, yes, no) if isinstance(x, Value))
    values = [trace.lift(x) for x in (condition, yes, no)]
    return trace.value(f"where({', '.join(v.text for v in values)})", _widest(*values[1:]))


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else apply("max", x, min)
    return x if max is None else apply("min", x, max)


def _new(number: int) -> Callable[..., Value]:
    def function(x: Value, size: Any = (), *, dtype: Any = None, device: Any = None) -> Value:
        if tuple(size) != ():
            raise untraceable(f"a tensor of shape {tuple(size)} is made", "make it outside of the function")
        return x.trace.lift(bool(number) if str(dtype) == "torch.bool" else float(number))

    return function


def power(x: Any, exponent: Any) -> Value:
    if isinstance(exponent, Value) and isinstance(x, (int, float)) and x > 0:
        return apply("exp", apply("mul", exponent, math.log(x), real=True), real=True)
    number = isinstance(exponent, (int, float))
    if number and exponent == 0.5:
        return apply("sqrt", x, real=True)
    if not number or not float(exponent).is_integer() or not 1 <= abs(exponent) <= 8:
        raise untraceable(
            f"a power has the exponent {exponent!r}",
            "use whole ones from 1 to 8 or -8 to -1, a number above 0 as the base, or exp and log",
        )
    result = x
    for _ in range(abs(int(exponent)) - 1):
        result = apply("mul", result, x)
    if exponent < 0:
        return divide(1.0, result)
    return convert(result, "real") if isinstance(exponent, float) else result


def shift(x: Any, places: Any, *, left: bool) -> Value:
    if not isinstance(x, Value) or x.kind != "int" or not isinstance(places, int) or not 0 <= places < 31:
        raise untraceable(
            f"{x!r} is shifted by {places!r} places", "shift positions by whole numbers from 0 to 30"
        )
    return apply("mul" if left else "floordiv", x, 1 << places)


def sign(x: Value) -> Value:
    positive, negative = (apply("lt", *pair, result="bool") for pair in ((0, x), (x, 0)))
    return convert(where(positive, 1, where(negative, -1, 0)), x.kind)


def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return apply("floordiv", a, b)
    if rounding_mode is not None:
        raise untraceable(f"rounding_mode is {rounding_mode!r}", "use 'floor', or //")
    return apply("div", a, b, real=True)


def _binary(op: str, **kwargs: Any) -> Callable[[Any, Any], Value]:
    return lambda a, b: apply(op, a, b, **kwargs)


def _flipped(op: str, **kwargs: Any) -> Callable[[Any, Any], Value]:
    return lambda a, b: apply(op, b, a, **kwargs)


def _unary(op: str, **kwargs: Any) -> Callable[[Any], Value]:
    return lambda a: apply(op, a, **kwargs)


def _logical(op: str) -> Callable[..., Value]:
    def function(*operands: Any) -> Value:
        trace = next(x.trace for x in operands if isinstance(x, Value))
        return apply(op, *(convert(trace.lift(x), "bool") for x in operands))

    return function


_COMPARE = {"result": "bool"}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
#: By the names that PyTorch's functions, its methods and the operators have.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _binary("add"),
    "sub": _binary("sub"),
    "subtract": _binary("sub"),
    "mul": _binary("mul"),
    "multiply": _binary("mul"),
    "div": divide,
    "divide": divide,
    "true_divide": divide,
    "floor_divide": _binary("floordiv"),
    "remainder": _binary("mod"),
    "pow": power,
    "bitwise_left_shift": functools.partial(shift, left=True),
    "bitwise_right_shift": functools.partial(shift, left=False),
    "sign": sign,
    "square": lambda x: apply("mul", x, x),
    "neg": _unary("neg"),
    "negative": _unary("neg"),
    "abs": _unary("abs"),
    "absolute": _unary("abs"),
    "minimum": _binary("min"),
    "maximum": _binary("max"),
    "clamp": clamp,
    "clip": clamp,
    "relu": lambda x: apply("max", x, 0),
    "exp": _unary("exp", real=True),
    "exp2": lambda x: apply("exp", apply("mul", x, math.log(2.0), real=True), real=True),
    "log": _unary("log", real=True),
    "sqrt": _unary("sqrt", real=True),
    "tanh": _unary("tanh", real=True),
    "sigmoid": _unary("sigmoid", real=True),
    "where": where,
    "masked_fill": lambda x, mask, value: where(mask, value, x),
    "new_ones": _new(1),
    "new_zeros": _new(0),
    "lt": _binary("lt", **_COMPARE),
    "less": _binary("lt", **_COMPARE),
    "le": _binary("le", **_COMPARE),
    "less_equal": _binary("le", **_COMPARE),
    "gt": _flipped("lt", **_COMPARE),
    "greater": _flipped("lt", **_COMPARE),
    "ge": _flipped("le", **_COMPARE),
    "greater_equal": _flipped("le", **_COMPARE),
    "eq": _binary("eq", **_COMPARE),
    "ne": _binary("ne", **_COMPARE),
    "not_equal": _binary("ne", **_COMPARE),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "bitwise_and": _binary("and"),
    "bitwise_or": _binary("or"),
    "bitwise_xor": _binary("xor"),
    "bitwise_not": _unary("not"),
    "float": lambda x: convert(x, "real"),
    "int": lambda x: convert(x, "int"),
    "long": lambda x: convert(x, "int"),
    "bool": lambda x: convert(x, "bool"),
    "clone": lambda x: x,
    "detach": lambda x: x,
}

#: Python's operators, by the functions that they are.
_OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "eq": "eq",
    "ne": "ne",
}


def _define_operators() -> None:
    for name, function in _OPERATORS.items():
        f = _FUNCTIONS[function]
        setattr(Value, f"__{name}__", lambda a, b, f=f: f(a, b))
        if function not in _COMPARISONS:
            setattr(Value, f"__r{name}__", lambda a, b, f=f: f(b, a))
    for name, function in (("neg", "neg"), ("abs", "abs"), ("invert", "bitwise_not")):
        f = _FUNCTIONS[function]
        setattr(Value, f"__{name}__", lambda a, f=f: f(a))


_define_operators()
FUNCTIONS.update(_FUNCTIONS)


def call_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of PyTorch makes of values."""
    name = getattr(func, "__name__", str(func))
    if name.endswith("_") and not name.startswith("__"):
        raise untraceable(f"torch.{name} changes a tensor in place", f"use torch.{name.strip('_')}")
    plain = name.strip("_")
    reflected = plain.startswith("r") and plain[1:] in _OPERATORS
    if reflected:
        args, plain = args[::-1], plain[1:]
    plain = _OPERATORS.get(plain, plain) if name.startswith("__") else plain
    if plain == "getitem":
        array, index = args
        indices = index if isinstance(index, tuple) else (index,)
        trace = next(i.trace for i in indices if isinstance(i, Value))
        return trace.read(array, indices)
    function = _FUNCTIONS.get(plain)
    if function is None:
        raise untraceable(
            f"torch.{plain} is called on a score or a position",
            f"known are {', '.join(sorted(_FUNCTIONS))}",
        )
    return function(*args, **kwargs)


FUNCTIONS["__torch_function__"] = call_torch
FUNCTIONS["convert"] = convert
