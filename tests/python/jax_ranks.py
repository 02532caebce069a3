"""What test_jax_ranks.py runs in a process of its own: four CPU devices are a choice of JAX's start."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tandem
import torch
from jax.sharding import Mesh, PartitionSpec
from tandem.distributed import Layout
from tandem.jax import attention, context_parallel_attention, row_order

RANKS, ROWS = 4, 64
ROWS_OF = PartitionSpec(None, "rows")


def whole(layout: str, **options: Any) -> Any:
    """Attention over four devices as a function of whole tensors."""
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    order = row_order(layout, ROWS, RANKS)

    def one(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return context_parallel_attention(
            q, k, v, axis_name="rows", layout=layout, sink=sink, return_lse=True, **options
        )

    specs = (ROWS_OF, ROWS_OF, ROWS_OF, PartitionSpec())
    results = (ROWS_OF, PartitionSpec(None, None, "rows"))
    divided = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)

    def run(q: Any, k: Any, v: Any, sink: Any) -> Any:
        out, lse = divided(*(t[:, order] for t in (q, k, v)), sink)
        back = np.argsort(order)
        return out[:, back], lse[:, :, back]

    return jax.jit(run)


def same_as_one(layout: str, dtype: Any, **options: Any) -> None:
    keys = jax.random.split(jax.random.key(1), 6)
    q, k, v = (
        jax.random.normal(key, (2, ROWS, heads, 32)).astype(dtype)
        for key, heads in zip(keys[:3], (4, 2, 2), strict=True)
    )
    sink = jax.random.normal(keys[3], (4,))
    wanted, pull_one = jax.vjp(
        lambda q, k, v, sink: attention(q, k, v, sink=sink, return_lse=True, **options), q, k, v, sink
    )
    got, pull = jax.vjp(whole(layout, **options), q, k, v, sink)
    dout, dlse = (
        jax.random.normal(keys[4], q.shape).astype(dtype),
        jax.random.normal(keys[5], wanted[1].shape),
    )
    most = 1e-5 if dtype == jnp.float32 else 0.02
    for a, b in zip((*got, *pull((dout, dlse))), (*wanted, *pull_one((dout, dlse))), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(*(np.asarray(t, np.float32) for t in (a, b)), atol=most, rtol=most)


def gradient_of_bias(layout: str) -> None:
    """Of a bias that all devices have, with dropout: that of one device."""
    keys = jax.random.split(jax.random.key(2), 5)
    q, k, v, dout = (jax.random.normal(key, (1, ROWS, 2, 16)) for key in keys[:4])
    bias = jax.random.normal(keys[4], (1, 2, ROWS, ROWS))
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.3, "dropout_seed": 9}
    mesh, order = Mesh(np.array(jax.devices()), ("rows",)), row_order(layout, ROWS, RANKS)
    divided = jax.shard_map(
        lambda q, k, v, bias: context_parallel_attention(
            q, k, v, axis_name="rows", layout=layout, bias=bias, **options
        ),
        mesh=mesh,
        in_specs=(ROWS_OF, ROWS_OF, ROWS_OF, PartitionSpec()),
        out_specs=ROWS_OF,
        check_vma=False,
    )
    got = jax.jit(jax.grad(lambda b: (divided(*(t[:, order] for t in (q, k, v)), b) * dout[:, order]).sum()))
    wanted = jax.grad(lambda b: (attention(q, k, v, bias=b, **options) * dout).sum())
    np.testing.assert_allclose(got(bias), wanted(bias), atol=1e-5, rtol=1e-5)


def main() -> None:
    assert len(jax.devices()) == RANKS
    for layout in ("zigzag", "contiguous"):
        held: Layout = getattr(Layout, layout)(ROWS, RANKS)
        order = torch.cat([held.indices(r) for r in range(RANKS)])
        assert row_order(layout, ROWS, RANKS).tolist() == order.tolist()
        for dtype in (jnp.float32, jnp.bfloat16):
            same_as_one(layout, dtype, causal=True)
            same_as_one(layout, dtype, causal=True, window=(9, -1), softcap=3.0)
            same_as_one(layout, dtype, scale=0.3)
        bias = jax.random.normal(jax.random.key(5), (4, ROWS, ROWS))
        seen = jax.random.bernoulli(jax.random.key(6), 0.7, (2, 1, ROWS, ROWS))
        dropout = {"dropout_p": 0.3, "dropout_seed": jax.random.key(7), "dropout_offset": 2**33 + 5}
        same_as_one(layout, jnp.float32, causal=True, window=(30, -1), bias=bias, mask=seen, **dropout)
        same_as_one(layout, jnp.float32, bias=bias[:, :1], mask=seen[..., :1, :])
        gradient_of_bias(layout)
    for message, options in {
        "without causal, which looks ahead": {"window": (9, 4)},
        "layout is 'striped'; it must be one of 'contiguous', 'zigzag'": {"layout": "striped"},
        "page_table is not an option": {"page_table": None},
    }.items():
        with pytest.raises(tandem.TandemError, match=message):
            x = jnp.zeros((1, ROWS, 2, 16))
            context_parallel_attention(x, x, x, axis_name="rows", **options)
    with pytest.raises(tandem.InvalidArgumentError, match=r"broadcasts to \(batch, heads_q, 64, 64\)"):
        whole("zigzag", bias=jnp.zeros((16, ROWS)))(x, x, x, jnp.zeros(2))
    with pytest.raises(tandem.InvalidArgumentError, match="60 rows are not divided evenly into 8 parts"):
        row_order("zigzag", 60, RANKS)
    print("passed")


if __name__ == "__main__":
    main()
