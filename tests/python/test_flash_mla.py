"""FlashMLA's decoding: latent caches of 16 bits and of FP8 records, dense and by indices."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from pages import paged, used
from tandem.flash_mla import flash_mla_with_kvcache, get_mla_metadata

D, D_V = 576, 512
LENGTHS = [140, 20, 0, 64]


def latent(rows: int = 140, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(len(LENGTHS), rows, 1, D).to(dtype)


def in_pages(cache: torch.Tensor, page_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache in pages, NaN where no request has a row, and the table."""
    pages, _, table = paged(cache, cache, LENGTHS, page_size)
    return pages, table


def expected(q: torch.Tensor, keys: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return oracle.exact(q, keys, keys[..., :D_V], **options)


def records(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 records of keys, and the keys that they stand for, in f32."""
    groups = keys[..., :D_V].float().unflatten(-1, (4, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    codes = (groups / scales).to(torch.float8_e4m3fn)
    rope = keys[..., D_V:].bfloat16()
    stored = torch.cat(
        (
            codes.flatten(-2).view(torch.uint8),
            scales.squeeze(-1).contiguous().view(torch.uint8),
            rope.contiguous().view(torch.uint8),
        ),
        -1,
    )
    return stored, torch.cat(((codes.float() * scales).flatten(-2), rope.float()), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_all_rows(dtype: torch.dtype, heads: int, causal: bool) -> None:
    q, cache = torch.randn(4, 2, heads, D).to(dtype), latent(dtype=dtype)
    pages, table = in_pages(cache)
    schedule, splits = get_mla_metadata(used(LENGTHS), heads, 1)
    out, lse = flash_mla_with_kvcache(
        q, pages, table, used(LENGTHS), D_V, schedule, splits, softmax_scale=0.05, causal=causal
    )
    for b, n in enumerate(LENGTHS):
        keys = cache[b : b + 1, :n]
        options = {"scale": 0.05, "causal": causal}
        same = (
            ()
            if dtype == torch.float32
            else oracle.same_dtype(q[b : b + 1], keys, keys[..., :D_V], **options)[:1]
        )
        wanted, wanted_lse = expected(q[b : b + 1], keys, **options)
        oracle.assert_close(out[b : b + 1], wanted, *same)
        oracle.assert_close(lse[b : b + 1], wanted_lse.masked_fill(wanted_lse == -torch.inf, torch.inf))
    assert (lse[2] == torch.inf).all() and not out[2].any()


def test_fp8_records() -> None:
    q = torch.randn(4, 2, 16, D)
    stored, keys = records(latent())
    pages, table = in_pages(stored.float())
    pages = pages.nan_to_num(255.0).to(torch.uint8)  # NaN where no request has a row
    for view in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        out, lse = flash_mla_with_kvcache(
            q, pages.view(view), table, used(LENGTHS), D_V, causal=True, is_fp8_kvcache=True
        )
        for b, n in enumerate(LENGTHS):
            wanted, wanted_lse = expected(q[b : b + 1], keys[b : b + 1, :n], causal=True)
            oracle.assert_close(out[b : b + 1], wanted)
            oracle.assert_close(lse[b : b + 1], wanted_lse.masked_fill(wanted_lse == -torch.inf, torch.inf))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_rows_that_indices_choose(fp8: bool, sink: bool) -> None:
    q, pages = torch.randn(2, 3, 16, D), torch.randn(6, 8, 1, D)
    extra = torch.randn(2, 4, 1, D)
    if fp8:
        (pages, keys), (extra, extra_keys) = records(pages), records(extra)
    else:
        keys, extra_keys = pages, extra
    indices = torch.randint(-3, 50, (2, 3, 20), dtype=torch.int32)
    indices[0, 1] = -1
    of_extra = torch.randint(-1, 8, (2, 3, 5), dtype=torch.int32)
    of_extra[0, 1] = 8
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    sinks = torch.randn(16) if sink else None
    out, lse = flash_mla_with_kvcache(
        q, pages, None, None, D_V,
        is_fp8_kvcache=fp8, indices=indices, topk_length=lengths, attn_sink=sinks,
        extra_k_cache=extra, extra_indices_in_kvcache=of_extra,
    )  # fmt: skip
    for b in range(2):
        for i in range(3):
            own = [n for n in indices[b, i, : lengths[b]].tolist() if 0 <= n < 48]
            more = [n for n in of_extra[b, i].tolist() if 0 <= n < 8]
            seen = torch.cat((keys.flatten(0, 1)[own], extra_keys.flatten(0, 1)[more]))[None]
            wanted, wanted_lse = expected(q[b : b + 1, i : i + 1], seen)
            if sinks is not None:
                share = torch.sigmoid(wanted_lse[0, :, 0] - sinks).nan_to_num(0.0)
                wanted = wanted * share[:, None]
            oracle.assert_close(out[b : b + 1, i : i + 1], wanted)
            oracle.assert_close(
                lse[b, :, i], wanted_lse[0, :, 0].masked_fill(torch.tensor(not seen.numel()), torch.inf)
            )


def test_an_infinite_sink() -> None:
    q, (pages, table) = torch.randn(4, 1, 2, D), in_pages(latent())
    for sink, factor in ((torch.inf, 0.0), (-torch.inf, 1.0)):
        out, lse = flash_mla_with_kvcache(
            q, pages, table, used(LENGTHS), D_V, attn_sink=torch.full((2,), sink)
        )
        plain, same = flash_mla_with_kvcache(q, pages, table, used(LENGTHS), D_V)
        assert torch.equal(out, plain * factor) and torch.equal(lse, same)


def test_what_is_wrong_is_said() -> None:
    q, (pages, table) = torch.randn(4, 1, 2, D), in_pages(latent())
    given: tuple[Any, ...] = (q, pages, table, used(LENGTHS), D_V)
    indices = torch.zeros(4, 1, 3, dtype=torch.int32)
    for arguments, options, message in (
        ((q, pages, None, None, D_V), {}, "block_table is missing"),
        ((q, pages, table, None, D_V), {}, "cache_seqlens is missing"),
        ((q, pages, table, used(LENGTHS), 600), {}, "head_dim_v is 600; values are the first columns"),
        (given, {"is_fp8_kvcache": True}, r"k_cache is torch.float32 of shape \(\d+, 64, 1, 576\)"),
        (given, {"indices": indices, "causal": True}, "causal is given with indices"),
        (given, {"indices": indices[:2]}, r"indices have shape \(2, 1, 3\); pass \(4, 1, 'topk'\)"),
        (given, {"extra_k_cache": pages}, "extra_k_cache and extra_indices_in_kvcache go together"),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{message}"):
            flash_mla_with_kvcache(*arguments, **options)
