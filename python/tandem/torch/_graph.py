"""Functions of the user's own in what torch.compile compiles: the function becomes text, a constant of the
graph, and the tensors that it reads become inputs of an operator.

Dynamo follows Python, but not the tracer (_trace). So it follows the code here, which calls the function with
tensors on the meta device and notes what is done with them; the tracer is then called with the notes, as a
function whose result is a constant. Dynamo guards all numbers and functions that it has met on the way.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tandem import _arrays, _call
from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.functions import _functions
from tandem.functions._trace import Part, Value, untraceable
from tandem.functions._trace_calls import call_torch

_GETITEM = (Tensor.__getitem__, operator.getitem)
#: What a tensor is that no mode has seen being made of a score.
_UNSEEN = (
    "tensor on the meta device (torch.compile makes one in torch.nn.functional.tanh and sigmoid, and of "
    ".data: call torch.tanh, torch.sigmoid or detach())"
)


class _Notes(TorchFunctionMode):
    """Notes what PyTorch's functions are called with, if a score, a position or what was made of them is
    among their arguments. These are tensors on the meta device; no other tensor is."""

    def __init__(self, arrays: list[Any], known: list[Any]) -> None:
        super().__init__()
        self.arrays = arrays  #: what the call reads, each with the sizes that count
        self.known = known  #: score and positions, and the result of each step
        self.steps: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (_has_meta(args) or _has_meta(tuple(kwargs.values()))):
            return func(*args, **kwargs)
        named: tuple[Any, ...] = ()
        if func in _GETITEM:  # PyTorch would look for the numbers of the indices
            array, index = args
            index = index if isinstance(index, tuple) else (index,)
            dtype = torch.float32 if array.dtype.is_floating_point else array.dtype
            result = torch.empty(array.shape[len(index) :], dtype=dtype, device="meta")
            read = self.noted(array) if array.is_meta else self.read(array, (2,) * array.ndim)
            given = (read, self.noted(index))
        else:  # in place, of copies: the tracer has an error for it
            result = func(*(_on_meta(a) for a in args), **{n: _on_meta(a) for n, a in kwargs.items()})
            if not _has_meta((result,)):
                return result  # a dtype or a shape
            given = tuple(self.noted(a) for a in args)
            named = tuple((n, self.noted(a)) for n, a in kwargs.items())
        self.steps.append((func, given, named, torch.is_grad_enabled()))
        self.known.append(result)
        return result

    def noted(self, x: Any) -> Any:
        """x as a constant: (what it is, which)."""
        x = _tensor_of(x)
        if isinstance(x, Tensor):
            if x.is_meta:
                found = [i for i, known in enumerate(self.known) if known is x]
                return ("value", found[0]) if found else ("other", _UNSEEN)
            if x.numel() == 1:
                return self.read(x.reshape(1), (1,))
            return self.read(x, tuple(operator.index(n) for n in x.shape))
        if isinstance(x, (tuple, list)):
            return ("tuple", tuple(self.noted(i) for i in x))
        # These make constants of numbers that Dynamo takes for variable.
        if isinstance(x, int) and not isinstance(x, bool):
            return ("constant", operator.index(x))
        if isinstance(x, float):
            return ("constant", math.ldexp(x, 0))
        if x is None or isinstance(x, (bool, str, torch.dtype)):
            return ("constant", x)
        return ("other", type(x).__name__)

    def read(self, array: Tensor, sizes: tuple[int, ...]) -> Any:
        for i, (known, _) in enumerate(self.arrays):
            if known is array:
                return ("array", i)
        self.arrays.append((array, sizes))
        return ("array", len(self.arrays) - 1)


def _has_meta(x: Any) -> bool:
    """Whether a tensor on the meta device is among x."""
    if isinstance(x, (tuple, list)):
        return any(_has_meta(i) for i in x)
    return isinstance(x, Tensor) and x.is_meta


def _on_meta(x: Any) -> Any:
    """x with other tensors, without contents."""
    if isinstance(x, (tuple, list)):
        return [_on_meta(i) for i in x]
    x = _tensor_of(x)
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _tensor_of(x: Any) -> Any:
    """x, or a tensor of an array or a number of NumPy, of a dtype that functions read."""
    if not isinstance(x, (np.ndarray, np.generic)):
        return x
    t = torch.as_tensor(x)
    wider = {torch.float64: torch.float32, torch.uint8: torch.int32, torch.int16: torch.int32}
    return t.to(wider.get(t.dtype, t.dtype))


def _notes_of(function: Any, arrays: list[Any], dtypes: Sequence[torch.dtype]) -> Any:
    """(steps, result) of a function whose arguments have these dtypes."""
    if function is None:
        return None
    known = [torch.empty((), dtype=dtype, device="meta") for dtype in dtypes]
    notes = _Notes(arrays, list(known))
    with notes:
        result = function(*known)
    noted = notes.noted(result)
    return tuple(notes.steps), noted


#: Stand for (batch, heads_q, seqlen_q, seqlen_k), which may be variable, in the constants of a graph.
_SHAPE = (2, 3, 5, 7)


def of_call(call: _call.Call, q: Any, k: Any, *functions: Any) -> _functions.Functions | None:
    """As _functions.of_call, where Dynamo follows it."""
    shape, packed = _functions.pairs_of(call.metadata, q, k)
    if 0 in shape:
        return None
    score_mod, bias, alibi_slopes, mask_mod, mask = functions
    arrays: list[Any] = []
    positions = [torch.int32] * 4
    notes = (
        _notes_of(score_mod, arrays, [torch.float32, *positions]),
        _notes_of(mask_mod, arrays, positions),
    )
    shape, places = _placed(shape, arrays, {"bias": bias, "alibi_slopes": alibi_slopes, "mask": mask})
    stand_ins = tuple((array.dtype, sizes) for array, sizes in arrays)
    score, mask_text, read, error = _written(shape, packed, notes, places, stand_ins)
    if error is not None:
        raise UnsupportedError(error)
    made = _functions.Functions(score, mask_text, [arrays[i][0] for i in read], None)
    made.library = _arrays.library_of("q", q)  # negative bits are the dispatcher's
    return made


def _placed(shape: tuple[int, ...], arrays: list[Any], named: dict[str, Any]) -> Any:
    """Adds the named arrays: the shape that stands for `shape`, and ((name, number of the array), ...)."""
    given = {name: array for name, array in named.items() if array is not None}
    for name, array in given.items():
        if not isinstance(array, Tensor):
            raise InvalidArgumentError(f"{name} is a {type(array).__name__}; pass a torch.Tensor")
    constant = tuple(1 if n == 1 else stand_in for n, stand_in in zip(shape, _SHAPE, strict=True))
    sizes = [_sizes(x, shape, constant, name == "alibi_slopes") for name, x in given.items()]
    if None in sizes:  # an error, which tells them as they are
        constant = tuple(operator.index(n) for n in shape)
        sizes = [tuple(operator.index(n) for n in array.shape) for array in given.values()]
    places = []
    for name, size in zip(given, sizes, strict=True):
        same = [i for i, (array, _) in enumerate(arrays) if array is given[name]]
        place = same[0] if same else len(arrays)
        arrays[place : place + 1] = [(given[name], size)]
        places.append((name, place))
    return constant, tuple(places)


def _sizes(
    array: Tensor, shape: tuple[int, ...], constant: tuple[int, ...], has_heads: bool
) -> tuple[int, ...] | None:
    """What stands for the sizes of an array that broadcasts to `shape`, for which `constant` stands, or has
    its heads; None where it does not."""
    if has_heads:
        shape, constant = shape[:2], constant[:2]
    first = len(shape) - array.ndim
    if not 0 <= first < len(shape):
        return None
    sizes = tuple(
        stand_in if size == wanted else 1 if size == 1 and not has_heads else 0
        for size, wanted, stand_in in zip(array.shape, shape[first:], constant[first:], strict=True)
    )
    return None if 0 in sizes else sizes


class _Replay:
    """A function by its notes."""

    def __init__(self, notes: Any, arrays: list[Tensor]) -> None:
        self.notes, self.arrays = notes, arrays

    def __call__(self, *values: Value) -> Any:
        steps, result = self.notes
        known = list(values)
        for func, args, kwargs, has_gradients in steps:
            given = tuple(self.of(x, known) for x in args)
            named = {name: self.of(x, known) for name, x in kwargs}
            with torch.set_grad_enabled(has_gradients):
                of_part = func in _GETITEM and isinstance(given[0], Part)
                known.append(operator.getitem(*given) if of_part else call_torch(func, given, named))
        return self.of(result, known)

    def of(self, noted: Any, known: list[Any]) -> Any:
        what, x = noted
        if what == "value":
            return known[x]
        if what == "array":
            return self.arrays[x]
        if what == "tuple":
            return tuple(self.of(i, known) for i in x)
        if what == "other":
            raise untraceable(f"a {x} is used with a score or a position", "use numbers, elements of tensors")
        return x


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _written(
    shape: tuple[int, ...], packed: bool, notes: Any, whole: tuple[tuple[str, int], ...], stand_ins: Any
) -> tuple[str | None, str | None, tuple[int, ...], str | None]:
    """(the score's text, the mask's, the numbers of the arrays that these read in their order, an error)."""
    arrays = [torch.empty(sizes, dtype=dtype, device="meta") for dtype, sizes in stand_ins]
    given = dict(zip(("score_mod", "mask_mod"), notes, strict=True))
    named: dict[str, Any] = {name: arrays[i] for name, i in whole}
    named |= {name: _Replay(noted, arrays) for name, noted in given.items() if noted is not None}
    try:
        made = _functions.trace_functions(shape, None, packed=packed, **named)
    except Exception as error:  # Dynamo would take it for an error of its own
        return None, None, (), str(error)
    if made is None:
        return None, None, (), None
    numbers = [next(i for i, x in enumerate(arrays) if y is x or y._base is x) for y in made.arrays]
    return made.score, made.mask, tuple(numbers), None
