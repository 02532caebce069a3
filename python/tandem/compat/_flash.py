"""What `flash_attn` and `flash_attn2` share: FlashAttention's options as Tandem's, and what Tandem lacks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tandem import _call
from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.compat import _chunks
from tandem.torch import _calls, _record, _with_functions

#: What FlashAttention calls Tandem's arguments, for `_errors.named`: those of all its functions, ...
NAMES = {
    "scale": "softmax_scale",
    "window": "window_size",
    "window_left": "window_size[0]",
    "window_right": "window_size[1]",
    "q_scale": "q_descale",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}
#: ... those of flash_attn_with_kvcache, ...
CACHE_NAMES = NAMES | {
    "k": "k_cache",
    "v": "v_cache",
    "seqused_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad",
    "k_new": "k",
    "v_new": "v",
    "cu_seqlens_new": "cu_seqlens_k_new",
    "rotary_offsets": "rotary_seqlens",
}
#: ... and those that have several names.
SINKS = ("sink", "learnable_sink", "s_aux", "sinks")
TABLES = ("page_table", "block_table")


def one_of(names: tuple[str, ...], *values: Any) -> Any:
    """The argument that has these names, of which one may be given."""
    for value in values:
        if value is not None:
            break
    else:
        return None
    given = [(names[i], value) for i, value in enumerate(values) if value is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"{given[0][0]} and {given[1][0]} are both given, two names of one; pass one of them"
        )
    return given[0][1]


_NOT_GIVEN = (None,) * len(_call.METADATA)


def problem(
    scale: float | None,
    causal: bool,
    window_size: Any,
    metadata: tuple[Any, ...] = (),
    softcap: float = 0,
    deterministic: bool = False,
    split_size: int = 0,
) -> _call.Call:
    """The call that means this. `metadata`: the first of _call.METADATA; the others are None. The last three
    are tandem.attention's."""
    left, right = _call.pair("window_size", window_size)
    # FlashAttention-4 writes an unbounded side as None.
    window = (-1 if left is None else left, -1 if right is None else right)
    metadata += _NOT_GIVEN[len(metadata) :]
    # Keywords would take a third of the time that it takes to make a call.
    call = _call.Call(scale, causal, window, softcap, deterministic, False, 0, metadata)
    call.split_size = split_size
    return call


def add_alibi(call: _call.Call, q: Any, k: Any, slopes: Any, chunk: Any = 0) -> None:
    """Gives the call FlashAttention's alibi_slopes, where they are not None."""
    if slopes is not None:
        if _chunks.length(chunk) > 0:
            raise UnsupportedError(
                "alibi_slopes is given with attention_chunk, but Tandem has no position bias in chunks; pass "
                "a mask_mod of chunks to tandem.attention"
            )
        only_tensors(q=q, k=k, alibi_slopes=slopes)
        call.functions = _with_functions.of_call(call, q, k, None, None, slopes, None, None)


def run(
    call: _call.Call,
    q: Any,
    k: Any,
    v: Any,
    sink: Any = None,
    return_lse: bool = False,
    chunk: Any = 0,
    out: Any = None,
) -> Any:
    """The result (`out`, where given), or it and the LSE. `chunk` is FlashAttention's attention_chunk."""
    # As one comparison or none, of what most calls leave out: functions called are what a call costs most.
    if (type(chunk) is not int or chunk != 0) and _chunks.length(chunk) > 0:
        results = _run_in_chunks(call, q, k, v, sink, return_lse, _chunks.length(chunk))
        if out is None:
            return results
        return (out.copy_(results[0]), results[1]) if return_lse else out.copy_(results)
    if sink is not None:
        sink = plain(sink)
    if out is None and call.functions is None and call.dropout_p == 0:
        results = _record.quick(call, q, k, v, sink, return_lse)
        if results is not None:
            return results
    if _takes_fp8(call, q, k, v):
        call = replace(call, precision="fp8")
    only_tensors(q=q, k=k, v=v)
    # FlashAttention copies tensors whose last dimension is not contiguous.
    q, k, v = gathered(q), gathered(k), gathered(v)
    return _calls.in_full(call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=None)


