"""Biases and masks in JAX, beside jax.nn.dot_product_attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tandem

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("tandem.jax", reason="this build has no JAX", exc_type=ImportError)

import jax.numpy as jnp  # noqa: E402
from tandem.jax import attention, dot_product_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_on_the_cpu")

B, T, S, H, D = 2, 13, 19, 4, 16


def arrays(rows: int = T, keys: int = S, heads_kv: int = H) -> list[jax.Array]:
    random = np.random.default_rng(3)
    shapes = ((B, rows, H, D), (B, keys, heads_kv, D), (B, keys, heads_kv, D))
    return [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]


def bias_of(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(5).standard_normal(shape, np.float32)).astype(dtype)


def mask_of(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(6).random(shape) > 0.3).at[..., 0].set(True)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": bias_of(B, H, T, S)},
    "broadcast bias": {"bias": bias_of(1, H, 1, S)},
    "bias of two dimensions": {"bias": bias_of(T, S)},
    "mask": {"mask": mask_of(B, 1, T, S)},
    "both": {"bias": bias_of(1, H, T, S), "mask": mask_of(1, 1, T, S)},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (4, 2)},
    "causal window": {"is_causal": True, "local_window_size": 5, "bias": bias_of(1, H, T, S)},
    "lengths": {"key_value_seq_lengths": jnp.array([7, 19]), "query_seq_lengths": jnp.array([13, 9])},
    "causal with lengths": {"is_causal": True, "key_value_seq_lengths": jnp.array([7, 19])},
    "scale": {"scale": 0.3, "bias": bias_of(1, 1, T, S)},
}


@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_jaxs(case: str, heads_kv: int) -> None:
    options = dict(CASES[case])
    bias = options.pop("bias", None)
    q, k, v = arrays(heads_kv=heads_kv)
    dout = bias_of(B, T, H, D)
    lengths = options.get("query_seq_lengths")
    if lengths is not None:  # JAX leaves numbers in rows that take no part
        dout = dout * (jnp.arange(T)[None, :, None, None] < lengths[:, None, None, None])

    def loss(attend: Any, *given: Any) -> Any:
        out = attend(*given, **options)
        return (out * dout).sum()

    given = (q, k, v) if bias is None else (q, k, v, bias)
    every = tuple(range(len(given)))
    ours = jax.jit(jax.value_and_grad(lambda *x: loss(dot_product_attention, *x), every))(*given)
    theirs = jax.value_and_grad(lambda *x: loss(jax.nn.dot_product_attention, *x), every)(*given)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    for a, b in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_as_many_queries_as_keys_need_no_mask_array() -> None:
    q, k, v = arrays(T, T)
    out = dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert jnp.array_equal(out, attention(q, k, v, causal=True, window=(3, 0)))


def test_one_sequence_and_the_residual() -> None:
    q, k, v = arrays()
    out, lse = dot_product_attention(q[0], k[0], v[0], return_residual=True)
    both, all_lse = attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, both[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, all_lse[0].T, rtol=1e-6, atol=1e-6)


def test_a_16_bit_bias_has_a_16_bit_gradient() -> None:
    q, k, v = arrays()
    bias = bias_of(1, H, T, S, dtype=jnp.bfloat16)
    gradient = jax.grad(lambda b: attention(q, k, v, bias=b).sum())(bias)
    assert gradient.dtype == jnp.bfloat16


def test_under_vmap() -> None:
    q, k, v = arrays()
    biases = bias_of(3, H, T, S)
    out = jax.vmap(lambda b: attention(q, k, v, bias=b))(biases)
    for i in range(3):
        assert jnp.array_equal(out[i], attention(q, k, v, bias=biases[i]))


def test_errors() -> None:
    q, k, v = arrays()
    with pytest.raises(tandem.InvalidArgumentError, match="does not broadcast"):
        attention(q, k, v, bias=bias_of(S, T))
    with pytest.raises(tandem.InvalidArgumentError, match="must be boolean"):
        attention(q, k, v, mask=bias_of(T, S))
    with pytest.raises(tandem.InvalidArgumentError, match="boolean; pass it as mask"):
        attention(q, k, v, bias=mask_of(T, S))
    with pytest.raises(tandem.UnsupportedError, match="precision exact alone"):
        attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), bias=bias_of(T, S), precision="fp8")
