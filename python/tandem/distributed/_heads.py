"""The strategy "heads": each rank computes some heads over all rows, as one device would.

DeepSpeed-Ulysses (arXiv:2309.14509): an all-to-all turns (some rows, all heads) into (all rows, some heads),
another one turns results back. No results are merged. Where there are fewer heads of K and V than ranks, the
ranks that share one each have it, and its gradients are added in f32 by ascending rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.distributed import _calls, _parts
from tandem.distributed._comm import OTHERS, Ranks
from tandem.distributed._job import Gradients, Job, Result, put_rows
from tandem.distributed._layout import Layout, kept_with_layout, used_here
from tandem.distributed._mask import Mask
from tandem.distributed._routes import Piece, inverse_of

#: For each rank its heads of q and of k and v, as (first, last + 1)
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
    """Rows by rank, and rows in the order in which attention over them runs."""

    rows: list[int]  #: of each rank
    by_rank: Tensor  #: of each row, rank by rank, where it is in that order

    @classmethod
    def of(cls, shards: Sequence[Tensor], place: Tensor, device: torch.device) -> Order:
        """``shards``: of each rank the numbers of its rows; ``place``: the same numbers in that order."""
        numbers = torch.cat(list(shards))
        where = torch.zeros(int(numbers.max()) + 1 if len(numbers) else 0, dtype=torch.int64)
        where[numbers] = torch.arange(len(numbers))
        return cls([len(shard) for shard in shards], inverse_of(where[place]).to(device))


@kept_with_layout
def order_of(layout: Layout, device: torch.device) -> Order:
    """All rows, in their own order."""
    shards = [layout.indices(r) for r in range(layout.ranks)]
    return Order.of(shards, torch.arange(layout.total), device)


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
    ranks: Ranks, order: Order, tensors: Sequence[Tensor], ranges: Sequence[Sequence[tuple[int, int]]]
) -> list[Tensor]:
    """Tensors of one dtype, (batch, all rows, the rank's heads, ...), of those of the rank's rows, (batch,
    rows, heads, ...). ``ranges[i][r]``: the heads of the i-th tensor that rank r gets."""
    rank, size = ranks.rank, ranks.size
    pairs = list(zip(tensors, ranges, strict=True))

    def parts(memory: Tensor, rows: int, r: int) -> list[Tensor]:
        """For each tensor so many rows of the heads of rank r, (rows, batch, heads, ...), in this memory."""
        shapes = [(rows, t.shape[0], heads[r][1] - heads[r][0], *t.shape[3:]) for t, heads in pairs]
        each = torch.split(memory, [math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(each, shapes, strict=True)]

    def numbers(rows: int, r: int) -> int:
        """Elements of these."""
        return sum(
            rows * t.shape[0] * (heads[r][1] - heads[r][0]) * t.shape[3:].numel() for t, heads in pairs
        )

    going = [numbers(order.rows[rank], r) for r in range(size)]
    coming = [numbers(rows, rank) for rows in order.rows]
    sends, receives = (torch.split(tensors[0].new_empty(sum(n)), n) for n in (going, coming))
    for r in range(size):
        of_rank = [t[:, :, slice(*heads[r])].transpose(0, 1) for t, heads in pairs]
        _copy(parts(sends[r], order.rows[rank], r), of_rank)
    came = _exchanged(ranks, sends, receives)
    del sends  # so that K and V are there twice at most
    shards = [parts(memory, rows, rank) for memory, rows in zip(came, order.rows, strict=True)]
    whole = [t.new_empty((len(order.by_rank), *t.shape[1:])) for t in shards[0]]
    for places, of_rank in zip(torch.split(order.by_rank, order.rows), shards, strict=True):
        for t, shard in zip(whole, of_rank, strict=True):
            put_rows(t, places, shard)
    return [t.transpose(0, 1) for t in whole]


def _exchanged(ranks: Ranks, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Sequence[Tensor]:
    """A message to each rank, and what comes of each."""
    ranks.exchange([[t] for t in sends], [[t] for t in receives], OTHERS).wait()
    return receives


def _copy(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for place, t in zip(places, tensors, strict=True):
        place.copy_(t)


def to_rows(ranks: Ranks, order: Order, t: Tensor, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The parts of (batch, rows, heads, ...) that ranks have computed for the rank's rows, by rank, of the
    heads that each has, (batch, all rows, heads, ...)."""
    rank = ranks.rank
    sends = t.transpose(0, 1).index_select(0, order.by_rank)
    per_head = t.shape[0] * t.shape[3:].numel()
    going = [rows * per_head * t.shape[2] for rows in order.rows]
    counts = [b - a for a, b in ranges]
    coming = [order.rows[rank] * per_head * count for count in counts]
    receives = torch.split(t.new_empty(sum(coming)), coming)
    came = _exchanged(ranks, torch.split(sends.view(-1), going), receives)
    return [
        piece.view(order.rows[rank], t.shape[0], count, *t.shape[3:]).transpose(0, 1)
        for piece, count in zip(came, counts, strict=True)
    ]


class Exchange:
    """The way from rows to heads and back, of one call."""

    def __init__(self, ranks: Ranks, order: Order, heads_q: int, heads_kv: int) -> None:
        found = shares(heads_q, heads_kv, ranks.size)
        assert not isinstance(found, str), found  # validated before
        self.ranks, self.order = ranks, order
        used_here(order.by_rank)
        self.of_q, self.of_kv = [of_q for of_q, _ in found], [of_kv for _, of_kv in found]
        self.are_shared = are_shared(found)

    @property
    def first_head(self) -> int:
        """The first of the query heads that the rank computes."""
        return self.of_q[self.ranks.rank][0]

    def of_sink(self, sink: Tensor | None) -> Tensor | None:
        """That of the rank's heads."""
        return None if sink is None else sink[slice(*self.of_q[self.ranks.rank])].contiguous()

    def inputs(self, *tensors: Tensor) -> list[Tensor]:
        """q, k and v of the rank's heads, and more tensors with as many heads as q."""
        ranges = [self.of_q, self.of_kv, self.of_kv, *[self.of_q] * (len(tensors) - 3)]
        return to_heads(self.ranks, self.order, tensors, ranges)

    def of_lse(self, lse: Tensor) -> Tensor:
        """(batch, heads, rows)"""
        (found,) = to_heads(self.ranks, self.order, (lse.transpose(1, 2),), (self.of_q,))
        return found.transpose(1, 2).contiguous()

    def results(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The output and LSE of the rank's rows."""
        out = torch.cat(to_rows(self.ranks, self.order, out, self.of_q), 2)
        lse = torch.cat(to_rows(self.ranks, self.order, lse.transpose(1, 2), self.of_q), 2)
        return out, lse.transpose(1, 2).contiguous()

    def again(
        self, saved: _parts.Saved, k: Tensor, v: Tensor, kept: Sequence[Tensor] | None
    ) -> tuple[_parts.Saved, Tensor, Tensor]:
        """What the backward pass takes of the rank's heads, and k and v of these. What the forward pass has
        not kept is sent once more."""
        dlse = None if saved.dlse is None else self.of_lse(saved.dlse)
        if kept is None:
            q, k, v, out, dout = self.inputs(saved.q, k, v, saved.out, saved.dout)
            lse = self.of_lse(saved.lse)
        else:
            (dout,) = to_heads(self.ranks, self.order, (saved.dout,), (self.of_q,))
            q, k, v, out, lse = kept
        return _parts.Saved(q, out, lse, dout, dlse), k, v

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """dq, dk and dv of the rank's rows; of heads that ranks share the sum, by ascending rank."""
        dq = torch.cat(to_rows(self.ranks, self.order, dq, self.of_q), 2)
        return dq, self._total(dk, k), self._total(dv, v)

    def _total(self, gradient: Tensor, like: Tensor) -> Tensor:
        total = torch.zeros_like(like, dtype=gradient.dtype)
        parts = to_rows(self.ranks, self.order, gradient, self.of_kv)
        for part, (a, b) in zip(parts, self.of_kv, strict=True):
            total[:, :, a:b] += part
        return total.to(like.dtype)


def _exchange(job: Job, q: Tensor, k: Tensor) -> Exchange:
    return Exchange(job.ranks, order_of(job.layout, q.device), q.shape[2], k.shape[2])


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Result:
    exchange = _exchange(job, q, k)
    q, k, v = exchange.inputs(q, k, v)
    rows = _parts.Rows.of(q, v.shape[-1], True)
    inside = exchange.of_sink(sink)
    options = job.options.at(exchange.first_head)
    for call in calls(job.layout, job.mask):
        _parts.forward(call, options, q, k, v, rows, inside)
    return Result(*exchange.results(rows.out, rows.lse), (q, k, v, rows.out, rows.lse))


def backward(job: Job, saved: _parts.Saved, k: Tensor, v: Tensor, kept: Sequence[Tensor] | None) -> Gradients:
    exchange = _exchange(job, saved.q, k)
    whole, all_k, all_v = exchange.again(saved, k, v, kept)
    dtype = torch.float32 if exchange.are_shared else k.dtype
    dq = _parts.gradient_of(whole.q, True)
    dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (all_k, all_v))
    options = job.options.at(exchange.first_head)
    for call in calls(job.layout, job.mask):
        _parts.backward(call, options, whole, all_k, all_v, dq, dk, dv)
    return exchange.gradients(dq, dk, dv, k, v)
