"""Attention in JAX, through XLA's foreign function interface.

from tandem.jax import attention

`attention` works under jit and grad (reverse mode), and under vmap one call after another. There is no
forward mode and no second derivative. The package is built with the headers of the jaxlib beside it; a build
without has no JAX, and says so when this is imported.
"""

from __future__ import annotations

import atexit
import functools
import math
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tandem import _arrays, _call, _core, _functions, _jax_ranks
from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem._jax_ranks import row_order

__all__ = ["attention", "context_parallel_attention", "dot_product_attention", "row_order"]

_handlers = _core.jax_handlers()
if not _handlers:
    raise ImportError(
        "this tandem was built without jaxlib's headers; install jaxlib first, then tandem with "
        "`pip install --no-build-isolation`"
    )
for (_target, _platform), _capsule in _handlers.items():
    jax.ffi.register_ffi_target(_target, _capsule, platform=_platform)


@atexit.register
def _end_calls() -> None:
    """After Ctrl-C a process ends calls on XLA's threads: JAX, whose exit comes later, waits for them."""
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        _core.end_calls()


@dataclass(frozen=True)
class _Options:
    """What a traced call is specialised for."""

    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    deterministic: bool
    pad: bool
    threads: int
    precision: str
    strict: bool
    split_size: int
    out_dtype: str | None
    #: functions as text, which read t0, t1, ...; "": none
    score_function: str = ""
    mask_function: str = ""

    def attributes(self) -> dict[str, Any]:
        return {
            "has_scale": self.scale is not None,
            "scale": np.float32(self.scale or 0.0),
            "causal": self.causal,
            "window_left": np.int64(self.window[0]),
            "window_right": np.int64(self.window[1]),
            "softcap": np.float32(self.softcap),
            "deterministic": self.deterministic,
            "pad": self.pad,
            "threads": np.int64(self.threads),
            "precision": np.int64(self.call().precision_code().value),
            "strict": self.strict,
            "split_size": np.int64(self.split_size),
            "score_function": self.score_function,
            "mask_function": self.mask_function,
        }

    def call(self) -> _call.Call:
        return _call.Call(
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            deterministic=self.deterministic,
            pad=self.pad,
            threads=self.threads,
            precision=self.precision,
            strict=self.strict,
            split_size=self.split_size,
        )


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_k: jax.Array | None = None,
    seqused_q: jax.Array | None = None,
    seqused_k: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    page_table: jax.Array | None = None,
    leftpad_k: jax.Array | None = None,
    cache_batch_idx: jax.Array | None = None,
    causal_by_sequence: jax.Array | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    pad: bool = False,
    deterministic: bool = False,
    threads: int = 0,
    precision: str = "exact",
    strict: bool = False,
    split_size: int = 0,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> Any:
    """As `tandem.attention`, on JAX arrays; all its arguments but ``out``, ``check``, dropout and functions.
    Gradients flow to q, k, v, sink and bias, from the LSE too; those of a cache
    (``page_table`` and so on) are an error.

    The arrays may be traced; the other arguments are Python values. Arguments that break a rule are an error
    as the call is traced, the same as `tandem.attention`'s.
    """
    if out_dtype is not None:
        out_dtype = _arrays.dtype_named(out_dtype).name
    return_lse = _call.flag("return_lse", return_lse)
    window = _call.pair("window", window)
    given = (
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        q_scale,
        k_scale,
        v_scale,
        page_table,
        leftpad_k,
        cache_batch_idx,
        _call.integers(causal_by_sequence),
    )
    inputs = {"q": q, "k": k, "v": v} | ({} if sink is None else {"sink": sink})
    inputs = {name: jnp.asarray(array) for name, array in inputs.items()}
    score, seen, read = _functions_of(given, inputs["q"], inputs["k"], bias, mask)
    options = _Options(
        scale,
        causal,
        window,
        softcap,
        deterministic,
        pad,
        threads,
        precision,
        strict,
        split_size,
        out_dtype,
        score,
        seen,
    )
    metadata = {
        name: jnp.asarray(array)
        for name, array in zip(_call.METADATA, given, strict=True)
        if array is not None
    }
    for name, array in read.items():
        (inputs if jnp.issubdtype(array.dtype, jnp.floating) else metadata)[name] = array
    out, lse = _attention(options, inputs, metadata)
    return (out, lse) if return_lse else out


