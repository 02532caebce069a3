"""Traces of functions of the user's own, kept from call to call.

What a trace writes down depends on the function's code and on what that code reaches (`values_of`):
numbers that it closes over, finds as globals or has as defaults, functions that it calls, and the dtypes and
shapes of arrays, never their values. `reached` writes all of that down as a key, and gives None where it
cannot compare what a function reaches (an object with attributes, a module but torch and math, a name of
Python's that may read something). Then the function is traced in each call.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import math
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from tandem.functions._trace import FUNCTIONS

#: Python's own functions that depend on their arguments alone.
_PLAIN = {
    name: getattr(builtins, name)
    for name in (
        "abs all any bool dict divmod enumerate float int isinstance len list max min pow range reversed "
        "round set sorted str sum tuple type zip"
    ).split()
}
#: Instructions by which a function changes something that is not its own.
_STORES = frozenset(
    "STORE_GLOBAL DELETE_GLOBAL STORE_ATTR DELETE_ATTR STORE_SUBSCR DELETE_SUBSCR IMPORT_NAME".split()
)
#: Attributes, besides those of two underscores, by which code gets at frames and through them at anything.
_HIDDEN = frozenset("gi_frame cr_frame ag_frame tb_frame cell_contents format format_map".split())
_DEEPEST = 8
_MOST = 256


class _Unknown(Exception):
    """Something is reached that cannot be compared."""


class Reached:
    """What the functions of a call reach: a key, and the arrays in the order in which they were met."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.key: tuple[Any, ...] = ()


def reached(library: str, *functions: Any) -> Reached | None:
    """What functions that are traced together reach, None for those that a call has not. None: unknown."""
    found = Reached()
    try:
        key = [None if f is None else _function(f, found.arrays, 0) for f in functions]
    except (_Unknown, ValueError):  # ValueError: a cell that is empty as yet
        return None
    found.key = (library, *key)
    return found


def _function(f: Any, arrays: list[Any], depth: int) -> tuple[Any, ...]:
    if type(f) is not types.FunctionType or f.__dict__ or depth > _DEEPEST:
        raise _Unknown
    code = _code(f.__code__)
    if code.is_opaque:
        raise _Unknown
    values = [cell.cell_contents for cell in f.__closure__ or ()]  # ValueError where one is empty
    cells = len(values)
    found: tuple[str, ...] = ()
    if code.names:
        own, scope = getattr(f, "__builtins__", {}), f.__globals__  # stubs of some Pythons have no builtins
        if any(n in own and n not in scope and own[n] is not _PLAIN.get(n) for n in code.names):
            raise _Unknown
        found = tuple(n for n in code.names if n in scope)
        values += [scope[n] for n in found]
    values += f.__defaults__ or ()
    keywords = f.__kwdefaults__ or {}
    values += keywords.values()
    given = (code, cells, found, len(f.__defaults__ or ()), tuple(keywords))
    return (*given, *(_value(x, code.names, arrays, depth) for x in values)) if values else given


def _value(x: Any, names: frozenset[str], arrays: list[Any], depth: int) -> Any:
    """What stands for x in a key."""
    kind = type(x)
    if kind is int or kind is bool or kind is str or x is None:
        return kind, x
    if kind is float or (isinstance(x, (np.integer, np.floating, np.bool_)) and kind.__module__ == "numpy"):
        return kind, repr(x)  # -0.0 and NaN
    if kind is tuple or kind is list:
        if len(x) > 64 or not all(isinstance(i, (int, float, str)) for i in x):
            raise _Unknown
        return kind, *(_value(i, names, arrays, depth) for i in x)
    if kind is types.FunctionType:
        return _function(x, arrays, depth + 1)
    if kind is types.ModuleType:
        return _module(x, names)
    if kind is np.ndarray or _is_plain_tensor(x):
        return _array(x, arrays)
    raise _Unknown


def _is_plain_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(x) in (torch.Tensor, torch.nn.Parameter) and not x.__dict__


