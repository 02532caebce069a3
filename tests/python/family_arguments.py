"""Arguments by model type, for models that take more than their parameters' names tell."""

from __future__ import annotations

from typing import Any

import family_heard
import family_seen

ARGUMENTS = family_seen.ARGUMENTS | family_heard.ARGUMENTS


def of(config: Any, takes: Any, side: str) -> dict[str, Any] | None:
    """The arguments of the configuration's type, if a forward pass that `takes` these names can have them."""
    make = ARGUMENTS.get(config.model_type)
    if make is None:
        return None
    arguments = make(config, side)
    return arguments if {*arguments} <= {*takes} else None
