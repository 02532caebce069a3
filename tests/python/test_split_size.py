"""split_size: a sequence's bits depend on nothing but the sequence, through every door."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tandem
import torch
from pages import paged, used
from tandem import flash_attn
from test_forward import DTYPES, qkv

LENGTH = 300
SPLIT = 128


def sequence(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return qkv(batch=1, seqlen_q=LENGTH, seqlen_k=LENGTH, dtype=dtype)


def expect_steps(whole: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Any) -> None:
    """That chunks and single steps of a sequence have the bits of the whole."""
    for first, end in ((0, 1), (0, 129), (129, 130), (130, 200), (299, 300)):
        out = attend(q[:, first:end], k[:, :end], v[:, :end])
        assert torch.equal(out, whole[:, first:end]), (first, end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_are_the_prefill(dtype: torch.dtype) -> None:
    q, k, v = sequence(dtype)
    options: dict[str, Any] = {"causal": True, "split_size": SPLIT}
    whole = tandem.attention(q, k, v, **options)
    expect_steps(whole, q, k, v, lambda *t: tandem.attention(*t, **options))
    compiled = torch.compile(lambda *t: tandem.attention(*t, **options), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), whole)
    expect_steps(whole, q, k, v, lambda *t: flash_attn.flash_attn_func(*t, causal=True, split_size=SPLIT))


def test_pages_and_a_batch_change_nothing() -> None:
    q, k, v = sequence(torch.bfloat16)
    whole = tandem.attention(q, k, v, causal=True, split_size=SPLIT)
    others = qkv(batch=2, seqlen_q=1, seqlen_k=LENGTH, dtype=torch.bfloat16)
    lengths = [40, LENGTH, 129]
    cache = (torch.cat([other[:1], own, other[1:]]) for other, own in zip(others[1:], (k, v), strict=True))
    k, v, table = paged(*cache, lengths, 16)
    steps = torch.cat([others[0][:1], q[:, -1:], others[0][1:]])
    out = tandem.attention(
        steps, k, v, page_table=table, seqused_k=used(lengths), causal=True, split_size=SPLIT
    )
    assert torch.equal(out[1], whole[0, -1:])
    out = flash_attn.flash_attn_with_kvcache(
        steps, k, v, cache_seqlens=used(lengths), page_table=table, causal=True, split_size=SPLIT
    )
    assert torch.equal(out[1], whole[0, -1:])


def test_without_it_bits_may_differ() -> None:
    """What the others prove would prove nothing if it held anyway."""
    q, k, v = sequence(torch.float32)
    whole = tandem.attention(q, k, v, causal=True)
    step = tandem.attention(q[:, -1:], k, v, causal=True)
    assert not torch.equal(step, whole[:, -1:])
    torch.testing.assert_close(step, whole[:, -1:])


def test_gradients_are_the_same() -> None:
    q, k, v = (t.requires_grad_() for t in sequence(torch.float32))
    found = []
    for split_size in (0, SPLIT):
        out = tandem.attention(q, k, v, causal=True, split_size=split_size, deterministic=True)
        found.append(torch.autograd.grad(out.sum(), (q, k, v)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_numpy() -> None:
    q, k, v = (t.numpy() for t in sequence(torch.float32))
    whole = tandem.attention(q, k, v, causal=True, split_size=np.int64(SPLIT))
    step = tandem.attention(q[:, -1:], k, v, causal=True, split_size=SPLIT)
    assert np.array_equal(step, whole[:, -1:])


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    from tandem import jax as tandem_jax

    q, k, v = (jax.numpy.asarray(t.numpy()) for t in sequence(torch.float32))
    attend = jax.jit(lambda *t: tandem_jax.attention(*t, causal=True, split_size=SPLIT))
    assert jax.numpy.array_equal(attend(q[:, -1:], k, v), attend(q, k, v)[:, -1:])


def test_wrong_values_are_errors() -> None:
    q, k, v = sequence(torch.float32)
    with pytest.raises(tandem.InvalidArgumentError, match="split_size is 100; it must be a multiple of 128"):
        tandem.attention(q, k, v, split_size=100)
    with pytest.raises(tandem.InvalidArgumentError, match="split_size is 'x'; pass an integer"):
        tandem.attention(q, k, v, split_size="x")  # type: ignore[arg-type]
    assert "split" in tandem.explain(q, k, v, split_size=SPLIT)
