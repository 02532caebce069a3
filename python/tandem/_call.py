"""One call of the library: arrays of one library in, arrays of the same library out. No autograd here."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from tandem import _arrays, _core
from tandem._core import DType
from tandem._errors import InvalidArgumentError

#: The tensors of a call that no gradient flows through, but for the gate, in the order in which Call.metadata
#: has them: what is between (q, k, v, sink) and (out, lse, max_logits).
METADATA = _core.FORWARD[4:-3]

#: Where it has the output gate, the only one of them with a gradient.
GATE = METADATA.index("gate")

#: The last of METADATA, of which no call has gradients: those that make k and v a cache, and the mask of each
#: sequence.
FORWARD_ONLY = METADATA[-4:]

#: The dtypes of 8-bit inputs. Their result is bf16 unless out_dtype says otherwise.
CODES = (DType.e4m3, DType.s8)


def _option(default: Any, kind: str, expects: str = "True or False", **taken: bool) -> Any:
    """A row of the table of options: the kind as PyTorch's schemas have it, or one of "window", "precision"
    and "word" (a seed); what an error tells to pass; and of ``operator`` (torch.ops.tandem), ``jax``
    (tandem.jax) and ``parts`` (what is a part of a call: that of a rank or of a device of a mesh, and a
    backward pass by itself) those that do not take it. No gradient flows through an option."""
    where = {"operator": True, "jax": True, "parts": True} | taken
    return field(default=default, metadata={"kind": kind, "expects": expects, **where})


@dataclass(slots=True)  # frozen would make making one three times as slow
class Call:
    """Everything of a call but the tensors that gradients flow through (q, k, v and the sink)."""

    scale: float | None = _option(None, "float?", "a number, or None for head_dim_qk ** -0.5")
    causal: bool = _option(False, "bool")
    window: tuple[int, int] = _option((-1, -1), "window", "(left, right), two integers; -1 is unbounded")
    softcap: float = _option(0, "float", "a number; 0 is off")
    deterministic: bool = _option(False, "bool")
    check: bool = _option(False, "bool", jax=False)
    threads: int = _option(0, "SymInt", "an integer; 0 is every core")
    #: what METADATA names; None where not given
    metadata: tuple[Any, ...] = (None,) * len(METADATA)
    precision: str = _option("exact", "precision", parts=False)
    strict: bool = _option(False, "bool", parts=False)
    backward_precision: str = _option("exact", "precision", parts=False)
    split_size: int = _option(0, "SymInt", "an integer, a multiple of 128; 0 is off", parts=False)
    sm_limit: int = _option(0, "SymInt", "an integer, at least 1, or 0 for all SMs")
    return_max_logits: bool = _option(False, "bool", parts=False)
    #: a _functions.Functions; None where the caller has none
    functions: Any = None
    dropout_p: float = _option(0, "float", "a number, at least 0 (off) and below 1", operator=False)
    #: None until _dropout.draw
    dropout_seed: int | None = _option(None, "word", "an integer", operator=False)
    dropout_offset: int = _option(0, "word", "an integer", operator=False)
    #: (batch, 4) int32, dropout_places of attention.hpp; None of whole sequences
    dropout_places: Any = None
    #: formula(call, q, k, v, *captured): the result by operators with second derivatives; None: there is none
    formula: Any = None

    @property
    def gate(self) -> Any:
        """The output gate, None where not given."""
        return self.metadata[GATE]

    @gate.setter
    def gate(self, gate: Any) -> None:
        self.metadata = (*self.metadata[:GATE], gate, *self.metadata[GATE + 1 :])

    @property
    def finds_max_logits(self) -> bool:
        """Whether the forward pass finds them: for the caller, or for gradients that they scale."""
        return self.return_max_logits or self.saves_max_logits

    @property
    def saves_max_logits(self) -> bool:
        """Whether the backward pass reads them."""
        return self.backward_precision != "exact"

    @property
    def asks_pairs(self) -> Any:
        """Whether something is asked of every pair of query and key: a function, or dropout."""
        return self.functions is not None or self.dropout_p != 0

    def options(self) -> _core.Options:
        """The options as C++ takes them; an error that names the first of another type."""
        options = self._validated_options()
        if self.sm_limit != 0:
            sms("sm_limit", self.sm_limit)
        if self.functions is not None:
            self.functions.set(options)
        if self.dropout_p != 0 and self.dropout_places is not None:
            library = _arrays.library_of("dropout_places", self.dropout_places)
            layout = library.layout("dropout_places", self.dropout_places)
            options.set_dropout_places(_core.Tensor(*layout))
        return options

    def _validated_options(self) -> _core.Options:
        try:
            return _core.Options(_values(self))
        except TypeError:
            plain = self.plain()
        try:
            return _core.Options(_values(plain))
        except TypeError as error:  # plain() has validated all but seeds and numbers out of range
            name = str(error)
            raise misfit(name, getattr(self, name)) from None

    def plain(self) -> Call:
        """This call with Python's own numbers, in place of NumPy's and of arrays and tensors of one."""
        values = {name: _plain(name, kind, getattr(self, name)) for name, kind in KINDS if kind != "word"}
        others = ("metadata", "functions", "dropout_seed", "dropout_offset", "dropout_places")
        return Call(**values, **{name: getattr(self, name) for name in others})

    def flat(self) -> tuple[Any, ...]:
        """The options and metadata as the operators of torch.ops.tandem take them."""
        plain = self.plain()
        left, right = plain.window
        at = OPERATOR.index("window")
        values = [getattr(plain, name) for name in OPERATOR]
        return (*values[:at], left, right, *values[at + 1 :], *plain.metadata)

    @staticmethod
    def of_flat(flat: Sequence[Any]) -> Call:
        """The inverse of flat."""
        values, metadata = list(flat[:FLAT_OPTIONS]), tuple(flat[FLAT_OPTIONS:])
        at = OPERATOR.index("window")
        values[at : at + 2] = [tuple(values[at : at + 2])]
        return Call(**dict(zip(OPERATOR, values, strict=True)), metadata=metadata)


_ROWS = {f.name: f.metadata for f in fields(Call) if f.metadata}
#: (name, kind) of every option, and the names of those that are taken where _option says.
KINDS = tuple((name, row["kind"]) for name, row in _ROWS.items())
OPERATOR = tuple(name for name, row in _ROWS.items() if row["operator"])
#: How many options are before the metadata in what Call.flat returns: a window is two.
FLAT_OPTIONS = len(OPERATOR) + 1
JAX = tuple(name for name, row in _ROWS.items() if row["jax"])
PARTS = tuple(name for name, row in _ROWS.items() if row["parts"])


def expect_options(function: str, options: Iterable[str], taken: Sequence[str]) -> None:
    """An error where one of these keywords of `function` is not among the options that are `taken`."""
    for name in options:
        if name not in taken:
            if name in _ROWS or name in METADATA:
                raise InvalidArgumentError(f"{name} is not an option of {function}; leave it out")
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def of_options(function: str, options: dict[str, Any], taken: Sequence[str]) -> Call:
    """The call with these keywords of `function`. Without dropout it has no seed."""
    expect_options(function, options, taken)
    call = Call(**options)
    if isinstance(call.dropout_p, (int, float)) and call.dropout_p == 0:
        call.dropout_p, call.dropout_seed, call.dropout_offset = 0, None, 0
    return call


_PRECISIONS = tuple(_core.Precision.__members__)
_values = operator.attrgetter(*_core.OPTIONS)
_core.know_options(Call, _values(Call()), [name in OPERATOR for name in _core.OPTIONS])


def _plain(name: str, kind: str, value: Any) -> Any:
    """An option as a value of Python's own."""
    if kind == "window":
        left, right = pair(name, value)
        return _integer(left), _integer(right)
    if kind == "bool":
        return flag(name, value)
    if kind == "SymInt":
        return _integer(value)
    if kind == "float?" and value is None:
        return value
    if kind == "precision":
        if not isinstance(value, str) or value not in _PRECISIONS:
            raise InvalidArgumentError(f"{name} is {value!r}; it must be one of {', '.join(_PRECISIONS)}")
        return value
    return number(name, value)


