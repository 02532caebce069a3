"""What test_jax_ranks.py runs in a process of its own: four CPU devices are a choice of JAX's start."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tandem
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
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


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_rows(layout: str) -> None:
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


def test_errors() -> None:
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


#: Arrays sharded over the devices, under jit.
BATCH, LENGTH, HEADS, DIM = 4, 12, 4, 8
MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
WHERE = {
    "batch": PartitionSpec("x"),
    "batch over all": PartitionSpec(("x", "y")),
    "heads": PartitionSpec(None, None, "y"),
    "both": PartitionSpec("x", None, "y"),
    "rows": PartitionSpec(None, "x"),
}


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


CALLS: dict[str, Any] = {
    "causal": lambda: ({"causal": True}, {}),
    "sink": lambda: ({}, {"sink": random(HEADS)}),
    "lengths": lambda: ({"seqused_k": jnp.array([3, 12, 0, 7])}, {}),
    "mask": lambda: ({"mask": random(BATCH, 1, 1, LENGTH) > 0}, {}),
    "bias": lambda: ({}, {"bias": random(BATCH, HEADS, LENGTH, LENGTH)}),
    "bias of heads": lambda: ({}, {"bias": random(HEADS, 1, LENGTH)}),
    "bias of all": lambda: ({}, {"bias": random(LENGTH)}),
    "dropout": lambda: ({"dropout_p": 0.3, "dropout_seed": 7}, {}),
    "dropout by key": lambda: ({"dropout_p": 0.3, "dropout_seed": jax.random.key(7), "causal": True}, {}),
}


@pytest.mark.parametrize(
    ("name", "heads_kv"),
    [
        *((name, 2) for name in CALLS),
        *((name, n) for name in ("sink", "bias", "dropout") for n in (HEADS, 1)),
    ],
)
@pytest.mark.parametrize("where", WHERE)
def test_devices_compute_their_own(where: str, name: str, heads_kv: int) -> None:
    """With the results of one device, gradients included, and gather nothing that is theirs."""
    fixed, learned = CALLS[name]()
    qkv = [random(BATCH, LENGTH, heads, DIM) for heads in (HEADS, heads_kv, heads_kv)]
    seeds = random(BATCH, LENGTH, HEADS, DIM), random(BATCH, HEADS, LENGTH)

    def call(q: Any, k: Any, v: Any, learned: Any) -> Any:
        out, lse = attention(q, k, v, return_lse=True, **fixed, **learned)
        return (out * seeds[0]).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * seeds[1]).sum(), out

    step = jax.jit(jax.grad(call, argnums=(0, 1, 2, 3), has_aux=True))
    expected = step(*qkv, learned)
    spec = WHERE[where]
    divides_heads = len(spec) > 2
    keys_of = PartitionSpec(*spec[:2]) if heads_kv == 1 and divides_heads else spec
    shardings = [NamedSharding(MESH, s) for s in (spec, keys_of, keys_of)]
    divided = [jax.device_put(t, s) for t, s in zip(qkv, shardings, strict=True)]
    found = step(*divided, learned)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    if where != "rows" and (heads_kv > 1 or not divides_heads):
        assert found[0][0].sharding.is_equivalent_to(shardings[0], 4)
        assert "all-gather" not in step.lower(*divided, learned).compile().as_text()


def test_shards_under_vmap() -> None:
    q = random(3, BATCH, LENGTH, HEADS, DIM)
    found = jax.jit(jax.vmap(lambda t: attention(t, t, t)))(q)
    for i in range(3):
        np.testing.assert_allclose(found[i], attention(q[i], q[i], q[i]), rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    assert jax.device_count() == 4
    if pytest.main(["-q", "-x", "-p", "no:cacheprovider", __file__]) == 0:
        print("passed")
    else:
        sys.exit(1)
