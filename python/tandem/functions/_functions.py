"""Functions of the user's own on scores, and masks: traced by a call with proxies, whose operators write the
function down as text (docs/functions.md has the grammar) for the C++ side.

The signatures are those of PyTorch's FlexAttention: ``score_mod(score, b, h, q_idx, kv_idx)`` and
``mask_mod(b, h, q_idx, kv_idx)``. Nothing here imports PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem import _arrays, _call, _core
from tandem._errors import InvalidArgumentError
from tandem.functions import _kept_traces, _trace_calls
from tandem.functions._trace import Captured, Trace, Value
from tandem.functions._trace_ops import apply, convert

#: The keywords of tandem.attention that become functions.
NAMES = ("score_mod", "bias", "alibi_slopes", "mask_mod", "mask")


@dataclass(frozen=True)
class Places:
    """What the arguments of functions are written down as, where they are not the call's own leaves."""

    b: str = "b"
    h: str = "h"
    q: str = "q"
    k: str = "k"
    distance: str = "sub(add(q, sub(nk, nq)), k)"  #: of query and key, as alibi_slopes counts it
    captured: tuple[Any, ...] = ()  #: arrays that these read, t0 and so on


_trace_calls.define()

_PAGE_TABLE = _call.METADATA.index("page_table")

#: The places of a call that has the sequences whole.
OWN_PLACES = Places()


class Functions:
    """The functions of a call, written down."""

    __slots__ = ("arrays", "differentiated", "library", "mask", "place", "score")

    def __init__(self, score: str | None, mask: str | None, arrays: list[Any], library: Any) -> None:
        # Views with the negative bit have the other sign in memory.
        if arrays and library and library.name == "torch":
            arrays = [array.resolve_neg() if array.is_neg() else array for array in arrays]
        self.score, self.mask, self.arrays, self.library = score, mask, arrays, library
        #: The numbers of the arrays whose gradients a backward call is asked for.
        self.differentiated: tuple[int, ...] = ()
        #: Where a plan takes the arrays to be, without their memory; None: where they are.
        self.place: tuple[_core.DeviceKind, int] | None = None

    def reading(self, arrays: list[Any]) -> Functions:
        """These functions of other arrays; themselves where they read none."""
        return Functions(self.score, self.mask, arrays, self.library) if arrays else self

    def set(self, options: _core.Options) -> None:
        options.functions = self.parsed()

    def parsed(self) -> _core.Functions:
        """As C++ has them."""
        views = tuple(map(self._view, self.arrays)) if self.arrays else ()
        return _parsed(self.score, self.mask, views, self.differentiated)

    def _view(self, array: Any) -> _core.Tensor:
        array = _as_bytes(array)
        view = _core.view(array) if self.place is None else None
        if view is not None:
            return view
        layout = self.library.layout("an array that a function reads", array)
        if self.place is not None:
            layout = (0, *layout[1:4], *self.place)
        return _core.Tensor(*layout)

    def set_gradients(self, options: _core.Options, gradients: Sequence[Any]) -> None:
        """Has a backward call write the gradients of the arrays, None of those that are not wanted."""
        made = [g if g is None else self.library.layout("a captured array's gradient", g) for g in gradients]
        options.set_captured_gradients([layout and _core.Tensor(*layout) for layout in made])


@functools.lru_cache(256)
def _parsed(
    score: str | None, mask: str | None, views: tuple[_core.Tensor, ...], differentiated: tuple[int, ...]
) -> _core.Functions:
    """Functions as C++ has them: parsed once for forward and backward, and for all calls that read the same
    memory. Where arrays lie is asked in each call: a parameter's data may move."""
    return _core.Functions(score, mask, views, differentiated)


def _as_bytes(array: Any) -> Any:
    """Booleans as int8, in the same memory."""
    if _arrays.dtype_name(array.dtype) != "bool":
        return array
    if isinstance(array, np.ndarray):
        return array.view(np.int8)
    return array.view(_arrays.torch_dtype(_core.DType.s8))


