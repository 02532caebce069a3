"""The mask of a call in whole sequences: which keys a query sees, and how many pairs a set of rows has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Places = Any  #: an int, or an int64 array of them


@dataclass(frozen=True)
class Mask:
    """Query i of a sequence sees keys ``i - left`` to ``i + right`` of it; -1 is unbounded. Queries and keys
    of a sequence are as many, so that no alignment is to be thought of."""

    left: int = -1
    right: int = -1

    @classmethod
    def of(cls, causal: bool, window: tuple[int, int]) -> Mask:
        """The mask that these options of ``tandem.attention`` mean."""
        return cls(window[0], 0 if causal else window[1])

    def keys(self, first: Places, last: Places, seqlen: Places) -> tuple[Places, Places]:
        """Keys ``[begin, end)`` that some query of rows first to last (inclusive) sees."""
        begin = first * 0 if self.left < 0 else _clamp(first - self.left, seqlen)
        end = seqlen if self.right < 0 else _clamp(last + self.right + 1, seqlen)
        return begin, end

    def pairs(self, start: Places, count: Places, step: Places, seqlen: Places) -> Places:
        """Visible pairs of the queries start, start + step, ... (count of them); exact."""
        ends = count * seqlen
        if self.right >= 0:  # the sum of min(i + right + 1, seqlen)
            inside = _clamp((seqlen - self.right - 1 - start) // step + 1, count)
            ends = _series(start + self.right + 1, step, inside) + (count - inside) * seqlen
        begins = count * 0
        if self.left >= 0:  # the sum of max(i - left, 0)
            outside = _clamp((self.left - start) // step + 1, count)
            begins = _series(start + outside * step - self.left, step, count - outside)
        return ends - begins


def _clamp(value: Places, most: Places) -> Places:
    if isinstance(value, np.ndarray):
        return np.clip(value, 0, most)
    return max(0, min(value, most))


def _series(first: Places, step: Places, count: Places) -> Places:
    """first + (first + step) + ..., count terms."""
    return count * first + step * (count * (count - 1) // 2)
