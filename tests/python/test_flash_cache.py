"""Caches behind FlashAttention-3's and vLLM's names, as engines use them: pages in any order, NaN in unused
rows, slices of tables and of results, sequences without rows, appending with a rotary embedding."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from pages import paged, used
from tandem import flash_attn, vllm_flash_attn
from tandem.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from test_forward import DTYPES

LENGTHS = [53, 20, 0, 1]
SINK = torch.tensor([-1.0, 0.5, 2.0, 7.0])


def cache(dtype: torch.dtype = torch.float32, rows: int = 53) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, rows, 2, 32).to(dtype), torch.randn(4, rows, 2, 32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 20])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_pages(dtype: torch.dtype, page_size: int, seqlen_q: int) -> None:
    q, (k, v) = torch.randn(4, seqlen_q, 4, 32).to(dtype), cache(dtype)
    k_pages, v_pages, table = paged(k, v, LENGTHS, page_size)
    wide = torch.full((6, table.shape[1] + 3), 1 << 30, dtype=torch.int32)
    wide[1:5, 2:-1] = table
    options: dict[str, Any] = {"causal": True, "softcap": 3.0}
    given = {
        "cache_seqlens": used(LENGTHS),
        "window_size": (30, 0),
        "return_softmax_lse": True,
        "s_aux": SINK.bfloat16(),
    }
    for name, each in (("page_table", table), ("block_table", wide[1:5, 2:-1])):
        got = flash_attn_with_kvcache(q, k_pages, v_pages, **given, **options, **{name: each})
        oracle.assert_sequences_close(got, q, k, v, LENGTHS, window=(30, 0), sink=SINK, **options)


def test_hints_change_nothing() -> None:
    q, (k, v) = torch.randn(4, 2, 4, 32), cache()
    k_pages, v_pages, table = paged(k, v, LENGTHS, 16)
    given = {"cache_seqlens": used(LENGTHS), "page_table": table, "causal": True}
    expected = flash_attn_with_kvcache(q, k_pages, v_pages, **given)
    metadata = flash_attn.get_scheduler_metadata(
        4, 2, 53, 4, 2, 32, given["cache_seqlens"], page_size=16, causal=True
    )
    assert metadata.dtype == torch.int32 and metadata.numel() == 0
    for hints in (
        {"scheduler_metadata": metadata, "num_splits": 4},
        {
            "scheduler_metadata": torch.zeros(9, dtype=torch.int32),
            "pack_gqa": True,
            "sm_margin": 8,
            "max_seqlen_q": 0,
        },
    ):
        assert torch.equal(flash_attn_with_kvcache(q, k_pages, v_pages, **given, **hints), expected)


def test_chosen_entries_behind_padding() -> None:
    q, (k, v) = torch.randn(3, 2, 4, 32), cache()
    index, padding, lengths = torch.tensor([2, 0, 2]), torch.tensor([7, 0, 10]), [20, 53, 40]
    given = {"cache_batch_idx": index, "cache_leftpad": padding}
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=used(lengths), **given, causal=True)
    for b in range(3):
        rows = (slice(index[b], index[b] + 1), slice(padding[b], lengths[b]))
        oracle.assert_close(out[b : b + 1], oracle.exact(q[b : b + 1], k[rows], v[rows], causal=True)[0])
    # an integer counts for each sequence of the call, not of the cache
    two = flash_attn_with_kvcache(q[:2], k, v, cache_seqlens=9, cache_batch_idx=index[:2])
    assert two.shape == (2, 2, 4, 32)


def test_varlen_queries_some_without_rows() -> None:
    (k, v), cu, lengths = cache(), torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32), [53, 20, 0, 1]
    q = torch.randn(8, 4, 32)  # two rows past the last sequence
    k_pages, v_pages, table = paged(k, v, lengths, 16)
    given = {"seqused_k": used(lengths), "block_table": table, "causal": True, "return_lse": True}
    out, lse = flash_attn_varlen_func(q, k_pages, v_pages, cu, None, 3, 1 << 20, num_splits=7, **given)
    oracle.assert_sequences_close((out, lse), q, k, v, lengths, cu, causal=True)
    assert torch.equal(out[6:], torch.zeros(2, 4, 32)) and (lse[:, 6:] == -torch.inf).all()
    empty = flash_attn_varlen_func(
        q[:0], k_pages, v_pages, cu * 0, None, 0, 0, seqused_k=used(lengths), block_table=table
    )
    assert empty.shape == (0, 4, 32)
    with pytest.raises(tandem.InvalidArgumentError, match="^block_table is given without seqused_k"):
        flash_attn_varlen_func(q, k_pages, v_pages, cu, None, block_table=table)


def test_results_of_the_callers() -> None:
    (k, v), cu = cache(), torch.tensor([0, 3, 3, 5, 6])
    k_pages, v_pages, table = paged(k, v, LENGTHS, 16)
    q, buffer = torch.randn(6, 4, 32), torch.full((9, 4, 40), torch.nan)
    given = {"seqused_k": used(LENGTHS), "block_table": table, "causal": True}
    expected, expected_lse = flash_attn_varlen_func(q, k_pages, v_pages, cu, None, **given, return_lse=True)
    mine = buffer[2:8, :, 8:]
    out, lse = flash_attn_varlen_func(q, k_pages, v_pages, cu, None, **given, return_lse=True, out=mine)
    assert out is mine and torch.equal(mine, expected) and torch.equal(lse, expected_lse)
    assert buffer.isnan().sum() == buffer.numel() - mine.numel()
    assert (
        flash_attn_varlen_func(q, k_pages, v_pages, cu, None, **given, out=mine, attention_chunk=16) is mine
    )


@pytest.mark.parametrize("chunk", [7, 16])
def test_chunks_of_a_cache(chunk: int) -> None:
    q, (k, v) = torch.randn(4, 3, 4, 32), cache()
    k_pages, v_pages, table = paged(k, v, LENGTHS, 8)
    options: dict[str, Any] = {"cache_seqlens": used(LENGTHS), "causal": True, "attention_chunk": chunk}
    expected = flash_attn_with_kvcache(q, k, v, **options)
    torch.testing.assert_close(
        flash_attn_with_kvcache(q, k_pages, v_pages, page_table=table, **options), expected
    )
    chosen = flash_attn_with_kvcache(
        q[:, :1], k.flip(0), v.flip(0), cache_batch_idx=torch.tensor([3, 2, 1, 0]), **options
    )
    torch.testing.assert_close(chosen, flash_attn_with_kvcache(q[:, :1], k, v, **options))
    behind = (torch.cat([torch.full((4, 5, 2, 32), torch.nan), t], 1) for t in (k, v))
    options["cache_seqlens"] = used([n + 5 for n in LENGTHS])
    padded = flash_attn_with_kvcache(q, *behind, cache_leftpad=used([5] * 4), **options)
    torch.testing.assert_close(padded, expected)


@pytest.mark.parametrize("page", [-1, -(1 << 31), 99, (1 << 31) - 1])
def test_chunks_read_no_page_that_no_table_names(page: int) -> None:
    q, (k, v) = torch.randn(1, 1, 4, 32), cache(rows=16)
    v = torch.full_like(v, 7.0)
    options: dict[str, Any] = {"cache_seqlens": used([32]), "causal": True, "attention_chunk": 16}
    for more in ({"page_table": torch.tensor([[2, page]])}, {"cache_batch_idx": torch.tensor([page])}):
        options["cache_seqlens"] = used([32 if "page_table" in more else 16])
        out = flash_attn_with_kvcache(q, k, v, **options, **more)
        assert torch.equal(out, torch.zeros_like(out))
        if "page_table" in more:
            del options["attention_chunk"]
            for qv in (torch.randn(1, 1, 4, 32), None):
                ones = flash_attn_with_kvcache(q, k, v, qv=qv, **options, **more)
                assert (ones <= 7.0).all()


def vllm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, **options: Any) -> Any:
    return vllm_flash_attn.flash_attn_varlen_func(q, k, v, 0, cu, 1 << 20, **options)


def test_vllms_order_and_what_it_hands_over() -> None:
    """A step with prefill, decode and a request without rows (padding for CUDA graphs): a result in a slice,
    descales by expand, a bfloat16 sink, a list for the window, hints."""
    (k, v), lengths, cu = (
        cache(torch.bfloat16),
        [53, 20, 0, 7],
        torch.tensor([0, 20, 21, 21, 22], dtype=torch.int32),
    )
    q, out = torch.randn(22, 4, 32).bfloat16(), torch.full((30, 4, 32), torch.nan, dtype=torch.bfloat16)
    k_pages, v_pages, table = paged(k, v, lengths, 16)
    descale = torch.tensor(3.0).expand(4, 2)
    metadata = vllm_flash_attn.get_scheduler_metadata(4, 20, 53, 4, 2, 32, used(lengths), cu_seqlens_q=cu)
    options: dict[str, Any] = {
        "causal": True,
        "window_size": [40, -1],
        "softcap": 0.0,
        "s_aux": SINK.bfloat16(),
    }
    options |= {"scheduler_metadata": metadata, "num_splits": 3, "fa_version": 3, "return_softmax_lse": True}
    got, lse = vllm(
        q, k_pages, v_pages, cu, seqused_k=used(lengths), block_table=table, out=out[4:26],
        q_descale=descale, k_descale=descale, v_descale=descale, **options,
    )  # fmt: skip
    assert got.data_ptr() == out[4:].data_ptr() and out[:4].isnan().all() and out[26:].isnan().all()
    meant: dict[str, Any] = {"causal": True, "window": (40, -1), "sink": SINK}
    oracle.assert_sequences_close((got, lse), q, k, v, lengths, cu, **meant)


def test_vllms_keys_without_pages() -> None:
    q, k, v = torch.randn(9, 4, 32), torch.randn(12, 2, 32), torch.randn(12, 2, 32)
    cu_q, cu_k = torch.tensor([0, 4, 9]), torch.tensor([0, 5, 12])
    out = vllm(q, k, v, cu_q, cu_seqlens_k=cu_k, causal=True)
    assert torch.equal(out, tandem.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True))
    q8, k8, v8 = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
    descale = torch.tensor(0.5).expand(2, 2)
    scaled = vllm(
        q8, k8, v8, cu_q, cu_seqlens_k=cu_k, q_descale=descale, k_descale=descale, v_descale=descale
    )
    dense = torch.full((2, 2), 0.5)
    names = {name: dense for name in ("q_scale", "k_scale", "v_scale")}
    same = tandem.attention(q8, k8, v8, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **names)
    assert torch.equal(scaled, same)


def test_vllms_alibi_slopes() -> None:
    """A prompt, a token, a request without rows; slopes by head, and by request and head."""
    (k, v), lengths = cache(), [53, 20, 0]
    q, cu = torch.randn(21, 4, 32), torch.tensor([0, 20, 21, 21], dtype=torch.int32)
    k_pages, v_pages, table = paged(k[:3], v[:3], lengths, 16)
    by_request = torch.rand(3, 4)
    for slopes in (by_request[0], by_request):
        options = {"seqused_k": used(lengths), "block_table": table, "causal": True, "alibi_slopes": slopes}
        out = vllm(q, k_pages, v_pages, cu, **options)
        oracle.assert_sequences_close(out, q, k, v, lengths, cu, causal=True, alibi_slopes=slopes)
    with pytest.raises(tandem.UnsupportedError, match="^alibi_slopes is given with attention_chunk"):
        flash_attn_varlen_func(q, k_pages, v_pages, cu, None, attention_chunk=8, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_of_each_of_vllms_requests(causal: bool) -> None:
    q, (k, v), cu = torch.randn(4, 4, 32), cache(), torch.tensor([0, 3, 3, 4], dtype=torch.int32)
    lengths = used([9, 0, 5])
    flags = torch.tensor([1, 0, 0], dtype=torch.int32)
    out = vllm(
        q, k[:3], v[:3], cu, seqused_k=lengths, causal=causal, dynamic_causal=flags, window_size=[4, 4]
    )
    for rows, b, own in ((slice(0, 3), 0, True), (slice(3, 4), 2, False)):
        options = {"causal": own, "window": (4, 4), "seqused_k": lengths[b : b + 1]}
        same = tandem.attention(q[None, rows], k[b : b + 1], v[b : b + 1], **options)
        assert torch.equal(out[rows], same[0])


def test_what_vllm_asks_and_tandem_lacks() -> None:
    q, (k, v), cu = torch.randn(4, 4, 32), cache(), torch.arange(5)
    given = {"seqused_k": used(LENGTHS)}
    for name, value in (
        ("dropout_p", 0.1),
        ("output_scale", torch.ones(1)),
        ("cp_world_size", 2),
        ("mask_mod", print),
        ("block_sparse_tensors", q),
        ("aux_tensors", [q]),
    ):
        with pytest.raises(tandem.UnsupportedError, match=f"^{name} is "):
            vllm(q, k, v, cu, **given, **{name: value})
    for lengths, which in (({}, "neither"), (given | {"cu_seqlens_k": cu}, "both")):
        with pytest.raises(
            tandem.InvalidArgumentError, match=f"^cu_seqlens_k and seqused_k are {which} given"
        ):
            vllm(q, k, v, cu, **lengths)
    assert (
        vllm_flash_attn.is_fa_version_supported(3)
        and vllm_flash_attn.fa_version_unsupported_reason(2) is None
    )
    with pytest.raises(tandem.InvalidArgumentError, match="^fa_version is 5"):
        vllm_flash_attn.is_fa_version_supported(5)
