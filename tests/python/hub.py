"""Transformers without its hub. What imports this is skipped where Transformers is not installed."""

from __future__ import annotations

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", minversion="5.14", reason="Transformers 5.14 is missing")

from tandem.integrations import transformers as integration  # noqa: E402

__all__ = ["integration", "padding", "transformers"]


def padding(side: str, rows: int, *pads: int) -> torch.Tensor:
    """The mask of a batch with so many tokens of padding in each row on that side, or of full rows."""
    mask = torch.ones(len(pads), rows, dtype=torch.int64)
    for row, count in enumerate(pads):
        if side == "left":
            mask[row, :count] = 0
        elif side == "right":
            mask[row, rows - count :] = 0
    return mask
