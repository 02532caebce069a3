"""What the arguments of every model family are made of: tokens, padding, images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

BATCH, ROWS = 3, 14
PADS = (0, 3, 6)  # tokens of padding in each row of the batch
#: Arguments from a model's configuration and the side of the padding.
Make = Callable[[Any, str], dict[str, Any]]


def field(config: Any, names: tuple[str, ...]) -> Any:
    """The first of `names` that the configuration or one inside it has."""
    for name in names:
        if isinstance(value := getattr(config, name, None), (int, list, tuple)):
            return value
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig) and (value := field(part, names)) is not None:
            return value
    return None


def padding(side: str, rows: int = ROWS) -> Tensor:
    mask = torch.ones(BATCH, rows, dtype=torch.int64)
    for row, pads in enumerate(PADS):
        if side == "left":
            mask[row, :pads] = 0
        elif side == "right":
            mask[row, rows - pads :] = 0
    return mask


def tokens(side: str) -> Tensor:
    ids = torch.randint(5, 48, (BATCH, ROWS)) * padding(side)
    last = padding(side).cumsum(1).argmax(1)
    ids[torch.arange(BATCH), last] = 2  # pooled by the end's token, and by the highest
    return ids


def text(side: str) -> dict[str, Any]:
    return {"input_ids": tokens(side), "attention_mask": padding(side)}


def image(size: int = 32, *batch: int) -> Tensor:
    return torch.randn(*(batch or (BATCH,)), 3, size, size)


def part(config: Any, name: str) -> Any:
    return getattr(config, name, config)


def image_of(size: int) -> Make:
    return lambda config, side: {"pixel_values": image(size)}
