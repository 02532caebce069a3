"""Shards that are on their ranks, made whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tandem.distributed._comm import Ranks
from tandem.distributed._layout import Layout


def gather(x: Tensor, *, layout: Layout, group: Any = None, dim: int | None = None) -> Tensor:
    """The whole tensor of the shards x of all ranks, on every rank: `Layout.unshard` over a group. For
    looking at results; no gradient flows through it.

    Args:
      x: the rank's rows, in dimension ``dim`` (default: 0 for packed tensors, else 1); of one dtype and
        otherwise one shape on all ranks.
      layout, group: as for `context_parallel_attention`.
    """
    ranks = Ranks.of(group)
    dim = layout.dim if dim is None else dim
    rows = [layout.rows(r) for r in range(ranks.size)]
    own = x.detach().movedim(dim, 0)
    sends = own.repeat(ranks.size, *(1,) * (own.ndim - 1))
    came = ranks.exchange(sends, [len(own)] * ranks.size, rows).wait()
    return layout.unshard([shard.movedim(0, dim) for shard in came.split(rows)], dim)
