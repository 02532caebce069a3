"""tandem.attention whose queries choose their keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import tandem
import torch
from pages import paged, used
from tandem.flash_mla import flash_mla_with_kvcache
from test_forward import qkv
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

B, N, M, H, HKV, TOPK = 2, 9, 40, 6, 2, 12


def chosen(*shape: int, keys: int = M, kind: torch.dtype = torch.int32) -> Tensor:
    """Numbers of keys, some of them none's, some twice."""
    return torch.randint(-3, keys + 3, shape).to(kind)


def times(indices: Tensor, keys: int) -> Tensor:
    """How often each key is named, (batch, heads_kv or 1, seqlen_q, keys)."""
    if indices.ndim == 3:
        indices = indices[:, :, None]
    named = (indices >= 0) & (indices < keys)
    counts = torch.zeros(*indices.shape[:3], keys)
    counts.scatter_add_(-1, indices.clamp(0, keys - 1).long(), named.float())
    return counts.transpose(1, 2)


def expected(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """A key that is named n times is one whose logit is larger by log n."""
    counts = times(indices, k.shape[1])
    more = counts.repeat_interleave(q.shape[2] // counts.shape[1], 1).log().to(q.dtype)
    return oracle.attention(q, k, v, score_mod=lambda s, b, *_: s + more[b], **options)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("heads", [(), (HKV,)], ids=["shared", "by head"])
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients(kind: torch.dtype, heads: tuple[int, ...], causal: bool) -> None:
    q, k, v = qkv(B, N, M, H, HKV)
    sink = torch.randn(H)
    indices = chosen(B, N, *heads, TOPK, kind=kind)
    inputs = [t.requires_grad_() for t in (q, k, v, sink)]
    out, lse = tandem.attention(q, k, v, sink=sink, indices=indices, causal=causal, return_lse=True)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want, want_lse = expected(*exact[:3], indices, sink=exact[3], causal=causal)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=1e-5)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    grads = torch.autograd.grad([want, want_lse], exact, [dout.double(), dlse.double()])
    for one, right in zip(got, grads, strict=True):
        torch.testing.assert_close(one.double(), right, atol=1e-4, rtol=1e-5)
    again = tandem.attention_backward(
        dout, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), dlse=dlse, sink=sink.detach(),
        indices=indices, causal=causal,
    )  # fmt: skip
    assert all(map(torch.equal, got, again))


def test_lengths_and_numpy() -> None:
    q, k, v = (t.numpy() for t in qkv(B, N, M, H, HKV))
    indices = chosen(B, N, TOPK).numpy()
    length = np.random.default_rng(1).integers(-1, TOPK + 2, (B, N))
    cut = np.where(np.arange(TOPK) < length[..., None], indices, -1)
    got = tandem.attention(q, k, v, indices=indices, topk_length=length)
    assert np.array_equal(got, tandem.attention(q, k, v, indices=cut))
    assert not tandem.attention(q, k, v, indices=indices[..., :0]).any()


def test_packed() -> None:
    q, k, v = (t.flatten(0, 1) for t in qkv(B, N, M, H, HKV))
    indices = chosen(B, N, TOPK)
    cu = {"cu_seqlens_q": torch.tensor([0, N, 2 * N]), "cu_seqlens_k": torch.tensor([0, M, 2 * M])}
    got = tandem.attention(q, k, v, indices=indices.flatten(0, 1), **cu)
    dense = [t.unflatten(0, (B, -1)) for t in (q, k, v)]
    assert torch.equal(got, tandem.attention(*dense, indices=indices).flatten(0, 1))


def test_pages_and_rows_that_are_not_named() -> None:
    q, k, v = qkv(B, N, M, H, HKV)
    lengths = [M, 17]
    indices = torch.stack([chosen(N, TOPK, keys=n) for n in lengths])
    want = tandem.attention(q, k, v, indices=indices, seqused_k=used(lengths))
    unnamed = times(indices, M).sum((1, 2)) == 0
    k, v = (t.masked_fill(unnamed[..., None, None], torch.nan) for t in (k, v))
    pages, values, table = paged(k, v, lengths, 8)
    options = {"indices": indices, "page_table": table, "seqused_k": used(lengths)}
    assert torch.equal(tandem.attention(q, pages, values, **options), want)


@pytest.mark.parametrize("heads", [16, 128])
def test_the_slots_of_flash_mla(heads: int) -> None:
    """The rows of a cache as one sequence's: what FlashMLA's indices name."""
    q, cache = torch.randn(B, 2, heads, 576), torch.randn(5, 64, 1, 576)
    indices = chosen(B, 2, 100, keys=5 * 64)
    want, want_lse = flash_mla_with_kvcache(q, cache, None, None, 512, indices=indices)
    table = torch.arange(5)[None]
    queries, of_queries = q.flatten(0, 1)[None], indices.flatten(0, 1)[None]
    options = {"page_table": table, "indices": of_queries, "return_lse": True}
    out, lse = tandem.attention(queries, cache, cache[..., :512], **options)
    torch.testing.assert_close(out[0].unflatten(0, (B, 2)), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[0].T.unflatten(0, (B, 2)).transpose(1, 2), want_lse, atol=1e-5, rtol=1e-5)


def test_operations_are_those_of_pairs_that_are_named() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(B, N, M, H, HKV))
    with FlopCounterMode(display=False) as counter:
        out = tandem.attention(q, k, v, indices=chosen(B, N, TOPK))
    forward = 2 * B * N * H * TOPK * (q.shape[-1] + v.shape[-1])
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == forward * 5 // 2


def test_compiled() -> None:
    q, k, v = qkv(B, N, M, H, HKV)
    indices = chosen(B, N, TOPK)
    attend = torch.compile(lambda *t: tandem.attention(*t[:3], indices=t[3]), backend="aot_eager")
    assert torch.equal(attend(q, k, v, indices), tandem.attention(q, k, v, indices=indices))


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    from tandem.jax import attention

    arrays = [t.numpy() for t in qkv(B, N, M, H, HKV)]
    indices = chosen(B, N, TOPK).numpy()

    def loss(*given: Any) -> Any:
        return attention(*given, indices=indices).sum()

    got = jax.grad(loss, (0, 1, 2))(*arrays)
    tensors = [torch.from_numpy(a).requires_grad_() for a in arrays]
    tandem.attention(*tensors, indices=torch.from_numpy(indices)).sum().backward()
    for one, t in zip(got, tensors, strict=True):
        assert np.array_equal(np.asarray(one), t.grad)


def test_errors() -> None:
    q, k, v = qkv(B, N, M, H, HKV)
    indices = chosen(B, N, TOPK)
    for options, message in (
        ({"indices": indices[0]}, r"indices has 2 dimensions; it must be \(batch, seqlen_q, topk\)"),
        ({"topk_length": indices[..., 0]}, "topk_length is given without indices; pass both, or neither"),
        ({"indices": indices, "split_size": 128}, "indices is given with split_size"),
        ({"indices": indices, "score_mod": lambda s, *_: s * 2}, "indices is given with a score function"),
    ):
        with pytest.raises(tandem.TandemError, match=message):
            tandem.attention(q, k, v, **options)
