"""What a function of scores is written down as while it is traced: values, which stand for a number of each
pair of query and key, and the arrays that they are read from. _trace_calls has the operators and functions on
values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem import _arrays
from tandem._errors import InvalidArgumentError, UnsupportedError

_PACKAGE = str(Path(__file__).parent)

#: The kinds of values, each wider than those before it: PyTorch's dtypes, of which all reals are one, and
#: int32 and int64 are called as the language calls them.
KINDS = ("bool", "uint8", "int8", "int16", "int", "wide", "real")

#: The functions that values have, by the names of PyTorch's functions and methods; _trace_calls fills it.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


def where_called() -> str:
    """The line outside this package (and PyTorch) that is being executed, for errors."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and "/torch/" not in name:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def untraceable(what: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where_called()}: {what}, but a function of scores is traced once for all queries and keys; "
        f"{remedy}"
    )


class Trace:
    """What is being written down: one name for every value, and the arrays that are read."""

    def __init__(self, library: _arrays.Library | None = None) -> None:
        self.library = library
        self.lines: list[str] = []
        self.captured: list[Any] = []
        #: Whether the function has looked at numbers of arrays, on which what is written down may depend.
        self.read_values = False
        self._has_gradients = _is_grad_enabled()

    def value(self, text: str, kind: str) -> Value:
        """A value with a name of its own; one that is made inside of torch.no_grad() has no derivative."""
        if kind == "real" and self._has_gradients and not _is_grad_enabled():
            text = f"stop({text})"
        name = f"${len(self.lines)}"
        self.lines.append(f"{name}={text};")
        return Value(self, name, kind)

    def leaf(self, text: str, kind: str) -> Value:
        return Value(self, text, kind)

    def text(self, result: Value) -> str:
        return " ".join((*self.lines, result.text))

    def number(self, array: Any) -> int:
        """The number of a captured array."""
        for i, known in enumerate(self.captured):
            if known is array:
                return i
        if self.library is not None:
            _arrays.expect(f"an array that a function reads ({where_called()})", array, self.library)
        self.captured.append(array)
        return len(self.captured) - 1

    def read(self, array: Any, indices: Sequence[Any]) -> Any:
        """An element of a captured array; with fewer indices than dimensions, what takes the others."""
        lifted = [self.index(i) for i in indices]
        if len(lifted) > array.ndim:
            raise InvalidArgumentError(
                f"{where_called()}: {len(lifted)} indices into an array of {array.ndim} dimensions"
            )
        if len(lifted) < array.ndim:
            return Part(self, array, lifted)
        dtype = str(array.dtype).removeprefix("torch.")
        element = f"t{self.number(array)}[{', '.join(lifted)}]"
        if dtype == "bool":
            return self.value(f"ne({element}, 0)", "bool")
        if dtype not in _READ:
            raise InvalidArgumentError(
                f"{where_called()}: a function reads an array of dtype {dtype}; convert it to one of "
                f"{', '.join((*_READ, 'bool'))}"
            )
        return self.value(element, kind_of(dtype))

    def index(self, i: Any) -> str:
        if isinstance(i, slice) or i is None or i is Ellipsis:
            raise untraceable(
                f"an index is {i!r}", "give one index for each dimension, made of b, h, q_idx and kv_idx"
            )
        value = self.lift(i)
        if value.kind == "real":
            raise InvalidArgumentError(f"{where_called()}: an index is real; indices are integers")
        return value.text

    def lift(self, x: Any) -> Value:
        """A value of this trace: x itself, a number, or an array of one."""
        if isinstance(x, Value):
            return x
        if isinstance(x, (bool, np.bool_)):
            return Value(self, "true" if x else "false", "bool")
        if isinstance(x, (int, np.integer)):
            if not -(2**63) <= x < 2**63:
                raise untraceable(f"{x} does not fit 64 bits", "use a smaller number, or a float")
            return Value(self, str(int(x)), "int" if -(2**31) <= x < 2**31 else "wide")
        if isinstance(x, (float, np.floating)):
            return Value(self, _real_text(float(x)), "real")
        x = _plain(x)
        if isinstance(x, np.ndarray) or _arrays.is_torch(x):
            if math.prod(x.shape) == 1:
                return self.read(x.reshape(1), [0])  # type: ignore[no-any-return]
            raise untraceable(
                f"an array of shape {tuple(x.shape)} is used whole", "index it: array[h, q_idx, kv_idx]"
            )
        raise untraceable(
            f"a {type(x).__name__} is used as a value", "use numbers, the arguments, and elements of arrays"
        )


#: What the kernels read, besides booleans.
_READ = ("float32", "float16", "bfloat16", "int32", "int64", "int8")
_KIND_OF = {"int32": "int", "int64": "wide", "half": "real", "double": "real"}


