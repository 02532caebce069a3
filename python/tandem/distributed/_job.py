"""What the strategies share: one attention over ranks, as a rank sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.distributed._comm import Ranks
from tandem.distributed._layout import Layout
from tandem.distributed._machine import Machine
from tandem.distributed._mask import Mask
from tandem.distributed._parts import Options, Rows, add_sink


@dataclass(frozen=True)
class Job:
    """An attention over ranks. Tensors have four dimensions, a batch of 1 where sequences are packed."""

    ranks: Ranks
    layout: Layout
    mask: Mask
    options: Options
    machine: Machine  #: by which the strategy divides its work


@dataclass
class Result:
    """A rank's rows, in q's dtype and f32; ``kept`` is what the strategy's backward takes besides."""

    out: Tensor
    lse: Tensor
    kept: Any = None


Gradients = tuple[Tensor, Tensor, Tensor]  #: dq, dk, dv in the dtype of q, k and v


def finished(rows: Rows, q: Tensor, sink: Tensor | None, exact: bool) -> Result:
    """The result of what all calls gave. Of `is_exact` calls the sink is in it already."""
    if sink is not None and not exact:
        add_sink(rows, sink)
    return Result(rows.out.to(q.dtype), rows.lse)


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """K and V as one tensor that can be sent: (rows, batch, heads, head_dim_qk + head_dim_v)."""
    return torch.cat([k, v], -1).transpose(0, 1)


def apart(kv: Tensor, head_dim_qk: int) -> tuple[Tensor, Tensor]:
    """K and V, (batch, rows, heads, head_dim), as views of what `side_by_side` made."""
    kv = kv.transpose(0, 1)
    return kv[..., :head_dim_qk], kv[..., head_dim_qk:]


def put_rows(whole: Tensor, index: Tensor, rows: Tensor) -> None:
    """Writes rows to these places of ``whole``, which are rows of the same shape."""
    to, given = of_sixteen_bytes(whole, rows)
    to.index_copy_(0, index, given)


def of_sixteen_bytes(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors' memory as elements of 16 bytes, where all of them can be seen so: a copy takes a thread
    for each element."""
    for t in tensors:
        width = 16 // t.element_size()
        # `view` asks that the offset divides, a GPU that the address does; a storage may begin anywhere.
        begins = (t.data_ptr() // t.element_size(), t.storage_offset())
        bounds = (t.shape[-1], *begins, *t.stride()[:-1])
        if not t.numel() or t.is_neg() or t.stride(-1) != 1 or any(n % width for n in bounds):
            return tensors
    return tuple(t.view(torch.complex128) for t in tensors)
