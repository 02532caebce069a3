"""Dropout where a rank has whole sequences of some heads: what one device keeps is kept.

Which entries are kept follows from (sequence * heads + head, query, key), sequence and head counted in the
call (docs/functions.md). A rank computes ``width`` heads from ``first`` on, in a call that has no others:
sequence s has the number (s * heads + first) / width there, and those between are empty. Then number * width
+ head is what one device counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.distributed import _parts
from tandem.distributed._calls import Group, Pair, Place
from tandem.distributed._job import Job
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._mask import Mask


@kept_with_layout
def whole(layout: Layout, mask: Mask, batch: int, heads: int, first: int, width: int) -> Group:
    """The call of all sequences, of a batch or packed, end to end."""
    pairs: list[Pair] = []
    places: list[Place] = []
    row = 0
    for sequence, length in enumerate(layout.lengths if layout.packed else layout.lengths * batch):
        empty = (sequence * heads + first) // width - len(pairs)
        pairs += [(row, row, row, row)] * empty
        places += [(0, 0, 0, 1)] * empty
        pairs.append((row, row + length, row, row + length))
        places.append((sequence, 0, 0, 1))
        row += length
    return Group(mask.left, mask.right, pairs, places, True, True)


@dataclass(frozen=True)
class _Block:
    """Heads of a rank that are one call."""

    call: Group
    options: _parts.Options
    of_q: slice
    of_kv: slice


def _blocks(job: Job, options: _parts.Options, q: Tensor, k: Tensor) -> Iterator[_Block]:
    """Blocks of so many heads that the number of those before them is a multiple: all of a rank's where ranks
    have equally many. No two of them have a key head in common."""
    assert options.dropout is not None  # the caller's case
    if not q.numel():
        return
    heads, first, count = options.dropout.heads, options.first_head, q.shape[2]
    width, group = math.gcd(heads, first, count), count // k.shape[2]
    for at in range(0, count, width):
        call = whole(job.layout, job.mask, q.shape[0], heads, first + at, width)
        of_kv = slice(at // group, max(at // group + 1, (at + width) // group))
        yield _Block(call, options.at(at), slice(at, at + width), of_kv)


def _joined(t: Tensor) -> Tensor:
    """(1, batch * rows, heads, head_dim)"""
    return t.flatten(0, 1).unsqueeze(0)


def _joined_lse(t: Tensor) -> Tensor:
    """(1, heads, batch * rows) of (batch, heads, rows)"""
    return t.transpose(0, 1).flatten(1).unsqueeze(0)


def forward(
    job: Job, options: _parts.Options, q: Tensor, k: Tensor, v: Tensor, rows: _parts.Rows, sink: Tensor | None
) -> None:
    """Writes ``rows``, of all sequences and the rank's heads."""
    for block in _blocks(job, options, q, k):
        mine = _joined(q[:, :, block.of_q])
        keys, values = (_joined(t[:, :, block.of_kv]) for t in (k, v))
        part = _parts.Rows.of(mine, v.shape[-1], True)
        inside = None if sink is None else sink[block.of_q]
        _parts.forward(block.call, block.options, mine, keys, values, part, inside)
        rows.out[:, :, block.of_q] = part.out.view(q.shape[:2] + part.out.shape[2:])
        rows.lse[:, block.of_q] = part.lse.view(part.lse.shape[1], *q.shape[:2]).transpose(0, 1)


def backward(
    job: Job,
    options: _parts.Options,
    saved: _parts.Saved,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Writes dq, dk and dv."""
    for block in _blocks(job, options, saved.q, k):
        q, out, dout = (_joined(t[:, :, block.of_q]) for t in (saved.q, saved.out, saved.dout))
        dlse = None if saved.dlse is None else _joined_lse(saved.dlse[:, block.of_q])
        of_block = _parts.Saved(q, out, _joined_lse(saved.lse[:, block.of_q]), dout, dlse)
        keys = [_joined(t[:, :, block.of_kv]) for t in (k, v)]
        parts = [torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (q, *keys)]
        _parts.backward(block.call, block.options, of_block, *keys, *parts)
        of_heads = (block.of_q, block.of_kv, block.of_kv)
        for place, heads, part in zip((dq, dk, dv), of_heads, parts, strict=True):
            place[:, :, heads] = part.view(k.shape[:2] + part.shape[2:])
