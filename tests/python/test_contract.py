"""The contract's lines on NaN, empty rows and metadata, through the Python package and every CPU dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tandem
import torch
from test_forward import DTYPES, qkv

NAN = float("nan")


def poisoned_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out = torch.full((*q.shape[:-1], v.shape[-1]), NAN, dtype=q.dtype)
    return tandem.attention(q, k, v, out=out, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_line_2_a_query_that_sees_no_key(dtype: torch.dtype) -> None:
    q, k, v = qkv(seqlen_q=9, seqlen_k=5, dtype=dtype)
    out, lse = tandem.attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :4] == 0).all() and (lse[:, :, :4] == -math.inf).all()
    assert (out[:, 4:] != 0).any() and lse[:, :, 4:].isfinite().all()
    dout = torch.randn(out.shape).to(dtype)
    dout[:, :4] = NAN
    dq, dk, dv = tandem.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert (dq[:, :4] == 0).all()
    assert dq.isfinite().all() and dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_line_2_with_a_sink_its_lse_is_the_sink_and_dlse_the_sinks(dtype: torch.dtype) -> None:
    q, k, v = qkv(seqlen_q=9, seqlen_k=5, dtype=dtype)
    sink = torch.tensor([-3.0, 0.5, 2.0, 80.0])
    out, lse = tandem.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    assert (out[:, :4] == 0).all() and (lse[:, :, :4] == sink[:, None]).all()
    dout, dlse = torch.zeros(out.shape, dtype=dtype), torch.zeros(lse.shape)
    dout[:, :4] = NAN
    dlse[:, :, :4] = torch.randn(2, 4, 4)
    dq, dk, dv = (torch.full_like(t, NAN) for t in (q, k, v))
    dsink = torch.full_like(sink, NAN)
    made = {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
    tandem.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True, sink=sink, **made)
    assert not dq.any() and not dk.any() and not dv.any()
    torch.testing.assert_close(dsink, dlse.sum((0, 2)))


def test_line_20_parts_of_the_keys_with_the_sink_in_one_of_them() -> None:
    """Rows that see none of that part's keys have the sink all the same."""
    q, k, v = qkv(seqlen_q=9, seqlen_k=9)
    sink = torch.tensor([-3.0, 0.5, 2.0, 8.0])
    parts = []
    for keys, options in (
        (slice(5), {"window": (-1, 4)}),  # aligned to the corner of 9 queries and 5 keys
        (slice(5, 9), {"window": (-1, 0), "sink": sink}),
    ):
        parts.append(tandem.attention(q, k[:, keys], v[:, keys], return_lse=True, **options))
    lses = torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().transpose(2, 3)[..., None]
    out = sum(w * o for w, (o, _) in zip(weights, parts, strict=True))
    expected, expected_lse = tandem.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_line_3_empty_sequences_leave_their_neighbours_alone(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(20, 2, 16).to(dtype) for _ in range(3))
    with_empty = torch.tensor([0, 0, 8, 8, 20, 20])
    without = torch.tensor([0, 8, 20])
    options = {"causal": True}
    got = poisoned_forward(q, k, v, cu_seqlens_q=with_empty, cu_seqlens_k=with_empty, **options)
    assert torch.equal(got, tandem.attention(q, k, v, cu_seqlens_q=without, cu_seqlens_k=without, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lines_5_and_6_rows_past_the_end(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    seqused_q, seqused_k = torch.tensor([10, 0]), torch.tensor([7, 53])
    clean = tandem.attention(q, k, v, seqused_q=seqused_q, seqused_k=seqused_k)
    q[0, 10:] = NAN
    q[1] = NAN
    k[0, 7:], v[0, 7:] = NAN, math.inf
    out = torch.full_like(q, NAN)
    lse = tandem.attention(q, k, v, seqused_q=seqused_q, seqused_k=seqused_k, out=out, return_lse=True)[1]
    assert torch.equal(out, clean)
    assert (out[0, 10:] == 0).all() and (out[1] == 0).all()
    assert (lse[0, :, 10:] == -math.inf).all() and (lse[1] == -math.inf).all()
    dout = torch.randn(out.shape).to(dtype)
    dout[0, 10:] = NAN
    gradients = [torch.full_like(t, NAN) for t in (q, k, v)]
    names = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    tandem.attention_backward(dout, q, k, v, out, lse, seqused_q=seqused_q, seqused_k=seqused_k, **names)
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][0, 10:] == 0).all() and (gradients[1][0, 7:] == 0).all()
    assert (gradients[2][0, 7:] == 0).all() and (gradients[1][1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 30, 199])
def test_line_7_a_nan_key_reaches_exactly_the_rows_that_see_it(position: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(seqlen_q=200, seqlen_k=200, dtype=dtype)
    k[0, position, 1, 3] = NAN
    options = {"causal": True, "window": (50, -1)}
    out, lse = tandem.attention(q, k, v, return_lse=True, **options)
    rows = torch.arange(200)
    seen = (rows >= position) & (rows <= position + 50)
    group = out[0, :, 2:]  # the query heads of kv head 1
    assert group[seen].isnan().all() and not group[~seen].isnan().any()
    assert lse[0, 2:][:, seen].isnan().all() and not lse[0, 2:][:, ~seen].isnan().any()
    assert not out[1].isnan().any() and not out[0, :, :2].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_line_7_an_invisible_inf_key_reaches_nothing(dtype: torch.dtype) -> None:
    q, k, v = qkv(seqlen_q=20, seqlen_k=20, dtype=dtype)
    clean = tandem.attention(q, k, v, window=(4, 0))
    for value in (math.inf, -math.inf, NAN):
        k[:, 0] = value
        assert torch.equal(tandem.attention(q, k, v, window=(4, 0))[:, 5:], clean[:, 5:])


@pytest.mark.parametrize("logit", [-2e5, 6e4])
def test_line_8_huge_logits(logit: float) -> None:
    q, k, v = torch.ones(1, 3, 1, 8), torch.full((1, 4, 1, 8), logit / 8), torch.randn(1, 4, 1, 8)
    out, lse = tandem.attention(q, k, v, scale=1.0, return_lse=True)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, torch.full_like(lse, logit + math.log(4)), rtol=1e-6, atol=0)


def test_line_12_lengths_that_lie_never_read_out_of_bounds() -> None:
    q, k, v = (torch.randn(20, 2, 16) for _ in range(3))
    for lengths in ([0, 2**60, 5], [-7, -9, 3], [30, 10, 2**31 + 5]):
        cu_seqlens = torch.tensor(lengths)
        out = poisoned_forward(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        assert out.isfinite().all()
        with pytest.raises(tandem.InvalidArgumentError, match=r"^cu_seqlens_q\[\d\] is"):
            tandem.attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, check=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_line_15_forward_is_bitwise_reproducible(dtype: torch.dtype) -> None:
    q, k, v = qkv(seqlen_q=1, seqlen_k=3000, dtype=dtype)
    first = tandem.attention(q, k, v)
    assert all(torch.equal(tandem.attention(q, k, v), first) for _ in range(5))
