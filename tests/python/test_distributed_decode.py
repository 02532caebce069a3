"""Decode over ranks on gloo, on 2 and 4 processes: within the bounds of one device with the whole cache."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import distributed_cases as cases
import oracle
import pytest
import tandem
import torch
import torch.distributed as dist
from distributed_pool import Pool, on_every_rank
from tandem.distributed import CacheLayout, context_parallel_decode
from tandem.distributed._comm import Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

PAIR = (1, 3)  # ranks of a group are not those of all processes
SEQLEN, PAGE = 150, 16
LENGTHS = (150, 1, 0, 77, 33)  # all rows, one, none, and some

_refused = functools.partial(cases.refused, context_parallel_decode)


@dataclass(frozen=True)
class Case:
    """Queries of each sequence, heads, head dimensions and options."""

    queries: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    head_dim_v: int = 32
    options: tuple[tuple[str, Any], ...] = ()
    sink: bool = False
    lengths: tuple[int, ...] | None = LENGTHS


CASES = {
    "plain": Case(),
    "whole cache": Case(lengths=None),
    "causal": Case(3, options=(("causal", True),)),
    "full": Case(3, head_dim_v=16),
    "window": Case(options=(("causal", True), ("window", (20, -1)))),
    "window, many": Case(4, 8, 1, options=(("window", (20, 2)), ("softcap", 4.0)), sink=True),
    "one row": Case(2, options=(("window", (0, 0)), ("scale", 0.3))),
    "sink": Case(2, options=(("causal", True),), sink=True),
}


def layouts(ranks: int) -> dict[str, CacheLayout]:
    return {
        "striped": CacheLayout.striped(SEQLEN, ranks),
        "every n-th page": CacheLayout.striped(SEQLEN, ranks, PAGE),
        "pages": CacheLayout.pages(SEQLEN, ranks, PAGE),
        "one rank": CacheLayout(SEQLEN, ranks, 200),  # the others are without rows
    }


@dataclass
class Problem:
    """Whole tensors, the same on every rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    used: Tensor | None


def problem(case: Case, dtype: torch.dtype) -> Problem:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(len(LENGTHS), *shape, generator=generator).to(dtype)

    q = draw(case.queries, case.heads_q, 32)
    k, v = draw(SEQLEN, case.heads_kv, 32), draw(SEQLEN, case.heads_kv, case.head_dim_v)
    options = dict(case.options)
    if case.sink:
        options["sink"] = torch.randn(case.heads_q, generator=generator)
    used = None if case.lengths is None else torch.tensor(case.lengths, dtype=torch.int32)
    return Problem(q, k, v, options, used)


def expected(p: Problem) -> list[tuple[Tensor, ...]]:
    """Of out and LSE the fp64 reference, and what PyTorch makes of it in 16 bits."""
    tensors, options = (p.q, p.k, p.v), {**p.options, "seqused_k": p.used}
    out, lse = oracle.exact(*tensors, **options)
    if p.q.dtype == torch.float32:
        return [(out,), (lse,)]
    return [(out, oracle.eager(*tensors, **options)[0]), (lse,)]


