"""Arrays to 8-bit values and scales."""

from __future__ import annotations

from typing import Any

from tandem import _arrays, _call, _core, _run
from tandem._errors import InvalidArgumentError


def quantize(
    x: Any,
    dtype: str = "e4m3",
    *,
    granularity: str = "head",
    hadamard: bool = False,
    smooth: bool = False,
    threads: int = 0,
) -> tuple[Any, ...]:
    """8-bit values and their scales: ``x`` is about ``values * scales``.

    For callers who keep 8-bit tensors; ``attention`` with a ``precision`` does this inside.

    Args:
      x: ``(batch, seqlen, heads, head_dim)`` or ``(seqlen, heads, head_dim)``, float32, float16 or bfloat16.
      dtype: "e4m3" (float8_e4m3fn) or "s8" (int8).
      granularity: the elements that share a scale: "tensor": scales ``(1,)``; "head": ``(batch, heads)``,
        what ``attention`` takes as k_scale and v_scale; "block", 128 rows of a head: ``(batch, heads,
        ceil(seqlen / 128))``; "row": ``(batch, heads, seqlen)``.
      hadamard: multiply rows by random signs (always the same) and Hadamard matrices first. Done to q and k
        alike, their products stay as they are and outliers are spread.
      smooth: subtract each channel's mean over the rows first, and return it. Of k it changes no softmax.
      threads: as in ``attention``.

    Returns:
      ``(values, scales)``, with ``smooth`` also the mean, ``(batch, heads, head_dim)``. Scales are float32.
      Without a batch dimension in x, none has one. No gradient flows through them.

    Raises:
      As ``attention``. float32 on a GPU is an UnsupportedError.
    """
    if dtype not in ("e4m3", "s8"):
        raise InvalidArgumentError(f"dtype is {dtype!r}; it must be 'e4m3' or 's8'")
    if granularity not in _GRANULARITIES:
        names = ", ".join(_GRANULARITIES)
        raise InvalidArgumentError(f"granularity is {granularity!r}; it must be one of {names}")
    hadamard, smooth = _call.flag("hadamard", hadamard), _call.flag("smooth", smooth)
    _arrays.library_of("x", x)
    if x.ndim not in (3, 4):
        raise InvalidArgumentError(
            f"x has {x.ndim} dimensions; it must be (batch, seqlen, heads, head_dim) or "
            "(seqlen, heads, head_dim)"
        )
    arguments = (x, dtype, granularity, hadamard, smooth, threads)
    if _arrays.is_torch(x):
        from tandem.torch import _calls

        values, scales, mean = _calls.quantize(*arguments)
    else:
        values, scales, mean = _run.quantize(*arguments)
    return (values, scales, mean) if smooth else (values, scales)


#: A list: what cannot be hashed is none of them either.
_GRANULARITIES = [*_core.Granularity.__members__]