def _broadcast(trace: Trace, name: str, array: Any, shape: tuple[int, ...], places: Places) -> Any:
    """The element for a pair of an array that broadcasts to (batch, heads, seqlen_q, seqlen_k). A call of a
    part of a sequence takes that part of the array."""
    if not hasattr(array, "shape") or not 1 <= len(array.shape) <= 4:
        raise InvalidArgumentError(
            f"{name} must be an array that broadcasts to (batch, heads_q, seqlen_q, seqlen_k) = {shape}"
        )
    missing = 4 - len(array.shape)
    leaves = (places.b, "h", "q", "k")[missing:]
    indices = []
    for size, wanted, leaf in zip(array.shape, shape[missing:], leaves, strict=True):
        if size not in (1, wanted):
            raise InvalidArgumentError(
                f"{name} has shape {tuple(array.shape)}, which does not broadcast to (batch, heads_q, "
                f"seqlen_q, seqlen_k) = {shape}"
            )
        indices.append(0 if size == 1 else Value(trace, leaf, "int"))
    return trace.read(array, indices)


def _alibi(trace: Trace, score: Value, slopes: Any, shape: tuple[int, ...], places: Places) -> Value:
    batch, heads = shape[:2]
    if tuple(getattr(slopes, "shape", ())) not in ((heads,), (batch, heads)):
        raise InvalidArgumentError(
            f"alibi_slopes has shape {getattr(slopes, 'shape', None)}; it must be (heads_q,) = ({heads},) or "
            f"(batch, heads_q) = ({batch}, {heads})"
        )
    leaves = ("h",) if len(slopes.shape) == 1 else (places.b, "h")
    slope = trace.read(slopes, [Value(trace, leaf, "int") for leaf in leaves])
    distance = Value(trace, f"abs({places.distance})", "int")
    return apply("sub", score, apply("mul", slope, distance))


def _traced(function: Any, trace: Trace, places: Places, score: Value | None = None) -> Value:
    """What the user's function makes of proxies, of scores or of positions alone."""
    if not callable(function):
        raise TypeError(f"a function of scores or positions is {function!r}; pass a function")
    leaves = (places.b, places.h, places.q, places.k)
    values = [*([] if score is None else [score]), *(Value(trace, leaf, "int") for leaf in leaves)]
    result = _with_arrays(function, trace)(*values)
    return trace.lift(result)


def _with_arrays(function: Any, trace: Trace) -> Any:
    """The function with the NumPy arrays that it reaches, by its helpers too, made such that proxies can
    index them. PyTorch's tensors need nothing: a mode sees their indexing."""
    return _copied(function, trace, {}) if _reads_arrays(function, set()) else function


def _reads_arrays(x: Any, seen: set[Any]) -> bool:
    if isinstance(x, np.ndarray):
        return True
    if isinstance(x, functools.partial):
        return any(_reads_arrays(i, seen) for i in (x.func, *x.args, *x.keywords.values()))
    if isinstance(x, types.MethodType):
        return _reads_arrays(x.__func__, seen)
    if type(x) in (tuple, list, dict):
        return any(isinstance(i, np.ndarray) for i in (x.values() if type(x) is dict else x))
    library = (getattr(x, "__module__", None) or "").partition(".")[0]
    if not isinstance(x, types.FunctionType) or library in ("torch", "numpy") or x in seen:
        return False
    seen.add(x)
    return any(_reads_arrays(i, seen) for i in _kept_traces.values_of(x))


