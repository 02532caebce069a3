"""What `flash_attn` and `flash_attn2` share: FlashAttention's options as Tandem's, and what Tandem lacks."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from tandem import _call, _chunks, _torch
from tandem._errors import InvalidArgumentError, UnsupportedError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def problem(
    scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    deterministic: bool = False,
    metadata: tuple[Any, ...] = (None,) * len(_call.METADATA),
) -> _call.Call:
    """The call that means this. FlashAttention pads head dimensions itself: it has no option for that."""
    left, right = _call.pair("window_size", window_size)
    # FlashAttention-4 writes an unbounded side as None.
    window = (-1 if left is None else left, -1 if right is None else right)
    return _call.Call(scale, causal, window, softcap, deterministic, pad=True, metadata=metadata)


def run(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any = None, return_lse: bool = False, chunk: Any = 0
) -> Any:
    """The result, or it and the LSE. `chunk` is FlashAttention's attention_chunk."""
    if _chunks.length(chunk) > 0:
        return _run_in_chunks(call, q, k, v, sink, return_lse, _chunks.length(chunk))
    if isinstance(sink, Tensor) and sink.dtype in (torch.float16, torch.bfloat16):
        sink = sink.float()  # FlashAttention-4's are bfloat16; the gradient is converted back
    results = _torch.quick(call, q, k, v, sink, return_lse)
    if results is not None:
        return results
    only_tensors(q=q, k=k, v=v)
    # FlashAttention copies tensors whose last dimension is not contiguous.
    q, k, v = (t.contiguous() if _is_spread(t) else t for t in (q, k, v))
    return _torch.attention(call, q, k, v, sink, return_lse=return_lse, out=None, out_dtype=None)


def _run_in_chunks(call: _call.Call, q: Any, k: Any, v: Any, sink: Any, return_lse: bool, chunk: int) -> Any:
    metadata = {name: t for name, t in zip(_call.METADATA, call.metadata, strict=True) if t is not None}
    only_tensors(q=q, k=k, v=v, **metadata)
    only_packed("pass its values and offsets to flash_attn_varlen_func", q=q, k=k, v=v)
    split, rows, keys, values = _chunks.varlen(call, q, k, v, chunk)
    results = run(split, rows, keys, values, sink, return_lse)
    if q.ndim == 3:
        return results
    out, lse = results if return_lse else (results, None)
    out = out.unflatten(0, q.shape[:2])
    return out if lse is None else (out, lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous())


def only_tensors(**arrays: Any) -> None:
    for name, array in arrays.items():
        if not isinstance(array, Tensor):
            raise TypeError(
                f"{name} is a {type(array).__module__}.{type(array).__qualname__}; pass a torch.Tensor"
            )


def only_packed(remedy: str, **packed: Any) -> None:
    """Raises where a tensor of several in one cannot be taken apart; `remedy` is for nested tensors."""
    only_tensors(**packed)
    for name, t in packed.items():
        if t.is_nested:
            raise InvalidArgumentError(f"{name} is a nested tensor; {remedy}")
        if t.layout is not torch.strided:
            raise InvalidArgumentError(
                f"{name} is not a plain strided tensor (layout {t.layout}); make it dense"
            )


