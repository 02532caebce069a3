"""What test_jax_ranks.py runs in a process of its own: arrays sharded over four CPU devices, under jit."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tandem.jax import attention

BATCH, ROWS, HEADS, DIM = 4, 12, 4, 8
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
    "mask": lambda: ({"mask": random(BATCH, 1, 1, ROWS) > 0}, {}),
    "bias": lambda: ({}, {"bias": random(BATCH, HEADS, ROWS, ROWS)}),
    "bias of heads": lambda: ({}, {"bias": random(HEADS, 1, ROWS)}),
    "bias of all": lambda: ({}, {"bias": random(ROWS)}),
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
    qkv = [random(BATCH, ROWS, heads, DIM) for heads in (HEADS, heads_kv, heads_kv)]
    seeds = random(BATCH, ROWS, HEADS, DIM), random(BATCH, HEADS, ROWS)

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


def test_vmap() -> None:
    q = random(3, BATCH, ROWS, HEADS, DIM)
    found = jax.jit(jax.vmap(lambda t: attention(t, t, t)))(q)
    for i in range(3):
        np.testing.assert_allclose(found[i], attention(q[i], q[i], q[i]), rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    assert jax.device_count() == 4
    if pytest.main(["-q", "-x", "-p", "no:cacheprovider", __file__]) == 0:
        print("passed")
    else:
        sys.exit(1)
