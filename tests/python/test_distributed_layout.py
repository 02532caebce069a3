"""Who has which rows, how much work they are, and what has to be sent: against counting one by one."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import tandem
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tandem.distributed import Layout, balance, explain
from tandem.distributed._balance import Work, least_rows, least_rows_of_equal_shards
from tandem.distributed._calls import groups
from tandem.distributed._chunks import chunk_heads
from tandem.distributed._job import of_sixteen_bytes
from tandem.distributed._machine import CPU, H200, Shape
from tandem.distributed._mask import Mask
from tandem.distributed._routes import arrivals, pieces, received, route, sent

KINDS = ("contiguous", "zigzag", "striped", "balanced")
LENGTHS = st.one_of(st.integers(0, 40), st.lists(st.integers(0, 20), max_size=6))
MASKS = st.builds(Mask, st.integers(-1, 12), st.integers(-1, 12))


def make(kind: str, lengths: Any, ranks: int) -> Layout:
    layout: Layout = getattr(Layout, kind)(lengths, ranks)
    return layout


def places(layout: Layout) -> list[tuple[int, int]]:
    """(sequence, place) of each row."""
    return [(s, i) for s, length in enumerate(layout.lengths) for i in range(length)]


def sees(mask: Mask, query: tuple[int, int], key: tuple[int, int]) -> bool:
    apart = key[1] - query[1]
    after = mask.left < 0 or apart >= -mask.left
    return query[0] == key[0] and after and (mask.right < 0 or apart <= mask.right)


@given(st.sampled_from(KINDS), LENGTHS, st.integers(1, 5), MASKS)
def test_rows_work_and_traffic(kind: str, lengths: Any, ranks: int, mask: Mask) -> None:
    layout = make(kind, lengths, ranks)
    where = places(layout)
    held = [[where[i] for i in layout.indices(r).tolist()] for r in range(ranks)]
    assert sorted(row for rows in held for row in rows) == where
    assert [layout.positions(r).tolist() for r in range(ranks)] == [[i for _, i in rows] for rows in held]
    assert [layout.rows(r) for r in range(ranks)] == [len(rows) for rows in held]
    pairs = [sum(sees(mask, q, k) for q in rows for k in where) for rows in held]
    assert layout.pairs(window=(mask.left, mask.right)) == pairs

    # Of each rank the rows between the first and the last key that a run of its queries sees.
    needs: list[set[tuple[int, int]]] = [set() for _ in range(ranks)]
    for r in range(ranks):
        for run in layout.runs[r]:
            begin, end = mask.keys(run.start, run.last, layout.lengths[run.sequence])
            needs[r] |= {(run.sequence, i) for i in range(begin, end)}
        assert needs[r] >= {k for k in where if any(sees(mask, q, k) for q in held[r])}
    assert received(layout, mask) == [len(needs[r] - set(held[r])) for r in range(ranks)]
    assert sum(sent(layout, mask)) == sum(received(layout, mask))


@example("striped", 12, 2, Mask(0, 0))  # no row of a stripe sees one of another
@example("striped", [12, 7], 3, Mask(1, 0))
@given(st.sampled_from(KINDS), LENGTHS, st.integers(1, 4), MASKS)
def test_calls_cover_each_visible_pair_once(kind: str, lengths: Any, ranks: int, mask: Mask) -> None:
    """Of the calls of a rank with the keys that arrive, as Tandem masks them."""
    layout = make(kind, lengths, ranks)
    where = places(layout)
    for rank in range(ranks):
        arrived = arrivals(layout, mask, rank)
        came: list[tuple[int, int]] = []
        for source in range(ranks):
            for piece in route(layout, mask, source, rank):
                came += [(piece.sequence, piece.start + i * piece.step) for i in range(piece.count)]
        keys = came if arrived.order is None else [came[i] for i in arrived.order.tolist()]
        queries = [where[i] for i in layout.indices(rank).tolist()]
        found: list[tuple[tuple[int, int], tuple[int, int]]] = []
        for call in groups(pieces(layout, rank), arrived.keys, mask, layout.packed, []):
            cu_q, cu_k = (cu.tolist() for cu in call.cu_seqlens(torch.device("cpu")))
            assert cu_q == sorted(cu_q) and cu_k == sorted(cu_k)
            for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
                shift = (d - c) - (b - a)
                for i in range(b - a):
                    for j in range(d - c):
                        apart = j - i - shift
                        after = call.left < 0 or apart >= -call.left
                        if after and (call.right < 0 or apart <= call.right):
                            query = queries[call.queries[0] + a + i]
                            found.append((query, keys[call.keys[0] + c + j]))
        assert len(found) == len(set(found))
        assert set(found) == {(q, k) for q in queries for k in where if sees(mask, q, k)}


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 5), MASKS)
def test_no_layout_sends_less_than_the_least(lengths: list[int], ranks: int, mask: Mask) -> None:
    work = Work(lengths, mask)
    for kind in KINDS:
        layout = make(kind, lengths, ranks)
        busiest = max(layout.pairs(window=(mask.left, mask.right)))
        assert sum(received(layout, mask)) >= least_rows(work, busiest)


@pytest.mark.parametrize(("length", "ranks"), [(8, 2), (12, 3), (12, 2), (16, 2)])
def test_zigzag_sends_the_least_of_equal_shards(length: int, ranks: int) -> None:
    """Of every way to give ranks equal rows and equal work."""
    rows, work = length // ranks, length * (length + 1) // 2 // ranks
    least = length * ranks

    def divide(left: frozenset[int], reached: int) -> None:
        nonlocal least
        if not left:
            least = min(least, reached)
            return
        top = max(left)  # whoever has it
        for others in itertools.combinations(sorted(left - {top}), rows - 1):
            if sum(others) + top + rows == work:
                divide(left - {top, *others}, reached + top + 1 - rows)

    divide(frozenset(range(length)), 0)
    zigzag = Layout.zigzag(length, ranks)
    assert sum(received(zigzag, Mask(-1, 0))) == least == least_rows_of_equal_shards(length, ranks)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_equal_shards_send_up_to_an_eighth_more(ranks: int) -> None:
    layout = Layout.zigzag(8192 * ranks, ranks)
    rows = sum(received(layout, Mask(-1, 0)))
    assert rows == least_rows_of_equal_shards(layout.total, ranks) == 3 * (ranks - 1) * layout.total // 4
    assert 1.05 < rows / least_rows(Work(layout.lengths, Mask(-1, 0)), max(layout.pairs(causal=True))) < 9 / 8


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_made_whole(kind: str, packed: bool) -> None:
    layout = make(kind, [7, 0, 30, 1] if packed else 38, 3)
    x = torch.randn((38, 2, 8) if packed else (2, 38, 2, 8), requires_grad=True)
    shards = [layout.shard(x, r) for r in range(3)]
    whole = layout.unshard(shards)
    assert torch.equal(whole, x)
    whole.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))


def test_ranges_are_checked() -> None:
    for ranges, message in (
        ([[(0, 4)], [(5, 10)]], "row 4 is in no range"),
        ([[(0, 6)], [(5, 10)]], "row 5 is in two ranges"),
        ([[(0, 6)], [(6, 9)]], "ranges end at row 9, but there are 10 rows"),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            Layout.of_ranges(10, ranges)
    with pytest.raises(tandem.InvalidArgumentError, match="x has 9 rows in dimension 1"):
        Layout.zigzag(10, 2).shard(torch.zeros(1, 9, 1, 8), 0)
    with pytest.raises(tandem.InvalidArgumentError, match=r"shards have \[4, 5\] rows"):
        Layout.zigzag(10, 2).unshard([torch.zeros(1, n, 1, 8) for n in (4, 5)])
    with pytest.raises(tandem.InvalidArgumentError, match=r"lengths\[1\] is -1"):
        Layout.zigzag([3, -1], 2)


def test_chunks_are_few_where_they_hide_nothing() -> None:
    """Large work has more than small; where a backward pass of a chunk would be few tiles, it has fewer;
    where kernels are shorter than their launches there is one."""
    mask, shape = Mask(-1, 0), Shape(1, 64, 8, 128, 128, 2)
    sizes = [
        (8192, 2, (8,), (8,)),
        (8192, 4, (8,), (8,)),
        (32768, 4, (2, 3, 3), (2, 2, 2, 2)),
        (512, 2, (8,), (8,)),
        (16384, 16, (1,) * 8, (2, 3, 3)),
    ]
    for rows, ranks, *chunks in sizes:  # rows of a rank
        layout = Layout.zigzag(rows * ranks, ranks)
        found = [chunk_heads(layout, mask, shape, H200, backward) for backward in (False, True)]
        assert found == chunks, (rows, ranks, found)
    packed = Layout.balanced([500] * 64, 8)
    assert chunk_heads(packed, mask, shape, H200, False) == (8,)
    slow = replace(H200, flops=1e9)
    assert chunk_heads(packed, mask, shape, slow, False) == (2, 2, 2, 2)
    for heads in range(1, 20):  # each head once
        for ranks in (1, 2, 5, 8):
            few = Shape(1, 2 * heads, heads, 64, 64, 2)
            layout = Layout.zigzag(1024 * ranks, ranks)
            found = chunk_heads(layout, mask, few, H200, True)
            assert sum(found) == heads and min(found) > 0, (heads, ranks, found)
    with warnings.catch_warnings(action="error"):
        nothing = replace(shape, batch=0)
        for machine in (H200, CPU):
            assert sum(chunk_heads(Layout.zigzag(64, 4), mask, nothing, machine, True)) == 8


def test_elements_of_sixteen_bytes_are_what_can_be_seen_so() -> None:
    """Memory of others begins anywhere, and a place in it that divides by 16 may be at an offset that does
    not."""
    numbers = np.zeros(64, dtype=np.float32)
    after = -(numbers.ctypes.data // 4) % 4  # the first element at an address that divides by 16
    memory = torch.from_numpy(numbers[after + 1 : after + 41])
    for odd in (memory[3:35].view(2, 16), memory[4:36].view(2, 16), torch._neg_view(torch.zeros(2, 16))):
        assert of_sixteen_bytes(odd)[0] is odd
    whole = torch.from_numpy(numbers[after : after + 32]).view(2, 16)
    assert of_sixteen_bytes(whole)[0].shape == (2, 4)


def test_no_slivers() -> None:
    """A sequence that fits nowhere whole is cut into no less than a tile."""
    for lengths in ([2077, 2222, 28469], [5000, 4000, 3000, 2500, 30, 1200], [777] * 9):
        layout = Layout.balanced(lengths, 4)
        short = [r for runs in layout.runs for r in runs if r.count < min(128, lengths[r.sequence])]
        assert not [run for run in short if run.count < layout.total // (64 * 4)], layout.runs
        pairs = layout.pairs(causal=True)
        assert max(pairs) * 4 <= 1.12 * sum(pairs)


def test_tables_and_the_choice() -> None:
    sizes = {"heads_q": 64, "heads_kv": 8, "head_dim_qk": 128}
    text = explain(Layout.zigzag(65536, 8), causal=True, **sizes)
    assert text.startswith("gather: the quickest by the model")
    assert "busiest / mean 1.0000; rows received 344064, at least 312284" in text
    assert explain(Layout.zigzag(64, 2), strategy="ring", **sizes).startswith("ring: asked for")
    with pytest.raises(tandem.InvalidArgumentError, match="cannot be divided among 5 ranks"):
        explain(Layout.zigzag(64, 5), strategy="heads", heads_q=4, heads_kv=2, head_dim_qk=64)
    assert "cannot be divided" in explain(Layout.zigzag(64, 5), heads_q=4, heads_kv=2, head_dim_qk=64)
    whole = balance(Layout.balanced([100, 100], 2), causal=True)
    assert whole.endswith("busiest / mean 1.0000; rows received 0, at least 0")


def test_rows_can_be_evened_out_too() -> None:
    """What a row costs besides its pairs; only pairs: the ends of long sequences are few rows."""
    lengths = [4000, *[100] * 60]
    by_pairs, by_rows = Layout.balanced(lengths, 4), Layout.balanced(lengths, 4, row_pairs=1e6)
    assert max(by_rows.rows(r) for r in range(4)) <= 1.1 * 2500 < max(by_pairs.rows(r) for r in range(4))


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_work_is_even_and_little_is_sent(ranks: int) -> None:
    """8192 tokens a rank: one sequence, and documents as in training on long contexts."""
    random = Random(ranks)
    total, mask = 8192 * ranks, Mask(-1, 0)

    def documents(draw: Callable[[], float]) -> list[int]:
        lengths: list[int] = []
        while sum(lengths) < total:
            lengths.append(min(max(1, int(draw())), total - sum(lengths)))
        return lengths

    mixtures: list[tuple[list[int], float]] = [([total], 1.02)]
    for _ in range(3):
        web = documents(lambda: random.lognormvariate(7.0, 1.2))
        long = documents(
            lambda: random.uniform(16e3, 128e3) if random.random() < 1 / 7 else random.uniform(500, 4000)
        )
        mixtures += [(web, 1.1), (long, 1.1)]
    for lengths, most in mixtures:
        layout = Layout.balanced(lengths, ranks)
        pairs = layout.pairs(causal=True)
        assert max(pairs) * ranks <= (most + 1e-3) * sum(pairs), lengths
        least = least_rows(Work(layout.lengths, mask), max(pairs))
        # Where no sequence has to be cut, whole ones may still fill the ranks unevenly.
        bound = 1.1 * least or 0.04 * (ranks - 1) * total
        assert sum(received(layout, mask)) <= bound, lengths


@pytest.mark.parametrize(
    ("lengths", "ranks", "message"),
    [
        (8.0, 2, "lengths is 8.0; pass an integer, or integers"),
        (["all"], 2, "lengths is .*; pass an integer, or integers"),
        (-1, 2, "lengths.0. is -1; it must be at least 0"),
        (8, "2", "ranks is '2'; pass an integer"),
        (8, 0, "ranks is 0; it must be at least 1"),
    ],
)
def test_lengths_and_ranks_that_are_none(lengths: Any, ranks: Any, message: str) -> None:
    for make in (Layout.zigzag, Layout.contiguous, Layout.striped, Layout.balanced):
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            make(lengths, ranks)
