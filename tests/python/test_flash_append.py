"""Appending to caches behind FlashAttention-3's names: contiguous, in pages, by entries, packed, with a
rotary embedding of what is appended and of the queries, and what does not fit."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from pages import paged, row_of, used
from tandem.flash_attn import flash_attn_with_kvcache
from test_flash_cache import cache


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: int, interleaved: bool
) -> torch.Tensor:
    """One row (heads, head_dim) by complex numbers."""
    half = cos.shape[1]
    x = x.double()
    pairs = x[:, : 2 * half].unflatten(1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(1, 2)
    angle = torch.complex(cos[position].double(), sin[position].double())
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    turned = (turned if interleaved else turned.transpose(1, 2)).flatten(1)
    return torch.cat([turned, x[:, 2 * half :]], 1).to(torch.float32)


@pytest.mark.parametrize("place", ["contiguous", "pages", "chosen entries"])
@pytest.mark.parametrize(
    ("rotary", "rotary_dim"),
    [(None, 16), *((kind, dim) for kind in ("neighbours", "halves") for dim in (2, 16, 20, 24))],
)
@pytest.mark.parametrize("causal", [True, False])
def test_append(place: str, rotary: str | None, rotary_dim: int, causal: bool) -> None:
    before, after = [30, 20, 0, 5], [33, 23, 3, 8]
    q, (k, v), (new_k, new_v) = torch.randn(4, 3, 4, 32), cache(rows=33), cache(rows=3)
    whole_k, whole_v = (torch.cat([t, torch.zeros(4, 3, 2, 32)], 1) for t in (k, v))
    angles = torch.randn(40, rotary_dim // 2)
    tables = (angles.cos(), angles.sin())
    expected_q = q.clone()
    for b, n in enumerate(before):
        for j in range(3):
            turned = new_k[b, j]
            if rotary is not None:
                turned = rotated(turned, *tables, n + j, rotary == "neighbours")
                expected_q[b, j] = rotated(q[b, j], *tables, n + j if causal else n, rotary == "neighbours")
            whole_k[b, n + j], whole_v[b, n + j] = turned, new_v[b, j]
    given: dict[str, Any] = {"cache_seqlens": used(before), "causal": causal, "return_softmax_lse": True}
    if rotary is not None:
        given |= {
            "rotary_cos": tables[0],
            "rotary_sin": tables[1],
            "rotary_interleaved": rotary == "neighbours",
        }
    if place == "pages":
        k_cache, v_cache, given["page_table"] = paged(k, v, after, 8)
    elif place == "chosen entries":
        k_cache, v_cache = k.flip(0).clone(), v.flip(0).clone()
        given["cache_batch_idx"] = torch.tensor([3, 2, 1, 0])
    else:
        k_cache, v_cache = k.clone(), v.clone()
    untouched = k_cache.clone()
    got = flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, **given)
    oracle.assert_sequences_close(got, expected_q, whole_k, whole_v, after, causal=causal)
    if place == "pages":
        for b, n in enumerate(before):
            torch.testing.assert_close(row_of(k_cache, given["page_table"], b, n + 2), whole_k[b, n + 2])
            assert torch.equal(row_of(v_cache, given["page_table"], b, n), whole_v[b, n])
        changed = (k_cache != untouched) & ~(k_cache.isnan() & untouched.isnan())
        assert changed.flatten(2).any(-1).sum() == 12
        # the same rows, packed, and places of another beginning
        given |= {
            "cu_seqlens_k_new": torch.tensor([0, 3, 6, 9, 12]),
            "cu_seqlens_q": torch.tensor([0, 3, 6, 9, 12]),
        }
        if rotary is not None:
            given["rotary_seqlens"] = used(before)
        packed = (t.flatten(0, 1) for t in (new_k, new_v))
        out, lse = flash_attn_with_kvcache(q.flatten(0, 1), k_cache, v_cache, *packed, **given)
        torch.testing.assert_close(out.unflatten(0, (4, 3)), got[0])
        torch.testing.assert_close(lse.unflatten(1, (4, 3)).transpose(0, 1), got[1])


@pytest.mark.parametrize("place", ["contiguous", "pages"])
@pytest.mark.parametrize("rotary", [False, True])
def test_compiled_in_one_graph(place: str, rotary: bool) -> None:
    def step(*tensors: torch.Tensor) -> Any:
        q, k, v, new_k, new_v, *rest = tensors
        names = ("cache_seqlens", "rotary_cos", "rotary_sin", "page_table")
        given: dict[str, Any] = dict(zip(names, rest, strict=False))
        return flash_attn_with_kvcache(q, k, v, new_k, new_v, **given, causal=True)

    tables = (torch.randn(40, 8), torch.randn(40, 8)) if rotary else (None, None)
    caches, more = cache(rows=24), ()
    if place == "pages":
        k, v, table = paged(*caches, [24] * 4, 8)
        caches, more = (k, v), (table,)
    inputs = [torch.randn(4, 2, 4, 32), *caches, *cache(rows=2), used([3, 0, 22, 9]), *tables, *more]
    copies = [None if t is None else t.clone() for t in inputs]
    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*copies), step(*inputs))
    for a, b in zip(copies[1:3], caches, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_ragged_append_and_where_it_does_not_fit() -> None:
    q, (k, v) = torch.randn(4, 1, 4, 32), cache(rows=24)
    k_cache, v_cache, table = paged(k, v, [24, 24, 8, 24], 8)
    new_k, new_v = torch.randn(6, 2, 32), torch.randn(6, 2, 32)
    cu, before = torch.tensor([0, 2, 2, 5, 5]), used([22, 24, 5, 9])
    given: dict[str, Any] = {
        "page_table": table,
        "cu_seqlens_k_new": cu,
        "cache_seqlens": before,
        "causal": True,
    }
    out = flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, **given)
    k[0, 22:], v[0, 22:], k[2, 5:8], v[2, 5:8] = new_k[:2], new_v[:2], new_k[2:5], new_v[2:5]
    oracle.assert_sequences_close(out, q, k, v, [24, 24, 8, 9])
    kept = k_cache.clone(), v_cache.clone()
    for change, message in (
        (
            {"cache_seqlens": used([23, 24, 5, 9])},
            r"cache_seqlens\[0\] is 23; 2 rows more are rows 23 to 24, and a s",
        ),
        (
            {"cache_seqlens": used([22, 24, 6, 9])},
            r"page_table\[2, 1\] is -1; row 8 of sequence 2 is appended there",
        ),
        (
            {"cache_seqlens": used([22, 24, -1, 9])},
            r"cache_seqlens\[2\] is -1, but a sequence of page_table has 24 rows; pass 0 to 24",
        ),
        ({"cache_seqlens": None}, "k is given without cache_seqlens"),
        (
            {"cu_seqlens_k_new": torch.tensor([0, 2, 1, 5, 5])},
            r"cu_seqlens_k_new is \[0, 2, 1, 5, 5\]; offsets asc",
        ),
        ({"cu_seqlens_k_new": None}, r"k has shape \(6, 2, 32\); pass \(4, seqlen_new"),
        ({"softcap": -1.0}, "softcap"),
        ({"rotary_cos": torch.ones(8, 4)}, "rotary_cos and rotary_sin belong together"),
        (
            {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)},
            "k has positions 5 to 23, but rotary_cos has 8",
        ),
        (
            {"rotary_cos": torch.ones(40, 17), "rotary_sin": torch.ones(40, 17)},
            r"rotary_cos has shape \(40, 17\); pass one position at least, and a rotary_dim from 2 to head",
        ),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{message}"):
            flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, **given | change)
    for k_new, message in (
        (new_k.half(), "k is torch.float16 but k_cache is torch.float32; convert k"),
        (new_k[:, :1], "k has shape"),
        (new_k[:5], "v has shape"),
        (
            new_k.clone().requires_grad_(),
            "k is appended to a cache, and one of q, k, v and the caches requires",
        ),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{message}"):
            flash_attn_with_kvcache(q, k_cache, v_cache, k_new, new_v, **given)
    for a, b in zip((k_cache, v_cache), kept, strict=True):  # nothing was written
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_the_last_of_two_sequences_that_share_an_entry_is_kept() -> None:
    q, (k, v), (new_k, new_v) = torch.randn(2, 1, 4, 32), cache(rows=24), cache(rows=1)
    options: dict[str, Any] = {"cache_seqlens": 7, "cache_batch_idx": torch.tensor([1, 1])}
    out = flash_attn_with_kvcache(q, k, v, new_k[:2], new_v[:2], **options)
    assert torch.equal(k[1, 7], new_k[1, 0]) and torch.equal(v[1, 7], new_v[1, 0])
    expected = tandem.attention(q, *(t[1:2, :8].expand(2, -1, -1, -1) for t in (k, v)))
    torch.testing.assert_close(out, expected)


def test_rows_whose_elements_lie_apart_are_copied() -> None:
    q, caches, rows = torch.randn(4, 2, 4, 32), cache(rows=24), cache(rows=2)
    angles = torch.randn(40, 8)
    options: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True}

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        k, v = (t.clone() for t in caches)
        q, k_new, v_new = given
        out = flash_attn_with_kvcache(q, k, v, k_new, v_new, cache_seqlens=9, **options)
        return [out, k, v]

    apart = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, *rows)]
    oracle.assert_equal(run(*apart), run(q, *rows))


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_without_memory_have_the_shapes(packed: bool) -> None:
    """What happens on any device but the CPU: no value is read."""
    meta = {"device": "meta"}
    rows = (8,) if packed else (4, 2)
    q, k, v = (torch.empty(*rows, heads, 32, **meta) for heads in (4, 2, 2))
    pages = torch.empty(9, 16, 2, 32, **meta), torch.empty(9, 16, 2, 32, **meta)
    options: dict[str, Any] = {
        "page_table": torch.empty(4, 2, dtype=torch.int32, **meta),
        "cache_seqlens": torch.empty(4, dtype=torch.int32, **meta),
        "rotary_cos": torch.empty(40, 8, **meta),
        "rotary_sin": torch.empty(40, 8, **meta),
    }
    if packed:
        cu = torch.empty(5, dtype=torch.int32, **meta)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu}
    for causal in (True, False):
        out, lse = flash_attn_with_kvcache(q, *pages, k, v, **options, causal=causal, return_softmax_lse=True)
        assert out.shape == q.shape and out.is_meta
        assert lse.shape == ((4, 8) if packed else (4, 4, 2))
