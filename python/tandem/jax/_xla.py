"""One call of `tandem.jax` as XLA sees it: targets of its foreign function interface, and their gradient."""

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

from tandem import _arrays, _call, _core
from tandem._errors import UnsupportedError
from tandem.jax import _shards

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
class Options:
    """What a traced call is specialised for."""

    #: of _call.JAX
    values: tuple[Any, ...]
    out_dtype: str | None
    #: functions as text, which read t0, t1, ...; "": none
    score_function: str = ""
    mask_function: str = ""

    @functools.cached_property
    def call(self) -> _call.Call:
        return _call.Call(**dict(zip(_call.JAX, self.values, strict=True)))

    def attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {"score_function": self.score_function, "mask_function": self.mask_function}
        for name, kind in _call.KINDS:
            value = getattr(self.call, name)
            if name in _call.JAX and value is not None:
                found[name] = _ATTRIBUTE[kind](value)
        return found


#: An option's kind as an attribute of a target, of the type that each_option's place in C++ has.
_ATTRIBUTE: dict[str, Any] = {
    "float": np.float32,
    "float?": np.float32,
    "bool": bool,
    "SymInt": np.int64,
    "word": np.uint64,
    "window": functools.partial(np.array, dtype=np.int64),
    "precision": lambda name: np.int64(_core.Precision[name].value),
}


def _outputs(options: Options, q: jax.Array, v: jax.Array) -> dict[str, jax.ShapeDtypeStruct]:
    name = _arrays.name_of(_call.result_dtype(_arrays.dtype_of("q", q), options.out_dtype))
    by_row = ("lse", "max_logits") if options.call.finds_max_logits else ("lse",)
    return {
        "out": jax.ShapeDtypeStruct((*q.shape[:-1], *v.shape[-1:]), name),
        **dict.fromkeys(by_row, jax.ShapeDtypeStruct(_call.lse_shape(q), jnp.float32)),
    }


def _check(options: Options, arrays: dict[str, Any], backward: bool) -> None:
    """Raises what the library would, from shapes and dtypes alone."""

    def view(name: str, array: Any) -> _core.Tensor:
        strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
        return _core.Tensor(0, _arrays.dtype_of(name, array), array.shape, strides)

    names = _core.BACKWARD if backward else _core.FORWARD
    views = tuple(view(name, arrays[name]) if name in arrays else None for name in names)
    asked = options.call.options()
    if options.score_function or options.mask_function:
        read = [view(f"t{n}", arrays[f"t{n}"]) for n in range(len(arrays)) if f"t{n}" in arrays]
        wanted = [n for n in range(len(read)) if f"dt{n}" in arrays]
        texts = (options.score_function or None, options.mask_function or None)
        asked.functions = _core.Functions(*texts, read, wanted)
        asked.set_captured_gradients([view(f"dt{n}", arrays[f"dt{n}"]) for n in wanted])
    if "dropout_places" in arrays:
        asked.set_dropout_places(view("dropout_places", arrays["dropout_places"]))
    _core.workspace_bytes(views, asked, backward)


def _run(
    target: str, options: Options, arrays: dict[str, Any], results: dict[str, jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    _check(options, {**arrays, **results}, target == "tandem_backward")

    def run(results: dict[str, jax.ShapeDtypeStruct], arrays: dict[str, jax.Array]) -> Any:
        call = jax.ffi.ffi_call(target, tuple(results.values()), vmap_method="sequential")
        names = {"inputs": ",".join(arrays), "outputs": ",".join(results)}
        return tuple(call(*arrays.values(), **names, **options.attributes()))

    if jax.device_count() == 1 or not _WHOLE.isdisjoint(arrays):
        return list(run(results, arrays))
    return list(_shards.Shards(run, arrays, results, options.call.dropout_p != 0)(*arrays.values()))


#: Arrays of calls that are not divided over devices: k and v have no batch, or the call is a part itself.
_WHOLE = frozenset(
    (
        "cu_seqlens_q",
        "cu_seqlens_k",
        "indices",
        "topk_length",
        "page_table",
        "leftpad_k",
        "cache_batch_idx",
        "dropout_places",
    )
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    options: Options, inputs: dict[str, jax.Array], metadata: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    results = _outputs(options, inputs["q"], inputs["v"])
    out, lse, *max_logits = _run("tandem_forward", options, {**inputs, **metadata}, results)
    return out, lse, max_logits[0] if max_logits else None


def _attention_forward(
    options: Options, inputs: dict[str, jax.Array], metadata: dict[str, jax.Array]
) -> tuple[Any, Any]:
    results = attention(options, inputs, metadata)
    return results, (inputs, metadata, *results)


def _attention_backward(options: Options, saved: Any, gradients: Any) -> tuple[Any, Any]:
    inputs, metadata, out, lse, max_logits = saved
    dout, dlse, _ = gradients
    arrays = {**inputs, **metadata, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    if options.call.saves_max_logits:
        arrays["max_logits"] = max_logits
    return _gradients(options, tuple(inputs), arrays), {
        name: _zero(array) for name, array in metadata.items()
    }


def _zero(array: jax.Array) -> Any:
    """The gradient of an argument that none flows through, as JAX writes it."""
    integer = jnp.issubdtype(array.dtype, jnp.integer)
    return np.zeros(array.shape, jax.dtypes.float0) if integer else jnp.zeros_like(array)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(
    options: Options, names: tuple[str, ...], arrays: dict[str, jax.Array]
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


attention.defvjp(_attention_forward, _attention_backward)
