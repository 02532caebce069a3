"""What the library does, through Python's own logging."""

from __future__ import annotations

import logging

from tandem import _core
from tandem._errors import InvalidArgumentError

_LEVELS = {0: logging.CRITICAL, 1: logging.INFO, 2: logging.DEBUG}
_NAMES = {"off": 0, "info": 1, "debug": 2}
_logger = logging.getLogger("tandem")


def set_log_level(level: str) -> None:
    """Sends what the library says to ``logging.getLogger("tandem")``; nothing is said before.

    Args:
      level: "info", a GPU kernel's first use and where it came from; "debug", every call too; or "off". The
        logger has a level and handlers of its own, as any.

    Raises:
      InvalidArgumentError: another level.
    """
    if level not in [*_NAMES]:  # a list: what cannot be hashed is another level too
        raise InvalidArgumentError(f"level is {level!r}; it must be one of {', '.join(_NAMES)}")
    _core.set_log(_NAMES[level], _write)


def _write(level: int, message: str) -> None:
    _logger.log(_LEVELS[level], message)
