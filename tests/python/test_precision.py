"""8-bit precisions from Python: what they cost in accuracy, what strict promises, gradients, errors."""

from __future__ import annotations

from typing import Any

import pytest
import tandem
import torch
from tandem import flash_attn
from test_forward import qkv

LARGEST_ERROR = {"fp8": 0.15, "int8": 0.04}


@pytest.mark.parametrize("precision", LARGEST_ERROR)
def test_close_to_exact(precision: str) -> None:
    q, k, v = qkv(seqlen_q=150, seqlen_k=200, dtype=torch.bfloat16)
    exact = tandem.attention(q.float(), k.float(), v.float(), causal=True)
    out, lse = tandem.attention(q, k, v, causal=True, precision=precision, return_lse=True)
    error = (out.float() - exact).abs().max().item()
    assert 0.0 < error < LARGEST_ERROR[precision]
    plain, plain_lse = tandem.attention(q, k, v, causal=True, return_lse=True)
    assert 0.0 < (lse - plain_lse).abs().max().item() < LARGEST_ERROR[precision]
    assert not torch.equal(out, plain)
    compiled = torch.compile(tandem.attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, causal=True, precision=precision), out)


def test_strict_is_causal_to_the_bit() -> None:
    q, k, v = qkv(seqlen_q=140, seqlen_k=140, dtype=torch.float16)
    whole = tandem.attention(q, k, v, causal=True, precision="int8", strict=True)
    part = tandem.attention(*(t[:, :70] for t in (q, k, v)), causal=True, precision="int8", strict=True)
    assert torch.equal(whole[:, :70], part)
    assert not torch.equal(whole, tandem.attention(q, k, v, causal=True, precision="int8"))


def test_gradients_are_the_16_bit_ones() -> None:
    tensors = [t.requires_grad_() for t in qkv(dtype=torch.bfloat16)]
    out, lse = tandem.attention(*tensors, precision="fp8", return_lse=True)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, dout)
    q, k, v = (t.detach() for t in tensors)
    same = tandem.attention_backward(dout, q, k, v, out.detach(), lse.detach())
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_gradients_in_8_bits(strict: bool) -> None:
    options: dict[str, Any] = {"causal": True, "precision": "int8", "strict": strict}
    tensors = [t.requires_grad_() for t in qkv(dtype=torch.bfloat16)]
    dout = torch.randn_like(tensors[0])
    sixteen = torch.autograd.grad(tandem.attention(*tensors, **options), tensors, dout)
    options["backward_precision"] = "int8"
    out, lse, max_logits = tandem.attention(*tensors, **options, return_lse=True, return_max_logits=True)
    gradients = torch.autograd.grad(out, tensors, dout)
    for a, b in zip(gradients, sixteen, strict=True):
        assert not torch.equal(a, b)
        assert torch.cosine_similarity(a.float().flatten(), b.float().flatten(), 0) > 0.998
    q, k, v = (t.detach() for t in tensors)
    saved = (dout, q, k, v, out.detach(), lse.detach())
    same = tandem.attention_backward(*saved, max_logits=max_logits, **options)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    compiled = torch.compile(tandem.attention, fullgraph=True, backend="aot_eager")
    again = torch.autograd.grad(compiled(*tensors, **options), tensors, dout)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


@pytest.mark.parametrize("kind", ["normal", "outliers", "biased"])
def test_gradients_in_8_bits_are_like_exact_ones(kind: str) -> None:
    q, k, v = qkv(heads_q=4, heads_kv=2, seqlen_q=300, seqlen_k=300, dtype=torch.float32)
    if kind == "outliers":
        q, k, v = (t * torch.where(torch.rand(t.shape) < 0.001, 10.0, 1.0) for t in (q, k, v))
    if kind == "biased":
        k, v = k + 8 * torch.randn(k.shape[-1]), v + 2 * torch.randn(v.shape[-1])
    tensors = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    options: dict[str, Any] = {"causal": True, "precision": "int8", "backward_precision": "int8"}
    out = tandem.attention(*tensors, **options)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, dout)
    exact = tandem.attention(*(t.float() for t in tensors), causal=True)
    expected = torch.autograd.grad(exact, tensors, dout.float())
    for a, b in zip(gradients, expected, strict=True):
        assert torch.cosine_similarity(a.float().flatten(), b.float().flatten(), 0) > 0.998


def test_gradients_in_8_bits_go_with_int8() -> None:
    tensors = qkv(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="^backward_precision int8 takes .* precision is exact; "):
        tandem.attention(*tensors, backward_precision="int8")
    with pytest.raises(ValueError, match="^backward_precision is 'e5m2'; it must be one of "):
        tandem.attention(*tensors, precision="int8", backward_precision="e5m2")


def test_explain_names_the_recipe() -> None:
    text = tandem.explain(*qkv(dtype=torch.bfloat16), precision="int8", strict=True)
    assert "Q K^T in s8, one scale a row, rotated; P V in s8, one scale a row of V, rotated" in text


@pytest.mark.parametrize("granularity", ["tensor", "head", "block", "row"])
@pytest.mark.parametrize("dtype", ["e4m3", "s8"])
def test_quantize(granularity: str, dtype: str) -> None:
    x = torch.randn(2, 200, 3, 32)
    quantized, scales, mean = tandem.quantize(x, dtype, granularity=granularity, smooth=True)
    centered = x - x.mean(1, keepdim=True)
    torch.testing.assert_close(mean, x.mean(1))
    spread = {
        "tensor": lambda: scales.view(1, 1, 1, 1),
        "head": lambda: scales[:, None, :, None],
        "block": lambda: scales.repeat_interleave(128, 2)[:, :, :200].transpose(1, 2)[..., None],
        "row": lambda: scales.transpose(1, 2)[..., None],
    }[granularity]()
    error = (quantized.float() * spread - centered).abs()
    bound = spread * 0.5 if dtype == "s8" else centered.abs() / 16 + spread * 2**-10
    assert (error <= bound * 1.001).all()


