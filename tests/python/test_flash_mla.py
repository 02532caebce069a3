"""FlashMLA's decoding: latent caches of 16 bits and of FP8 records, dense and by indices."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from pages import paged, used
from tandem import flash_mla
from tandem.compat import _latent
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


def check(out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, **options: Any) -> None:
    """Of sequences of LENGTHS. Where a query sees nothing, FlashMLA's LSE is infinity."""
    assert not lse.isneginf().any()
    got = out, lse.masked_fill(lse.isposinf(), -torch.inf)
    oracle.assert_sequences_close(got, q, keys, keys[..., :D_V], LENGTHS, **options)


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
    check(out, lse, q, cache, scale=0.05, causal=causal)
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
        check(out, lse, q, keys, causal=True)


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


@pytest.mark.parametrize("compiled", [False, True])
def test_only_records_in_use_are_read(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """A wide table costs what a narrow one does. Where lengths are not read, the cache bounds it."""
    q, (stored, keys) = torch.randn(2, 1, 2, D), records(torch.randn(6, 8, 1, D))
    table = torch.full((2, 5000), 2**30, dtype=torch.int32)
    table[:, :3] = torch.tensor([[4, 1, 9], [4, 0, 3]])
    lengths, read, made = torch.tensor([13, 24], dtype=torch.int32), [], []
    convert, append = flash_mla._from_records, _latent._cache.append_kv

    def append_kv(k: torch.Tensor, v: None, to: torch.Tensor, *rest: Any, **options: Any) -> None:
        made.append(len(to))
        read.append(0 if compiled else int(options["seqused_new"].sum()))
        append(k, v, to, *rest, **options)

    monkeypatch.setattr(_latent._cache, "append_kv", append_kv)
    monkeypatch.setattr(flash_mla, "_from_records", lambda t: (read.append(len(t)), convert(t))[1])
    call = torch.compile(flash_mla_with_kvcache, backend="eager") if compiled else flash_mla_with_kvcache
    out, _ = call(q, stored, table, lengths, D_V, is_fp8_kvcache=True)
    for b, (pages, n) in enumerate((([4, 1], 13), ([4, 0, 3], 24))):
        rows = keys[pages].flatten(0, 1)[None, :n]
        oracle.assert_close(out[b : b + 1], expected(q[b : b + 1], rows)[0])
    assert made == [6, 6] if compiled else (made, read) == ([4, 4], [8 + 5 + 8 + 8] * 2)
    read.clear()
    indices = torch.full((2, 1, 30), -1, dtype=torch.int32)
    indices[:, :, 7:9] = torch.tensor([40, 3])
    out, _ = call(q, stored, None, None, D_V, indices=indices, is_fp8_kvcache=True)
    rows = keys.flatten(0, 1)[[40, 3]][None]
    oracle.assert_close(out, torch.cat([expected(each[None], rows)[0] for each in q]))
    assert sum(read) == (48 if compiled else 2)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("number", [-1, -(2**31), 4, 2**31 - 1])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_that_there_is_not(fp8: bool, number: int, compiled: bool) -> None:
    """Its rows are zeros, not those of another request."""
    q, keys = torch.randn(1, 1, 2, D), torch.randn(4, 8, 1, D)
    cache, keys = records(keys) if fp8 else (keys, keys)
    table = torch.tensor([[2, number]], dtype=torch.int32)
    call = torch.compile(flash_mla_with_kvcache, backend="eager") if compiled else flash_mla_with_kvcache
    where = (table, torch.tensor([13], dtype=torch.int32), D_V)
    out, lse = call(q, cache, *where, is_fp8_kvcache=fp8)
    rows = torch.cat((keys[2], torch.zeros(5, 1, D)))[None]
    oracle.assert_all_close((out, lse), expected(q, rows))


def test_a_cache_whose_blocks_lie_apart() -> None:
    q, room = torch.randn(2, 3, 4, D), torch.randn(5, 16, 1, D)
    indices = torch.randint(-1, 40, (2, 3, 9), dtype=torch.int32)
    given: tuple[Any, ...] = (None, None, D_V)
    found = flash_mla_with_kvcache(q, room[:, :8], *given, indices=indices)
    wanted = flash_mla_with_kvcache(q, room[:, :8].contiguous(), *given, indices=indices)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_records_whose_blocks_lie_apart(dtype: torch.dtype) -> None:
    """They become keys of q's dtype, rounded once."""
    q, (stored, keys) = torch.randn(2, 1, 4, D).to(dtype), records(torch.randn(5, 16, 1, D))
    room = torch.zeros(5, 17, 1, 660, dtype=torch.uint8)
    room[:, 1:, :, 4:] = stored
    where = (torch.tensor([[3, 1], [0, 3]]), torch.tensor([20, 32]), D_V)
    found = flash_mla_with_kvcache(q, room[:, 1:, :, 4:], *where, is_fp8_kvcache=True)
    wanted = flash_mla_with_kvcache(q, keys.to(dtype), *where)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("fp8", [False, True])
def test_nothing_to_see(fp8: bool) -> None:
    """Caches without blocks, tables without entries, batches without requests."""
    cache = records(torch.randn(3, 8, 1, D))[0] if fp8 else torch.randn(3, 8, 1, D)
    for batch, blocks, entries in ((2, 0, 2), (2, 3, 0), (0, 3, 2)):
        q, table = torch.randn(batch, 2, 4, D), torch.zeros(batch, entries, dtype=torch.int32)
        lengths = torch.zeros(batch, dtype=torch.int32)
        for where in (
            {"block_table": table, "cache_seqlens": lengths},
            {"indices": torch.full((batch, 2, entries), -1)},
        ):
            options = {"block_table": None, "cache_seqlens": None, **where}
            out, lse = flash_mla_with_kvcache(
                q, cache[:blocks], head_dim_v=D_V, is_fp8_kvcache=fp8, **options
            )
            assert out.shape == (batch, 2, 4, D_V) and not out.any()
            assert lse.shape == (batch, 4, 2) and (lse == torch.inf).all()


def test_what_is_wrong_is_said() -> None:
    q, (pages, table) = torch.randn(4, 1, 2, D), in_pages(latent())
    bytes_of, lengths = torch.zeros(4, 64, 1, 656, dtype=torch.uint8), used(LENGTHS)
    given: tuple[Any, ...] = (q, pages, table, lengths, D_V)
    indices = torch.zeros(4, 1, 3, dtype=torch.int32)
    rows: dict[str, Any] = {"indices": indices}
    more: dict[str, Any] = {"extra_k_cache": pages, "extra_indices_in_kvcache": indices}
    of_rows = r"it must be int32 or int64 of shape \(4, 1, topk\)"
    for arguments, options, message in (
        ((q, pages, None, None, D_V), {}, "block_table is missing"),
        ((q, pages, table, None, D_V), {}, "cache_seqlens is missing"),
        ((q, pages, table, lengths, 600), {}, "head_dim_v is 600; values are the first columns"),
        ((q, pages, table, lengths, 8.0), {}, "head_dim_v is 8.0; values are the first columns"),
        ((q[0], pages, table, lengths, D_V), {}, r"q is float32 of shape \(1, 2, 576\)"),
        ((q.double(), pages, table, lengths, D_V), {}, "q is float64"),
        ((q, pages.half(), table, lengths, D_V), {}, r"k_cache is float16 of .* it must be float32 of"),
        ((q[..., :64], pages, table, lengths, D_V), {}, "q has head_dim 64, but keys of k_cache have 576"),
        ((q, pages[0], table, lengths, D_V), {}, r"k_cache is float32 of shape \(64, 1, 576\)"),
        ((q, bytes_of, table, lengths, D_V), {}, "k_cache is uint8 .* is_fp8_kvcache=True"),
        ((q, pages, table.float(), lengths, D_V), {}, "block_table is float32"),
        (
            (q, pages, table[0], lengths, D_V),
            {},
            r"block_table .* it must be int32 or int64 of shape \(4, max",
        ),
        ((q, pages, table, lengths[:2], D_V), {}, r"cache_seqlens is int32 of shape \(2,\)"),
        ((q, pages, table, 7, D_V), {}, "cache_seqlens is a int; pass a torch.Tensor"),
        ((q.clone().requires_grad_(), *given[1:]), {}, "q requires a gradient"),
        (given, {"is_fp8_kvcache": True}, r"k_cache is float32 of shape \(\d+, 64, 1, 576\)"),
        (
            (q, torch.zeros(4, 64, 1, 660, dtype=torch.uint8)[..., 2:-2], table, lengths, D_V),
            {"is_fp8_kvcache": True},
            r"k_cache begins at byte 2 and has strides \(42240, 660, 660, 1\); .*: clone k_cache",
        ),
        (
            (q, bytes_of, table, lengths, 64),
            {"is_fp8_kvcache": True},
            "head_dim_v is 64; with is_fp8_kvcache",
        ),
        (given, {"is_fp8_kvcache": 1}, "is_fp8_kvcache is 1; pass True or False"),
        (given, {"causal": "no"}, "causal is 'no'; pass True or False"),
        (given, rows | {"causal": True}, "causal is given with indices"),
        (given, {"indices": indices[:2]}, r"indices is int32 of shape \(2, 1, 3\); " + of_rows),
        (given, {"indices": indices.float()}, "indices is float32 .*" + of_rows),
        (given, {"topk_length": lengths}, "topk_length is given without indices; pass both"),
        (given, rows | {"topk_length": 2}, "topk_length is a int"),
        (given, rows | {"topk_length": lengths[:1]}, r"topk_length is int32 of shape \(1,\)"),
        (given, {"extra_k_cache": pages}, "extra_k_cache and extra_indices_in_kvcache go together"),
        (given, more | {"extra_k_cache": pages.half()}, "extra_k_cache is float16"),
        (given, more | {"extra_indices_in_kvcache": indices[:, 0]}, "extra_indices_in_kvcache is int32"),
        (given, more | {"extra_topk_length": lengths[None]}, "extra_topk_length is int32"),
        (given, {"attn_sink": torch.ones(1)}, r"attn_sink is float32 of shape \(1,\); .* of shape \(2,\)"),
        (given, {"attn_sink": 1.0}, "attn_sink is a float"),
        (given, {"softmax_scale": "small"}, "softmax_scale is 'small'; pass a number"),
        (given, {"split_size": 100}, "split_size is 100"),
        ((q, pages.repeat(1, 1, 1, 2)[..., ::2], table, lengths, D_V), {}, "k_cache .*stride"),
        ((q.repeat(1, 1, 2, 1)[:, :, :3], pages.repeat(1, 1, 2, 1), table, lengths, D_V), {}, ".*heads_q"),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{message}"):
            flash_mla_with_kvcache(*arguments, **options)
