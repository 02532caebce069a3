"""float8 queries on a float8 cache: the plain formula on values times scales, by every door to caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import tandem
import torch
from pages import paged, used
from tandem import flash_attn, vllm_flash_attn
from test_forward import e4m3

LENGTHS = [53, 20, 0]


def scales() -> dict[str, torch.Tensor]:
    return {f"{name}_scale": torch.rand(3, 2) + 0.5 for name in "qkv"}


def real(t: torch.Tensor, scale: torch.Tensor, b: int, rows: int) -> torch.Tensor:
    """Rows of sequence b with their scales, heads as the tensor has them."""
    by_head = scale[b].repeat_interleave(t.shape[2] // 2)
    return t[b : b + 1, :rows].double() * by_head[:, None].double()


def check(out: torch.Tensor, q: Any, k: Any, v: Any, named: dict[str, torch.Tensor]) -> None:
    """That `out` is causal attention of each sequence."""
    for b, n in enumerate(LENGTHS):
        inputs = [real(t, named[f"{name}_scale"], b, rows) for t, name, rows in ((q, "q", 9), (k, "k", n))]
        expected, _ = oracle.exact(*inputs, real(v, named["v_scale"], b, n), causal=True)
        rounding = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[out.dtype]
        error = (out[b : b + 1].double() - expected).abs().max()
        assert error <= rounding * max(expected.abs().max().item(), 1.0)


def test_flash_attention_and_vllm() -> None:
    q, k, v, named = e4m3(3, 9, 4, 32), e4m3(3, 53, 2, 32), e4m3(3, 53, 2, 32), scales()
    k_pages, v_pages, table = paged(k, v, LENGTHS, 16)
    descales = {name.replace("scale", "descale"): scale for name, scale in named.items()}
    out = flash_attn.flash_attn_with_kvcache(
        q, k_pages, v_pages, cache_seqlens=used(LENGTHS), page_table=table, causal=True, **descales
    )
    check(out, q, k, v, named)
    packed = vllm_flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1),
        k_pages,
        v_pages,
        9,
        torch.arange(0, 28, 9, dtype=torch.int32),
        53,
        seqused_k=used(LENGTHS),
        block_table=table,
        causal=True,
        **descales,
    )
    assert torch.equal(packed, out.flatten(0, 1))


def test_scales_without_dimensions() -> None:
    """Numbers, as engines keep a layer's."""
    q, k, v = e4m3(3, 9, 4, 32), e4m3(3, 53, 2, 32), e4m3(3, 53, 2, 32)
    names = ("q_scale", "k_scale", "v_scale")
    number, one = (dict.fromkeys(names, t) for t in (torch.tensor(0.5), torch.tensor([0.5])))
    expected = tandem.attention(q, k, v, **one)
    assert torch.equal(tandem.attention(q, k, v, **number), expected)
    descales = {name.replace("scale", "descale"): torch.tensor(0.5) for name in names}
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **descales), expected)
    chunked = flash_attn.flash_attn_func(q, k, v, attention_chunk=64, **descales)
    torch.testing.assert_close(chunked, expected)
    caches = [torch.zeros_like(k) for _ in range(4)]
    rows = torch.randn(2, 3, 5, 2, 32)
    for pair, scale in ((caches[:2], torch.tensor(0.5)), (caches[2:], torch.tensor([0.5]))):
        tandem.append_kv(*rows, *pair, cache_seqlens=used([0, 1, 2]), k_scale=scale, v_scale=scale)
    assert torch.equal(torch.stack(caches[:2]).view(torch.int8), torch.stack(caches[2:]).view(torch.int8))


def test_numpy() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = e4m3(3, 9, 4, 32), e4m3(3, 53, 2, 32), e4m3(3, 53, 2, 32)
    k_pages, v_pages, table = paged(k, v, LENGTHS, 16)
    where = {"page_table": table, "seqused_k": used(LENGTHS)}
    out = tandem.attention(q, k_pages, v_pages, out_dtype="f32", **where)
    arrays = (t.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) for t in (q, k_pages, v_pages))
    same = tandem.attention(*arrays, out_dtype="f32", **{name: t.numpy() for name, t in where.items()})
    assert np.array_equal(out.numpy(), same)


def test_a_gpu_widens_them() -> None:
    q, k, v = (torch.empty(3, 9, heads, 32, dtype=torch.float8_e4m3fn, device="meta") for heads in (4, 2, 2))
    padding = torch.zeros(3, dtype=torch.int32, device="meta")
    assert "q, in e4m3, becomes bf16 first" in tandem.explain(q, k, v, leftpad_k=padding, device="H200")


def test_what_is_refused() -> None:
    q, k, v = (torch.empty(3, 9, heads, 32, dtype=torch.float8_e4m3fn, device="meta") for heads in (4, 2, 2))
    where = {"leftpad_k": torch.zeros(3, dtype=torch.int32, device="meta")}
    with pytest.raises(tandem.InvalidArgumentError, match="^leftpad_k is given with an 8-bit precision; "):
        tandem.attention(q, k, v, **where, precision="fp8")
    codes = [t.to(torch.int8) for t in (q, k, v)]
    with pytest.raises(tandem.InvalidArgumentError, match="^leftpad_k is given with q in s8; pass q in f16"):
        tandem.attention(*codes, **where)
