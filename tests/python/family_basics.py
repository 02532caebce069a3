"""What the arguments of every model family are made of: tokens, padding, images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hub
import torch
from torch import Tensor
from transformers import PreTrainedConfig

BATCH, ROWS = 3, 14
PADS = (0, 3, 6)  # tokens of padding in each row of the batch
#: Arguments from a model's configuration and the side of the padding.
Make = Callable[[Any, str], dict[str, Any]]


def by_type(table: dict[str, Make]) -> dict[str, Make]:
    """The table by single model types, of which a key names one or several."""
    return {model_type: make for types, make in table.items() for model_type in types.split(", ")}


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
    return hub.padding(side, rows, *PADS)


def behind(side: str) -> Tensor:
    """Padding on the right or none, for models that have none on the left."""
    return padding("right" if side == "right" else "none")


def tokens(side: str) -> Tensor:
    ids = ints(ROWS) * padding(side)
    last = padding(side).cumsum(1).argmax(1)
    ids[torch.arange(BATCH), last] = 2  # pooled by the end's token, and by the highest
    return ids


def text(side: str, token: int | None = None, count: int = 1) -> dict[str, Any]:
    """Words, `count` of them the token of an image or a sound, where no side has padding."""
    given = {"input_ids": tokens(side), "attention_mask": padding(side)}
    if token is not None:
        given["input_ids"][:, 6 : 6 + count] = token
    return given


def randn(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def ints(*shape: int) -> Tensor:
    return torch.randint(5, 48, (BATCH, *shape))


def ones(*shape: int) -> Tensor:
    return torch.ones(BATCH, *shape, dtype=torch.int64)


def image(size: int = 32, *batch: int) -> Tensor:
    return torch.randn(*(batch or (BATCH,)), 3, size, size)
