"""Arguments by model type, for models that take more than their parameters' names tell."""

from __future__ import annotations

from typing import Any

import family_audio
import family_video
import family_vision

ARGUMENTS = (
    family_vision.ARGUMENTS | family_audio.ARGUMENTS | dict.fromkeys(family_video.GIVEN, family_video.session)
)


def of(config: Any, takes: Any, side: str) -> dict[str, Any] | None:
    """The arguments of the configuration's type, if a forward pass that `takes` these names can have them."""
    make = ARGUMENTS.get(config.model_type)
    if make is None:
        return None
    arguments = make(config, side)
    return arguments if arguments and {*arguments} <= {*takes} else None


def call(model: Any, arguments: dict[str, Any]) -> Any:
    """The model's outputs: of one call, or of one for each frame of a film."""
    return family_video.run(model, arguments) if "inference_session" in arguments else model(**arguments)