def schema(*, with_defaults: bool = False) -> str:
    """The options of the operators of torch.ops.tandem, as PyTorch's schemas write them."""
    written = {"window": "SymInt {0}_left{1}, SymInt {0}_right{1}", "precision": "str {0}{1}"}
    rows = []
    for f in fields(Call):
        if f.name in OPERATOR:
            default = -1 if f.name == "window" else f.default
            default = f'"{default}"' if isinstance(default, str) else default
            form = written.get(f.metadata["kind"], f.metadata["kind"] + " {0}{1}")
            rows.append(form.format(f.name, f"={default}" if with_defaults else ""))
    return ", ".join(rows)


#: What stands for the option of an argument that is none.
_FLAG = _ROWS["causal"]


def misfit(name: str, value: Any, option: str | None = None) -> InvalidArgumentError:
    """The error of the argument `name`, which means that option (itself by default), of another type."""
    return InvalidArgumentError(f"{name} is {value!r}; pass {_ROWS.get(option or name, _FLAG)['expects']}")


def number(name: str, value: Any) -> float:
    """The number that the argument `name` is."""
    if isinstance(value, (float, int)):
        return value
    followed = _arrays.is_followed(value)
    if followed:
        remedy = "multiply q by it and pass scale=1.0" if name == "scale" else f"pass {name}.item()"
        raise InvalidArgumentError(
            f"{name} is a tensor that {followed}, but Tandem has no derivative for it; {remedy}, or "
            f"{name}.detach() where none is wanted"
        )
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise misfit(name, value)


