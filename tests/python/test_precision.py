"""8-bit precisions from Python: what they cost in accuracy, what strict promises, gradients, errors."""

from __future__ import annotations

import pytest
import tandem
import torch
from test_forward import qkv

LARGEST_ERROR = {"fp8": 0.15, "int8": 0.04, "int8-accurate": 0.03}


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


def test_explain_names_the_recipe() -> None:
    text = tandem.explain(*qkv(dtype=torch.bfloat16), precision="int8-accurate")
    assert (
        "precision int8-accurate: Q K^T in s8, one scale a row, rotated, K's mean removed; P V in 16" in text
    )


def test_errors() -> None:
    with pytest.raises(
        ValueError, match="^precision fp8 rounds f16 or bf16 inputs to 8 bits, but q is f32; "
    ):
        tandem.attention(*qkv(), precision="fp8")
    with pytest.raises(
        ValueError, match="^precision is 'fp4'; it must be one of exact, fp8, int8, int8-accurate$"
    ):
        tandem.attention(*qkv(dtype=torch.bfloat16), precision="fp4")
