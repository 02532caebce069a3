"""The strategy "gather": each rank receives the keys and values that its queries see, and computes at once.

Some heads of K and V at a time: while attention over one chunk of heads runs, the next chunk is on its way.
Heads are problems of their own, so that nothing is merged where a rank's queries are consecutive rows or two
runs of them. A rank sends another the rows that it needs and no others: under a mask or with packed sequences
that is less than an all-gather sends. In the backward pass the gradients of K and V go back the same way, in
f32, and their owner adds them by ascending rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.distributed import _parts
from tandem.distributed._arriving import Keys, Route, Sums, route_of
from tandem.distributed._chunks import bounds, chunk_heads
from tandem.distributed._job import Gradients, Job, Result, finished
from tandem.distributed._machine import Shape


def _heads_of_chunks(job: Job, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> list[tuple[int, int]]:
    return bounds(chunk_heads(job.layout, job.mask, Shape.of(q, k, v), job.machine, backward))


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Result:
    route = route_of(job.layout, job.mask, job.ranks.rank, q.device)
    rows = _parts.Rows.of(q, v.shape[-1], route.exact)
    _add_chunks(job, route, q, k, v, sink if route.exact else None, rows)
    return finished(rows, q, sink, route.exact)


def _add_chunks(
    job: Job, route: Route, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, rows: _parts.Rows
) -> None:
    group = q.shape[2] // k.shape[2]
    todo = _heads_of_chunks(job, q, k, v, False)
    arriving = Keys(route, job.ranks, k, v, todo)
    for i, (a, b) in enumerate(todo):
        keys = arriving.take(i)
        heads = slice(a * group, b * group)
        part = _parts.Rows(rows.out[:, :, heads], rows.lse[:, heads])
        inside = None if sink is None else sink[heads]
        for call in route.groups:
            _parts.forward(call, job.options.at(a * group), q[:, :, heads], *keys, part, inside)


def backward(
    job: Job, saved: _parts.Saved, k: Tensor, v: Tensor, kept: None, dtype: torch.dtype | None = None
) -> Gradients:
    """``dtype``: of dk and dv, where it is not theirs."""
    q = saved.q
    route = route_of(job.layout, job.mask, job.ranks.rank, q.device)
    dq = _parts.gradient_of(q, route.exact)
    covered = route.direct and route.groups[0].keys == (0, route.rows)
    make = torch.empty_like if covered or not route.direct else torch.zeros_like
    dk, dv = (make(t, dtype=dtype or t.dtype) for t in (k, v))
    _add_gradients(job, route, saved, k, v, (dq, dk, dv))
    return dq.to(q.dtype), dk, dv


def _add_gradients(
    job: Job, route: Route, saved: _parts.Saved, k: Tensor, v: Tensor, gradients: Gradients
) -> None:
    dq, dk, dv = gradients
    group = saved.q.shape[2] // k.shape[2]
    todo = _heads_of_chunks(job, saved.q, k, v, True)
    arriving = Keys(route, job.ranks, k, v, todo)
    sums = None if route.direct else Sums(route, job.ranks, k, v, todo)
    for i, (a, b) in enumerate(todo):
        keys = arriving.take(i)
        made = [t[:, :, a:b] for t in (dk, dv)] if sums is None else sums.start(i)
        heads = slice(a * group, b * group)
        some, options = saved.of_heads(heads), job.options.at(a * group)
        for call in route.groups:
            _parts.backward(call, options, some, *keys, dq[:, :, heads], *made)
        if sums is not None:
            if i > 0:
                sums.total(i - 1, dk, dv)
            sums.send(i)
    if sums is not None:
        sums.total(len(todo) - 1, dk, dv)
