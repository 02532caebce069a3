"""A strategy by its name, and what all of them share of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from tandem.distributed import _gather, _heads, _levels, _parts, _ring
from tandem.distributed._job import Gradients, Job, Result

_FORWARD: dict[str, Callable[..., Result]] = {
    "gather": _gather.forward,
    "ring": _ring.forward,
    "heads": _heads.forward,
    "heads+gather": partial(_levels.forward, _gather),
    "heads+ring": partial(_levels.forward, _ring),
}
_BACKWARD: dict[str, Callable[..., Gradients]] = {
    "gather": _gather.backward,
    "ring": _ring.backward,
    "heads": _heads.backward,
    "heads+gather": partial(_levels.backward, _gather),
    "heads+ring": partial(_levels.backward, _ring),
}


def forward(strategy: str, job: Job, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Result:
    """The results of a rank's rows; tensors have four dimensions."""
    return _FORWARD[strategy](job, q, k, v, sink)


def backward(
    strategy: str, job: Job, saved: _parts.Saved, k: Tensor, v: Tensor, sink: Tensor | None, kept: Any
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv and dsink (None without a sink). ``kept``: what the forward pass kept, or None, where a
    strategy that keeps something asks for it again."""
    dlse = None if saved.dlse is None else saved.dlse.resolve_neg().contiguous()
    saved = replace(saved, dout=saved.dout.resolve_neg().contiguous(), dlse=dlse)
    gradients = _BACKWARD[strategy](job, saved, k, v, kept)
    return (*gradients, None if sink is None else _parts.sink_gradient(sink, saved))