def test_values_of_quantize_go_into_attention() -> None:
    q, k, v = qkv(heads_q=2, dtype=torch.float32)
    (q8, qs), (k8, ks) = (tandem.quantize(t, hadamard=True) for t in (q, k))
    v8, vs = tandem.quantize(v)
    out = tandem.attention(q8, k8, v8, q_scale=qs, k_scale=ks, v_scale=vs, out_dtype="f32")
    assert (out - tandem.attention(q, k, v)).abs().max().item() < 0.15


@pytest.mark.parametrize("dtype", ["e4m3", "s8"])
@pytest.mark.parametrize("granularity", ["head", "block", "row"])
def test_quantized_inputs_take_the_precision_of_their_dtype(dtype: str, granularity: str) -> None:
    q, k, v = qkv(batch=2, heads_q=4, heads_kv=2, seqlen_q=150, seqlen_k=200, dtype=torch.bfloat16)
    quantized = [tandem.quantize(t, dtype, granularity=granularity, hadamard=t is not v) for t in (q, k, v)]
    precision = {"e4m3": "fp8", "s8": "int8"}[dtype]
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), (s for _, s in quantized), strict=True))
    options = {"precision": precision, "causal": True, **scales}
    out = tandem.attention(*(c for c, _ in quantized), **options)
    assert out.dtype == torch.bfloat16
    exact = tandem.attention(q.float(), k.float(), v.float(), causal=True)
    assert 0.0 < (out.float() - exact).abs().max().item() < 2 * LARGEST_ERROR[precision]
    assert "of the caller's quantized values and scales" in tandem.explain(
        *(c for c, _ in quantized), **options
    )
    compiled = torch.compile(tandem.attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*(c for c, _ in quantized), **options), out)


@pytest.mark.parametrize("dtype", ["e4m3", "s8"])
def test_queries_in_16_bits_on_keys_and_values_in_8(dtype: str) -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    (k8, ks), (v8, vs) = (tandem.quantize(t, dtype, granularity="head") for t in (k, v))
    scales = {"k_scale": ks, "v_scale": vs}
    out = tandem.attention(q, k8, v8, causal=True, **scales)
    values = [c.double() * s[:, None, :, None] for c, s in ((k8, ks), (v8, vs))]
    exact = tandem.attention(q.float(), *(t.float() for t in values), causal=True)
    assert out.dtype == torch.bfloat16
    # P and out are rounded to bf16, each by 2^-9 of what is no larger than the largest value
    assert (out.float() - exact).abs().max() <= 2**-8 * values[1].abs().max()
    assert f"mixed: k and v, in {dtype}, are converted where they are read" in tandem.explain(
        q, k8, v8, **scales
    )
    (k8r, ksr), (v8r, vsr) = (tandem.quantize(t, dtype, granularity="row") for t in (k, v))
    by_row = {"k_scale": ksr, "v_scale": vsr}
    values = [(c.float() * s.transpose(1, 2)[..., None]).bfloat16() for c, s in ((k8r, ksr), (v8r, vsr))]
    rows = tandem.attention(q, k8r, v8r, causal=True, **by_row)
    assert torch.equal(rows, tandem.attention(q, *values, causal=True))
    assert f"mixed: k and v, in {dtype}, become bf16 first" in tandem.explain(q, k8r, v8r, **by_row)
    compiled = torch.compile(tandem.attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k8, v8, causal=True, **scales), out)
    if dtype == "e4m3":
        found = flash_attn.flash_attn_func(q, k8, v8, causal=True, k_descale=ks, v_descale=vs)
        assert torch.equal(found, out)
    with pytest.raises(ValueError, match="^precision fp8 rounds q, k and v to 8 bits, but k is "):
        tandem.attention(q, k8, v8, precision="fp8", **scales)
    q.requires_grad_()
    remedy = "8-bit k and v have no backward: pass those they were made from, in bf16"
    with pytest.raises(ValueError, match=f"^k is (e4m3|s8); {remedy}$"):
        tandem.attention(q, k8, v8, **scales).sum().backward()


def test_errors() -> None:
    e4m3 = [tandem.quantize(t)[0] for t in qkv(dtype=torch.bfloat16)]
    with pytest.raises(ValueError, match="^precision int8 does not take q in e4m3; pass precision fp8"):
        tandem.attention(*e4m3, precision="int8")
    with pytest.raises(ValueError, match="^dtype is 'f32'; it must be 'e4m3' or 's8'$"):
        tandem.quantize(torch.zeros(1, 2, 3, 8), "f32")
    with pytest.raises(ValueError, match="^granularity is 'column'; "):
        tandem.quantize(torch.zeros(1, 2, 3, 8), granularity="column")
    with pytest.raises(
        ValueError, match="^precision fp8 rounds f16 or bf16 inputs to 8 bits, but q is f32; "
    ):
        tandem.attention(*qkv(), precision="fp8")
    with pytest.raises(
        ValueError, match="^precision is 'int8-accurate'; it must be one of exact, fp8, int8$"
    ):
        tandem.attention(*qkv(dtype=torch.bfloat16), precision="int8-accurate")
