"""Arithmetic on the values of a traced function (_trace), with PyTorch's rules for types."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tandem._errors import InvalidArgumentError
from tandem.functions._trace import KINDS, Value, untraceable, where_called

#: Kinds of fewer bits than the language's integers: what is added to make it positive, and the bits.
_NARROW = {"uint8": (0, 255), "int8": (128, 255), "int16": (32768, 65535)}


def common_kind(*operands: Any) -> str:
    """The kind that operands have together: numbers of Python change it only where they are of another
    category, as reals beside integers are."""
    kinds = [x.kind for x in operands if isinstance(x, Value)]
    if {"uint8", "int8"} <= set(kinds):
        kinds.append("int16")
    for x in operands:
        if isinstance(x, (float, np.floating)):
            kinds.append("real")
        elif isinstance(x, (int, np.integer)) and not isinstance(x, bool):
            narrow = all(kind == "bool" for kind in kinds)
            kinds.append("wide" if not -(2**31) <= x < 2**31 else "int" if narrow else "bool")
    return max(kinds or ["bool"], key=KINDS.index)


def lifted(*operands: Any) -> list[Value]:
    trace = next(x.trace for x in operands if isinstance(x, Value))
    return [trace.lift(x) for x in operands]


def _fitted(x: Value) -> Value:
    """An integer of a narrow kind, wrapped to it."""
    if x.kind not in _NARROW:
        return x
    above, bits = _NARROW[x.kind]
    text = f"sub(and(add({x.text}, {above}), {bits}), {above})" if above else f"and({x.text}, {bits})"
    return x.trace.value(text, x.kind)


def apply(op: str, *operands: Any, result: str | None = None, real: bool = False) -> Value:
    """The operation `op` of the text form. `result` is its kind; None: that which the operands have
    together."""
    values = lifted(*operands)
    raw = [v if isinstance(x, Value) or _is_array(x) else x for x, v in zip(operands, values, strict=True)]
    common = common_kind(*raw)
    if op in ("and", "or", "xor", "not") and common == "real":
        raise InvalidArgumentError(f"{where_called()}: {op} takes integers or booleans, not reals")
    if common in _NARROW and not real:  # numbers beside it wrap to it
        values = [
            _fitted(Value(v.trace, v.text, common)) if v is not x and isinstance(x, int) else v
            for x, v in zip(operands, values, strict=True)
        ]
    kind = result or ("real" if real else common)
    if result is None and kind == "bool":
        op = {"add": "or", "max": "or", "mul": "and", "min": "and"}.get(op, op)
        if op not in ("and", "or", "xor", "not"):
            raise InvalidArgumentError(
                f"{where_called()}: {op} of booleans, which PyTorch does not have either; use &, |, ^ or "
                "~, or make integers of them"
            )
    return _fitted(values[0].trace.value(f"{op}({', '.join(v.text for v in values)})", kind))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and not isinstance(x, np.generic)


def convert(x: Value, kind: str) -> Value:
    if x.kind == kind:
        return x
    if kind in ("bool", "wide", "real"):
        return x.trace.value(f"{kind}({x.text})", kind)
    if x.kind in ("bool", "wide", "real"):
        return _fitted(x.trace.value(f"int({x.text})", kind))
    return _fitted(Value(x.trace, x.text, kind))


def constant(x: Value, number: Any, kind: str) -> Value:
    """A number of a kind."""
    return convert(x.trace.lift(float(number) if kind == "real" else int(number)), kind)


def stop(x: Value) -> Value:
    """x without its derivative."""
    return x.trace.value(f"stop({x.text})", "real") if x.kind == "real" else x


def where(condition: Any, yes: Any, no: Any) -> Value:
    values = lifted(condition, yes, no)
    given = [
        v if isinstance(x, Value) or _is_array(x) else x for x, v in zip((yes, no), values[1:], strict=True)
    ]
    return values[0].trace.value(f"where({', '.join(v.text for v in values)})", common_kind(*given))


def masked_fill(x: Value, mask: Any, value: Any) -> Value:
    filled = where(mask, value, x)
    if KINDS.index(filled.kind) > KINDS.index(x.kind):
        raise InvalidArgumentError(
            f"{where_called()}: masked_fill of {value!r} into a {x.kind}; convert that first, as by float()"
        )
    return filled


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else apply("max", x, min)
    return x if max is None else apply("min", x, max)


def _exact_power(base: int, exponent: Value) -> Value:
    """A power of an integer, as integers multiply: from the bits of the exponent; 0 where that is below 0."""
    bits = 6 if exponent.kind == "wide" else 5
    size = 64 if exponent.kind == "wide" else 32
    result: Any = constant(exponent, 1, exponent.kind)
    for n in range(bits if base % 2 == 0 else 10):
        factor = (base ** (1 << n) + (1 << (size - 1))) % (1 << size) - (1 << (size - 1))
        is_set = apply("ne", apply("and", exponent, 1 << n), 0, result="bool")
        result = apply("mul", result, where(is_set, constant(exponent, factor, exponent.kind), 1))
    outside = apply("lt", exponent, 0, result="bool")
    if base % 2 == 0:
        outside = apply("or", outside, apply("lt", size - 1, exponent, result="bool"))
    return where(outside, 0, result)


def power(x: Any, exponent: Any) -> Value:
    if isinstance(exponent, Value) and isinstance(x, (int, float)) and x > 0:
        if isinstance(x, int) and exponent.kind != "real":
            return _exact_power(x, convert(exponent, "wide" if exponent.kind == "wide" else "int"))
        return apply("exp", apply("mul", exponent, math.log(x), real=True), real=True)
    number = isinstance(exponent, (int, float))
    if number and exponent == 0.5:
        return apply("sqrt", x, real=True)
    whole = number and float(exponent).is_integer() and 1 <= abs(exponent) <= 8
    if not whole or (exponent < 0 and isinstance(exponent, int) and x.kind != "real"):
        raise untraceable(
            f"a power has the exponent {exponent!r}",
            "use whole ones from 1 to 8, or of reals -8 to -1, a number above 0 as the base, or exp and log",
        )
    x = result = convert(x, "real") if isinstance(exponent, float) else x
    for _ in range(abs(int(exponent)) - 1):
        result = apply("mul", result, x)
    return divide(1.0, result) if exponent < 0 else result


def shift(x: Any, places: Any, *, left: bool) -> Value:
    kind = x.kind if isinstance(x, Value) else "int"
    most = 62 if kind == "wide" else 30
    fits = isinstance(places, int) and 0 <= places <= most
    if kind not in ("int", "wide") or not (
        fits or isinstance(places, Value) and places.kind in ("int", "wide")
    ):
        raise untraceable(
            f"{x!r} is shifted by {places!r} places", f"shift positions by whole numbers from 0 to {most}"
        )
    if isinstance(places, int):
        return apply("mul" if left else "floordiv", x, 1 << places)
    factor = _exact_power(2, convert(places, kind))
    if left:
        return apply("mul", x, factor)
    return where(
        apply("lt", most, places, result="bool"), floor_divide(x, 1 << most), floor_divide(x, factor)
    )


def sign(x: Value) -> Value:
    positive, negative = (apply("lt", *pair, result="bool") for pair in ((0, x), (x, 0)))
    return convert(where(positive, 1, where(negative, -1, 0)), x.kind)


def fmod(a: Any, b: Any) -> Value:
    """The remainder with the sign of the dividend."""
    if common_kind(*lifted(a, b)) == "real":
        return apply("fmod", a, b, real=True)
    return apply("sub", a, apply("mul", b, _toward_zero(a, b)))


def remainder(a: Any, b: Any) -> Value:
    """The remainder with the sign of the divisor."""
    if common_kind(*lifted(a, b)) != "real":
        return apply("mod", a, b)
    rest = fmod(a, b)
    return where(_is_other_side(rest, b), apply("add", rest, b), rest)


def _is_other_side(rest: Value, divisor: Any) -> Value:
    sides = (apply("lt", x, 0, result="bool") for x in lifted(rest, divisor))
    return apply("and", apply("ne", rest, 0, result="bool"), apply("ne", *sides, result="bool"))


def floor_divide(a: Any, b: Any) -> Value:
    if common_kind(*lifted(a, b)) != "real":
        return apply("floordiv", a, b)
    a, b = lifted(a, b)
    rest = fmod(a, b)  # as PyTorch computes it, exact where quotients round to the next whole number
    quotient = divide(apply("sub", a, rest), b)
    quotient = where(_is_other_side(rest, b), apply("sub", quotient, 1.0), quotient)
    whole = apply("floor", apply("add", quotient, 0.5), real=True)
    return where(apply("eq", b, 0, result="bool"), stop(divide(a, b)), whole)


def _toward_zero(a: Any, b: Any) -> Value:
    """The quotient of integers."""
    quotient = apply("floordiv", a, b)
    inexact = apply("ne", apply("mod", a, b), 0, result="bool")
    below = apply("lt", quotient, 0, result="bool")
    return apply("add", quotient, where(apply("and", inexact, below), 1, 0))


def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return floor_divide(a, b)
    if rounding_mode == "trunc" and common_kind(*lifted(a, b)) != "real":
        return _toward_zero(a, b)
    if rounding_mode not in (None, "trunc"):
        raise untraceable(f"rounding_mode is {rounding_mode!r}", "use 'floor' or 'trunc'")
    quotient = apply("div", a, b, real=True)
    return quotient if rounding_mode is None else whole("trunc", quotient)


def whole(which: str, x: Value) -> Value:
    """A real rounded to a whole number; integers are as they are."""
    if x.kind != "real":
        return x
    if which == "ceil":
        return apply("neg", apply("floor", apply("neg", x)))
    if which == "trunc":
        return where(apply("lt", x, 0, result="bool"), whole("ceil", x), whole("floor", x))
    return apply(which, x)
