"""Attention over the devices of a JAX mesh axis, inside jax.shard_map.

Every device has as many rows, in one part (contiguous) or two (zigzag). K and V of all devices are gathered,
and each part of the queries is one call, whose number of keys is known as it runs: one program for all.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.jax._shards import places

#: Parts of a sequence that a device holds.
PARTS = {"contiguous": 1, "zigzag": 2}


def row_order(layout: str, seqlen: int, ranks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The rows of a sequence, device by device: ``x[:, row_order(...)]`` is what shard_map is to divide, and
    ``argsort`` of it is the way back. The devices then hold what `tandem.distributed.Layout` gives ranks."""
    parts = _parts(layout)
    if seqlen % (parts * ranks):
        raise InvalidArgumentError(
            f"{seqlen} rows are not divided evenly into {parts * ranks} parts; pad the sequence, since "
            "devices of a mesh have shards of one size"
        )
    each = np.arange(seqlen, dtype=np.int64).reshape(parts * ranks, -1)
    order = np.arange(ranks)
    if parts == 2:
        order = np.stack([order, 2 * ranks - 1 - order], 1).ravel()
    return each[order].ravel()


def _parts(layout: str) -> int:
    if layout not in PARTS:
        names = ", ".join(repr(name) for name in PARTS)
        raise InvalidArgumentError(f"layout is {layout!r}; it must be one of {names}")
    return PARTS[layout]


def attend(
    attention: Any, q: Any, k: Any, v: Any, axis_name: str, layout: str, return_lse: bool, options: Any
) -> Any:
    """What `tandem.jax.context_parallel_attention` returns; ``attention`` is that of one device."""
    causal, window = options["causal"], options["window"]
    if not causal and (window[0] >= 0 or window[1] >= 0):
        raise UnsupportedError(
            f"window is {window} without causal, which looks ahead of a device's rows; pass causal=True, or "
            "take tandem.distributed in PyTorch"
        )
    parts, size = _parts(layout), jax.lax.axis_size(axis_name)
    rows = q.shape[1]
    if q.ndim != 4 or any(t.ndim != 4 or t.shape[1] != rows for t in (k, v)) or rows % parts:
        raise InvalidArgumentError(
            f"q, k and v have shapes {q.shape}, {k.shape} and {v.shape}; inside shard_map they are (batch, "
            f"rows, heads, head_dim) with as many rows, in {parts} equal parts"
        )
    back = np.argsort(row_order(layout, rows * size, size)) if parts > 1 else None
    keys, values = (
        _gathered(t, axis_name, parts, None if back is None else tuple(back.tolist())) for t in (k, v)
    )
    rank, each = jax.lax.axis_index(axis_name), rows // parts
    found = []
    for part, last in enumerate((rank, 2 * size - 1 - rank)[:parts]):
        used = jnp.full((q.shape[0],), (last + 1) * each, jnp.int32) if causal else None
        mine = q[:, part * each : (part + 1) * each]
        call = {**options, "seqused_k": used, "return_lse": True}
        for name in ("bias", "mask"):
            if options.get(name) is not None:
                call[name] = _rows_of(name, options[name], last * each, each, rows * size)
        if options.get("dropout_p", 0) != 0:
            call["dropout_places"] = places(q, q.shape[2], row=last * each)
        found.append(attention(mine, keys[part], values[part], **call))
    out = jnp.concatenate([out for out, _ in found], 1)
    return (out, jnp.concatenate([lse for _, lse in found], 2)) if return_lse else out


def _rows_of(name: str, whole: Any, first: Any, count: int, rows: int) -> Any:
    """The rows for some queries of an array that broadcasts to the scores of whole sequences."""
    whole = jnp.asarray(whole)
    if whole.ndim < 2 or whole.shape[-2] == 1:
        return whole
    if whole.shape[-2] != rows:
        raise InvalidArgumentError(
            f"{name} has shape {whole.shape}; over devices it is of whole sequences and broadcasts to "
            f"(batch, heads_q, {rows}, {rows})"
        )
    return jax.lax.dynamic_slice_in_dim(whole, first, count, whole.ndim - 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(t: Any, axis_name: str, parts: int, back: tuple[int, ...] | None) -> tuple[Any, ...]:
    """The rows of all devices, in the sequence's order, once for each part that computes with them."""
    whole = jax.lax.all_gather(t, axis_name, axis=1, tiled=True)
    if back is not None:
        whole = whole[:, np.array(back)]
    return (whole,) * parts


def _gathered_forward(t: Any, axis_name: str, parts: int, back: tuple[int, ...] | None) -> Any:
    return _gathered(t, axis_name, parts, back), None


def _gathered_backward(axis_name: str, parts: int, back: tuple[int, ...] | None, _: None, given: Any) -> Any:
    """The sum over parts and devices, in f32."""
    total = sum((each.astype(jnp.float32) for each in given[1:]), given[0].astype(jnp.float32))
    if back is not None:
        total = total[:, np.argsort(np.array(back))]
    own = jax.lax.psum_scatter(total, axis_name, scatter_dimension=1, tiled=True)
    return (own.astype(given[0].dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
