"""The strategy "ring": K and V of each rank go around, a rank's queries meet one rank's keys after another.

Ring Attention (arXiv:2310.01889), over any layout. In step s rank r computes with the keys of rank r - s
while those of rank r - s - 1 are on their way, and adds to its results in f32. In the backward pass the
gradients of K and V travel behind their keys, in f32: each rank adds its part, and what arrives after the
last step is the sum. The order of additions is that of the ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.distributed import _calls, _parts, _routes
from tandem.distributed._comm import GRADIENTS, KEYS, Waiting
from tandem.distributed._job import Gradients, Job, Result, apart, finished, side_by_side
from tandem.distributed._layout import Layout, kept_with_layout
from tandem.distributed._mask import Mask


@kept_with_layout
def steps(layout: Layout, mask: Mask, rank: int) -> list[list[_calls.Group]]:
    """The calls of each step."""
    touched: list[tuple[int, int]] = []
    queries = _routes.pieces(layout, rank)
    return [
        _calls.groups(
            queries, _routes.pieces(layout, (rank - s) % layout.ranks), mask, layout.packed, touched
        )
        for s in range(layout.ranks)
    ]


class _Turn:
    """K and V of the rank whose turn it is, beside which those of the next one arrive: two ranks' K and V."""

    def __init__(self, job: Job, k: Tensor, v: Tensor) -> None:
        self.job, self.head_dim, self.step = job, k.shape[-1], 0
        self.kv = side_by_side(k, v).contiguous()
        self.coming: Waiting | None = None

    def rows(self, step: int) -> int:
        ranks = self.job.ranks
        return self.job.layout.rows((ranks.rank - step) % ranks.size)

    @property
    def keys(self) -> tuple[Tensor, Tensor]:
        return apart(self.kv, self.head_dim)

    def start(self) -> None:
        """Sends for the keys of the next step."""
        if self.step + 1 < self.job.ranks.size:
            after = self.kv.new_empty((self.rows(self.step + 1), *self.kv.shape[1:]))
            self.coming = self.job.ranks.shift(self.kv, after, KEYS)

    def end(self) -> None:
        if self.coming is not None:
            self.kv = self.coming.wait()
            self.coming = None
        self.step += 1


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Result:
    calls = steps(job.layout, job.mask, job.ranks.rank)
    exact = _parts.is_exact([call for groups in calls for call in groups], q.shape[1])
    rows = _parts.Rows.of(q, v.shape[-1], exact)
    turn = _Turn(job, k, v)
    for groups in calls:
        turn.start()
        for call in groups:
            inside = sink if exact else None
            _parts.forward(call, job.options, q, *turn.keys, rows, inside)
        turn.end()
    return finished(rows, q, sink, exact)


def backward(
    job: Job, saved: _parts.Saved, k: Tensor, v: Tensor, kept: None, dtype: torch.dtype | None = None
) -> Gradients:
    """``dtype``: of dk and dv, where it is not theirs."""
    calls = steps(job.layout, job.mask, job.ranks.rank)
    dq = torch.zeros_like(saved.q, dtype=torch.float32)
    turn = _Turn(job, k, v)
    returning: Waiting | None = None
    for groups in calls:
        turn.start()
        sums = torch.zeros_like(turn.kv, dtype=torch.float32)
        for call in groups:
            _parts.backward(call, job.options, saved, *turn.keys, dq, *apart(sums, k.shape[-1]))
        if returning is not None:  # what the ranks before have added for the same keys
            sums = returning.wait().add_(sums)
        after = sums.new_empty((turn.rows(turn.step + 1), *sums.shape[1:]))
        if job.ranks.size > 1:
            returning = job.ranks.shift(sums, after, GRADIENTS)
        turn.end()
    if returning is not None:
        sums = returning.wait()
    dk, dv = apart(sums, k.shape[-1])
    return dq.to(saved.q.dtype), dk.to(dtype or k.dtype), dv.to(dtype or v.dtype)
