"""Caches of keys and values for tests: sequences in shuffled pages, NaN wherever no sequence has a row."""

from __future__ import annotations

import torch
from torch import Tensor


def paged(
    k: Tensor, v: Tensor, lengths: list[int], page_size: int, spare: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """(k pages, v pages, page_table) of k and v (batch, seqlen, heads, head_dim). The table ends in -1."""
    width = -(-k.shape[1] // page_size)
    count = len(lengths) * width + spare
    order = torch.randperm(count).tolist()
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    pools = tuple(t.new_full((count, page_size, *t.shape[2:]), torch.nan) for t in (k, v))
    for b, length in enumerate(lengths):
        for i, first in enumerate(range(0, length, page_size)):
            table[b, i] = order.pop()
            rows = min(page_size, length - first)
            for pool, t in zip(pools, (k, v), strict=True):
                pool[table[b, i], :rows] = t[b, first : first + rows]
    return (*pools, table)


def row_of(pool: Tensor, table: Tensor, b: int, row: int) -> Tensor:
    """Row `row` of sequence `b`, in place."""
    return pool[int(table[b, row // pool.shape[1]]), row % pool.shape[1]]


def used(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32)