def in_pages(t: Tensor, used: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A rank's rows in pages of a shuffled pool, whose other rows are NaN, and their table."""
    batch, rows = t.shape[:2]
    width = -(-rows // PAGE)
    pool = t.new_full((batch * width + 1, PAGE, *t.shape[2:]), torch.nan)
    table = torch.randperm(batch * width, generator=generator).view(batch, width).to(torch.int32)
    for b, row in itertools.product(range(batch), range(rows)):
        if row < used[b]:
            pool[table[b, row // PAGE], row % PAGE] = t[b, row]
    for b in range(batch):  # past a sequence's end anything may be, as in tandem.attention
        table[b, -(-int(used[b]) // PAGE) :] = 2**20
    return pool, table


def right(rank: int, name: str, dtype: torch.dtype, members: Any, device: str) -> None:
    """Every layout, contiguous and in pages."""
    group = cases.subgroup(members)
    if members is not None and rank not in members:
        return
    ranks = Ranks.of(group)
    p = problem(CASES[name], dtype)
    wanted = expected(p)
    for kind, layout in layouts(ranks.size).items():
        k, v = (layout.shard(t, ranks.rank) for t in (p.k, p.v))
        options = {**p.options, "cache": layout, "group": group, "seqused_k": p.used, "return_lse": True}
        moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
        used = torch.full((len(LENGTHS),), SEQLEN) if p.used is None else p.used
        mine = layout.before(ranks.rank, used)
        found = {"rows": context_parallel_decode(*(t.to(device) for t in (p.q, k, v)), **moved)}
        generator = torch.Generator().manual_seed(ranks.rank)
        (pages, table), _ = in_pages(k, mine, generator), generator.manual_seed(ranks.rank)
        values, _ = in_pages(v, mine, generator)
        tensors = (t.to(device) for t in (p.q, pages, values))
        found["pages"] = context_parallel_decode(*tensors, page_table=table.to(device), **moved)
        for way, results in found.items():
            for what, got, want in zip(("out", "lse"), results, wanted, strict=True):
                assert got.dtype == (dtype if what == "out" else torch.float32)
                try:
                    oracle.assert_close(got.cpu(), *want)
                except AssertionError as error:
                    raise AssertionError(f"{what} of {kind} in {way}: {error}") from None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("members", [PAIR, None], ids=["2", "4"])
def test_right(pool: Pool, members: Any, name: str, dtype: torch.dtype) -> None:
    pool.run(right, name, dtype, members, "cpu")


def _more_ways(rank: int) -> list[Tensor]:
    """A mesh of two dimensions, an 8-bit cache, one process; the results are the same bits on every rank."""
    p = problem(CASES["window, many"], torch.bfloat16)
    layout = CacheLayout.striped(SEQLEN, 4)
    k, v = (layout.shard(t, rank) for t in (p.k, p.v))
    options = {**p.options, "seqused_k": p.used}
    out = context_parallel_decode(p.q, k, v, cache=layout, **options)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    assert torch.equal(out, context_parallel_decode(p.q, k, v, cache=layout, group=mesh, **options))
    assert torch.equal(out, context_parallel_decode(p.q, k, v, cache=layout, check=False, **options))

    codes = [t.to(torch.float8_e4m3fn) for t in (p.k, p.v)]
    scales = {"k_scale": torch.arange(1.0, 6.0)[:, None] / 4, "v_scale": torch.tensor([2.0])}
    wide = [codes[0].float() * scales["k_scale"][:, None, :, None], codes[1].float() * 2.0]
    wanted, _ = oracle.exact(p.q, *wide, **options)
    eager, _ = oracle.eager(p.q, *(t.bfloat16() for t in wide), **options)
    shards = [layout.shard(t.view(torch.int8), rank).view(torch.float8_e4m3fn) for t in codes]
    got = context_parallel_decode(p.q, *shards, cache=layout, **scales, **options)
    oracle.assert_close(got, wanted, eager)

    alone = cases.subgroup((0,))
    if rank == 0:
        one = CacheLayout.striped(SEQLEN, 1)
        whole = context_parallel_decode(p.q, p.k, p.v, cache=one, group=alone, **options)
        oracle.assert_close(whole, *expected(p)[0])
    compiled = torch.compile(lambda q: 2 * context_parallel_decode(q, k, v, cache=layout), backend="eager")
    assert torch.equal(compiled(p.q), 2 * context_parallel_decode(p.q, k, v, cache=layout))
    return [out, got]


def test_more_ways_to_call(pool: Pool) -> None:
    first, *others = pool.run(_more_ways)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@on_every_rank
def test_a_cache_that_grows(rank: int) -> None:
    """Tokens appended to where the layout has them, a step at a time, as one device would."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.tensor([0, 37, 5], dtype=torch.int32)
    for layout in (CacheLayout.striped(48, 4), CacheLayout.striped(48, 4, 4), CacheLayout.pages(48, 4, 8)):
        whole = [torch.zeros(3, 48, 2, 16) for _ in range(2)]
        mine = [torch.zeros(3, layout.rows(rank), 2, 16) for _ in range(2)]
        used = lengths.clone()
        for count in (4, 1, 1):
            new = [torch.randn(3, count, 2, 16, generator=generator) for _ in range(2)]
            tandem.append_kv(*new, *whole, cache_seqlens=used)
            rows = used[:, None] + torch.arange(count, dtype=torch.int32)
            place = layout.local(rank, rows)
            entries = torch.arange(3, dtype=torch.int32)[:, None] * layout.rows(rank)
            slots = torch.where(place < 0, -1, place + entries).flatten()
            tandem.append_kv(*(t.flatten(0, 1) for t in new), *mine, slot_mapping=slots, check=True)
            used += count
            q = torch.randn(3, count, 4, 16, generator=generator)
            out = context_parallel_decode(q, *mine, cache=layout, seqused_k=used, causal=True)
            torch.testing.assert_close(out, tandem.attention(q, *whole, seqused_k=used, causal=True))
        for got, t in zip(mine, whole, strict=True):
            assert torch.equal(got, layout.shard(t, rank))


@on_every_rank
def test_a_cache_that_is_full(rank: int) -> None:
    """A token too many is written nowhere, and the next step says so."""
    layout, used = CacheLayout.striped(6, 4), torch.tensor([5, 2], dtype=torch.int32)
    keys = torch.zeros(2, layout.rows(rank), 1, 8)
    entry = torch.arange(2, dtype=torch.int32) * layout.rows(rank)
    for step in range(3):
        row = layout.local(rank, used)
        before, new = keys.clone(), torch.full((2, 1, 8), step + 1.0)
        tandem.append_kv(new, new, keys, keys.clone(), slot_mapping=torch.where(row < 0, -1, entry + row))
        changed = (keys != before).any(-1).any(-1).nonzero().tolist()
        live = [0, 1] if step == 0 else [1]
        assert changed == [[b, int(row[b])] for b in live if int(used[b]) % 4 == rank]
        used += 1
    for options in ({}, {"check": False}):
        message = _refused(torch.zeros(2, 1, 1, 8), keys, keys, cache=layout, seqused_k=used, **options)
        assert message.startswith("seqused_k[0] is 8, but cache has 0 to 6 rows of a sequence")


def _refusals(rank: int) -> dict[str, str]:
    """What each rank is told where rank 2 asks for something else, and where it passes something wrong."""
    cache, odd = CacheLayout.striped(64, 4), rank == 2
    q, k, v = torch.randn(2, 1, 4, 16), *(torch.randn(2, 16, 2, 16) for _ in range(2))
    used = torch.tensor([9, 8 + odd])
    told = {
        "seqused_k": _refused(q, k, v, cache=cache, seqused_k=used),
        "cache": _refused(q, k, v, cache=CacheLayout.pages(64, 4) if odd else cache),
        "causal": _refused(q, k, v, cache=cache, causal=odd),
        "window": _refused(q, k, v, cache=cache, window=(3 if odd else 4, 0)),
        "scale": _refused(q, k, v, cache=cache, scale=2.0 if odd else None),
        "shape": _refused(q[:, :, : 2 if odd else 4], k, v, cache=cache),
        "dtype": _refused(*((t.bfloat16() if odd else t) for t in (q, k, v)), cache=cache),
        "sink": _refused(q, k, v, cache=cache, sink=torch.zeros(4) if odd else None),
        "rows": _refused(q, k[:, 1:] if odd else k, v, cache=cache),
        "type": _refused(q, k, None if odd else v, cache=cache),
        "layout": _refused(q, k, v, cache=cache if not odd else "striped"),
        "ranks": _refused(q, k, v, cache=cache if not odd else CacheLayout.striped(64, 2)),
        "gradient": _refused(q.clone().requires_grad_(odd), k, v, cache=cache),
        "lengths": _refused(q, k, v, cache=cache, seqused_k=used.float() if odd else used),
        "table": _refused(q, k, v, cache=cache, page_table=torch.zeros(2 + odd, 1, dtype=torch.int32)),
        "heads": _refused(q, k, v[:, :, :1] if odd else v, cache=cache),
        "batch": _refused(q, k[: 2 - odd], v[: 2 - odd], cache=cache, causal=True),
        "length": _refused(q, k, v, cache=cache, seqused_k=used + 56 * odd),
        "left": _refused(q, k, v, cache=cache, window=(-2 if odd else -1, -1)),
        "right": _refused(q, k, v, cache=cache, window=(-1, -2 if odd else -1)),
    }
    with pytest.raises(tandem.UnsupportedError, match="q is under a transform of torch.func"):
        torch.func.vmap(lambda q: context_parallel_decode(q, k, v, cache=cache))(q[None])
    assert context_parallel_decode(q, k, v, cache=cache).shape == q.shape  # the group works as before
    return told


def test_what_is_wrong_is_told_on_every_rank(pool: Pool) -> None:
    values = {
        "seqused_k": ("seqused_k", "(9, 8)", "(9, 9)"),
        "cache": (
            "cache",
            "CacheLayout(seqlen=64, ranks=4, block=1)",
            "CacheLayout(seqlen=64, ranks=4, block=16)",
        ),
        "causal": ("causal", "False", "True"),
        "window": ("window", "(4, 0)", "(3, 0)"),
        "scale": ("scale", "None", "2.0"),
        "shape": ("shape of q", "(2, 1, 4, 16)", "(2, 1, 2, 16)"),
        "dtype": ("dtype of q", "float32", "bfloat16"),
        "sink": ("sink", "False", "True"),
    }
    parts = {
        "rows": "k has room for 15 rows of a sequence, but cache gives rank 2 16",
        "type": "v is a NoneType",
        "layout": "cache is 'striped'; make one with tandem.distributed.CacheLayout",
        "ranks": "cache is for 2 ranks, but the group has 4",
        "gradient": "q requires a gradient, but tandem.distributed.context_parallel_decode has none",
        "lengths": "seqused_k is float32 of shape (2,); it must be int32 or int64 of shape (2,)",
        "table": "page_table is int32 of shape (3, 1); it must be int32 or int64 of shape (2, max_pages)",
        "heads": "v",
        "batch": "k has a batch of 1, but q one of 2; pass as many",
        "length": "seqused_k[0] is 65, but cache has 0 to 64 rows of a sequence; end the sequence",
        "left": "window is (-2, -1)",
        "right": "window is (-1, -2)",
    }
    cases.assert_told(pool.run(_refusals), values, parts)


def _missing(rank: int) -> tuple[float, str]:
    """A rank that does not come, in a group with a time-out of 2 s; ranks that a group does not hold."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    cache = CacheLayout.striped(8, 2)
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 4, 2, 16)
    if rank > 1:
        return 0.0, _refused(q, k, k, cache=cache, group=group)
    if rank == 1:
        return 0.0, ""
    began = time.monotonic()
    with pytest.raises(tandem.ExecutionError, match="a rank has ended"):
        context_parallel_decode(q, k, k, cache=cache, group=group, check=False)
    return time.monotonic() - began, ""


def test_a_rank_that_does_not_come_is_an_error_in_time(pool: Pool) -> None:
    found = pool.run(_missing)
    assert 1.0 < found[0][0] < 10.0
    assert all(f"group does not hold this process, rank {r} of all" in found[r][1] for r in (2, 3))


def test_layouts_of_caches() -> None:
    for layout, rows in itertools.product(
        (CacheLayout.striped(61, 4), CacheLayout.striped(61, 4, 8), CacheLayout.pages(61, 4, 8)),
        (0, 1, 33, 61),
    ):
        held = [layout.indices(rank) for rank in range(4)]
        assert torch.equal(torch.cat(held).sort()[0], torch.arange(61))
        for rank, rows_of in enumerate(held):
            assert layout.rows(rank) == len(rows_of)
            mine = rows_of < rows
            assert layout.before(rank, rows) == layout.before(rank, torch.tensor(rows)) == mine.sum()
            place = layout.local(rank, torch.arange(61))
            assert torch.equal(place[rows_of], torch.arange(len(rows_of)))
            assert (place < 0).sum() == 61 - len(rows_of)
            outside = torch.tensor([-9, -1, 61, 62, 200])
            assert layout.local(rank, outside).tolist() == [-1] * 5
            assert layout.before(rank, outside).tolist() == [0, 0, *[len(rows_of)] * 3]
            assert layout.before(rank, 200) == len(rows_of) and layout.before(rank, -1) == 0
    assert [CacheLayout.pages(33, 4, 16).rows(rank) for rank in range(4)] == [16, 16, 1, 0]
    assert [CacheLayout.pages(0, 4).rows(rank) for rank in range(4)] == [0] * 4
    for rows in (3, torch.tensor([1.0])):
        with pytest.raises(tandem.InvalidArgumentError, match="rows is .*; pass a tensor of int32 or int64"):
            CacheLayout.striped(8, 2).local(0, rows)  # type: ignore[arg-type]
    with pytest.raises(tandem.InvalidArgumentError, match="rank is 2, but the cache is for ranks 0 to 1"):
        CacheLayout.striped(8, 2).rows(2)
    with pytest.raises(tandem.InvalidArgumentError, match="block is 0; it must be an integer, at least 1"):
        CacheLayout.striped(8, 2, 0)
    with pytest.raises(tandem.InvalidArgumentError, match="page_size is 0"):
        CacheLayout.pages(8, 2, 0)
    with pytest.raises(tandem.InvalidArgumentError, match="seqlen is -1"):
        CacheLayout.pages(-1, 2)
    with pytest.raises(
        tandem.InvalidArgumentError, match="x has 7 rows in dimension 1, but the layout has 8"
    ):
        CacheLayout.striped(8, 2).shard(torch.zeros(1, 7), 0)