def _functions_of(
    metadata: tuple[Any, ...], q: jax.Array, k: jax.Array, bias: Any, mask: Any
) -> tuple[str, str, dict[str, jax.Array]]:
    """A score and a mask function as text, and what they read, by its name in the text."""
    if bias is mask is None:
        return "", "", {}
    shape, packed = _functions.pairs_of(metadata, q, k)
    bias, mask = (None if x is None else jnp.asarray(x) for x in (bias, mask))
    functions = _functions.trace_functions(shape, None, bias=bias, mask=mask, packed=packed)
    if functions is None:
        return "", "", {}
    arrays = (a.astype(jnp.int8) if a.dtype == jnp.bool_ else a for a in functions.arrays)
    return functions.score or "", functions.mask or "", {f"t{n}": a for n, a in enumerate(arrays)}


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` on Tandem, with its arguments but ``implementation``.

    Its causal masks and windows are aligned at the top left: query i sees keys up to i. Where they are not
    those of `attention`, aligned at the bottom right, they become a mask array.

    Args:
      query: ``(batch, seqlen_q, heads_q, head_dim)``, or one sequence without the batch.
      key, value: ``(batch, seqlen_k, heads_kv, head_dim)``; heads_kv divides heads_q.
      bias: numbers added to scores; broadcasts to ``(batch, heads_q, seqlen_q, seqlen_k)``.
      mask: booleans of such a shape, True where a key is seen.
      scale: multiplies the products. Default ``head_dim ** -0.5``.
      is_causal: query i sees keys up to i.
      query_seq_lengths, key_value_seq_lengths: ``(batch,)``: the rows that take part; others give 0.
      local_window_size: ``(left, right)``, or one number for both.
      return_residual: also return the LSE, ``(batch, seqlen_q, heads_q)``.
    """
    single = query.ndim == 3
    if single:
        query, key, value = query[None], key[None], value[None]
    rows, keys = query.shape[1], key.shape[1]
    size = local_window_size
    left, right = (-1, -1) if size is None else (size, size) if isinstance(size, int) else size
    causal = _call.flag("is_causal", is_causal)
    lengths: dict[str, Any] = {"seqused_q": query_seq_lengths, "seqused_k": key_value_seq_lengths}
    if (causal or (left, right) != (-1, -1)) and (
        rows != keys or any(x is not None for x in lengths.values())
    ):
        distance = jnp.arange(keys) - jnp.arange(rows)[:, None]
        seen = distance <= (0 if causal else right if right >= 0 else keys)
        seen &= distance >= (-left if left >= 0 else -rows)
        mask = seen if mask is None else mask & seen
        causal, left, right = False, -1, -1
    out, lse = attention(
        query,
        key,
        value,
        scale=scale,
        causal=causal,
        window=(left, right),
        bias=bias,
        mask=mask,
        return_lse=True,
        pad=True,
        **lengths,
    )
    lse = jnp.swapaxes(lse, 1, 2)
    if single:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def context_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    layout: str = "zigzag",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Exact attention over sequences whose rows are divided along a mesh's axis; inside ``jax.shard_map``.

    Every device passes its rows, ``(batch, rows, heads, head_dim)``, and gets their results. Gradients flow;
    those of keys are added up in f32.

    Call shard_map with ``check_vma=False``: XLA's foreign functions don't tell over which axes results vary.

    Args:
      axis_name: the mesh's axis that rows are divided over.
      layout: which rows a device has, as of `tandem.distributed.Layout`: "zigzag", a part near the start and
        one near the end, or "contiguous". `row_order` sorts a sequence's rows for it.
      causal, window, return_lse: as for `attention`; a window comes with ``causal``.
      options: ``scale``, ``softcap``, ``sink``, ``deterministic`` and ``pad`` of `attention`.
    """
    unknown = options.keys() - {"scale", "softcap", "sink", "deterministic", "pad"}
    if unknown:
        raise InvalidArgumentError(
            f"{sorted(unknown)[0]} is not an option of attention over devices; leave it out"
        )
    causal, return_lse = _call.flag("causal", causal), _call.flag("return_lse", return_lse)
    options |= {"causal": causal, "window": _call.pair("window", window)}
    return _jax_ranks.attend(attention, q, k, v, axis_name, layout, return_lse, options)


def _outputs(options: _Options, q: jax.Array, v: jax.Array) -> dict[str, jax.ShapeDtypeStruct]:
    name = _arrays.name_of(_call.result_dtype(_arrays.dtype_of("q", q), options.out_dtype))
    return {
        "out": jax.ShapeDtypeStruct((*q.shape[:-1], *v.shape[-1:]), name),
        "lse": jax.ShapeDtypeStruct(_call.lse_shape(q), jnp.float32),
    }


def _check(options: _Options, arrays: dict[str, Any], backward: bool) -> None:
    """Raises what the library would, from shapes and dtypes alone."""

    def view(name: str, array: Any) -> _core.Tensor:
        strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
        return _core.Tensor(0, _arrays.dtype_of(name, array), array.shape, strides)

    names = _core.BACKWARD if backward else _core.FORWARD
    views = tuple(view(name, arrays[name]) if name in arrays else None for name in names)
    asked = options.call().options()
    if options.score_function or options.mask_function:
        read = [view(f"t{n}", arrays[f"t{n}"]) for n in range(len(arrays)) if f"t{n}" in arrays]
        wanted = [n for n in range(len(read)) if f"dt{n}" in arrays]
        asked.set_functions(options.score_function or None, options.mask_function or None, read, wanted)
        asked.set_captured_gradients([view(f"dt{n}", arrays[f"dt{n}"]) for n in wanted])
    _core.explain(views, asked, backward)


def _run(
    target: str, options: _Options, arrays: dict[str, Any], results: dict[str, jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    _check(options, {**arrays, **results}, target == "tandem_backward")
    call = jax.ffi.ffi_call(target, tuple(results.values()), vmap_method="sequential")
    names = {"inputs": ",".join(arrays), "outputs": ",".join(results)}
    return list(call(*arrays.values(), **names, **options.attributes()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    options: _Options, inputs: dict[str, jax.Array], metadata: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    results = _outputs(options, inputs["q"], inputs["v"])
    out, lse = _run("tandem_forward", options, {**inputs, **metadata}, results)
    return out, lse


def _attention_forward(
    options: _Options, inputs: dict[str, jax.Array], metadata: dict[str, jax.Array]
) -> tuple[Any, Any]:
    out, lse = _attention(options, inputs, metadata)
    return (out, lse), (inputs, metadata, out, lse)


def _attention_backward(options: _Options, saved: Any, gradients: Any) -> tuple[Any, Any]:
    inputs, metadata, out, lse = saved
    dout, dlse = gradients
    arrays = {**inputs, **metadata, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    return _gradients(options, tuple(inputs), arrays), {
        name: _zero(array) for name, array in metadata.items()
    }


def _zero(array: jax.Array) -> Any:
    """The gradient of an argument that none flows through, as JAX writes it."""
    integer = jnp.issubdtype(array.dtype, jnp.integer)
    return np.zeros(array.shape, jax.dtypes.float0) if integer else jnp.zeros_like(array)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(
    options: _Options, names: tuple[str, ...], arrays: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """The gradient by each of the arrays in `names`."""

    def run(names: list[str], dtype: Any = None) -> dict[str, jax.Array]:
        shapes = (jax.ShapeDtypeStruct(arrays[name].shape, dtype or arrays[name].dtype) for name in names)
        results = dict(zip((f"d{name}" for name in names), shapes, strict=True))
        return dict(zip(names, _run("tandem_backward", options, arrays, results), strict=True))

    gradients = run([name for name in names if name != "t0"])
    if "t0" in names:  # the bias's by a call of its own, which XLA leaves out where nobody asks for it
        of_bias = run(["t0"], jnp.float32)
        gradients["t0"] = of_bias["t0"].astype(arrays["t0"].dtype)
    return gradients


@_gradients.defjvp  # type: ignore[untyped-decorator]
def _no_second_derivative(*_: Any) -> Any:
    raise UnsupportedError("tandem.jax.attention has no second derivative")


_attention.defvjp(_attention_forward, _attention_backward)