def _copied(x: Any, trace: Trace, copies: dict[Any, Any]) -> Any:
    """What stands for x in the copy of a function. `copies`: of the functions, which may reach each other."""

    def replaced(x: Any) -> Any:
        return _copied(x, trace, copies) if _reads_arrays(x, set()) else x

    if isinstance(x, np.ndarray):
        return Captured(x, trace)
    if isinstance(x, functools.partial):
        keywords = {n: replaced(i) for n, i in x.keywords.items()}
        return functools.partial(replaced(x.func), *map(replaced, x.args), **keywords)
    if isinstance(x, types.MethodType):
        return types.MethodType(replaced(x.__func__), x.__self__)
    if type(x) is dict:
        return {n: replaced(i) for n, i in x.items()}
    if type(x) in (tuple, list):
        return type(x)(map(replaced, x))
    if x in copies:
        return copies[x]
    cells = [types.CellType() for _ in x.__closure__ or ()]
    scope = dict(x.__globals__)
    made = types.FunctionType(x.__code__, scope, x.__name__, None, tuple(cells))
    copies[x] = made
    scope.update((n, replaced(i)) for n, i in _kept_traces.globals_of(x).items())
    for cell, original in zip(cells, x.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # one that is empty as yet
            cell.cell_contents = replaced(original.cell_contents)
    made.__defaults__ = tuple(replaced(i) for i in x.__defaults__ or ()) or None
    made.__kwdefaults__ = {n: replaced(i) for n, i in (x.__kwdefaults__ or {}).items()} or None
    made.__dict__.update(x.__dict__)
    return made


def of_call(call: Any, q: Any, k: Any, *functions: Any) -> Functions | None:
    """The functions of a _call.Call, in the order of NAMES."""
    library = _arrays.library_of("q", q)
    _arrays.expect("k", k, library)
    shape, packed = pairs_of(call.metadata, q, k)
    return trace_functions(shape, library, *functions, packed=packed)


def pairs_of(metadata: Sequence[Any], q: Any, k: Any) -> tuple[tuple[int, int, int, int], bool]:
    """(batch, heads_q, seqlen_q, seqlen_k) of a call with that metadata, and whether it is packed."""
    cu = metadata[0] if metadata[0] is not None else metadata[1]  # cu_seqlens_q, cu_seqlens_k
    table = metadata[_PAGE_TABLE]
    of_q, of_k = q.shape, k.shape
    shape = (
        of_q[0] if cu is None else cu.shape[0] - 1,
        of_q[-2] if len(of_q) >= 2 else 0,
        of_q[-3] if len(of_q) >= 3 else 0,
        (1 if table is None else table.shape[-1]) * of_k[-3] if len(of_k) >= 3 else 0,
    )
    return shape, cu is not None


def trace_functions(
    shape: tuple[int, ...],
    library: Any,
    score_mod: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    mask_mod: Any = None,
    mask: Any = None,
    *,
    packed: bool = False,
    places: Places = OWN_PLACES,
) -> Functions | None:
    """The functions of a call of (batch, heads_q, seqlen_q, seqlen_k), or None of one that has none."""
    if 0 in shape or (score_mod is bias is alibi_slopes is mask_mod is mask is None):
        return None  # without a pair of query and key there is nothing to change
    if packed and (bias is not None or mask is not None):
        name = "bias" if bias is not None else "mask"
        raise InvalidArgumentError(
            f"{name} is given with cu_seqlens, but positions count in each sequence; use "
            f"{'score_mod' if bias is not None else 'mask_mod'} with an array by sequence"
        )
    found = None
    if library is not None and places is OWN_PLACES and bias is alibi_slopes is mask is None:
        found = _kept_traces.reached(library.name, score_mod, mask_mod)
    kept: Functions | None = None if found is None else _kept_traces.find(found)
    if kept is not None:
        return kept
    watching = contextlib.nullcontext() if score_mod is mask_mod is None else _watching(library)
    with watching:
        scores = Trace(library)
        scores.captured = list(places.captured)
        score = start = Value(scores, "s", "real")
        if score_mod is not None:
            score = _traced(score_mod, scores, places, score)
        if bias is not None:
            score = apply("add", score, _real("bias", _broadcast(scores, "bias", bias, shape, places)))
        if alibi_slopes is not None:
            score = _alibi(scores, score, alibi_slopes, shape, places)
        masks = Trace(library)
        masks.captured = scores.captured
        visible = None
        if mask_mod is not None:
            visible = convert(_traced(mask_mod, masks, places), "bool")
        if mask is not None:
            element = _broadcast(masks, "mask", mask, shape, places)
            if element.kind != "bool":
                raise InvalidArgumentError(
                    f"mask has dtype {mask.dtype}; it must be boolean, True where a key is visible: pass "
                    "numbers to be added as bias"
                )
            visible = element if visible is None else apply("and", visible, element)
    texts = (
        None if score is start else scores.text(score),
        None if visible is None else masks.text(visible),
    )
    made = Functions(*texts, [], library)
    if found is not None and not scores.read_values | masks.read_values | getattr(
        watching, "read_values", False
    ):
        _kept_traces.keep(found, made, scores.captured)
    return made.reading(scores.captured)


def _real(name: str, element: Value) -> Value:
    if element.kind == "bool":
        raise InvalidArgumentError(f"{name} is boolean; pass it as mask, or convert it")
    return element


def _watching(library: Any) -> Any:
    """A context in which indexing tensors by proxies is seen."""
    if library is not None and library.name == "torch":
        from tandem.functions import _watching

        return _watching.Watching()
    return contextlib.nullcontext()
