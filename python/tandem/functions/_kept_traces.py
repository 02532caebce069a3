"""Traces of functions of the user's own, kept from call to call.

What a trace writes down depends on the function's code and on what that code reaches (`values_of`):
numbers that it closes over, finds as globals or has as defaults, functions that it calls, and the dtypes and
shapes of arrays, never their values. `reached` writes all of that down as a key, and gives None where it
cannot compare what a function reaches (an object with attributes, a module but torch and math, a name of
Python's that may read something). Then the function is traced in each call. Where the next call has the same
function objects, `again` compares what they reach by identity, in a third of the time.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
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
        self.functions: tuple[Any, Any] = (None, None)
        self.arrays: list[Any] = []
        self.key: tuple[Any, ...] = ()


def reached(library: str, score: Any, mask: Any) -> Reached | None:
    """What functions that are traced together reach, None for those that a call has not. None: unknown."""
    found = Reached()
    found.functions = (score, mask)
    try:
        key = [None if f is None else _function(f, found.arrays, 0) for f in found.functions]
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
        if len(x) > 64 or not all(isinstance(i, (int, float, str, types.FunctionType)) for i in x):
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
    plain = _plain_modules()
    if module not in plain:
        raise _Unknown
    found = []
    for of in _attributes_of(module):
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


def _attributes_of(module: types.ModuleType) -> tuple[types.ModuleType, ...]:
    """The modules whose attributes code may read that has this one: itself, and those that it leads to."""
    return (math,) if module is math else _plain_modules()[1:]


def _plain_modules() -> tuple[types.ModuleType, ...]:
    """The modules whose functions and constants are known."""
    torch = sys.modules.get("torch")
    return (math,) if torch is None else (math, torch, torch.nn, torch.nn.functional)


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


class _Layout:
    """Stands for an array among what a function reaches: one of this dtype and shape."""

    __slots__ = ("dtype", "kind", "shape")

    def __init__(self, x: Any) -> None:
        self.kind, self.dtype, self.shape = type(x), x.dtype, x.shape

    def fits(self, x: Any) -> bool:
        if type(x) is not self.kind or x.dtype != self.dtype or x.shape != self.shape:
            return False
        return self.kind is np.ndarray or not x.__dict__


class _Same:
    """One function object, and what it reached when it was last written down."""

    __slots__ = ("cells", "code", "defaults", "looked_up", "reference")

    def __init__(self, f: types.FunctionType) -> None:
        code = _code(f.__code__)
        self.reference: Callable[[], Any] = weakref.ref(f)
        self.code, self.defaults = f.__code__, f.__defaults__
        if f.__kwdefaults__ or any(type(x) not in _SCALARS for x in f.__defaults__ or ()):
            raise _Unknown
        self.cells = tuple(_known(cell.cell_contents) for cell in f.__closure__ or ())
        #: (a namespace, None for the function's globals; a name; what it has there) of all that is looked up.
        self.looked_up: list[tuple[dict[str, Any] | None, str, Any]] = []
        own, scope = getattr(f, "__builtins__", {}), f.__globals__
        for name in code.names:
            x = scope.get(name, _NOTHING)
            self.looked_up.append((None, name, _known(x)))
            if x is _NOTHING and name in own:
                self.looked_up.append((own, name, own[name]))
            if type(x) is types.ModuleType:
                self._look_into(x, code.names)
        for x in self.cells:
            if type(x) is types.ModuleType:
                self._look_into(x, code.names)

    def _look_into(self, module: types.ModuleType, names: frozenset[str]) -> None:
        for of in _attributes_of(module):
            self.looked_up += ((vars(of), name, vars(of).get(name, _NOTHING)) for name in names)

    def is_now(self, f: Any, arrays: list[Any]) -> bool:
        """Whether f is that object and reaches the same. Adds the arrays that it reaches, in the order in
        which `reached` meets them; where one is met twice it is not the same."""
        if self.reference() is not f or f.__code__ is not self.code or f.__defaults__ is not self.defaults:
            return False
        if f.__kwdefaults__ or f.__dict__:
            return False
        if self.cells:  # to make a zip of nothing takes 0.2 us
            for cell, known in zip(f.__closure__ or (), self.cells, strict=True):
                if (x := cell.cell_contents) is not known and not _is_such(x, known, arrays):
                    return False
        scope = f.__globals__
        for namespace, name, known in self.looked_up:
            x = (scope if namespace is None else namespace).get(name, _NOTHING)
            if x is not known and not _is_such(x, known, arrays):
                return False
        return True


_SCALARS = (int, bool, str, float, type(None))
_NOTHING = object()


def _known(x: Any) -> Any:
    """What stands for x in a _Same: itself, or what an array looks like."""
    if type(x) in _SCALARS or x is _NOTHING or type(x) is types.ModuleType:
        return x
    if type(x) is np.ndarray or _is_plain_tensor(x):
        return _Layout(x)
    raise _Unknown


def _is_such(x: Any, known: Any, arrays: list[Any]) -> bool:
    if type(known) is not _Layout or not known.fits(x):
        return False
    for array in arrays:  # any() of a generator takes three times as long
        if x is array:
            return False
    arrays.append(x)
    return True


#: By the functions' identities: the library, each function's _Same, and the trace.
_same: dict[tuple[int, int], tuple[Any, ...]] = {}


def again(library: str, score: Any, mask: Any) -> Any:
    """As find, of functions that are the same objects as in an earlier call and reach what they did then."""
    entry = _same.get((id(score), id(mask)))
    if entry is None or entry[0] != library:
        return None
    _, of_score, of_mask, kept = entry
    arrays: list[Any] = []
    try:
        if of_score is not None and not of_score.is_now(score, arrays):
            return None
        if of_mask is not None and not of_mask.is_now(mask, arrays):
            return None
    except ValueError:  # a cell that is empty now
        return None
    return kept.of(arrays)


class _Kept:
    """A trace: a _functions.Functions without arrays, and which of the arrays that were met they read."""

    __slots__ = ("functions", "last", "places")

    def __init__(self, functions: Any, places: tuple[int, ...]) -> None:
        self.functions, self.places = functions, places
        #: Refers to one of the functions of the last call that had it. None: `again` cannot know them.
        self.last: Any = lambda: None

    def of(self, arrays: list[Any]) -> Any:
        """The functions of a call in which these arrays were met."""
        return self.functions.reading([arrays[i] for i in self.places]) if self.places else self.functions


#: By a Reached's key.
_kept: dict[tuple[Any, ...], _Kept] = {}
#: Held by who adds to _kept, _same or _codes, or takes from them.
_lock = threading.Lock()


def find(found: Reached) -> Any:
    """The _functions.Functions of an earlier call of the same functions, which read the arrays of this one;
    None: there was none."""
    kept = _kept.get(found.key)
    if kept is None:
        return None
    score, mask = found.functions
    last = mask if score is None else score
    if kept.last is not None:
        if kept.last() is last:  # not one that each call makes anew
            _remember(found, kept)
        else:
            kept.last = weakref.ref(last)
    return kept.of(found.arrays)


def _remember(found: Reached, kept: _Kept) -> None:
    """Has `again` know the functions of a call, where it can."""
    score, mask = found.functions
    try:
        same = [None if f is None else _Same(f) for f in (score, mask)]
    except (_Unknown, ValueError):
        kept.last = None
        return
    with _lock:
        if len(_same) >= _MOST:
            _same.pop(next(iter(_same)))
        _same[id(score), id(mask)] = (found.key[0], *same, kept)


def keep(found: Reached, functions: Any, captured: list[Any]) -> None:
    """Keeps a trace that has looked at no array's values: a _functions.Functions without arrays, and the
    arrays that it reads. Not one that reads an array made on the way."""
    places = [next((i for i, known in enumerate(found.arrays) if known is x), None) for x in captured]
    if any(place is None for place in places):
        return
    with _lock:
        if len(_kept) >= _MOST:
            _kept.pop(next(iter(_kept)))
        _kept[found.key] = _Kept(functions, tuple(i for i in places if i is not None))
