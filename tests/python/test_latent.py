"""FlashAttention's qv: two products with the queries, of keys and values that are columns of one cache."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from pages import paged
from tandem import flash_attn, vllm_flash_attn

BATCH, KEYS, HEADS = 2, 50, 16


def latent(d: int = 64, d_v: int = 512, rows: int = KEYS, **options: Any) -> tuple[torch.Tensor, ...]:
    """q, qv, and a cache of which v is the first d_v columns and k the d behind them."""
    q = torch.randn(BATCH, 3, HEADS, d, **options)
    return q, torch.randn(BATCH, 3, HEADS, d_v, **options), torch.randn(BATCH, rows, 1, d_v + d, **options)


def expected(q: torch.Tensor, qv: torch.Tensor, cache: torch.Tensor, **options: Any) -> Any:
    d_v = qv.shape[-1]
    return oracle.exact(torch.cat((qv, q), -1), cache, cache[..., :d_v], **options)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_the_sum_of_two_products(dtype: torch.dtype) -> None:
    q, qv, cache = latent(dtype=dtype)
    v, k = cache.split([512, 64], -1)
    for options in ({"causal": True}, {"scale": 0.1}):
        given = {"softmax_scale" if name == "scale" else name: value for name, value in options.items()}
        out = flash_attn.flash_attn_func(q, k, v, qv=qv, **given)
        whole = torch.cat((qv, q), -1), cache, v
        same = () if dtype == torch.float32 else oracle.same_dtype(*whole, **options)[:1]
        oracle.assert_close(out, oracle.exact(*whole, **options)[0], *same)


def test_k_may_come_before_v() -> None:
    q, qv, cache = latent()
    k, v = cache.split([64, 512], -1)
    out = flash_attn.flash_attn_func(q, k, v, qv=qv)
    oracle.assert_close(out, oracle.exact(torch.cat((q, qv), -1), cache, v)[0])


def test_a_cache_in_pages_is_read_where_it_lies() -> None:
    q, qv, cache = latent(rows=64)
    pages = cache.view(8, 16, 1, 576)[[5, 2, 7, 0, 1, 6, 3, 4]]
    table = torch.tensor([[3, 4, 1, 6], [7, 0, 5, 2]], dtype=torch.int32)
    used = torch.tensor([50, 33], dtype=torch.int32)
    v, k = pages[..., :512], pages[..., 512:]
    out = flash_attn.flash_attn_with_kvcache(
        q, k, v, qv=qv, cache_seqlens=used, page_table=table, causal=True
    )
    for b in range(BATCH):
        one = slice(b, b + 1)
        oracle.assert_close(out[one], expected(q[one], qv[one], cache[one, : used[b]], causal=True))
    cu = torch.tensor([0, 3, 6], dtype=torch.int32)
    # As vLLM makes them: the head's dimension is put in behind, with strides of its own.
    flat = pages.squeeze(2)
    packed = vllm_flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1),
        flat[..., 512:].unsqueeze(-2),
        flat[..., :512].unsqueeze(-2),
        3,
        cu,
        50,
        seqused_k=used,
        q_v=qv.flatten(0, 1),
        softmax_scale=576**-0.5,
        causal=True,
        block_table=table,
    )
    assert torch.equal(packed, out.flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_in_tensors_of_their_own(dtype: torch.dtype) -> None:
    q, qv, cache = latent(dtype=dtype)
    v, k = (t.clone() for t in cache.split([512, 64], -1))
    out = flash_attn.flash_attn_func(q, k, v, qv=qv, causal=True)
    beside = flash_attn.flash_attn_func(q, cache[..., 512:], cache[..., :512], qv=qv, causal=True)
    assert torch.equal(out, beside)
    used = [50, 37]
    for page in (16, 64):
        k_pages, v_pages, table = paged(k, v, used, page)
        lengths = torch.tensor(used, dtype=torch.int32)
        pages = flash_attn.flash_attn_with_kvcache(
            q, k_pages, v_pages, qv=qv, cache_seqlens=lengths, page_table=table, causal=True
        )
        for b in range(BATCH):
            one = slice(b, b + 1)
            whole = torch.cat((qv[one], q[one]), -1), cache[one, : used[b]], v[one, : used[b]]
            same = () if dtype == torch.float32 else oracle.same_dtype(*whole, causal=True)[:1]
            oracle.assert_close(pages[one], oracle.exact(*whole, causal=True)[0], *same)
        packed = vllm_flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1), k_pages, v_pages, 3, torch.tensor([0, 3, 6], dtype=torch.int32), 50,
            seqused_k=lengths, q_v=qv.flatten(0, 1), causal=True, block_table=table,
        )  # fmt: skip
        assert torch.equal(packed, pages.flatten(0, 1))


def test_padding_and_chosen_entries_in_tensors_of_their_own() -> None:
    q, qv, cache = latent(16, 32)
    v, k = (t.clone() for t in cache.split([32, 16], -1))
    k[1, :7], v[1, :7] = torch.nan, torch.nan
    out = flash_attn.flash_attn_with_kvcache(
        q, k, v, qv=qv, cache_seqlens=50, cache_leftpad=torch.tensor([7, 0], dtype=torch.int32),
        cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32), causal=True,
    )  # fmt: skip
    oracle.assert_close(out[:1], expected(q[:1], qv[:1], cache[1:, 7:], causal=True))
    oracle.assert_close(out[1:], expected(q[1:], qv[1:], cache[:1], causal=True))


def test_what_is_appended_to_tensors_of_their_own_takes_part() -> None:
    q, qv, cache = latent(16, 32)
    v, k, table = paged(cache[..., :32], cache[..., 32:], [20, 20], 16)
    new = cache[:, 20:23]
    out = flash_attn.flash_attn_with_kvcache(
        q, k, v, k=new[..., 32:], v=new[..., :32], qv=qv, cache_seqlens=20, page_table=table, causal=True
    )
    oracle.assert_close(out, expected(q, qv, cache[:, :23], causal=True))


def test_what_is_appended_takes_part() -> None:
    q, qv, cache = latent()
    rows = cache[:, 20:23].clone()
    cache[:, 20:] = float("nan")
    v, k = cache[..., :512], cache[..., 512:]
    out = flash_attn.flash_attn_with_kvcache(
        q, k, v, k=rows[..., 512:], v=rows[..., :512], qv=qv, cache_seqlens=20, causal=True
    )
    assert torch.equal(cache[:, 20:23], rows)
    oracle.assert_close(out, expected(q, qv, cache[:, :23], causal=True))


@pytest.mark.parametrize("place", ["side by side", "k before v", "apart", "packed"])
def test_gradients_are_those_of_the_concatenations(place: str) -> None:
    q, qv, cache = latent(16, 32)
    leaves = [t.requires_grad_() for t in (q, qv, cache)]
    v, k = cache.split([32, 16], -1)
    if place == "k before v":
        k, v = cache.split([16, 32], -1)
    elif place == "apart":
        k, v = k.clone(), v.clone()
    out = expected(q, qv, torch.cat((v, k), -1), causal=True)
    if place == "packed":
        cu_q, cu_k = torch.tensor([0, 3, 6]), torch.tensor([0, KEYS, 2 * KEYS])
        flat = (t.flatten(0, 1) for t in (q, k, v))
        got = flash_attn.flash_attn_varlen_func(*flat, cu_q, cu_k, qv=qv.flatten(0, 1), causal=True)
        got = got.view(out.shape)
    else:
        got = flash_attn.flash_attn_func(q, k, v, qv=qv, causal=True)
    oracle.assert_close(got, out)
    dout = torch.randn(out.shape)
    for a, b in zip(*(torch.autograd.grad(t, leaves, dout.to(t)) for t in (got, out)), strict=True):
        oracle.assert_close(a, b)


def test_what_it_lacks_is_an_error_with_a_remedy() -> None:
    q, qv, cache = latent(16, 32)
    v, k = cache.split([32, 16], -1)

    def run(name: str, **changed: Any) -> None:
        given = {"q": q, "k": k, "v": v, "qv": qv} | changed
        with pytest.raises(tandem.TandemError, match=name):
            flash_attn.flash_attn_func(**given)

    run("^qv is given with k, torch.float32 of shape .2, 49, 1, 16., and v, .* pass as many rows", k=k[:, 1:])
    run("^qv is given with k, torch.float64 .* in one dtype", k=k.double())
    run(r"^qv has shape \(2, 3, 16, 16\); pass \(2, 3, 16, 32\)", qv=q)
    run("^qv is torch.float64 but q is torch.float32; convert", qv=qv.double())
    run("^qv is given with k_descale; leave k_descale out", k_descale=torch.ones(2, 1))
    with pytest.raises(TypeError, match="^qv is a builtins.int; pass a torch.Tensor"):
        flash_attn.flash_attn_func(q, k, v, qv=3)  # type: ignore[arg-type]
