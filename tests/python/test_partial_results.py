"""Outputs in f32 of 16-bit inputs: the numbers that are otherwise rounded, for whoever adds them up."""

from __future__ import annotations

from typing import Any

import pytest
import tandem
import torch
from test_forward import qkv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ((90, 130), {"causal": True}),
        ((3, 700), {"window": (300, -1), "softcap": 5.0}),  # few queries have kernels of their own
        ((90, 130), {"seqused_k": torch.tensor([1, 77], dtype=torch.int32)}),  # one key, and rows not in use
        ((5, 0), {}),
    ],
)
def test_they_round_to_the_usual_ones(rows: tuple[int, int], options: Any, dtype: torch.dtype) -> None:
    q, k, v = qkv(2, *rows, 4, 2, 40, 24, dtype)
    out, lse = tandem.attention(q, k, v, return_lse=True, **options)
    wide = torch.full(out.shape, torch.nan)
    _, same_lse = tandem.attention(q, k, v, out=wide, return_lse=True, **options)
    assert torch.equal(wide.to(dtype), out) and torch.equal(lse, same_lse)
    if rows[1] > 1:
        assert not torch.equal(wide, out.float())

    dout = torch.randn(out.shape).to(dtype)
    narrow = tandem.attention_backward(dout, q, k, v, out, lse, **options)
    gradients = {f"d{name}": torch.full(t.shape, torch.nan) for name, t in {"q": q, "k": k, "v": v}.items()}
    tandem.attention_backward(dout, q, k, v, out, lse, **gradients, **options)
    for got, want in zip(gradients.values(), narrow, strict=True):
        assert torch.equal(got.to(dtype), want)


def test_gradients_of_keys_and_values_have_one_dtype() -> None:
    q, k, v = qkv(1, 9, 9, 2, 2, 16, 16, torch.bfloat16)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    with pytest.raises(tandem.InvalidArgumentError, match="dv is bf16 but dk is f32; convert it to f32"):
        tandem.attention_backward(out, q, k, v, out, lse, dk=torch.empty(k.shape))
    alike = tandem.attention_backward(out, q, k, v, out, lse)
    dq, dk, dv = tandem.attention_backward(out, q, k, v, out, lse, dq=torch.empty(q.shape))
    assert torch.equal(dq.bfloat16(), alike[0])
    assert torch.equal(dk, alike[1])
    assert torch.equal(dv, alike[2])
    with pytest.raises(tandem.InvalidArgumentError, match="out is f16 but q is bf16; convert it to bf16"):
        tandem.attention(q, k, v, out=torch.empty(out.shape, dtype=torch.float16))