def kind_of(dtype: Any) -> str:
    """The kind of a dtype, or of its name."""
    name = np.dtype(dtype).name if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    if name.startswith(("float", "bfloat")):
        return "real"
    kind = _KIND_OF.get(name, name)
    if kind not in KINDS:
        raise untraceable(
            f"a value is made {name}", f"known are float32, int32, int64 and {', '.join(KINDS[:4])}"
        )
    return kind


def _is_grad_enabled() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled()


def _real_text(x: float) -> str:
    if math.isnan(x):
        return "nan"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    text = repr(x)
    return text if any(c in text for c in ".e") else text + ".0"


class Part:
    """A captured array with some of its indices."""

    __array_ufunc__ = None

    def __init__(self, trace: Trace, array: Any, indices: list[str]) -> None:
        self._trace, self._array, self._indices = trace, array, indices

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        known = [Value(self._trace, text, "int") for text in self._indices]
        return self._trace.read(self._array, [*known, *more])


def _of_array(name: str) -> Any:
    """A method of Captured that is the array's."""
    return lambda self, *args, **kwargs: getattr(self._read(), f"__{name}__")(*args, **kwargs)


class Captured(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that a function reads by indices that are not numbers, while the function is traced; else it
    is as NumPy has it, and the trace notes that numbers of it have been read."""

    def __init__(self, array: np.ndarray[Any, Any], trace: Trace) -> None:
        self.array, self._trace = array, trace

    def _read(self) -> np.ndarray[Any, Any]:
        self._trace.read_values = True
        return self.array

    def _made(self, x: Any) -> Any:
        """x, out of the array: other arrays may be indexed, too, and so may what methods give."""
        if isinstance(x, np.ndarray):
            return Captured(x, self._trace)
        if callable(x):
            return lambda *args, **kwargs: self._made(x(*map(_plain, args), **kwargs))
        return x

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if any(isinstance(i, Value) for i in indices):
            return self._trace.read(self.array, [_plain(i) for i in indices])
        return self._made(self._read()[_plain(index)])

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "ndim", "shape", "size"):
            return getattr(self.array, name)
        return self._made(getattr(self._read(), name))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Value) for x in inputs):
            return NotImplemented  # which Value has
        if "out" in kwargs:
            kwargs["out"] = tuple(map(_plain, kwargs["out"]))
        self._read()
        return self._made(getattr(ufunc, method)(*map(_plain, inputs), **kwargs))

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Any:
        return map(self._made, self._read())

    __array__, __bool__, __contains__, __float__, __index__, __int__, __repr__ = map(
        _of_array, "array bool contains float index int repr".split()
    )

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For isinstance."""
        return np.ndarray


def _plain(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_plain, x))
    return x.array if type(x) is Captured else x


class Value:
    """A number that is known for each pair of query and key: an argument of a traced function, or what
    becomes of it."""

    __slots__ = ("kind", "text", "trace")

    def __init__(self, trace: Trace, text: str, kind: str) -> None:
        self.trace, self.text, self.kind = trace, text, kind

    def __repr__(self) -> str:
        return f"<{self.kind} {self.text} of a traced function>"

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise untraceable(
            "a condition depends on a score or a position (if, and, or, not, while)",
            "use torch.where(condition, a, b), &, | and ~",
        )

    def _no_number(self) -> Any:
        raise untraceable("a score or a position is made a Python number", "leave it as it is")

    __int__ = __float__ = __len__ = __iter__ = __round__ = __floor__ = __ceil__ = __trunc__ = _no_number
    item = tolist = numpy = _no_number

    def __index__(self, *_: Any, **__: Any) -> Any:
        raise untraceable(
            "a position indexes something of which the trace does not know, or counts (range)",
            "index tensors, or arrays of NumPy that the function closes over or finds as globals or defaults",
        )

    __array__ = __index__

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return FUNCTIONS["__numpy_function__"](name, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return FUNCTIONS["__numpy_function__"](func.__name__, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return FUNCTIONS["__torch_function__"](func, args, kwargs or {})

    @property
    def dtype(self) -> Any:
        """PyTorch's dtype of such a number, for functions that ask for it."""
        torch = sys.modules["torch"]
        return getattr(torch, {"real": "float32", "int": "int32", "wide": "int64"}.get(self.kind, self.kind))

    @property
    def device(self) -> Any:
        return sys.modules["torch"].device("cpu")

    @property
    def data(self) -> Value:
        """Without its derivative."""
        value: Value = FUNCTIONS["detach"](self)
        return value

    def __getattr__(self, name: str) -> Any:
        """Methods of tensors: those that are functions, too."""
        if name.startswith("_") or name not in FUNCTIONS:
            raise AttributeError(
                f"{where_called()}: {name} is not known of a score or a position; known are "
                f"{', '.join(sorted(n for n in FUNCTIONS if not n.startswith('_')))}"
            )
        return lambda *args, **kwargs: FUNCTIONS["__call__"]("torch", name, (self, *args), kwargs)
