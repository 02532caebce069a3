"""Functions on the values of a traced function that are made of others (_trace_ops): activations of
torch.nn.functional, tests of numbers, and constants of a value's type."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tandem.functions._trace import Value, kind_of, untraceable
from tandem.functions._trace_ops import apply, clamp, constant, convert, divide, where, whole

_INF = math.inf


def _real(x: Any) -> Any:
    return convert(x, "real")


def _sigmoid(x: Any) -> Any:
    return apply("sigmoid", x, real=True)


def _tanh(x: Any) -> Any:
    return apply("tanh", x, real=True)


def _exp(x: Any) -> Any:
    return apply("exp", x, real=True)


def _log1p(x: Any) -> Any:
    return apply("log1p", x, real=True)


def _erf(x: Any) -> Any:
    return apply("erf", x, real=True)


def _lt(a: Any, b: Any) -> Any:
    return apply("lt", a, b, result="bool")


def _relu(x: Any) -> Any:
    """With the derivative 0 at 0, and NaN of NaN."""
    return where(apply("le", x, 0, result="bool"), constant(x, 0, x.kind), x)


def _expm1(x: Any) -> Any:
    """Near 0 by tanh(x / 2) = (e^x - 1) / (e^x + 1)."""
    half = _tanh(x * 0.5)
    return where(_lt(abs(x), 0.5), 2.0 * half / (1.0 - half), _exp(x) - 1.0)


def _softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = input * float(beta)
    return where(_lt(threshold, scaled), _real(input), _log1p(_exp(scaled)) / float(beta))


def _gelu(input: Any, *, approximate: str = "none") -> Any:
    if approximate not in ("none", "tanh"):
        raise untraceable(f"gelu has approximate={approximate!r}", "use 'none' or 'tanh'")
    if approximate == "none":
        return 0.5 * input * (_erf(input * math.sqrt(0.5)) + 1.0)
    return 0.5 * input * (1.0 + _tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * input * input * input)))


def _elu(input: Any, alpha: float = 1.0) -> Any:
    return where(_lt(0, input), _real(input), float(alpha) * _expm1(_real(input)))


def _selu(input: Any) -> Any:
    return 1.0507009873554804934193349852946 * _elu(input, 1.6732632423543772848170429916717)


def _logaddexp(a: Any, b: Any) -> Any:
    most: Any = apply("max", a, b, real=True)
    same = apply("eq", a, b, result="bool")  # of two infinities, too
    apart = abs(apply("sub", a, b, real=True))
    return where(same, most + math.log(2.0), most + _log1p(_exp(-apart)))


def _round(x: Any, *, decimals: int = 0) -> Any:
    if decimals != 0:
        raise untraceable(f"round has decimals={decimals}", "multiply before it and divide behind it")
    return whole("round", x)


def _is(number: float, *, either: bool = False) -> Callable[[Any], Any]:
    """Whether a real is an infinity."""

    def function(x: Any) -> Any:
        if x.kind != "real":
            return constant(x, 0, "bool")
        return apply("eq", abs(x) if either else x, number, result="bool")

    return function


def _isnan(x: Any) -> Any:
    return apply("ne", x, x, result="bool")


def _isfinite(x: Any) -> Any:
    return constant(x, 1, "bool") if x.kind != "real" else _lt(abs(x), _INF)


def _nan_to_num(
    x: Any, nan: float | None = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Any:
    if x.kind != "real":
        return x
    most = 3.4028234663852886e38
    x = where(_isnan(x), float(nan or 0.0), x)
    x = where(apply("eq", x, _INF, result="bool"), most if posinf is None else float(posinf), x)
    return where(apply("eq", x, -_INF, result="bool"), -most if neginf is None else float(neginf), x)


def _like(number: Any) -> Callable[..., Any]:
    def function(x: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
        return constant(x, number, x.kind if dtype is None else kind_of(dtype))

    return function


def _full_like(x: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    kind = x.kind if dtype is None else kind_of(dtype)
    return convert(fill_value if isinstance(fill_value, Value) else x.trace.lift(fill_value), kind)


def _new(number: Any) -> Callable[..., Any]:
    def function(x: Any, size: Any = (), *, dtype: Any = None, device: Any = None) -> Any:
        if not isinstance(size, (tuple, list)) or tuple(size) != ():
            raise untraceable(f"a tensor of shape {size} is made", "make it outside of the function")
        return constant(x, number, x.kind if dtype is None else kind_of(dtype))

    return function


def _new_full(x: Any, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    _new(0)(x, size)
    return _full_like(x, fill_value, dtype=dtype)


#: By the names of PyTorch's functions and methods.
COMPOSED: dict[str, Callable[..., Any]] = {
    "relu": _relu,
    "relu6": lambda x: clamp(x, 0, 6),
    "leaky_relu": lambda x, negative_slope=0.01: where(_lt(0, x), _real(x), x * float(negative_slope)),
    "elu": _elu,
    "selu": _selu,
    "celu": lambda x, alpha=1.0: where(_lt(0, x), _real(x), float(alpha) * _expm1(x / float(alpha))),
    "silu": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * _tanh(_softplus(x)),
    "gelu": _gelu,
    "softplus": _softplus,
    "softsign": lambda x: x / (1.0 + abs(x)),
    "tanhshrink": lambda x: x - _tanh(x),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: clamp(x, min_val, max_val),
    "hardsigmoid": lambda x: clamp(x / 6.0 + 0.5, 0.0, 1.0),
    "hardswish": lambda x: x * clamp(x + 3.0, 0.0, 6.0) / 6.0,
    "log_sigmoid": lambda x: where(_lt(x, 0), x - _log1p(_exp(x)), -_log1p(_exp(-x))),
    "logaddexp": _logaddexp,
    "expm1": _expm1,
    "log10": lambda x: apply("div", apply("log", x, real=True), math.log(10.0)),
    "rsqrt": lambda x: divide(1.0, apply("sqrt", x, real=True)),
    "reciprocal": lambda x: divide(1.0, x),
    "tan": lambda x: divide(apply("sin", x, real=True), apply("cos", x, real=True)),
    "sinh": lambda x: 0.5 * (_expm1(x) - _expm1(-x)),
    "cosh": lambda x: 0.5 * (_exp(x) + _exp(-x)),
    "erfc": lambda x: 1.0 - _erf(x),
    "hypot": lambda a, b: apply("sqrt", a * a + b * b, real=True),
    "lerp": lambda a, b, weight: a + weight * (b - a),
    "frac": lambda x: x - whole("trunc", x),
    "round": _round,
    "isnan": _isnan,
    "isinf": _is(_INF, either=True),
    "isposinf": _is(_INF),
    "isneginf": _is(-_INF),
    "isfinite": _isfinite,
    "nan_to_num": _nan_to_num,
    "fmax": lambda a, b: where(_isnan(a), b, where(apply("ne", b, b, result="bool"), a, apply("max", a, b))),
    "fmin": lambda a, b: where(_isnan(a), b, where(apply("ne", b, b, result="bool"), a, apply("min", a, b))),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _full_like,
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": _new_full,
}