def cached(
    call: _call.Call,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    sink: Any,
    return_lse: bool,
    chunk: Any = 0,
) -> Any:
    """Attention to the first `cache_seqlens` rows of caches (batch, seqlen, heads, head_dim)."""
    only_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if k_cache.ndim != 4:
        raise InvalidArgumentError(
            f"k_cache has shape {tuple(k_cache.shape)}; pass (batch, seqlen_cache, heads_kv, head_dim)"
        )
    batch, rows = k_cache.shape[:2]
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.shape != (batch,):
            raise InvalidArgumentError(
                f"cache_seqlens has shape {tuple(cache_seqlens.shape)}; pass ({batch},), one number for each "
                "sequence of k_cache, or an integer"
            )
    elif cache_seqlens is not None:
        try:
            used = operator.index(cache_seqlens)
        except TypeError:
            raise InvalidArgumentError(
                f"cache_seqlens is {cache_seqlens!r}; pass an integer, a tensor of shape ({batch},), or None "
                "for the whole cache"
            ) from None
        if not 0 <= used <= rows:
            raise InvalidArgumentError(
                f"cache_seqlens is {used}, but k_cache has {rows} rows; pass 0 to {rows}"
            )
        cache_seqlens = torch.full((batch,), used, dtype=torch.int32, device=k_cache.device)
    metadata = list(call.metadata)
    metadata[_call.METADATA.index("seqused_k")] = cache_seqlens
    call.metadata = tuple(metadata)
    return run(call, q, k_cache, v_cache, sink, return_lse, chunk)


_APPEND = ("no append to a cache", "write k and v into the caches before, and count them in cache_seqlens")
_ROTARY = ("no rotary embedding with a cache", "rotate q and k before the call")

#: What Tandem lacks: what it would take, and what to do instead, by FlashAttention's name of it.
_LACKS = {
    "qv": ("no second query product", "concatenate qv to q and v to k"),
    "dropout_p": ("no dropout", "pass 0"),
    "alibi_slopes": ("no position bias", "pass None"),
    "k": _APPEND,
    "v": _APPEND,
    "cu_seqlens_k_new": _APPEND,
    "rotary_cos": _ROTARY,
    "rotary_sin": _ROTARY,
    "rotary_seqlens": _ROTARY,
    "cache_batch_idx": ("no indirect caches", "pass k_cache[cache_batch_idx] and v_cache[cache_batch_idx]"),
    "cache_leftpad": ("no padding before a sequence", "let sequences begin at row 0 of the cache"),
    "page_table": ("no paged caches", "gather the pages first: k_cache[page_table].flatten(1, 2)"),
    "block_table": ("no paged caches", "gather the blocks first: k_cache[block_table].flatten(1, 2)"),
}  # fmt: skip


def refuse(**given: Any) -> None:
    """Raises where one of FlashAttention's options that Tandem lacks is given: is not None, or 0."""
    for name, value in given.items():
        if value is None or (isinstance(value, (int, float)) and value == 0):
            continue
        lack, remedy = _LACKS[name]
        said = f"{value!r}" if isinstance(value, (int, float)) else "given"
        raise UnsupportedError(f"{name} is {said}, but Tandem has {lack}; {remedy}")


def without_dropout(position: int, parameter: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes 0 an error as the function's positional argument `position`, which is `parameter` there.

    FlashAttention-2 has dropout_p in that place, and its callers pass 0.0, which as a scale would give the
    mean of v. By name 0 means 0.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def checked(*arguments: _P.args, **options: _P.kwargs) -> _R:
            if len(arguments) > position:
                value = arguments[position]
                if isinstance(value, (int, float)) and value == 0:
                    raise InvalidArgumentError(
                        f"argument {position + 1} is {value!r}: that is FlashAttention-2's dropout_p, and "
                        f"{parameter} here; import from tandem.flash_attn2, or pass {parameter} by name"
                    )
            return function(*arguments, **options)

        return checked

    return decorate


def serve(module: ModuleType, *names: str) -> None:
    """Makes imports of `names` find `module`; an error where something else was imported by one of them."""
    for name in names:
        present = sys.modules.get(name)
        if present not in (None, module):
            raise InvalidArgumentError(
                f"{name} is imported already, from {getattr(present, '__file__', None)}; "
                "call serve() before that"
            )
    for name in names:
        sys.modules[name] = module


def _is_spread(t: Tensor) -> bool:
    """Whether a row's elements lie apart. What has no strides or no rows is for attention() to judge."""
    if t.layout is not torch.strided or t.is_nested or t.ndim == 0:
        return False
    return t.stride(-1) != 1 and t.shape[-1] != 1
