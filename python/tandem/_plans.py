"""Calls that are planned but not run: explain, workspace_bytes, and the rules for tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem import _arrays, _call, _core
from tandem._core import DeviceKind, DType
from tandem._errors import InvalidArgumentError
from tandem.functions import _functions


def explain(q: Any, k: Any, v: Any, *, backward: bool = False, device: Any = None, **options: Any) -> str:
    """Which kernel and tiles would run this call and why, as a few lines of text.

    Takes what `attention` takes (all but out and out_dtype), and raises what the call would raise. No array
    is read or written, nor memory taken: PyTorch's tensors may be on the meta device, for a call that this
    machine could not hold.

    Args:
      backward: the backward pass of that call.
      device: plan as if the arrays were there: "cpu", "cuda", "cuda:1" (or a torch.device), or a GPU that
        this machine need not have, "H100", "H100 PCIe", "H200", "GH200", "A100", "A10", "RTX 3090", "L4",
        "RTX 4090", "B200" or "RTX 5090". Default: where they are; the CPU for the meta device.
    """
    return _core.explain(*_planned("explain", q, k, v, backward, device, options), backward)


def workspace_bytes(
    q: Any, k: Any, v: Any, *, backward: bool = False, device: Any = None, **options: Any
) -> int:
    """Scratch bytes that this call allocates beyond its inputs and outputs. Arguments as for `explain`."""
    return _core.workspace_bytes(*_planned("workspace_bytes", q, k, v, backward, device, options), backward)


def check(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any, out: Any = None, *, backward: bool = False
) -> None:
    """Raises what the call, or its backward pass, would raise; on the CPU of tensors without memory."""
    arrays = _described(call, q, k, v, sink, backward, None, return_lse=True)
    if out is not None:
        at = _core.FORWARD.index("out")
        view = _core.Tensor(*_arrays.library_of("q", q).layout("out", out))
        arrays = (*arrays[:at], view, *arrays[at + 1 :])
    _core.workspace_bytes(arrays, call.options(), backward)


def _planned(
    function: str, q: Any, k: Any, v: Any, backward: bool, device: Any, options: dict[str, Any]
) -> tuple[tuple[Any, ...], _core.Options]:
    """What the C++ side needs to plan a call of `attention` with these options, or its backward pass."""
    metadata = tuple(options.pop(name, None) for name in _call.METADATA)
    sink = options.pop("sink", None)
    return_lse = _call.flag("return_lse", options.pop("return_lse", False))
    functions = [options.pop(name, None) for name in _functions.NAMES]
    call = _call.of_options(function, options, [name for name, _ in _call.KINDS])
    call.metadata = metadata
    if any(f is not None for f in functions):
        call.functions = _functions.of_call(call, q, k, *functions)
    place = None if device is None else _place(device)
    if call.functions is not None:
        call.functions.place = place
    return _described(call, q, k, v, sink, backward, place, return_lse=return_lse), call.options()


def _described(
    call: _call.Call,
    q: Any,
    k: Any,
    v: Any,
    sink: Any,
    backward: bool,
    place: tuple[DeviceKind, int] | None,
    *,
    return_lse: bool,
) -> tuple[Any, ...]:
    """Views of the call's arrays, as _core.FORWARD or _core.BACKWARD name them, without the memory of those
    that the call would make."""
    library = _arrays.library_of("q", q)

    def seen(name: str, array: Any) -> _core.Tensor | None:
        if array is None and name not in ("k", "v"):
            return None
        _arrays.expect(name, array, library)
        address, dtype, shape, strides, *where = library.layout(name, array)
        if _arrays.is_meta(array) != _arrays.is_meta(q):
            raise InvalidArgumentError(
                f"{name} is on device {array.device} but q is on {q.device}; pass all tensors on the meta "
                "device, or none"
            )
        if place is not None:
            # Aligned as that device's memory is; v in k's memory stays there.
            address, where = address & -256 if name in ("q", "k", "v") else address, [*place]
        return _core.Tensor(address, dtype, shape, strides, *where)

    inputs = {"q": q, "k": k, "v": v, "sink": sink, **dict(zip(_call.METADATA, call.metadata, strict=True))}
    views = {name: seen(name, array) for name, array in inputs.items()}
    where = place or library.layout("q", q)[-2:]

    def made(shape: Sequence[int], dtype: DType) -> _core.Tensor:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return _core.Tensor(0, dtype, shape, strides[: len(shape)], *where)

    of_q = _arrays.dtype_of("q", q)
    out = made((*q.shape[:-1], *v.shape[-1:]), DType.bf16 if of_q in _call.CODES else of_q)
    lse = made(_call.lse_shape(q), DType.f32)
    if not backward:
        max_logits = lse if call.return_max_logits else None
        return (*views.values(), out, lse if return_lse else None, max_logits)
    max_logits = lse if call.saves_max_logits else None
    gradients = (made(a.shape, _arrays.dtype_of(name, a)) for name, a in (("q", q), ("k", k), ("v", v)))
    dsink = None if sink is None else made(sink.shape, DType.f32)
    dgate = None if call.gate is None else out
    return (*views.values(), out, lse, out, None, max_logits, *gradients, dsink, dgate)


def _place(device: Any) -> tuple[DeviceKind, int]:
    """Where `device` is: "cpu", "cuda:0", a torch.device, or the name of a GPU."""
    named = {name.lower(): index for name, index in _core.described_devices().items()}
    text = str(device).strip().lower().removeprefix("nvidia ")
    kind, _, index = text.partition(":")
    if text in named:
        return DeviceKind.cuda, named[text]
    if text == "cpu":
        return DeviceKind.cpu, 0
    if kind == "cuda" and (index.isdecimal() or text == "cuda"):
        return DeviceKind.cuda, int(index or 0)
    names = ", ".join(repr(name) for name in _core.described_devices())
    raise InvalidArgumentError(f"device is {device!r}; pass 'cpu', 'cuda', 'cuda:1' or a GPU's name: {names}")
