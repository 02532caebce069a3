"""append_kv and merge: NumPy and PyTorch, in place, under torch.compile, and the errors of Python alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
import tandem
import torch


def arrays(library: str, *tensors: torch.Tensor | None) -> list[Any]:
    """The tensors, or the same as NumPy's arrays."""
    if library == "torch":
        return list(tensors)
    return [None if t is None else t.numpy() for t in tensors]


def paged() -> dict[str, torch.Tensor]:
    """Three sequences of two new tokens each, in pages of 16 rows."""
    return {
        "k_new": torch.randn(3, 2, 2, 32),
        "v_new": torch.randn(3, 2, 2, 16),
        "k_cache": torch.randn(8, 16, 2, 32),
        "v_cache": torch.randn(8, 16, 2, 16),
        "cache_seqlens": torch.tensor([0, 15, 31], dtype=torch.int32),
        "page_table": torch.tensor([[5, -1, -7], [3, 0, 99], [-1, 7, 2]], dtype=torch.int32),
    }


def place(before: int, table: torch.Tensor) -> tuple[int, int]:
    return int(table[before // 16]), before % 16


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_append_to_pages_in_place(library: str) -> None:
    call = paged()
    wanted = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    for b in range(3):
        for j in range(2):
            page, row = place(int(call["cache_seqlens"][b]) + j, call["page_table"][b])
            wanted["k_cache"][page, row] = call["k_new"][b, j]
            wanted["v_cache"][page, row] = call["v_new"][b, j]
    given = dict(zip(call, arrays(library, *call.values()), strict=True))
    assert tandem.append_kv(**given, check=True) is None  # type: ignore[misc]
    for name, tensor in wanted.items():
        assert np.array_equal(np.asarray(given[name]), tensor.numpy())


@pytest.mark.parametrize("interleaved", [False, True])
def test_append_embeds_keys_and_queries(interleaved: bool) -> None:
    """In NumPy's arrays as in PyTorch's, whose results test_flash_append.py compares with the formula."""
    k_new, v_new, q = torch.randn(2, 3, 2, 32), torch.randn(2, 3, 2, 32), torch.randn(2, 3, 4, 32)
    angles = torch.arange(20.0)[:, None] * 0.5 ** torch.arange(8.0)
    results = []
    for library in ("torch", "numpy"):
        given = arrays(library, k_new, v_new, torch.zeros(2, 9, 2, 32), torch.zeros(2, 9, 2, 32))
        seqlens, cos, sin, queries = arrays(library, torch.tensor([6, 2]), angles.cos(), angles.sin(), q)
        q_out = tandem.append_kv(
            *given,
            cache_seqlens=seqlens,
            rotary_cos=cos,
            rotary_sin=sin,
            rotary_interleaved=interleaved,
            q=queries,
        )
        results.append([torch.as_tensor(t) for t in (q_out, *given[2:])])
    assert all(t.count_nonzero() == 2 * 3 * 2 * 32 for t in results[0][1:])
    assert not torch.equal(results[0][0], q)
    oracle.assert_equal(*results)


def test_append_by_slots_to_an_8_bit_cache_that_attention_reads() -> None:
    k, v = torch.randn(7, 2, 64, dtype=torch.bfloat16), torch.randn(7, 2, 64, dtype=torch.bfloat16)
    caches = [torch.zeros(4, 4, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2)]
    scale = torch.tensor([0.5])
    slots = torch.tensor([8, 9, 10, 11, 0, 1, -1])
    tandem.append_kv(k, v, *caches, slot_mapping=slots, k_scale=scale, v_scale=scale, check=True)
    rows = torch.cat([caches[0][2], caches[0][0]])[:6]
    assert torch.equal(rows.float(), (k[:6].float() / 0.5).to(torch.float8_e4m3fn).float())
    assert caches[0][1].float().count_nonzero() == 0
    as_numpy = [np.zeros((4, 4, 2, 64), ml_dtypes.float8_e4m3fn) for _ in range(2)]
    tandem.append_kv(
        k.float().numpy(),
        v.float().numpy(),
        *as_numpy,
        slot_mapping=slots.numpy(),
        k_scale=scale.numpy(),
        v_scale=scale.numpy(),
    )
    for mine, other in zip(as_numpy, caches, strict=True):
        assert np.array_equal(mine.view(np.uint8), other.view(torch.uint8).numpy())


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_append_finds_scales_by_row(library: str, dtype: torch.dtype) -> None:
    if library == "numpy" and dtype != torch.int8:
        pytest.skip("NumPy has no e4m3 of its own")
    torch.manual_seed(5)
    pages, page_size, heads, head_dim = 6, 4, 2, 32
    k, v = (torch.randn(2, 9, heads, head_dim) * torch.arange(1, 10)[:, None, None] for _ in range(2))
    k[0, 3], k[1, 5, 1] = 0.0, -0.0
    k8, v8 = (torch.zeros(pages, page_size, heads, head_dim, dtype=dtype) for _ in range(2))
    # In memory with the heads innermost, as the caches have them.
    k_scale, v_scale = torch.full((2, pages, page_size, heads), torch.nan).transpose(2, 3)
    table, used = torch.tensor([[5, 0, 2], [1, 4, 3]]), torch.tensor([9, 9])
    given = arrays(library, k, v, k8, v8)
    seqlens, pages_of, k_found, v_found = arrays(library, used - 9, table, k_scale, v_scale)
    tandem.append_kv(
        *given, cache_seqlens=seqlens, page_table=pages_of, k_scale_cache=k_found, v_scale_cache=v_found
    )
    for x, cache, scale in ((k, k8, k_scale), (v, v8, v_scale)):
        values, scales = tandem.quantize(x, "s8" if dtype == torch.int8 else "e4m3", granularity="row")
        rows = cache[table].flatten(1, 2)[:, :9]
        assert torch.equal(rows.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(scale.transpose(1, 2)[table].flatten(1, 2)[:, :9], scales.transpose(1, 2))
        assert scale.transpose(1, 2)[table].flatten(1, 2)[:, 9:].isnan().all()


def test_keys_alone() -> None:
    k_new, cache = torch.randn(2, 1, 1, 576), torch.zeros(2, 4, 1, 576)
    tandem.append_kv(k_new, None, cache, None, cache_seqlens=torch.tensor([3, 0]))
    assert torch.equal(cache[0, 3], k_new[0, 0]) and torch.equal(cache[1, 0], k_new[1, 0])


def test_append_tells_autograd_that_the_caches_changed() -> None:
    call = paged()
    before = call["k_cache"]._version, call["v_cache"]._version
    tandem.append_kv(**call)
    assert call["k_cache"]._version > before[0] and call["v_cache"]._version > before[1]
    for name in ("k_new", "k_cache"):
        wrong = paged()
        wrong[name].requires_grad_()
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{name} requires a gradient, but"):
            tandem.append_kv(**wrong)
        with torch.no_grad():
            tandem.append_kv(**wrong)


def test_opcheck() -> None:
    call = paged()
    names = tandem._core.APPEND_INPUTS
    given = [call.get(name) for name in names]
    arguments = (*given, call["k_cache"], call["v_cache"], None, None, False, False, 0)
    torch.library.opcheck(torch.ops.tandem.append_kv, arguments)
    outs = [torch.randn(2, 5, 3, 8) for _ in range(3)]
    lses = [torch.randn(2, 3, 5) for _ in range(3)]
    torch.library.opcheck(torch.ops.tandem.merge, (outs, lses, None, 0))
    torch.library.opcheck(torch.ops.tandem.merge, (outs, lses, torch.bfloat16, 0))


def test_compiled_append_is_seen_by_what_comes_after() -> None:
    """The cache is written inside the graph, and the attention behind it reads the new rows."""

    def step(q: torch.Tensor, **call: torch.Tensor) -> Any:
        tandem.append_kv(**call)
        return call["k_cache"].sum(), tandem.attention(q, call["k_cache"], call["k_cache"])

    def fresh() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        kv = torch.zeros(2, 2, 8, 2, 32)  # one tensor, K and V by entry
        return {
            "k_new": torch.randn(2, 1, 2, 32),
            "v_new": torch.randn(2, 1, 2, 32),
            "k_cache": kv[:, 0],
            "v_cache": kv[:, 1],
            "cache_seqlens": torch.tensor([1, 7]),
        }

    q = torch.randn(2, 1, 4, 32)
    eager, compiled = fresh(), fresh()
    found = torch.compile(step, fullgraph=True)(q, **compiled)
    torch.testing.assert_close(found, step(q, **eager))
    assert torch.equal(compiled["k_cache"], eager["k_cache"])
    assert torch.equal(compiled["v_cache"], eager["v_cache"])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_merge_of_parts_is_one_call(library: str, stacked: bool) -> None:
    q, k, v = torch.randn(2, 5, 4, 32), torch.randn(2, 90, 2, 32), torch.randn(2, 90, 2, 16)
    whole = tandem.attention(q, k, v, return_lse=True)
    edges = [0, 10, 10, 60, 90]  # one part is empty
    pieces = [
        tandem.attention(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    outs, lses = (list(x) for x in zip(*pieces, strict=True))
    given: Any = (torch.stack(outs), torch.stack(lses)) if stacked else (outs, lses)
    if library == "numpy":
        given = [x.numpy() if stacked else [t.numpy() for t in x] for x in given]
    out, lse = tandem.merge(*given)
    for mine, other in zip((out, lse), whole, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), other, rtol=1e-5, atol=1e-5)
    assert str(tandem.merge(*given, out_dtype="f16")[0].dtype).endswith("float16")


def test_compiled_merge() -> None:
    def function(outs: torch.Tensor, lses: torch.Tensor) -> Any:
        return tandem.merge(outs, lses, out_dtype=torch.bfloat16)

    outs, lses = torch.randn(3, 7, 2, 16), torch.randn(3, 2, 7)
    found = torch.compile(function, fullgraph=True)(outs, lses)
    oracle.assert_equal(found, function(outs, lses))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: tandem.merge([], []), tandem.InvalidArgumentError, "outs has no parts; pass one at least"),
        (
            lambda: tandem.merge([torch.zeros(2, 1, 8)], [np.zeros((1, 2), np.float32)]),
            TypeError,
            "lses[0] is an array of numpy but outs is one of torch; convert one of them",
        ),
        (
            lambda: tandem.merge([np.zeros((2, 8), np.float32)], [np.zeros((1, 2), np.float32)]),
            tandem.InvalidArgumentError,
            "outs[0] has 2 dimensions; it must be (batch, seqlen_q, heads_q, head_dim_v) or (total_q, "
            "heads_q, head_dim_v)",
        ),
        (
            lambda: tandem.merge([torch.zeros(2, 1, 8, requires_grad=True)], [torch.zeros(1, 2)]),
            tandem.InvalidArgumentError,
            "outs requires a gradient, but tandem.merge has none; pass detached tensors, or call under "
            "torch.no_grad()",
        ),
        (
            lambda: tandem.append_kv(**{**paged(), "k_cache": np.zeros((8, 16, 2, 32), np.float32)}),
            TypeError,
            "k_cache is an array of numpy but k_new is one of torch; convert one of them",
        ),
        (
            lambda: tandem.append_kv(**paged(), check=1.5),
            tandem.InvalidArgumentError,
            "check is 1.5; pass True or False",
        ),
    ],
)
def test_errors(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message


def test_read_only_caches_are_refused() -> None:
    call = {name: t.numpy() for name, t in paged().items()}
    call["k_cache"].flags.writeable = False
    with pytest.raises(tandem.InvalidArgumentError, match="^k_cache is read-only"):
        tandem.append_kv(**call)
