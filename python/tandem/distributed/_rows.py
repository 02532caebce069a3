"""Shards that are on their ranks, made whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem import _call
from tandem._errors import InvalidArgumentError
from tandem.distributed import _agree
from tandem.distributed._begin import validate_layout, validate_rows, validate_tensor, without_rows
from tandem.distributed._comm import Ranks
from tandem.distributed._layout import Layout


def gather(
    x: Tensor, *, layout: Layout, group: Any = None, dim: int | None = None, check: bool = True
) -> Tensor:
    """The whole tensor of the shards x of all ranks, on every rank: `Layout.unshard` over a group. For
    looking at results; no gradient flows through it.

    Args:
      x: the rank's rows, in dimension ``dim`` (default: 0 for packed tensors, else 1); of one dtype and
        otherwise one shape on all ranks.
      layout, group, check: as for `context_parallel_attention`.

    Raises:
      TandemError: as `context_parallel_attention` does, before rows are sent.
    """
    ranks = Ranks.of(group)
    ranks.hosts()
    with _agree.agreed(ranks, "gather", check) as same:
        _call.flag("check", check)
        same |= _validate(ranks, layout, x, dim)
    dim = same["dim"]
    rows = [layout.rows(r) for r in range(ranks.size)]
    came = ranks.gather_rows(x.detach().movedim(dim, 0), rows)
    shards = torch.split(came, rows)
    return layout.unshard([shard.movedim(0, dim) for shard in shards], dim)


def _validate(ranks: Ranks, layout: Any, x: Any, dim: Any) -> dict[str, Any]:
    """What has to be the same on every rank; an error where this rank's arguments break a rule."""
    validate_layout(layout, ranks)
    validate_tensor("x", x, ranks)
    dim = layout.dim if dim is None else dim
    if not -x.ndim <= dim < x.ndim:
        raise InvalidArgumentError(f"dim is {dim}, but x has {x.ndim} dimensions")
    validate_rows("x", x, layout, ranks, dim)
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "device": x.device.type,
        "shape of x but rows": without_rows(x, dim),
        "dim": dim % x.ndim,
        "layout": f"{layout.kind} {layout.digest}",
    }