def word(name: str, value: Any) -> int:
    """A seed or an offset as 64 bits."""
    try:
        return operator.index(value) % 2**64
    except TypeError:
        raise misfit(name, value) from None


def sms(name: str, limit: Any) -> int:
    """The number of SMs that the argument `name` is, 0 for all of them."""
    limit = _integer(limit)
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit < 2**31:
        raise misfit(name, limit, "sm_limit")
    return limit


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value


def flag(name: str, value: Any) -> bool:
    """The bool that the argument `name` is; NumPy's own will do."""
    if value is True or value is False:
        return value is True
    if isinstance(value, np.bool_):
        return bool(value)
    raise misfit(name, value)


def integers(array: Any) -> Any:
    """An array of booleans as int32 of 0 and 1; any other argument as it is."""
    if array is None:
        return array
    kind = str(getattr(array, "dtype", ""))
    if kind not in ("bool", "torch.bool"):
        return array
    return array.int() if kind == "torch.bool" else array.astype(np.int32)


def pair(name: str, window: Any) -> tuple[int, int]:
    """(left, right) of any sequence of two; `name` is the argument's, for errors."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise misfit(name, window, "window") from None
    return left, right


def widest_head(device: str) -> int:
    """The largest head dimension on a kind of device, by PyTorch's name of it."""
    return 1024 if device == "cpu" else 256


def lse_shape(q: Any) -> tuple[int, ...]:
    """(batch, heads, seqlen_q), or (heads, total_q) for packed queries."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3]) if q.ndim >= 3 else tuple(q.shape)


def result_dtype(dtype: DType, out_dtype: Any) -> DType:
    """The dtype of the result that a call makes, of a q of `dtype`."""
    if out_dtype is None:
        return DType.bf16 if dtype in CODES else dtype
    asked = _arrays.dtype_named(out_dtype)
    if asked != dtype and dtype in (DType.f32, DType.f16, DType.bf16):
        raise InvalidArgumentError(
            f"out_dtype is {asked.name} but q is {dtype.name}; it is for the result of an 8-bit q: leave it "
            "out and convert the result"
        )
    return asked


def forward(
    call: Call, q: Any, k: Any, v: Any, sink: Any, *, return_lse: bool, out: Any = None, out_dtype: Any = None
) -> tuple[Any, Any, Any]:
    """(out, lse, max_logits): `out` is made if None; `lse` is None unless return_lse, max_logits unless the
    call finds them."""
    library = _arrays.library_of("q", q)
    _arrays.expect("k", k, library)
    _arrays.expect("v", v, library)
    made = out
    if out is None:
        dtype = result_dtype(_arrays.dtype_of("q", q), out_dtype)
        made = library.empty(q, (*q.shape[:-1], *v.shape[-1:]), dtype)
    lse, max_logits = (
        library.empty(q, lse_shape(q), DType.f32) if wanted else None
        for wanted in (return_lse, call.finds_max_logits)
    )
    arrays = (q, k, v, sink, *call.metadata, made, lse, max_logits)
    _core.forward(arrays, call.options(), library.stream(q))
    if out is not None:
        _arrays.wrote(out)
    return made, lse, max_logits


def returned(call: Call, results: Sequence[Any], return_lse: bool) -> Any:
    """What the caller gets of `results`, (out, lse, max_logits)."""
    out, lse, max_logits = results
    if not call.return_max_logits:
        return (out, lse) if return_lse else out
    return (out, lse, max_logits) if return_lse else (out, max_logits)


def backward(call: Call, tensors: Sequence[Any], written: Sequence[Any] = (None,) * 5) -> tuple[Any, ...]:
    """(dq, dk, dv, dsink, dgate): those in `written`, made where None; the last two are None without a sink
    and a gate. `tensors`: (dout, dlse, q, k, v, sink, out, lse, max_logits), of which dlse, sink and
    max_logits may be None."""
    dout, dlse, q, k, v, sink, out, lse, max_logits = tensors
    library = _arrays.library_of("q", q)

    def like(name: str, array: Any, given: Any) -> Any:
        if given is not None or array is None:
            return given
        _arrays.expect(name, array, library)
        return library.empty(array, array.shape, _arrays.dtype_of(name, array))

    inputs = {"q": q, "k": k, "v": v, "sink": sink, "gate": call.gate}
    made = tuple(map(like, inputs, inputs.values(), written))
    arrays = (q, k, v, sink, *call.metadata, out, lse, dout, dlse, max_logits, *made)
    _core.backward(arrays, call.options(), library.stream(q))
    return made
