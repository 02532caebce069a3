"""The strategies of two levels: heads within a node, "gather" or "ring" across nodes.

An all-to-all within a node turns its ranks' rows of all heads into all of its rows of some heads. The ranks
of one place in their nodes then have the same heads, and are as many as there are nodes: between them goes
what a single level would send, a node's rows at a time, each rank over its own link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from tandem.distributed import _heads, _parts
from tandem.distributed._job import Gradients, Job, Result
from tandem.distributed._layout import Layout, joined, kept_with_layout


@kept_with_layout
def of_nodes(layout: Layout, within: int) -> Layout:
    """The layout whose ranks are nodes of ``within`` ranks each."""
    runs = []
    for first in range(0, layout.ranks, within):
        held = [run for shard in layout.runs[first : first + within] for run in shard]
        if all(run.step == 1 for run in held):
            held.sort(key=lambda run: (run.sequence, run.start))
        runs.append(held)
    return Layout(layout.lengths, tuple(map(joined, runs)), layout.kind, layout.packed)


@kept_with_layout
def order_of(layout: Layout, within: int, node: int, device: torch.device) -> _heads.Order:
    """A node's rows, in the order of the layout of nodes."""
    first = node * within
    shards = [layout.indices(r) for r in range(first, first + within)]
    return _heads.Order.of(shards, of_nodes(layout, within).indices(node), device)


def _parts_of(job: Job, q: Tensor, k: Tensor) -> tuple[_heads.Exchange, Job]:
    """The exchange within the node, and the job across nodes."""
    assert job.ranks.levels is not None  # validated before
    across, within = job.ranks.levels
    order = order_of(job.layout, within.size, across.rank, q.device)
    exchange = _heads.Exchange(within, order, q.shape[2], k.shape[2])
    options = job.options.at(exchange.first_head)
    return exchange, replace(job, ranks=across, layout=of_nodes(job.layout, within.size), options=options)


def forward(inner: ModuleType, job: Job, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Result:
    exchange, across = _parts_of(job, q, k)
    q, k, v = exchange.inputs(q, k, v)
    result = inner.forward(across, q, k, v, exchange.of_sink(sink))
    return Result(*exchange.results(result.out, result.lse), (q, k, v, result.out, result.lse))


def backward(
    inner: ModuleType, job: Job, saved: _parts.Saved, k: Tensor, v: Tensor, kept: Sequence[Tensor] | None
) -> Gradients:
    exchange, across = _parts_of(job, saved.q, k)
    whole, all_k, all_v = exchange.again(saved, k, v, kept)
    # Sums over ranks that share a head are made in f32.
    dtype = torch.float32 if exchange.are_shared else k.dtype
    dq, dk, dv = inner.backward(across, whole, all_k, all_v, None, dtype)
    return exchange.gradients(dq, dk, dv, k, v)