def _array(x: Any, arrays: list[Any]) -> tuple[Any, ...]:
    """By its place among the arrays: which of them are one is part of the key."""
    for place, known in enumerate(arrays):
        if known is x:
            return ("array", place)
    arrays.append(x)
    return ("array", len(arrays) - 1, str(x.dtype), tuple(x.shape))


def _module(module: types.ModuleType, names: frozenset[str]) -> Any:
    """A module whose functions and constants are known, as they are now: with the attributes that code may
    read of it, and of those that it leads to."""
    torch = sys.modules.get("torch")
    plain = (math,) if torch is None else (math, torch, torch.nn, torch.nn.functional)
    if module not in plain:
        raise _Unknown
    found = []
    for of in (math,) if module is math else plain[1:]:
        attributes = vars(of)  # getattr takes a microsecond where there is none
        for name in names:
            x = attributes.get(name)
            if x is None or x in plain or name == "dtype" or name == "device":
                continue
            known_of_math = of is math and type(x) is types.BuiltinFunctionType
            if isinstance(x, (int, float)):
                x = repr(x)
            elif not (known_of_math or name in FUNCTIONS or type(x).__name__ == "dtype"):
                raise _Unknown  # it may read a setting
            found.append((name, x))
    return module.__name__, *found


class _Code:
    """What is known of a code object: kept by its identity, and compared by it in keys, which takes less
    than comparing its contents."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code  # whose identity nothing else has as long as this is here
        parts = list(_parts(code))
        #: The names that it looks up, and the code inside it: lambdas, generators, comprehensions, classes.
        self.names = frozenset(name for part in parts for name in part.co_names)
        #: Whether it changes what is not its own, or may read what its names do not tell.
        self.is_opaque = any(_is_hidden(n) for n in self.names) or any(
            instruction.opname in _STORES
            or (
                instruction.opname in ("STORE_DEREF", "DELETE_DEREF")
                and instruction.argval in code.co_freevars
            )
            for part in parts
            for instruction in dis.get_instructions(part)
        )


def _is_hidden(name: str) -> bool:
    return name in _HIDDEN or (name.startswith("__") and name.endswith("__"))


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)


_codes: dict[int, _Code] = {}


def _code(code: types.CodeType) -> _Code:
    known = _codes.get(id(code))
    if known is None:
        known = _Code(code)
        with _lock:
            if len(_codes) >= _MOST:
                _codes.clear()
            known = _codes.setdefault(id(code), known)
    return known


def globals_of(f: types.FunctionType) -> dict[str, Any]:
    """The globals that a function looks up, or code inside it."""
    scope = f.__globals__
    return {n: scope[n] for n in _code(f.__code__).names if n in scope}


def values_of(f: types.FunctionType) -> Iterator[Any]:
    """All that a function reaches besides its arguments, but for cells that are empty as yet."""
    for cell in f.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
    yield from globals_of(f).values()
    yield from f.__defaults__ or ()
    yield from (f.__kwdefaults__ or {}).values()


#: (the score's text, the mask's, which of the arrays that were met they read) by a Reached's key.
_kept: dict[tuple[Any, ...], tuple[str | None, str | None, tuple[int, ...]]] = {}
#: Held by who adds to _kept or _codes, or takes from them.
_lock = threading.Lock()


def find(found: Reached) -> tuple[str | None, str | None, list[Any]] | None:
    """The texts of an earlier call of the same functions, and the arrays that they read in this one."""
    kept = _kept.get(found.key)
    if kept is None:
        return None
    score, mask, places = kept
    return score, mask, [found.arrays[i] for i in places]


def keep(found: Reached, score: str | None, mask: str | None, captured: list[Any]) -> None:
    """Keeps a trace that has looked at no array's values. Not one that reads an array made on the way."""
    places = [next((i for i, known in enumerate(found.arrays) if known is x), None) for x in captured]
    if any(place is None for place in places):
        return
    with _lock:
        if len(_kept) >= _MOST:
            _kept.pop(next(iter(_kept)))
        _kept[found.key] = (score, mask, tuple(i for i in places if i is not None))
