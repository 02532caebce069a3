"""Which families' modules run inside a model of another family, and whose attention Tandem computes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

running: list[str] = []  # model types of the modules whose forward pass runs, the innermost last
served: set[str] = set()  # model types of modules whose attention called Tandem's


def note_attention() -> None:
    """Tandem's attention was called: by the innermost module that runs."""
    served.update(running[-1:])


def by_name(config: PreTrainedConfig, nested: bool = True) -> dict[str, str]:
    """Model types of the configurations inside `config`, by what their classes' names begin with."""
    named: dict[str, str] = {}
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig) and part.model_type:
            named[type(part).__name__.removesuffix("Config")] = part.model_type
            named |= by_name(part) if nested else {}
    return named


#: Modules whose class does not tell which configuration they are for, but whose place does.
PLACES = {"model.embed_audio": "Gemma4UnifiedAudio"}


def _kind_of(place: str, module: torch.nn.Module, named: dict[str, str]) -> str:
    """The model type that a module belongs to: by its configuration, its class's name, or its place."""
    own = getattr(module, "config", None)
    if isinstance(own, PreTrainedConfig) and own.model_type:
        return str(own.model_type)
    if (of_place := PLACES.get(place)) in named:
        return named[str(of_place)]
    begins = [name for name in named if type(module).__name__.startswith(name)]
    return named[max(begins, key=len)] if begins else ""


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[set[str]]:
    """Fills the set with the model types of the modules that run: every module that keeps a configuration."""
    seen: set[str] = set()
    hooks = []

    def enter(kind: str, *_: Any) -> None:
        seen.add(kind)
        running.append(kind)

    def leave(*_: Any) -> None:
        del running[-1:]

    named = by_name(model.config)
    for place, module in model.named_modules():
        if kind := _kind_of(place, module, named):
            hooks.append(module.register_forward_pre_hook(functools.partial(enter, kind)))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield seen
    finally:
        running.clear()
        for hook in hooks:
            hook.remove()
