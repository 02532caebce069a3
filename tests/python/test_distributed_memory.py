"""What a call over ranks allocates: K and V of few chunks beyond a rank's own, and nothing quadratic."""

from __future__ import annotations

from typing import Any

import pytest
import tandem
import torch
from distributed_pool import Pool
from tandem import _call, _run
from tandem.distributed import Layout, _gather, _parts, context_parallel_attention
from tandem.distributed._calls import Group
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


def allocated(rank: int, kind: str, strategy: str, rows: int, causal: bool) -> tuple[int, int]:
    """Of a rank the bytes of a forward and of a backward pass at most, beside their results."""
    layout = getattr(Layout, kind)(rows, 4)
    chosen = _gather.chunk_heads
    each = (1,) * HEADS  # a head each, as a machine would take for long sequences
    _gather.chunk_heads = lambda *arguments: each
    try:
        q, k, v = (
            torch.randn(1, layout.rows(rank), h, DIM, requires_grad=True) for h in (HEADS_Q, HEADS, HEADS)
        )
        results: list[Tensor] = []

        def attend() -> None:
            call: Any = context_parallel_attention
            options = {"causal": causal, "strategy": strategy, "return_lse": True}
            # Ranks that compare their arguments have 80 bytes, which gloo keeps for a while.
            out, lse = call(q, k, v, layout=layout, check=False, **options)
            results.extend((out, lse.detach()))

        attend()  # what a layout keeps
        results[0].sum().backward()
        results.clear()
        for t in (q, k, v):
            t.grad = None
        forward = _most(attend) - results[0].nbytes - results[1].nbytes
        dout = torch.randn_like(results[0])
        gradients = q.nbytes + k.nbytes + v.nbytes
        backward = _most(lambda: torch.autograd.backward(results[0], dout)) - gradients
        return forward, backward
    finally:
        _gather.chunk_heads = chosen


def _in_units(
    pool: Pool, kind: str, strategy: str, unit: int, causal: bool = True
) -> list[tuple[float, float]]:
    """Of each rank, in units of bytes that grow with the rows; the same for four times as many rows."""
    found = []
    for rows in (1024, 4096):
        of_ranks = pool.run(allocated, kind, strategy, rows, causal)
        found.append([tuple(each / (unit * rows) for each in both) for both in of_ranks])
    assert found[0] == found[1]  # nothing is quadratic, and nothing depends on when a message arrives
    return found[1]  # type: ignore[return-value]


#: Of each rank, in eighths of all rows: keys that it needs, and its own rows as often as they are sent.
ROWS = {
    ("zigzag", True): [(8, 3), (7, 4), (6, 5), (5, 6)],
    ("contiguous", True): [(2, 6), (4, 4), (6, 2), (8, 0)],
    ("contiguous", False): [(8, 6)] * 4,
}


@pytest.mark.parametrize(("kind", "causal"), ROWS)
def test_gather_holds_two_chunks(pool: Pool, kind: str, causal: bool) -> None:
    """A chunk is a head's K and V of all rows. There is the memory of two. Backward gradients, too, in f32 as
    the tensors here: those that are made, of two chunks, and those that come, less than three."""
    found = _in_units(pool, kind, "gather", 2 * DIM * 4, causal)
    for (forward, backward), (needed, sent) in zip(found, ROWS[kind, causal], strict=True):
        assert forward == 2 * needed / 8 <= 2
        gradients = (2 * needed + sent) / 8
        assert backward == forward + gradients and gradients < 3


def test_ring_holds_two_ranks_keys(pool: Pool) -> None:
    """A unit is a rank's K and V. Forward two of them, and the result of a part, here as large where it is of
    all queries, with a few numbers of each row. Backward two, beside dq in f32 three of gradients in f32 that
    come, go and are made, of which one is the result."""
    found = _in_units(pool, "zigzag", "ring", HEADS * 2 * DIM * 4 // 4)
    for rank, (forward, backward) in enumerate(found):
        assert 0 <= forward - 2 - (1 if rank == 3 else 1 / 2) <= 0.1
        assert backward == 2 + 3 - 1


def test_heads_hold_keys_twice(pool: Pool) -> None:
    """A unit is a rank's K and V, here as large as its q. Forward both as they go and as they come, then all
    rows of them and of out, which goes and comes. Backward dout and gradients of all rows; of these half a
    unit, dk or dv, goes, comes and is added up."""
    found = _in_units(pool, "zigzag", "heads", HEADS * 2 * DIM * 4 // 4)
    assert found == [(4, 4)] * 4


@pytest.mark.parametrize("heads", [slice(0, 8), slice(2, 4)])
def test_what_is_merged_has_one_layout(heads: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs want it; the CPU takes any. Rows 4 to 44 of 64 get a call, and then another."""
    q, k, v = (torch.randn(2, rows, h, DIM) for rows, h in ((64, HEADS_Q), (48, HEADS), (48, HEADS)))
    q, k, v = (
        t.bfloat16() for t in (q[:, :, heads], *(t[:, :, heads.start // 2 : heads.stop // 2] for t in (k, v)))
    )
    whole = _parts.Rows.of(torch.empty(2, 64, HEADS_Q, DIM), DIM, False)
    rows = _parts.Rows(whole.out[:, :, heads], whole.lse[:, heads])
    layouts: list[set[tuple[int, ...]]] = []

    def looked_at(outs: list[Tensor], lses: list[Tensor], *rest: Any) -> Any:
        layouts.extend({t.stride() for t in tensors} for tensors in (outs, lses))
        return merge(outs, lses, *rest)

    merge = _run.merge
    monkeypatch.setattr(_run, "merge", looked_at)
    for keys in (slice(0, 20), slice(20, 48)):
        group = Group(-1, -1, [(4, 44, 0, keys.stop - keys.start)], [(0, 0, 0, 1)])
        _parts.forward(group, _parts.Options(_call.Call()), q, k[:, keys], v[:, keys], rows)
    assert layouts and all(len(strides) == 1 for strides in layouts)
    out, lse = tandem.attention(q[:, 4:44], k, v, return_lse=True)
    torch.testing.assert_close(rows.out[:, 4:44].to(out.dtype), out, rtol=0.02, atol=0.01)
    torch.testing.assert_close(rows.lse[:, :, 4:44], lse)
