"""Whether all ranks ask for the same, found before any of them sends a tensor."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from tandem import _call
from tandem._errors import InvalidArgumentError
from tandem.distributed._comm import Ranks

#: Options that ranks may have of their own.
_OWN = ("check", "threads", "sm_limit")


def options_of(call: _call.Call) -> dict[str, Any]:
    """The options that have to be the same on every rank."""
    return {name: getattr(call, name) for name, _ in _call.KINDS if name not in _OWN}


@contextlib.contextmanager
def agreed(ranks: Ranks, call: str, check: Any) -> Iterator[dict[str, Any]]:
    """A block that validates a rank's arguments of `call` and puts what has to be the same on every rank into
    this dictionary. An error in it waits until the other ranks have been told (`agree`)."""
    asked: dict[str, Any] = {"call": call}
    error: Exception | None = None
    try:
        yield asked
    except Exception as found:  # whatever it is, the other ranks wait to be told
        error = found
    agree(ranks, asked, error, check)


def agree(ranks: Ranks, asked: dict[str, Any], error: Exception | None, check: bool) -> None:
    """Raises on every rank where two ranks ask for different things, or one of them has found an error.

    Args:
      asked: what has to be the same on every rank, by name.
      error: what this rank has found wrong with its own arguments.
      check: ask the other ranks; without, this rank's own error alone is raised.
    """
    if not check or ranks.size == 1:
        if error is not None:
            raise error
        return
    digest = hashlib.sha256(repr(sorted(asked.items())).encode()).digest()
    own = [int(error is not None), int.from_bytes(digest[:7], "little")]
    if all(numbers == own for numbers in ranks.gather_small(own)) and error is None:
        return
    told = ranks.gather_objects((None if error is None else str(error), asked))
    if error is not None:
        raise error
    for rank, (message, _) in enumerate(told):
        if message is not None:
            raise InvalidArgumentError(f"rank {rank} of the group: {message}")
    first = told[0][1]
    for rank, (_, other) in enumerate(told):
        for name, value in other.items():
            if value != first.get(name):
                raise InvalidArgumentError(
                    f"ranks disagree on {name}: rank 0 of the group has {first.get(name)}, rank {rank} has "
                    f"{value}; pass the same on every rank"
                )
