"""Caches of CUDA tensors behind FlashAttention-3's names, against the CPU's results: appending with a rotary
embedding, keys of 8 bits, padding before pages, CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tandem
import torch
from pages import paged, used
from tandem.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tandem.flash_mla import flash_mla_with_kvcache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use")

BEFORE, AFTER = [30, 20, 0, 5], [33, 23, 3, 8]


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def on(device: str, value: Any) -> Any:
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def expect_the_cpus_results(run: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> None:
    """`run` gives results, and may change its tensors: both are to be as on the CPU."""
    results = []
    for device in ("cpu", "cuda"):
        given = [on(device, t) for t in tensors]
        made = run(*given, **{name: on(device, value) for name, value in options.items()})
        results.append([t.cpu().float() for t in (*made, *given)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2, equal_nan=True)


def appended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    **options: Any,
) -> Any:
    return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options, return_softmax_lse=True)


@pytest.mark.parametrize("place", ["contiguous", "pages", "chosen entries"])
@pytest.mark.parametrize("rotary", [None, "neighbours", "halves"])
@pytest.mark.parametrize("causal", [True, False])
def test_append(place: str, rotary: str | None, causal: bool) -> None:
    q, new, caches = half(4, 3, 8, 64), (half(4, 3, 2, 64), half(4, 3, 2, 64)), [half(4, 40, 2, 64)] * 2
    options: dict[str, Any] = {"cache_seqlens": used(BEFORE), "causal": causal}
    if rotary is not None:
        angles = torch.randn(40, 16)
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        options["rotary_interleaved"] = rotary == "neighbours"
    if place == "pages":
        *caches, options["page_table"] = paged(*caches, AFTER, 8)
    elif place == "chosen entries":
        options["cache_batch_idx"] = torch.tensor([3, 2, 1, 0])
    expect_the_cpus_results(appended, q, *new, *caches, **options)


def test_packed_append_of_other_rows_than_the_queries() -> None:
    q, new = half(9, 8, 64), (half(6, 2, 64), half(6, 2, 64))
    *caches, table = paged(half(4, 40, 2, 64), half(4, 40, 2, 64), [40] * 4, 8)
    angles = torch.randn(64, 16)
    expect_the_cpus_results(
        appended,
        q,
        *new,
        *caches,
        page_table=table,
        cache_seqlens=used(BEFORE),
        cu_seqlens_q=used([0, 4, 5, 5, 9]),
        cu_seqlens_k_new=used([0, 2, 2, 5, 6]),
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        rotary_seqlens=used([1, 2, 3, 4]),
        causal=True,
    )


def test_rows_without_a_place_are_left_out() -> None:
    q, new, caches = half(2, 1, 8, 64), (half(2, 1, 2, 64), half(2, 1, 2, 64)), (half(2, 16, 2, 64),) * 2
    k, v = (t.cuda() for t in caches)
    before = k.clone()
    appended(q.cuda(), *(t.cuda() for t in new), k, v, cache_seqlens=used([16, 3]).cuda())
    assert torch.equal(k[0], before[0])
    assert torch.equal(k[1, 3].cpu(), new[0][1, 0])


def test_appending_in_a_graph() -> None:
    q, k, v = half(2, 1, 8, 64).cuda(), half(2, 1, 2, 64).cuda(), half(2, 1, 2, 64).cuda()
    caches = half(2, 64, 2, 64).cuda(), half(2, 64, 2, 64).cuda()
    lengths = used([5, 40]).cuda()
    angles = torch.randn(64, 16).cuda()
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    appended(q, k, v, *(t.clone() for t in caches), **options)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = appended(q, k, v, *caches, **options)
    for step in range(3):
        kept = [t.clone() for t in caches]
        graph.replay()
        expected, _ = appended(q, k, v, *kept, **options)
        torch.testing.assert_close(out, expected)
        for a, b in zip(caches, kept, strict=True):
            assert torch.equal(a, b), step
        lengths += 1


@pytest.mark.parametrize("dtype", ["e4m3", "s8"])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("page_size", [0, 7, 16])
def test_keys_of_eight_bits(dtype: str, queries: int, page_size: int) -> None:
    q, k, v = half(4, queries, 8, 128), half(4, 96, 2, 128), half(4, 96, 2, 128)
    (k8, k_scale), (v8, v_scale) = tandem.quantize(k, dtype), tandem.quantize(v, dtype)
    options: dict[str, Any] = {"seqused_k": used([96, 50, 0, 5]), "k_scale": k_scale, "v_scale": v_scale}
    caches = [k8, v8]
    if page_size > 0:
        table = torch.randperm(4 * -(-96 // page_size), dtype=torch.int32).view(4, -1)
        spread = torch.arange(table.numel() * page_size).view(-1, page_size)
        caches = [torch.zeros(*spread.shape, 2, 128).to(t.dtype) for t in caches]
        for pool, t in zip(caches, (k8, v8), strict=True):
            for b in range(4):
                for row in range(96):
                    pool[table[b, row // page_size], row % page_size] = t[b, row]
        options["page_table"] = table

    def run(*given: torch.Tensor, **named: Any) -> Any:
        return tandem.attention(*given, **named, causal=True, return_lse=True)

    expect_the_cpus_results(run, q, *caches, **options)


@pytest.mark.parametrize("where", ["dense", "chunks", "packed", "contiguous", "pages"])
def test_fp8_by_flash_attentions_names(where: str) -> None:
    """Against the CPU's exact products: without a cache by the FP8 recipe, whose P is rounded to e4m3."""
    q, k, v = (half(2, rows, heads, 128) for rows, heads in ((300, 8), (320, 2), (320, 2)))
    q, k, v = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
    options: dict[str, Any] = {f"{name}_descale": torch.rand(2, 2) + 0.5 for name in "qkv"}
    function: Any = flash_attn_func
    options |= {"causal": True, "attention_chunk": 128 if where == "chunks" else 0}
    if where == "packed":
        function, cu = flash_attn_varlen_func, used([0, 300, 600])
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": used([0, 320, 640])}
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    elif where in ("contiguous", "pages"):
        function, options["cache_seqlens"] = flash_attn_with_kvcache, used([320, 301])
        if where == "pages":
            k, v = k.view(40, 16, 2, 128), v.view(40, 16, 2, 128)
            options["page_table"] = torch.arange(39, -1, -1, dtype=torch.int32).view(2, 20)
    expected = function(q, k, v, **options).float()
    found = function(q.cuda(), k.cuda(), v.cuda(), **{n: on("cuda", t) for n, t in options.items()})
    assert found.dtype == torch.bfloat16
    bound = 0.05 if where in ("contiguous", "pages") else 0.25
    torch.testing.assert_close(found.cpu().float(), expected, rtol=0.0, atol=bound)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_padding_before_pages(page_size: int) -> None:
    lengths = [90, 50, 12, 64]
    *pages, table = paged(half(4, 96, 2, 64), half(4, 96, 2, 64), lengths, page_size)
    padding = used([0, 17, 12, 5])

    def run(q: torch.Tensor, *caches: torch.Tensor, **options: Any) -> Any:
        return tandem.attention(q, *caches, **options, causal=True, return_lse=True)

    for queries in (1, 4, 100):
        options = {"page_table": table, "seqused_k": used(lengths), "leftpad_k": padding}
        expect_the_cpus_results(run, half(4, queries, 8, 64), *pages, **options)


