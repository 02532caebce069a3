"""JAX arrays through XLA's foreign function interface, against the plain formula in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import tandem
import torch
from pages import paged, used
from test_forward import DTYPES, FEATURES, qkv, varlen

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from tandem.jax import attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_on_the_cpu")


def to_jax(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype in (torch.bfloat16, torch.float8_e4m3fn):  # NumPy lacks both
        return jnp.asarray(value.float().numpy(), str(value.dtype).removeprefix("torch."))
    return jnp.asarray(value.numpy())


def to_torch(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.float32))


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    """The result, the LSE and every gradient, with gradients through both, under jit.

    In f32 against the formula; in 16 bits bit for bit what PyTorch tensors give, whose errors are measured
    elsewhere.
    """
    given = {name: to_jax(value) for name, value in options.items()}
    tensors = {"q": q, "k": k, "v": v}
    if options.get("sink") is not None:
        tensors["sink"] = options["sink"]
        del given["sink"]

    @jax.jit
    def function(inputs: dict[str, Any]) -> Any:
        return attention(**inputs, **given, return_lse=True, deterministic=True)

    results, pull = jax.vjp(function, {name: to_jax(tensor) for name, tensor in tensors.items()})
    assert results[0].dtype == to_jax(q).dtype and results[1].dtype == jnp.float32
    dout, dlse = torch.randn(results[0].shape).to(q.dtype), torch.randn(results[1].shape)
    gradients = pull((to_jax(dout), to_jax(dlse)))[0]
    got = [*results, *(gradients[name] for name in tensors)]
    if q.dtype == torch.float32:
        references = oracle.gradients(oracle.exact, q, k, v, dout, dlse, **options)
        for a, b in zip(got, (*oracle.exact(q, k, v, **options), *references), strict=True):
            oracle.assert_close(to_torch(a), b)
        return
    out, lse = tandem.attention(q, k, v, return_lse=True, **options)
    same = tandem.attention_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=True, **options)
    for a, b in zip(got, (out, lse, *same), strict=True):
        assert torch.equal(to_torch(a), b.float())


@pytest.mark.parametrize(
    "feature", ["causal window", "negative scale", "softcap causal", "sink causal", "seqused"]
)
def test_feature(feature: str) -> None:
    options = dict(FEATURES[feature])
    check(*qkv(), **{n: v.int() if n.startswith("seqused") else v for n, v in options.items()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_packed_sequences(dtype: torch.dtype) -> None:
    check(*qkv(dtype=dtype, head_dim_v=16))
    q, k, v = torch.randn(33, 4, 32), torch.randn(41, 2, 32), torch.randn(41, 2, 16)
    check(q.to(dtype), k.to(dtype), v.to(dtype), **varlen(), causal=True)


def test_vmap_runs_one_call_after_another() -> None:
    q, k, v = (to_jax(t) for t in qkv(batch=6))
    folded = [t.reshape(3, 2, *t.shape[1:]) for t in (q, k, v)]

    def loss(*inputs: Any) -> Any:
        return jnp.square(attention(*inputs, causal=True)).sum()

    ours = jax.vmap(jax.grad(loss, (0, 1, 2)))(*folded)
    for a, b in zip(ours, jax.grad(loss, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-5, atol=1e-5)
    out = jax.vmap(attention, in_axes=(0, None, None))(folded[0], k[:2], v[:2])
    np.testing.assert_array_equal(out[1], attention(folded[0][1], k[:2], v[:2]))


def test_float8() -> None:
    q, k, v = (jnp.asarray(t.numpy(), jnp.float8_e4m3fn) for t in qkv())
    options = {"k_scale": jnp.asarray([2.0]), "out_dtype": "f32"}
    out = attention(q, k, v, **options)
    expected = oracle.exact(to_torch(q), 2 * to_torch(k), to_torch(v))[0]
    assert out.dtype == jnp.float32 and attention(q, k, v).dtype == jnp.bfloat16
    oracle.assert_close(
        to_torch(out), expected, oracle.same_dtype(*(to_torch(t).bfloat16() for t in (q, 2 * k, v)))[0]
    )


@pytest.mark.parametrize(("dtype", "precision"), [("e4m3", "fp8"), ("s8", "int8")])
def test_8_bit_inputs_and_8_bit_k_and_v_beside_a_16_bit_q(dtype: str, precision: str) -> None:
    """Bit for bit what PyTorch tensors give."""
    q, k, v = qkv(dtype=torch.bfloat16)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (tandem.quantize(t, dtype) for t in (q, k, v))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for inputs, options in (
        ((q8, k8, v8), {"q_scale": q_scale, "precision": precision}),
        ((q8, k8, v8), {"q_scale": q_scale, "precision": precision, "out_dtype": "f32"}),
        ((q, k8, v8), {}),
        ((q.half(), k8, v8), {}),
    ):
        options |= scales | {"causal": True}
        given = {name: to_jax(value) for name, value in options.items()}
        out, lse = jax.jit(lambda *t, given=given: attention(*t, **given, return_lse=True))(
            *map(to_jax, inputs)
        )
        same, same_lse = tandem.attention(*inputs, **options, return_lse=True)
        assert str(out.dtype) == str(same.dtype).removeprefix("torch.")
        assert torch.equal(to_torch(out), same.float()) and torch.equal(to_torch(lse), same_lse)


def test_precision_and_strict() -> None:
    q, k, v = qkv(seqlen_q=64, seqlen_k=64, dtype=torch.bfloat16)
    options: dict[str, Any] = {"causal": True, "precision": "int8", "strict": True}
    out = attention(to_jax(q), to_jax(k), to_jax(v), **options)
    assert torch.equal(to_torch(out), tandem.attention(q, k, v, **options).float())

    options["backward_precision"] = "int8"
    leaves = [t.requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(tandem.attention(*leaves, **options).float().sum(), leaves)
    as_jax = [to_jax(t.detach()) for t in (q, k, v)]
    pulled = jax.grad(lambda *x: attention(*x, **options).astype("float32").sum(), (0, 1, 2))(*as_jax)
    for got, right in zip(pulled, expected, strict=True):
        assert torch.equal(to_torch(got), right.float())


def test_numpys_numbers_are_options() -> None:
    q, k, v = (to_jax(t) for t in qkv())
    given = {"causal": np.bool_(True), "softcap": np.int64(3), "window": (np.int64(9), np.int32(0))}
    own = {"causal": True, "softcap": 3.0, "window": (9, 0)}
    for scale in (np.float32(0.25), np.float64(0.25), np.array(0.25)):
        out = attention(q, k, v, scale=scale, threads=np.int64(1), return_lse=np.bool_(True), **given)[0]
        np.testing.assert_array_equal(out, attention(q, k, v, scale=0.25, **own))


def test_errors_come_as_the_call_is_traced() -> None:
    q, k, v = (to_jax(t) for t in qkv())
    with pytest.raises(tandem.InvalidArgumentError, match="softcap is -1"):
        jax.jit(attention, static_argnames="softcap").trace(q, k, v, softcap=-1.0)
    with pytest.raises(tandem.InvalidArgumentError, match="window is 128; pass \\(left, right\\)"):
        attention(q, k, v, window=128)
    with pytest.raises(tandem.InvalidArgumentError, match="scale is 'small'; pass a number"):
        attention(q, k, v, scale="small")
    for value in ("no", 1, None):
        with pytest.raises(tandem.InvalidArgumentError, match="return_lse is .*; pass True or False"):
            attention(q, k, v, return_lse=value)
    with pytest.raises(tandem.InvalidArgumentError, match="scale is .*; pass a number"):
        jax.grad(lambda scale: attention(q, k, v, scale=scale).sum())(0.3)
    with pytest.raises(tandem.InvalidArgumentError, match="out_dtype is bf16 but q is f32; it is for"):
        attention(q, k, v, out_dtype="bf16")
    with pytest.raises(tandem.InvalidArgumentError, match="q is i32"):
        attention(q.astype(jnp.int32), k, v)
    by_q = jax.grad(lambda q: attention(q, k, v).sum())
    with pytest.raises(tandem.UnsupportedError, match="no second derivative"):
        jax.grad(lambda q: by_q(q).sum())(q)


def gpus() -> list[Any]:
    try:
        return list(jax.devices("gpu"))
    except RuntimeError:
        return []


needs_gpu = pytest.mark.skipif(
    not gpus() or not torch.cuda.is_available(), reason="no GPU that JAX and PyTorch can use"
)


@needs_gpu
@pytest.mark.parametrize("feature", ["plain", "causal window", "softcap causal", "sink causal", "seqused"])
def test_on_a_gpu(feature: str) -> None:
    """Bit for bit what CUDA tensors of PyTorch give, whose errors are measured in test_gpu.py."""
    q, k, v = qkv(2, 200, 300, 4, 2, 64, dtype=torch.bfloat16)
    options: dict[str, Any] = {**FEATURES[feature], "deterministic": True}
    if feature == "seqused":
        options |= {"seqused_q": torch.tensor([200, 11]), "seqused_k": torch.tensor([20, 300])}
    tensors = {"q": q, "k": k, "v": v}
    if "sink" in options:
        tensors["sink"] = options.pop("sink")
    ours = {name: tensor.cuda().requires_grad_() for name, tensor in tensors.items()}
    given = {n: o.cuda() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    out, lse = tandem.attention(**ours, **given, return_lse=True)
    dout, dlse = torch.randn(out.shape).bfloat16(), torch.randn(lse.shape)
    expected = torch.autograd.grad((out, lse), list(ours.values()), (dout.cuda(), dlse.cuda()))
    with jax.default_device(gpus()[0]):
        lengths = {n: to_jax(o) for n, o in options.items()}
        call = jax.jit(lambda inputs: attention(**inputs, **lengths, return_lse=True))
        results, pull = jax.vjp(call, {name: to_jax(tensor) for name, tensor in tensors.items()})
        gradients = pull((to_jax(dout), to_jax(dlse)))[0]
    assert all(device.platform == "gpu" for device in results[0].devices())
    got = [*results, *(gradients[name] for name in tensors)]
    for a, b in zip(got, (out, lse, *expected), strict=True):
        assert torch.equal(to_torch(a), b.detach().float().cpu())


def test_a_cache_in_pages_under_jit() -> None:
    """Decoding steps, each a call of one compiled function; NaN wherever no sequence has a row."""
    lengths = [53, 20, 0]
    q, k, v = qkv(batch=3, seqlen_q=1)
    k_pages, v_pages, table = paged(k, v, lengths, 8)
    expected, expected_lse = tandem.attention(q, k, v, seqused_k=used(lengths), causal=True, return_lse=True)
    traced = 0

    @jax.jit
    def step(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        nonlocal traced
        traced += 1
        return attention(q, k, v, page_table=table, seqused_k=lengths, causal=True, return_lse=True)

    given = [to_jax(t) for t in (q, k_pages, v_pages, table)]
    out, lse = step(*given, to_jax(used(lengths)))
    torch.testing.assert_close(to_torch(out), expected)
    torch.testing.assert_close(to_torch(lse), expected_lse)
    shorter = step(*given, to_jax(used([20, 8, 0])))[0]
    torch.testing.assert_close(
        to_torch(shorter), tandem.attention(q, k, v, seqused_k=used([20, 8, 0]), causal=True)
    )
    assert traced == 1
    chosen = {"cache_batch_idx": torch.tensor([1, 1, 0]), "leftpad_k": torch.tensor([0, 4, 50])}
    out = attention(*(to_jax(t) for t in (q, k, v)), **{name: to_jax(t) for name, t in chosen.items()})
    torch.testing.assert_close(to_torch(out), tandem.attention(q, k, v, **chosen))
    with pytest.raises(
        tandem.InvalidArgumentError, match="^page_table is given to backward; a cache has no grad"
    ):
        jax.grad(lambda q: step(q, *given[1:], to_jax(used(lengths)))[0].sum())(given[0])
    with pytest.raises(tandem.InvalidArgumentError, match="^page_table and cu_seqlens_k are both given"):
        attention(*given[:3], page_table=given[3], cu_seqlens_k=to_jax(torch.tensor([0, 1, 2, 3])))
