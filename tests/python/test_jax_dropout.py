"""Dropout in JAX: the entries that tandem.attention keeps of the same seed, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tandem
import torch

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("tandem.jax", reason="this build has no JAX", exc_type=ImportError)

import jax.numpy as jnp  # noqa: E402
from tandem.jax import attention, dot_product_attention  # noqa: E402
from test_jax import gpus, needs_gpu  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_on_the_cpu")

P, SEED = 0.25, 0x123456789ABCDEF


def tensors(heads_kv: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v and the gradient of the result."""
    shapes = ((2, 70, 4, 32), (2, 90, heads_kv, 32), (2, 90, heads_kv, 32), (2, 70, 4, 32))
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def to_jax(t: torch.Tensor) -> Any:
    return jnp.asarray(t.float().numpy()).astype(str(t.dtype).removeprefix("torch."))


def key_of(seed: int) -> Any:
    return jnp.array([seed >> 32, seed % 2**32], jnp.uint32)


def same(array: Any, t: torch.Tensor) -> bool:
    return np.array_equal(np.asarray(array, np.float32), t.detach().float().numpy())


@pytest.mark.parametrize("how", ["integer", "words", "traced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=str)
def test_the_same_bits_as_in_pytorch(how: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Results and gradients, under jit; the seed as a constant of the graph, or as its input."""
    *inputs, dout = tensors(2, dtype)
    leaves = [t.clone().requires_grad_() for t in inputs]
    dropout: dict[str, Any] = {"dropout_p": P, "dropout_offset": 2**33 + 5}
    wanted, wanted_lse = tandem.attention(
        *leaves, **options, **dropout, dropout_seed=SEED, return_lse=True, deterministic=True
    )
    wanted.backward(dout)

    def call(q: Any, k: Any, v: Any, seed: Any) -> Any:
        fixed = SEED if how == "integer" else key_of(SEED) if how == "words" else seed
        return attention(
            q, k, v, **options, **dropout, dropout_seed=fixed, return_lse=True, deterministic=True
        )

    function = jax.jit(call)
    seed = key_of(SEED)
    (out, lse), pull = jax.vjp(lambda *x: function(*x, seed), *map(to_jax, inputs))
    assert same(out, wanted) and same(lse, wanted_lse)
    gradients = pull((to_jax(dout), jnp.zeros_like(lse)))
    for got, leaf in zip(gradients, leaves, strict=True):
        assert leaf.grad is not None and same(got, leaf.grad)


def test_a_key_of_an_integer_is_that_seed() -> None:
    *inputs, _ = tensors()
    wanted = tandem.attention(*inputs, dropout_p=P, dropout_seed=7)
    for seed in (7, np.int64(7), jax.random.key(7), jax.random.PRNGKey(7)):
        assert same(attention(*map(to_jax, inputs), dropout_p=P, dropout_seed=seed), wanted)


def test_with_a_bias_that_has_a_gradient() -> None:
    *inputs, dout = tensors()
    bias = torch.randn(1, 4, 70, 90).requires_grad_()
    tandem.attention(*inputs, bias=bias, dropout_p=P, dropout_seed=3).backward(dout)

    def loss(b: Any) -> Any:
        out = attention(*map(to_jax, inputs), bias=b, dropout_p=P, dropout_seed=jax.random.key(3))
        return (out * to_jax(dout)).sum()

    assert bias.grad is not None and same(jax.grad(loss)(to_jax(bias.detach())), bias.grad)


def test_under_vmap_each_has_its_key() -> None:
    q, k, v, _ = map(to_jax, tensors())
    keys = jax.random.split(jax.random.key(1), 3)
    out = jax.vmap(lambda key: attention(q, k, v, dropout_p=P, dropout_seed=key))(keys)
    for i in range(3):
        assert jnp.array_equal(out[i], attention(q, k, v, dropout_p=P, dropout_seed=keys[i]))
    assert not jnp.array_equal(out[0], out[1])


def test_one_graph_for_all_keys() -> None:
    q, k, v, _ = map(to_jax, tensors())
    traced = []

    @jax.jit
    def step(key: Any) -> Any:
        traced.append(key)
        return attention(q, k, v, dropout_p=P, dropout_seed=key)

    first, second = (step(jax.random.key(n)) for n in (1, 2))
    assert len(traced) == 1 and not jnp.array_equal(first, second)


def test_dot_product_attention_has_flaxs_names() -> None:
    q, k, v, _ = map(to_jax, tensors())
    key = jax.random.key(4)
    out = dot_product_attention(q, k, v, dropout_rng=key, dropout_rate=P)
    assert jnp.array_equal(out, attention(q, k, v, dropout_seed=key, dropout_p=P))
    assert jnp.array_equal(dot_product_attention(q, k, v, dropout_rng=key), dot_product_attention(q, k, v))


def test_places_of_a_part() -> None:
    """A call of some rows keeps what a call of all of them keeps."""
    q, k, v, _ = map(to_jax, tensors())
    dropout: dict[str, Any] = {"dropout_p": P, "dropout_seed": 11}
    whole = attention(q, k, v, **dropout)
    places = jnp.array([[0, 30, 0, 1], [4, 30, 0, 1]], jnp.int32)
    part = attention(q[:, 30:], k, v, dropout_places=places, **dropout)
    np.testing.assert_allclose(part, whole[:, 30:], rtol=1e-5, atol=1e-6)


def test_errors() -> None:
    q, k, v, _ = map(to_jax, tensors())
    words = "pass an integer, a key of jax.random of two words, or of another key jax.random.bits"
    for message, options in {
        "^dropout_p is 0.5 but dropout_seed is missing; pass a key of jax.random": {"dropout_p": 0.5},
        "^dropout_p is 1.5; it must be at least 0": {"dropout_p": 1.5, "dropout_seed": 1},
        "^dropout_p is 'x'; pass a number": {"dropout_p": "x"},
        rf"^dropout_seed is an array of uint32 and shape \(4,\); {words}": {
            "dropout_p": 0.5,
            "dropout_seed": jnp.zeros(4, jnp.uint32),
        },
        rf"^dropout_seed is an array of key<rbg> and shape \(4,\); {words}": {
            "dropout_p": 0.5,
            "dropout_seed": jax.random.key(1, impl="rbg"),
        },
        f"^dropout_seed is 1.5; {words}": {"dropout_p": 0.5, "dropout_seed": 1.5},
        "^dropout_offset is 'a'; pass an integer": {
            "dropout_p": 0.5,
            "dropout_seed": 1,
            "dropout_offset": "a",
        },
        "^dropout_places is given without dropout_p": {"dropout_places": jnp.zeros((2, 4), jnp.int32)},
        "^dropout_places has ": {
            "dropout_p": 0.5,
            "dropout_seed": 1,
            "dropout_places": jnp.zeros((2, 3), jnp.int32),
        },
    }.items():
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            jax.jit(lambda q, options=options: attention(q, k, v, **options))(q)
    with pytest.raises(tandem.UnsupportedError, match="^dropout_p is 0.5 with precision fp8"):
        attention(
            *(x.astype(jnp.bfloat16) for x in (q, k, v)), dropout_p=0.5, dropout_seed=1, precision="fp8"
        )


@needs_gpu
@pytest.mark.parametrize("how", ["eager", "jit", "constant"])
@pytest.mark.parametrize("kind", ["words", "key"])
def test_with_a_key_that_lies_on_a_gpu(kind: str, how: str) -> None:
    """Bit for bit what CUDA tensors of PyTorch give with the same seed, and what the CPU keeps."""
    *inputs, dout = tensors(2, torch.bfloat16)
    seed = SEED if kind == "words" else 7
    options: dict[str, Any] = {"causal": True, "dropout_p": P, "deterministic": True}
    leaves = [t.cuda().requires_grad_() for t in inputs]
    wanted = tandem.attention(*leaves, **options, dropout_seed=seed)
    wanted.backward(dout.cuda())
    on_cpu = tandem.attention(*inputs, **options, dropout_seed=seed).float()
    with jax.default_device(gpus()[0]):
        key = key_of(seed) if kind == "words" else jax.random.key(seed)
        assert all(device.platform == "gpu" for device in key.devices())

        def call(q: Any, k: Any, v: Any, given: Any) -> Any:
            return attention(q, k, v, **options, dropout_seed=key if how == "constant" else given)

        function = call if how == "eager" else jax.jit(call)
        out, pull = jax.vjp(lambda *x: function(*x, key), *map(to_jax, inputs))
        gradients = pull(to_jax(dout))
    assert same(out, wanted.cpu())
    for got, leaf in zip(gradients, leaves, strict=True):
        assert leaf.grad is not None and same(got, leaf.grad.cpu())
    # Another pattern differs by about the largest entry, two roundings do not.
    assert (wanted.detach().cpu().float() - on_cpu).abs().max() < 0.03 * on_cpu.abs().max()