@pytest.mark.parametrize("queries", [1, 4, 100])
@pytest.mark.parametrize("heads", [2, 8])
def test_causal_requests_beside_others(queries: int, heads: int) -> None:
    lengths = [90, 50, 120, 64]
    *pages, table = paged(half(4, 128, 2, 64), half(4, 128, 2, 64), lengths, 16)

    def run(q: torch.Tensor, *caches: torch.Tensor, **options: Any) -> Any:
        return tandem.attention(q, *caches, **options, return_lse=True)

    options: dict[str, Any] = {"page_table": table, "seqused_k": used(lengths)}
    options["causal_by_sequence"] = torch.tensor([True, False, False, True])
    for window in ((-1, -1), (30, 7)):
        expect_the_cpus_results(run, half(4, queries, heads, 64), *pages, **options, window=window)


@pytest.mark.parametrize("queries", [1, 4, 100, 700])
@pytest.mark.parametrize("split_size", [0, 256])
def test_results_in_f32(queries: int, split_size: int) -> None:
    q, k, v = half(2, queries, 8, 64).cuda(), half(2, 700, 2, 64).cuda(), half(2, 700, 2, 64).cuda()
    out = torch.full(q.shape, torch.nan, device="cuda")
    options: dict[str, Any] = {"causal": True, "split_size": split_size}
    tandem.attention(q, k, v, **options, out=out)
    rounded = tandem.attention(q, k, v, **options)
    assert torch.equal(out.bfloat16(), rounded)
    assert (out != rounded.float()).float().mean() > 0.9


def records(latent: torch.Tensor) -> torch.Tensor:
    """FlashMLA's FP8 records of latent vectors, with scales at random."""
    scales = torch.rand(*latent.shape[:-1], 4, device=latent.device) + 0.5
    codes = latent[..., :512].to(torch.float8_e4m3fn)
    return torch.cat([t.contiguous().view(torch.uint8) for t in (codes, scales, latent[..., 512:])], -1)


