"""Traces of functions of the user's own, kept from call to call.

What a trace writes down depends on the function's code and on what that code reaches: numbers that it closes
over, finds as globals or has as defaults, functions that it calls, and the dtypes and shapes of arrays, never
their values. `reached` writes all of that down as a key, and gives None where it cannot compare what a
function reaches (an object with attributes, a module but torch and math, a name of Python's that may read
something). Then the function is traced in each call.
"""

from __future__ import annotations

import builtins
import dis
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from tandem._trace import FUNCTIONS

#: Of Python's own functions, those that depend on their arguments alone.
_PLAIN = frozenset(
    "abs all any bool dict divmod enumerate float int isinstance len list max min pow range reversed round "
    "set sorted str sum tuple type zip".split()
)
#: Instructions by which a function changes something that is not its own.
_STORES = frozenset(
    "STORE_GLOBAL DELETE_GLOBAL STORE_ATTR DELETE_ATTR STORE_SUBSCR DELETE_SUBSCR IMPORT_NAME".split()
)
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
    """Of functions that are traced together, None of those that a call has not. None: unknown."""
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
    code = f.__code__
    names = _names(code)
    scope = f.__globals__
    globals_ = [n for n in names if n in scope]
    if any(n not in scope and n not in _PLAIN and hasattr(builtins, n) for n in names):
        raise _Unknown
    values = [
        *(cell.cell_contents for cell in f.__closure__ or ()),
        *(scope[n] for n in globals_),
        *(f.__defaults__ or ()),
        *(f.__kwdefaults__ or {}).values(),
    ]
    given = (_ByIdentity(code), tuple(globals_), len(f.__defaults__ or ()), tuple(f.__kwdefaults__ or ()))
    return (*given, *(_value(x, names, arrays, depth) for x in values))


def _value(x: Any, names: frozenset[str], arrays: list[Any], depth: int) -> Any:
    """What stands for x in a key."""
    kind = type(x)
    if kind is int or kind is bool or kind is str or x is None:
        return kind, x
    if kind is float or isinstance(x, (np.integer, np.floating, np.bool_)):
        return kind, repr(x)  # -0.0 and NaN
    if kind is tuple or kind is list:
        if len(x) > 64 or not all(isinstance(i, (int, float, str)) for i in x):
            raise _Unknown
        return kind, *(_value(i, names, arrays, depth) for i in x)
    if kind is types.FunctionType:
        return _function(x, arrays, depth + 1)
    if kind is types.ModuleType:
        return _module(x, names)
    # Deeper, nobody sees that an element of NumPy's is read (_functions._with_arrays).
    if (kind is np.ndarray and depth == 0) or _is_plain_tensor(x):
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
    if module is math:
        return "math"
    torch = sys.modules.get("torch")
    if torch is None or module not in (torch, torch.nn.functional):
        raise _Unknown
    plain = (math, torch, torch.nn, torch.nn.functional)
    for name in names - FUNCTIONS.keys() - {"dtype", "device"}:
        attribute = getattr(torch, name, math)
        if not (isinstance(attribute, (torch.dtype, float)) or any(attribute is known for known in plain)):
            raise _Unknown  # it may read a setting
    return module.__name__


class _ByIdentity:
    """A code object in a key: compared by identity, which takes less than its contents."""

    __slots__ = ("code",)

    def __init__(self, code: types.CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.code is self.code


#: By the identity of a code object, which it keeps: the names that it and the functions in it look up.
_judged: dict[int, tuple[types.CodeType, frozenset[str] | None]] = {}


def _names(code: types.CodeType) -> frozenset[str]:
    known = _judged.get(id(code))
    if known is None:
        if len(_judged) >= _MOST:
            _judged.clear()
        known = _judged[id(code)] = (code, _judge(code))
    if known[1] is None:
        raise _Unknown
    return known[1]


def _judge(code: types.CodeType) -> frozenset[str] | None:
    """None of code that changes what is not its own."""
    names: set[str] = set()
    for part in _parts(code):
        for instruction in dis.get_instructions(part):
            stores = (
                instruction.opname in ("STORE_DEREF", "DELETE_DEREF")
                and instruction.argval in code.co_freevars
            )
            if stores or instruction.opname in _STORES:
                return None
        names.update(part.co_names)
    return frozenset(names)


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)


#: (the score's text, the mask's, which of the arrays that were met they read) by a Reached's key.
_kept: dict[tuple[Any, ...], tuple[str | None, str | None, tuple[int, ...]]] = {}


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
    if len(_kept) >= _MOST:
        _kept.pop(next(iter(_kept)))
    _kept[found.key] = (score, mask, tuple(i for i in places if i is not None))
