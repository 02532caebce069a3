"""Results of tandem.attention against the plain formula in fp64; with gradients in test_autograd.py."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def qkv(
    batch: int = 2,
    seqlen_q: int = 37,
    seqlen_k: int = 53,
    heads_q: int = 4,
    heads_kv: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim_v or head_dim).to(dtype),
    )


def check_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    extra = {name: options.pop(name) for name in ("threads",) if name in options}
    out, lse = tandem.attention(q, k, v, return_lse=True, **options, **extra)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    expected_out, expected_lse = oracle.exact(q, k, v, **options)
    same = () if q.dtype == torch.float32 else oracle.same_dtype(q, k, v, **options)[:1]
    oracle.assert_close(out, expected_out, *same)
    oracle.assert_close(lse, expected_lse)
    return out, lse


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "left window": {"window": (7, -1)},
    "causal window": {"causal": True, "window": (9, 4)},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.3},
    "scale 1": {"scale": 1.0},
    "softcap": {"softcap": 3.0},
    "softcap causal": {"softcap": 3.0, "causal": True},
    "sink": {"sink": torch.tensor([-1.0, 0.5, 2.0, 7.0])},
    "sink causal": {"sink": torch.tensor([-1.0, 0.5, 2.0, 7.0]), "causal": True},
    "seqused": {"seqused_q": torch.tensor([37, 11]), "seqused_k": torch.tensor([20, 53])},
    "int32 seqused": {"seqused_k": torch.tensor([0, 30], dtype=torch.int32)},
}


@pytest.mark.parametrize("head_dim", [1, 7, 65, 100])
def test_pad(head_dim: int) -> None:
    check_forward(*qkv(head_dim=head_dim))


def varlen() -> dict[str, Any]:
    return {
        "cu_seqlens_q": torch.tensor([0, 5, 5, 30], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 9, 20, 41], dtype=torch.int32),
    }


def test_packed_queries_over_padded_keys() -> None:
    q, k, v = torch.randn(30, 2, 16), torch.randn(3, 12, 2, 16), torch.randn(3, 12, 2, 16)
    check_forward(q, k, v, cu_seqlens_q=varlen()["cu_seqlens_q"], seqused_k=torch.tensor([12, 3, 7]))


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("out_dtype", [None, "f32", torch.float16, torch.bfloat16])
@pytest.mark.parametrize("per_head", [False, True])
def test_e4m3(out_dtype: Any, per_head: bool) -> None:
    q, k, v = e4m3(2, 19, 4, 32), e4m3(2, 23, 2, 32), e4m3(2, 23, 2, 32)
    shape = (2, 2) if per_head else (1,)
    scales = {f"{name}_scale": torch.rand(shape) + 0.5 for name in "qkv"}
    out = tandem.attention(q, k, v, out_dtype=out_dtype, causal=True, **scales)
    assert out.dtype == (torch.float32 if out_dtype == "f32" else out_dtype or torch.bfloat16)

    def real(t: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        by_head = scale.expand(2, 2).repeat_interleave(t.shape[2] // 2, 1)
        return t.double() * by_head[:, None, :, None].double()

    expected, _ = oracle.exact(
        *(real(t, scales[f"{n}_scale"]) for t, n in ((q, "q"), (k, "k"), (v, "v"))), causal=True
    )
    rounding = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[out.dtype]
    assert (out.double() - expected).abs().max() <= rounding * expected.abs().max()
