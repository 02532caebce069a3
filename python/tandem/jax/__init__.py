"""Attention in JAX, through XLA's foreign function interface.

from tandem.jax import attention

`attention` works under jit and grad (reverse mode), and under vmap one call after another. There is no
forward mode and no second derivative. The package is built with the headers of the jaxlib beside it; a build
without has no JAX, and says so when this is imported.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tandem import _arrays, _call
from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.functions import _functions
from tandem.jax import _ranks, _xla
from tandem.jax._ranks import row_order

__all__ = ["attention", "context_parallel_attention", "dot_product_attention", "row_order"]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sink: jax.Array | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    dropout_seed: int | jax.Array | None = None,
    dropout_places: jax.Array | None = None,
    **options: Any,
) -> Any:
    """As `tandem.attention`, on JAX arrays; all its arguments but ``out``, ``check`` and functions.
    Gradients flow to q, k, v, sink and bias, from the LSE too; those of a cache
    (``page_table`` and so on) are an error.

    The arrays may be traced; the other arguments are Python values. Arguments that break a rule are an error
    as the call is traced, the same as `tandem.attention`'s.

    Args:
      dropout_p: each entry of the softmax becomes 0 with this probability, below 1, and the others are
        divided by ``1 - dropout_p``. The entries are those that `tandem.attention` keeps of the same seed.
      dropout_seed: an integer, or a key of ``jax.random`` of two words, typed or not, that may be traced:
        ``jax.random.key(7)`` is the seed 7. Of a key of another kind take ``jax.random.bits(key, (2,),
        "uint32")``. One has to be given: JAX has no random numbers of its own to draw it from. On a GPU a
        call reads a key from the device's memory, for which the host waits for the stream.
      dropout_offset: an integer that makes another choice of the same seed.
      dropout_places: ``(batch, 4)`` int32, where a call has some rows and heads of a whole, so that it keeps
        what a call of the whole would: of each batch entry its first query head, counted through all batch
        entries; the places of its first query and of its first key; and the distance from row to row.
    """
    given = {name: options.pop(name, None) for name in _call.METADATA}
    _call.expect_options("tandem.jax.attention", options, _call.JAX)
    if given["gate"] is not None:
        raise UnsupportedError("gate is given to JAX; multiply the result by jax.nn.sigmoid(gate)")
    if out_dtype is not None:
        out_dtype = _arrays.dtype_named(out_dtype).name
    return_lse = _call.flag("return_lse", return_lse)
    given["causal_by_sequence"] = _call.integers(given["causal_by_sequence"])
    inputs = {"q": q, "k": k, "v": v} | ({} if sink is None else {"sink": sink})
    inputs = {name: jnp.asarray(array) for name, array in inputs.items()}
    score, seen, read = _functions_of(tuple(given.values()), inputs["q"], inputs["k"], bias, mask)
    call = _call.Call(**options)
    call.window = _call.pair("window", call.window)
    call.dropout_p = _call.number("dropout_p", call.dropout_p)
    call.dropout_offset = _call.word("dropout_offset", call.dropout_offset)
    call.dropout_seed, key = _seed_of(call.dropout_p, dropout_seed) if call.dropout_p != 0 else (0, None)
    asked = _xla.Options(tuple(getattr(call, name) for name in _call.JAX), out_dtype, score, seen)
    named = given | {"dropout_places": dropout_places}
    named["dropout_seed"] = key
    metadata = {name: jnp.asarray(array) for name, array in named.items() if array is not None}
    for name, array in read.items():
        (inputs if jnp.issubdtype(array.dtype, jnp.floating) else metadata)[name] = array
    out, lse, max_logits = _xla.attention(asked, inputs, metadata)
    max_logits = None if max_logits is None else jax.lax.stop_gradient(max_logits)
    return _call.returned(call, (out, lse, max_logits), return_lse)


def _seed_of(p: Any, seed: Any) -> tuple[int, jax.Array | None]:
    """The seed of a call with dropout as a number, or as the two words of a key."""
    if seed is None:
        raise InvalidArgumentError(
            f"dropout_p is {p!r} but dropout_seed is missing; pass a key of jax.random, or an integer"
        )
    if isinstance(seed, (int, np.integer)):
        return _call.word("dropout_seed", seed), None
    key: Any = seed
    if jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if getattr(key, "shape", None) != (2,) or key.dtype != jnp.uint32:
        given = f"an array of {seed.dtype} and shape {key.shape}" if hasattr(key, "dtype") else repr(seed)
        raise InvalidArgumentError(
            f"dropout_seed is {given}; pass an integer, a key of jax.random of two words, or of another key "
            "jax.random.bits(key, (2,), 'uint32')"
        )
    return 0, key


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
    dropout_rng: int | jax.Array | None = None,
    dropout_rate: float = 0.0,
) -> Any:
    """`jax.nn.dot_product_attention` on Tandem, with its arguments but ``implementation``, and dropout.

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
      dropout_rng, dropout_rate: as flax's function of this name has them, with ``broadcast_dropout=False``:
        ``dropout_seed`` and ``dropout_p`` of `attention`.
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
        dropout_p=dropout_rate,
        dropout_seed=dropout_rng,
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
      options: ``scale``, ``sink``, ``deterministic``, ``sm_limit`` and others of `attention`; those that are
        not taken are an error that says so. ``bias`` and ``mask`` are of whole sequences and the same on
        every device, their rows in the sequence's order; ``dropout_p``, ``dropout_seed`` and
        ``dropout_offset``, the same on every device, keep what one device keeps.
    """
    taken = (*(name for name in _call.PARTS if name in _call.JAX), "sink", "bias", "mask")
    _call.expect_options("tandem.jax.context_parallel_attention", options, taken)
    causal, return_lse = _call.flag("causal", causal), _call.flag("return_lse", return_lse)
    options |= {"causal": causal, "window": _call.pair("window", window)}
    return _ranks.attend(attention, q, k, v, axis_name, layout, return_lse, options)
