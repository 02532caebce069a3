"""The strategy "heads": each rank computes some heads over all rows, as one device would.

DeepSpeed-Ulysses (arXiv:2309.14509): an all-to-all turns (some rows, all heads) into (all rows, some heads),
another one turns results back. No results are merged. Where there are fewer heads of K and V than ranks, the
ranks that share one each have it, and its gradients are added in f32 by ascending rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.distributed import _calls, _parts
from tandem.distributed._job import Gradients, Job, Result, Saved
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._mask import Mask
from tandem.distributed._routes import Piece

#: Of each rank its heads of q and of k and v, as (first, last + 1)
Shares = tuple[tuple[tuple[int, int], tuple[int, int]], ...]


def shares(heads_q: int, heads_kv: int, ranks: int) -> Shares | str:
    """Which rank computes which heads, or why they cannot be divided."""
    group = heads_q // heads_kv
    if ranks <= heads_kv:
        bounds = [heads_kv * r // ranks for r in range(ranks + 1)]
        pairs = list(zip(bounds[:-1], bounds[1:], strict=True))
        return tuple(((a * group, b * group), (a, b)) for a, b in pairs)
    if ranks % heads_kv == 0 and group % (ranks // heads_kv) == 0:
        each, sharing = heads_q // ranks, ranks // heads_kv
        return tuple(((r * each, (r + 1) * each), (r // sharing, r // sharing + 1)) for r in range(ranks))
    return (
        f"{heads_q} query heads on {heads_kv} key heads cannot be divided among {ranks} ranks: with more "
        "ranks than key heads, the ranks of a key head divide its query heads evenly"
    )


def are_shared(of_ranks: Shares) -> bool:
    """Whether several ranks have a head of K and V."""
    return len({of_kv for _, of_kv in of_ranks}) < len(of_ranks)


@dataclass(frozen=True)
class Order:
    """Rows by rank and rows by their place."""

    rows: list[int]  #: of each rank
    by_rank: Tensor  #: the number of each row, rank by rank
    by_place: Tensor  #: the inverse


@kept_with_layout
def order_of(layout: Layout, device: torch.device) -> Order:
    numbers = torch.cat([layout.indices(r) for r in range(layout.ranks)])
    rows = [layout.rows(r) for r in range(layout.ranks)]
    return Order(rows, numbers.to(device), numbers.argsort().to(device))


@kept_with_layout
def calls(layout: Layout, mask: Mask) -> list[_calls.Group]:
    """Attention over all rows."""
    pieces, begin = [], 0
    for sequence, length in enumerate(layout.lengths):
        if length:
            pieces.append(Piece(sequence, 0, length, 1, begin))
        begin += length
    return _calls.groups(pieces, pieces, mask, layout.packed, [])


def to_heads(
    job: Job, tensors: Sequence[Tensor], ranges: Sequence[Sequence[tuple[int, int]]]
) -> list[Tensor]:
    """Tensors of one dtype, (batch, all rows, the rank's heads, ...), of those of the rank's rows, (batch,
    rows, heads, ...). ``ranges[i][r]``: the heads of the i-th tensor that rank r gets."""
    rank, size = job.ranks.rank, job.ranks.size
    order = order_of(job.layout, tensors[0].device)
    pairs = list(zip(tensors, ranges, strict=True))
    parts = [t[:, :, slice(*heads[r])].transpose(0, 1).reshape(-1) for r in range(size) for t, heads in pairs]

    def numbers(rows: int, r: int) -> list[int]:
        """Elements of each tensor for rank r."""
        per_head = [t.shape[0] * t.shape[3:].numel() for t in tensors]
        return [rows * n * (heads[r][1] - heads[r][0]) for n, (_, heads) in zip(per_head, pairs, strict=True)]

    coming = [numbers(rows, rank) for rows in order.rows]
    going = [sum(numbers(order.rows[rank], r)) for r in range(size)]
    came = job.ranks.exchange(torch.cat(parts), going, [sum(n) for n in coming]).wait()
    pieces = came.split([n for each in coming for n in each])
    whole = []
    for i, (t, heads) in enumerate(pairs):
        count = heads[rank][1] - heads[rank][0]
        shape = (t.shape[0], count, *t.shape[3:])
        shards = [pieces[r * len(tensors) + i].view(order.rows[r], *shape) for r in range(size)]
        whole.append(torch.cat(shards).index_select(0, order.by_place).transpose(0, 1))
    return whole


def to_rows(job: Job, t: Tensor, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The parts of (batch, rows, heads, ...) that ranks have computed for the rank's rows, by rank, of the
    heads that each has, (batch, all rows, heads, ...)."""
    rank = job.ranks.rank
    order = order_of(job.layout, t.device)
    sends = t.transpose(0, 1).index_select(0, order.by_rank)
    per_head = t.shape[0] * t.shape[3:].numel()
    going = [rows * per_head * t.shape[2] for rows in order.rows]
    counts = [b - a for a, b in ranges]
    coming = [order.rows[rank] * per_head * count for count in counts]
    came = job.ranks.exchange(sends.reshape(-1), going, coming).wait()
    return [
        piece.view(order.rows[rank], t.shape[0], count, *t.shape[3:]).transpose(0, 1)
        for piece, count in zip(came.split(coming), counts, strict=True)
    ]


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Result:
    of_q, of_kv = _ranges(job, q, k)
    q, k, v = to_heads(job, (q, k, v), (of_q, of_kv, of_kv))
    rows = _parts.Rows.of(q, v.shape[-1], True)
    inside = None if sink is None else sink[slice(*of_q[job.ranks.rank])].contiguous()
    for call in calls(job.layout, job.mask):
        _parts.forward(call, job.options, q, k, v, rows, inside)
    out = torch.cat(to_rows(job, rows.out, of_q), 2)
    lse = torch.cat(to_rows(job, rows.lse.transpose(1, 2), of_q), 2).transpose(1, 2).contiguous()
    return Result(out, lse, (q, k, v, rows.out, rows.lse))


def backward(
    job: Job, saved: Saved, k: Tensor, v: Tensor, kept: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
) -> Gradients:
    of_q, of_kv = _ranges(job, saved.q, k)
    (dout,) = to_heads(job, (saved.dout,), (of_q,))
    dlse = None
    if saved.dlse is not None:
        (dlse,) = to_heads(job, (saved.dlse.transpose(1, 2),), (of_q,))
        dlse = dlse.transpose(1, 2)
    all_q, all_k, all_v, out, lse = kept
    shared = are_shared(tuple(zip(of_q, of_kv, strict=True)))
    dtype = torch.float32 if shared else k.dtype
    dq = _parts.gradient_of(all_q, True)
    dk, dv = torch.zeros_like(all_k, dtype=dtype), torch.zeros_like(all_v, dtype=dtype)
    whole = Saved(all_q, out, lse, dout, dlse)
    for call in calls(job.layout, job.mask):
        _parts.backward(call, job.options, whole, all_k, all_v, dq, dk, dv)
    dq = torch.cat(to_rows(job, dq, of_q), 2)
    results = []
    for gradient, like in ((dk, k), (dv, v)):
        total = torch.zeros_like(like, dtype=dtype)
        for part, (a, b) in zip(to_rows(job, gradient, of_kv), of_kv, strict=True):
            total[:, :, a:b] += part
        results.append(total.to(like.dtype))
    return dq, results[0], results[1]


def _ranges(job: Job, q: Tensor, k: Tensor) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    found = shares(q.shape[2], k.shape[2], job.ranks.size)
    assert not isinstance(found, str), found  # judged before
    return [of_q for of_q, _ in found], [of_kv for _, of_kv in found]
