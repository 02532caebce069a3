"""The exceptions of Tandem: a class for each status of the C++ library, each also the usual builtin."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_package = sys.modules["tandem"]
if getattr(_package, "__distribution__", None) != "tandem-attention":
    raise ImportError(
        f"the package tandem in {list(_package.__path__)} is of another distribution than tandem-attention, "
        "which is installed there, too: uninstall that one, then "
        "pip install --force-reinstall tandem-attention"
    )

_P = ParamSpec("_P")
_R = TypeVar("_R")


class TandemError(Exception):
    """Any failure of Tandem. Its message states the rule, the value that broke it and what to do."""


class InvalidArgumentError(TandemError, ValueError):
    """An argument breaks a rule."""


class UnsupportedError(TandemError, NotImplementedError):
    """A legal wish that no backend here can meet; never a silent fallback."""


class OutOfMemoryError(TandemError, MemoryError):
    """Host or device memory is exhausted."""


class ExecutionError(TandemError, RuntimeError):
    """The driver, the compiler or the operating system failed."""


class InternalError(TandemError, RuntimeError):
    """A bug in Tandem."""


# By tandem::Status.
_BY_STATUS = {
    1: InvalidArgumentError,
    2: UnsupportedError,
    3: OutOfMemoryError,
    4: ExecutionError,
}


def error(status: int, message: str) -> TandemError:
    """The exception for a status of the C++ library."""
    return _BY_STATUS.get(status, InternalError)(message)


def named(
    *aliases: tuple[str, ...], validate: Any = None, **names: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function's errors say ``names[x]`` where Tandem says x, so that its caller knows the arguments.
    Each of `aliases` is Tandem's name and the function's keywords for it, of which the given one is said.
    `validate`, where given, is called with the tuple of positional arguments before the function."""
    words = {*names, *(own for own, *_ in aliases)}
    pattern = re.compile(rf"(?<![\w.'\"])(?:{'|'.join(words)})(?!\w)")

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def caller_names(*arguments: _P.args, **options: _P.kwargs) -> _R:
            try:
                if validate is not None:
                    validate(arguments)
                return function(*arguments, **options)
            except (TandemError, TypeError) as error:
                given = {
                    own: name for own, *others in aliases for name in others if options.get(name) is not None
                }
                said = names | {own: name for own, name in given.items() if options.get(own) is None}
                text = pattern.sub(lambda word: said.get(word[0], word[0]), str(error))
                error.args = (text, *error.args[1:])
                raise

        return caller_names

    return decorate
