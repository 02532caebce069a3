"""attention_chunk of FlashAttention-3's functions: queries see the keys of their own chunk."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from tandem import flash_attn
from test_flash_attn import SINK
from test_forward import qkv, varlen


def in_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int, **options: Any) -> Any:
    """(out, lse) of one sequence in float64: each chunk's queries see its keys, and others none."""
    rows, keys = len(q), len(k)
    bounds = [(-rows, 0), *((c, min(c + chunk, keys)) for c in range(0, keys, chunk))]
    parts = []
    for first, last in bounds:
        of_q = slice(*(min(max(place - keys + rows, 0), rows) for place in (first, last)))
        of_k = slice(max(first, 0), last)
        parts.append(oracle.exact(q[None, of_q], k[None, of_k], v[None, of_k], **options))
    return tuple(torch.cat([part[i] for part in parts], 1 + i)[0] for i in range(2))


CHUNKED: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "window": (2, 0)}, {"window": (2, 1)}]


@pytest.mark.parametrize("options", CHUNKED, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
@pytest.mark.parametrize(("rows", "keys"), [(20, 20), (7, 20), (20, 7), (1, 9), (7, 0)])
def test_equally_long_sequences(rows: int, keys: int, chunk: int, options: dict[str, Any]) -> None:
    q, k, v = qkv(seqlen_q=rows, seqlen_k=keys)
    call = {name if name == "causal" else "window_size": value for name, value in options.items()}
    out, lse = flash_attn.flash_attn_func(q, k, v, attention_chunk=chunk, sink=SINK, return_lse=True, **call)
    assert out.shape == q.shape and lse.shape == (len(q), 4, rows)
    for b in range(len(q)):
        expected, expected_lse = in_chunks(q[b], k[b], v[b], chunk, sink=SINK, **options)
        oracle.assert_close(out[b], expected)
        oracle.assert_close(lse[b], expected_lse)


def test_varlen_sequences_and_their_rows_in_use() -> None:
    q, k, v = torch.randn(33, 4, 32), torch.randn(44, 2, 32), torch.randn(44, 2, 32)
    lengths = varlen()
    cu_q, cu_k = (lengths[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for used_q, used_k in ((None, None), ([5, 0, 3][: len(cu_q) - 1], [4, 9, 20][: len(cu_k) - 1])):
        used = {
            f"seqused_{name}": None if n is None else torch.tensor(n)
            for name, n in (("q", used_q), ("k", used_k))
        }
        out, lse = flash_attn.flash_attn_varlen_func(
            q, k, v, **lengths, **used, causal=True, attention_chunk=4, sink=SINK, return_attn_probs=True
        )
        expected, expected_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        for b in range(len(cu_q) - 1):
            ends = []
            for cu, n in ((cu_q, used_q), (cu_k, used_k)):
                rows = cu[b + 1] - cu[b]
                ends.append(slice(cu[b], cu[b] + (rows if n is None else min(n[b], rows))))
            part = in_chunks(q[ends[0]], k[ends[1]], v[ends[1]], 4, causal=True, sink=SINK)
            expected[ends[0]], expected_lse[:, ends[0]] = part
        oracle.assert_close(out, expected)
        oracle.assert_close(lse, expected_lse)


def test_gradients_and_one_graph() -> None:
    def function(*inputs: torch.Tensor) -> Any:
        *tensors, sink = inputs
        return flash_attn.flash_attn_func(
            *tensors, causal=True, attention_chunk=8, sink=sink, return_attn_probs=True
        )

    q, k, v = qkv(seqlen_q=20, seqlen_k=20)
    inputs = [t.requires_grad_() for t in (q, k, v, SINK.clone())]
    gradients = (torch.randn(q.shape), torch.randn(len(q), 4, 20))
    wide = [t.detach().double().requires_grad_() for t in inputs]
    parts = [in_chunks(*(t[b] for t in wide[:3]), 8, causal=True, sink=wide[3]) for b in range(len(q))]
    expected = torch.autograd.grad([torch.stack(t) for t in zip(*parts, strict=True)], wide, gradients)
    compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
    for call in (function, compiled):
        oracle.assert_all_close(torch.autograd.grad(call(*inputs), inputs, gradients), expected)


def test_a_cache() -> None:
    q, k, v = torch.randn(2, 1, 4, 32), torch.randn(2, 20, 2, 32), torch.randn(2, 20, 2, 32)
    used = torch.tensor([19, 9])
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, attention_chunk=8)
    for b, keys in enumerate((slice(16, 19), slice(8, 9))):
        oracle.assert_close(out[b], oracle.exact(q[b : b + 1], k[b : b + 1, keys], v[b : b + 1, keys])[0][0])


def test_float8_with_scales() -> None:
    q, k, v = (t.to(torch.float8_e4m3fn) for t in qkv(seqlen_q=20, seqlen_k=20))
    scales = [torch.rand(2, heads) + 0.5 for heads in (2, 2, 2)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    out = flash_attn.flash_attn_func(q, k, v, causal=True, attention_chunk=8, **names)
    for first in (0, 8, 16):
        rows = (slice(None), slice(first, first + 8))
        part = flash_attn.flash_attn_func(q[rows], k[rows], v[rows], causal=True, **names)
        torch.testing.assert_close(out[rows], part)


def test_arguments_that_do_not_fit() -> None:
    q, k, v = qkv()
    for chunk in (-1, 1.5, "8"):
        with pytest.raises(
            tandem.InvalidArgumentError, match=f"^attention_chunk is {chunk!r}; pass how many"
        ):
            flash_attn.flash_attn_func(q, k, v, attention_chunk=chunk)
    with pytest.raises(tandem.InvalidArgumentError, match="^q has 2 sequences, but k has 1; pass as many$"):
        flash_attn.flash_attn_func(q, k[:1], v[:1], attention_chunk=4)
    with pytest.raises(TypeError, match="^k is a numpy.ndarray; pass a torch.Tensor$"):
        flash_attn.flash_attn_func(q, k.numpy(), v, attention_chunk=4)
    with pytest.raises(tandem.InvalidArgumentError, match=r"^q has shape \(\); pass \(batch, seqlen, heads"):
        flash_attn.flash_attn_func(torch.tensor(1.0), k, v, attention_chunk=4)