@pytest.mark.parametrize("split_size", [0, 256])
def test_flashmlas_interface(split_size: int) -> None:
    """Dense and by indices, of 16 bits and of FP8 records."""
    lengths = [300, 70, 0, 256]
    latent, _, table = paged(*(half(4, 320, 1, 576),) * 2, lengths, 64)
    stored = records(latent.nan_to_num())
    rows = latent.shape[0] * 64
    indices = torch.randint(-1, rows, (4, 2, 40), dtype=torch.int32)

    def run(q: torch.Tensor, cache: torch.Tensor, **options: Any) -> Any:
        return flash_mla_with_kvcache(q, cache, head_dim_v=512, split_size=split_size, **options)

    for heads in (16, 128):
        q = half(4, 2, heads, 576)
        where: dict[str, Any] = {"block_table": table, "cache_seqlens": used(lengths), "causal": True}
        chosen = {
            "block_table": None,
            "cache_seqlens": None,
            "indices": indices,
            "attn_sink": torch.randn(heads),
        }
        expect_the_cpus_results(run, q, latent, **where)
        expect_the_cpus_results(run, q, stored, **where, is_fp8_kvcache=True)
        expect_the_cpus_results(run, q, latent.nan_to_num(), **chosen)
        expect_the_cpus_results(run, q, stored, **chosen, is_fp8_kvcache=True)


def wide(table: torch.Tensor, pages: int) -> torch.Tensor:
    """The table with room for so many pages a request; what is past their ends has numbers of any pages."""
    room = torch.randint(-1, 2**30, (len(table), pages), dtype=torch.int32, device=table.device)
    room[:, : table.shape[1]] = table
    return room


def peak_of(run: Callable[[], Any]) -> tuple[Any, int, float]:
    """Its result the second time, the bytes that it allocated then, and milliseconds."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before, 1e3 * (time.perf_counter() - begin)


@pytest.mark.parametrize("blocks", [64, 16384, 20000])
def test_fp8_records_of_a_wide_table_cost_what_is_in_use(blocks: int) -> None:
    """8 requests of 100 rows in a table for 131,072 rows each: memory follows the cache, time the rows."""
    stored = records(torch.randn(blocks, 64, 1, 576, dtype=torch.bfloat16, device="cuda"))
    table = torch.randperm(blocks, dtype=torch.int32)[:16].view(8, 2).cuda()
    q, lengths = half(8, 1, 128, 576).cuda(), used([100] * 8).cuda()

    def run(t: torch.Tensor) -> Any:
        return flash_mla_with_kvcache(q, stored, t, lengths, 512, causal=True, is_fp8_kvcache=True)

    narrow, of_narrow, _ = peak_of(lambda: run(table))
    found, of_wide, milliseconds = peak_of(lambda: run(wide(table, 2048)))
    torch.testing.assert_close(found, narrow, rtol=1e-2, atol=1e-2)
    workspace = 2**27  # of the call itself, and what is made of its table
    assert of_narrow < 16 * 64 * 1152 + workspace
    assert of_wide < 2 * stored.numel() + workspace
    assert milliseconds < 5


def test_fp8_records_in_a_graph() -> None:
    """Replayed at other lengths and pages than it was captured with."""
    stored = records(half(64, 64, 1, 576)).cuda()
    table = torch.randperm(64, dtype=torch.int32).view(4, 16).cuda()
    q, lengths = half(4, 1, 128, 576).cuda(), used([1] * 4).cuda()

    def run() -> Any:
        return flash_mla_with_kvcache(q, stored, table, lengths, 512, causal=True, is_fp8_kvcache=True)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for now in ([1, 70, 0, 1024], [500, 64, 65, 3]):
        lengths.copy_(used(now))
        table.copy_(table.flip(0))
        stored.copy_(stored.flip(0))
        graph.replay()
        torch.testing.assert_close((out, lse), run(), rtol=1e-2, atol=1e-2)


def test_keys_apart_from_values_of_a_wide_table_cost_what_is_in_use() -> None:
    """FlashAttention-3's `qv`, whose k and v are two tensors."""
    k, v = half(4096, 64, 1, 64).cuda(), half(4096, 64, 1, 512).cuda()
    table = torch.randperm(4096, dtype=torch.int32)[:16].view(8, 2).cuda()
    q, qv, lengths = half(8, 1, 128, 64).cuda(), half(8, 1, 128, 512).cuda(), used([100] * 8).cuda()

    def run(t: torch.Tensor) -> Any:
        options: dict[str, Any] = {"cache_seqlens": lengths, "page_table": t, "causal": True}
        return flash_attn_with_kvcache(q, k, v, qv=qv, **options)

    narrow, of_narrow, _ = peak_of(lambda: run(table))
    found, of_wide, milliseconds = peak_of(lambda: run(wide(table, 2048)))
    torch.testing.assert_close(found, narrow, rtol=1e-2, atol=1e-2)
    workspace = 2**27
    assert of_narrow < 16 * 64 * 1152 + workspace
    assert of_wide < 2 * (k.numel() + v.numel()) + workspace
    assert milliseconds < 5