def _takes_fp8(call: _call.Call, q: Any, k: Any, v: Any) -> bool:
    """Whether the call is one of FlashAttention-3's in FP8 on a GPU, which has no kernel that computes it
    exactly. Exact products take caches, which the kernels of 8-bit products do not."""
    if not (isinstance(q, Tensor) and q.is_cuda and q.dtype == torch.float8_e4m3fn):
        return False
    given = dict(zip(_call.METADATA, call.metadata, strict=True))
    is_cache = given["seqused_k"] is not None and given["cu_seqlens_k"] is None
    is_cache = is_cache or any(given[name] is not None for name in _call.FORWARD_ONLY)
    return not is_cache and not call.asks_pairs and call.precision == "exact"


def plain(sink: Any) -> Any:
    """A sink in float32. FlashAttention-4's are bfloat16; the gradient is converted back."""
    half = isinstance(sink, Tensor) and sink.dtype in (torch.float16, torch.bfloat16)
    return sink.float() if half else sink


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


def is_readable(t: Tensor) -> bool:
    """Whether what `t` holds can be looked at: on a GPU that would wait for it, and a compiler has none."""
    return t.is_cpu and not torch.compiler.is_compiling() and type(t).__name__ != "FakeTensor"


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


def three_in_one(qkv: Any, num_heads_q: Any) -> Any:
    """q, k and v of one tensor; with `num_heads_q`, q has so many heads, and k and v halve the others."""
    only_packed("pass q, k and v of all its sequences to flash_attn_varlen_func", qkv=qkv)
    heads: tuple[Any, ...] = (Integral, torch.SymInt)
    if num_heads_q is not None and not isinstance(num_heads_q, heads):
        raise InvalidArgumentError(
            f"num_heads_q is {num_heads_q!r}; pass an integer, or None for qkv of five dimensions"
        )
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        return qkv.unbind(2)
    if (
        qkv.ndim == 4
        and num_heads_q is not None
        and 0 < num_heads_q < qkv.shape[2]
        and (qkv.shape[2] - num_heads_q) % 2 == 0
    ):
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        return torch.split(qkv, [num_heads_q, heads_kv, heads_kv], dim=2)
    raise InvalidArgumentError(
        f"qkv has shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}; pass (batch, seqlen, 3, heads, "
        "head_dim), or (batch, seqlen, heads_q + 2 * heads_kv, head_dim) and num_heads_q"
    )


#: What Tandem lacks: what it would take, and what to do instead, by the name that FlashAttention or vLLM has.
_LACKS = {
    "dropout_p": ("no dropout", "pass 0"),
    "output_scale": ("no scaled output", "multiply the result by it"),
    "cp_world_size": ("no cache of every other key", "pass 1, and merge the ranks' results by their LSE"),
    "mask_mod": ("no mask functions", "pass None"),
    "block_sparse_tensors": ("no block-sparse masks", "pass None"),
    "aux_tensors": ("no tensors for mask functions", "pass None"),
}


def refuse(**given: Any) -> None:
    """Raises where one of FlashAttention's options that Tandem lacks is given: is not None, or 0."""
    for name, value in given.items():
        if value is None or (isinstance(value, (int, float)) and value == 0):
            continue
        lack, remedy = _LACKS[name]
        said = f"{value!r}" if isinstance(value, (int, float)) else "given"
        raise UnsupportedError(f"{name} is {said}, but Tandem has {lack}; {remedy}")


def without_dropout(position: int, parameter: str) -> Callable[[tuple[Any, ...]], None]:
    """Makes 0 an error as a function's positional argument `position`, which is `parameter` there, for
    `_errors.named`.

    FlashAttention-2 has dropout_p in that place, and its callers pass 0.0, which as a scale would give the
    mean of v. By name 0 means 0.
    """

    def validate(arguments: tuple[Any, ...]) -> None:
        if len(arguments) > position:
            value = arguments[position]
            if isinstance(value, (int, float)) and value == 0:
                raise InvalidArgumentError(
                    f"argument {position + 1} is {value!r}: that is FlashAttention-2's dropout_p, and "
                    f"{parameter} here; import from tandem.flash_attn2, or pass {parameter} by name"
                )

    return validate


def serve(module: ModuleType, *names: str) -> ModuleType:
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
    return module


def gathered(t: Tensor) -> Tensor:
    """The tensor, or a copy with contiguous rows where a row's elements lie apart."""
    return t.contiguous() if _is_spread(t) else t


def _is_spread(t: Tensor) -> bool:
    """Whether a row's elements lie apart. What has no strides or no rows is for attention() to validate."""
    if t.layout is not torch.strided or t.is_nested or t.ndim == 0:
        return False
    return t.stride(-1) != 1 and t.shape[-1] != 1
