"""What a call over ranks allocates: K and V of few chunks beyond a rank's own, and nothing quadratic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_pool import Pool
from tandem.distributed import Layout, _gather, context_parallel_attention
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

HEADS_Q, HEADS, DIM = 8, 4, 64


def _most(call: Any) -> int:
    """Bytes that PyTorch has allocated more at most, while a call runs, than before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def allocated(rank: int, kind: str, strategy: str, rows: int) -> tuple[int, int]:
    """Of a rank the bytes of a forward and of a backward pass at most, beside their results."""
    layout = getattr(Layout, kind)(rows, 4)
    count = _gather.chunk_count
    _gather.chunk_count = lambda *arguments: HEADS  # a head each, as a machine would take for long sequences
    try:
        q, k, v = (
            torch.randn(1, layout.rows(rank), h, DIM, requires_grad=True) for h in (HEADS_Q, HEADS, HEADS)
        )
        results: list[Tensor] = []

        def attend() -> None:
            call: Any = context_parallel_attention
            results.append(call(q, k, v, layout=layout, causal=True, strategy=strategy))

        attend()  # what a layout keeps
        results.pop().sum().backward()
        for t in (q, k, v):
            t.grad = None
        forward = _most(attend) - results[0].nbytes
        dout = torch.randn_like(results[0])
        gradients = q.nbytes + k.nbytes + v.nbytes
        backward = _most(lambda: torch.autograd.backward(results[0], dout)) - gradients
        return forward, backward
    finally:
        _gather.chunk_count = count


def _in_units(pool: Pool, kind: str, strategy: str, unit: int) -> list[tuple[float, float]]:
    """Of each rank, in units of bytes that grow with the rows; the same for four times as many rows."""
    found = []
    for rows in (2048, 8192):
        of_ranks = pool.run(allocated, kind, strategy, rows)
        found.append([tuple(each / (unit * rows) for each in both) for both in of_ranks])
    for few, many in zip(*found, strict=True):
        assert many == pytest.approx(few, rel=0.01)  # nothing is quadratic
    return found[1]  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_gather_holds_few_chunks(pool: Pool, kind: str) -> None:
    """A chunk is a head's K and V of all rows. Forward three of them, of which two are without a rank's own
    rows, and the rows that are sent, in two forms; backward gradients too, in f32 as the tensors here."""
    for forward, backward in _in_units(pool, kind, "gather", 2 * DIM * 4):
        assert forward <= 4.3 and backward <= 7.1


def test_ring_holds_two_ranks_keys(pool: Pool) -> None:
    """A unit is a rank's K and V. Forward two of them, and a part's result, which here is as large; backward
    two, gradients that come, go and are made, and dq in f32."""
    for forward, backward in _in_units(pool, "zigzag", "ring", HEADS * 2 * DIM * 4 // 4):
        assert forward <= 3.2 and backward <= 6.1
