"""The exceptions of Tandem: a class for each status of the C++ library, each also the usual builtin."""

from __future__ import annotations


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
