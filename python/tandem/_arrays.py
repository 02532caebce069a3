"""Array libraries as Tandem sees them: where an array's memory is, and how to make another like it.

Each library is one `Library`. A new one (CuPy, JAX) is a class here and an entry in `_libraries`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tandem import _core
from tandem._core import DeviceKind, DType
from tandem._errors import InvalidArgumentError

# What the libraries call the dtypes; ml_dtypes gives NumPy the ones it lacks, under the same names.
_DTYPES = {
    "float32": DType.f32,
    "float16": DType.f16,
    "bfloat16": DType.bf16,
    "float8_e4m3fn": DType.e4m3,
    "int32": DType.i32,
    "int64": DType.i64,
    "int8": DType.s8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SHORT = {dtype.name: dtype for dtype in _DTYPES.values()}


class Library(Protocol):
    """What Tandem needs to know of an array library. Arrays are `Any`: each library checks its own."""

    name: str

    def owns(self, array: Any) -> bool:
        """Whether `array` is one of this library's."""

    def layout(self, name: str, array: Any) -> tuple[Any, ...]:
        """What `_core.Tensor` takes. `name` is the argument's, for errors. The address is 0 of an array that
        has no memory, as on PyTorch's meta device."""

    def view(self, name: str, array: Any, *, writable: bool = False) -> _core.Tensor:
        """`array`'s memory, without a copy; an error where there is none."""

    def empty(self, like: Any, shape: Sequence[int], dtype: DType) -> Any:
        """A new contiguous array on the device of `like`."""

    def stream(self, array: Any) -> int:
        """The handle of the CUDA stream that work on `array` belongs on; 0 on the CPU."""


@functools.cache  # NumPy builds a dtype's name anew each time
def dtype_name(dtype: Any) -> str:
    """What a NumPy dtype, a PyTorch dtype or a scalar class is called."""
    return (
        getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    )


def _dtype(argument: str, name: str) -> DType:
    if name == "uint8":
        raise InvalidArgumentError(
            f"{argument} has dtype uint8; pass {argument}.view(torch.float8_e4m3fn) where its bytes are FP8 "
            "values, as engines keep them, or convert it"
        )
    if name not in _DTYPES:
        raise InvalidArgumentError(
            f"{argument} has dtype {name}, which is not one of {', '.join(_DTYPES)}; convert it first"
        )
    return _DTYPES[name]


def dtype_of(name: str, array: Any) -> DType:
    """The element type of an array of any library; `name` is the argument's, for errors."""
    return _dtype(name, dtype_name(array.dtype))


class NumPy:
    name = "numpy"

    def owns(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def layout(self, name: str, array: Any) -> tuple[Any, ...]:
        if isinstance(array, np.ma.MaskedArray):
            raise InvalidArgumentError(
                f"{name} is a masked array, and Tandem would not see its mask; pass {name}.data, and what is "
                "hidden by causal, window, seqused or cu_seqlens"
            )
        dtype = dtype_of(name, array)
        if not array.dtype.isnative or not array.flags.aligned:
            raise InvalidArgumentError(f"{name} is byte-swapped or not aligned to its elements; pass a copy")
        itemsize = array.itemsize
        if any(stride % itemsize for stride in array.strides):
            raise InvalidArgumentError(
                f"{name} has strides of {array.strides} bytes, not multiples of its "
                f"{itemsize}-byte elements; pass a copy"
            )
        strides = tuple(stride // itemsize for stride in array.strides)
        address = array.__array_interface__["data"][0]
        return address, dtype, array.shape, strides, DeviceKind.cpu, 0

    def view(self, name: str, array: Any, *, writable: bool = False) -> _core.Tensor:
        layout = self.layout(name, array)
        if writable and not array.flags.writeable:
            raise InvalidArgumentError(
                f"{name} is read-only, and results are written to it; pass a writable array"
            )
        return _core.Tensor(*layout)

    def empty(self, like: Any, shape: Sequence[int], dtype: DType) -> Any:
        return np.empty(shape, self._native(dtype))

    def stream(self, array: Any) -> int:
        return 0

    @staticmethod
    def _native(dtype: DType) -> Any:
        name = _NAMES[dtype]
        if hasattr(np, name):
            return np.dtype(name)
        import ml_dtypes  # NumPy's own dtypes lack bfloat16 and float8

        return np.dtype(getattr(ml_dtypes, name))


class Torch:
    name = "torch"

    def owns(self, array: Any) -> bool:
        return is_torch(array)

    def layout(self, name: str, array: Any) -> tuple[Any, ...]:
        import torch

        dtype = dtype_of(name, array)
        if array.layout is not torch.strided:
            raise InvalidArgumentError(
                f"{name} is not a plain strided tensor (layout {array.layout}); make it dense"
            )
        if not (array.is_cpu or array.is_cuda or array.is_meta):
            raise InvalidArgumentError(
                f"{name} is on device {array.device}; Tandem reads cpu and cuda tensors"
            )
        place = (DeviceKind.cuda, array.get_device()) if array.is_cuda else (DeviceKind.cpu, 0)
        return _address(array), dtype, tuple(array.shape), array.stride(), *place

    def view(self, name: str, array: Any, *, writable: bool = False) -> _core.Tensor:
        plain = _core.view(array)
        if plain is not None:
            return plain
        layout = self.layout(name, array)
        if array.is_neg():
            raise negated(name, writable)
        if array.is_meta:
            raise InvalidArgumentError(f"{name} is on the meta device, where no tensor has memory; move it")
        return _core.Tensor(*layout)

    def empty(self, like: Any, shape: Sequence[int], dtype: DType) -> Any:
        return like.new_empty(shape, dtype=torch_dtype(dtype))

    def stream(self, array: Any) -> int:
        return _raw_stream()(array.get_device()) if array.is_cuda else 0


def _address(tensor: Any) -> int:
    """Where a PyTorch tensor's memory is; 0 of one that has none."""
    fake = type(tensor).__name__ == "FakeTensor"  # of a device that it tells
    return 0 if fake or is_meta(tensor) else tensor.data_ptr()


def is_meta(array: Any) -> bool:
    """Whether `array` is a tensor on PyTorch's meta device, which has shapes and no memory."""
    return bool(getattr(array, "is_meta", False))


def negated(name: str, writable: bool) -> InvalidArgumentError:
    """The error of a tensor with PyTorch's negative bit, where nobody can resolve it for the caller."""
    remedy = (
        "pass a plain tensor, and copy the result into this one" if writable else f"pass {name}.resolve_neg()"
    )
    return InvalidArgumentError(
        f"{name} has the negative bit, as the imaginary part of a conjugate has: its memory holds the "
        f"numbers with the other sign; {remedy}"
    )


@functools.cache
def _raw_stream() -> Callable[[int], int]:
    """The handle of a device's current stream, by PyTorch's shortest way: torch.cuda.Stream takes 2 us."""
    import torch

    shortest: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return shortest or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def is_torch(array: Any) -> bool:
    """Whether `array` is a PyTorch tensor, without importing PyTorch to ask."""
    torch = sys.modules.get("torch")  # an array of a library that was never imported does not exist
    return torch is not None and isinstance(array, torch.Tensor)


def is_followed(value: Any) -> str:
    """How autograd follows `value`, if it does: a derivative by it may be asked for."""
    if not is_torch(value):
        return ""
    torch = sys.modules["torch"]
    if value.requires_grad and torch.is_grad_enabled():
        return "requires a gradient"
    forward: Any = torch.autograd.forward_ad
    if forward._current_level >= 0 and forward.unpack_dual(value).tangent is not None:
        return "carries a tangent"
    return ""


def wrote(*arrays: Any) -> None:
    """Tells autograd that the caller's tensors among these have changed: a backward pass that saved one of
    them is then an error, not a wrong gradient."""
    for array in arrays:
        if is_torch(array) and not array.is_inference():  # those have no version
            sys.modules["torch"].autograd.graph.increment_version(array)


def name_of(dtype: DType) -> str:
    """What array libraries call `dtype`."""
    return _NAMES[dtype]


@functools.cache
def torch_dtype(dtype: DType) -> Any:
    """PyTorch's dtype for `dtype`."""
    import torch

    return getattr(torch, _NAMES[dtype])


TORCH = Torch()
_libraries: tuple[Library, ...] = (NumPy(), TORCH)


def library_of(name: str, array: Any) -> Library:
    """The library of `array`, the argument called `name`."""
    for library in _libraries:
        if library.owns(array):
            return library
    module = type(array).__module__
    of_jax = ", or call tandem.jax.attention with arrays of JAX alone" if module.startswith("jax") else ""
    raise TypeError(
        f"{name} is a {module}.{type(array).__qualname__}; "
        f"pass an array of {' or '.join(library.name for library in _libraries)}{of_jax}"
    )


def expect(name: str, array: Any, library: Library, first: str = "q") -> None:
    """A TypeError unless `array`, the argument `name`, is of the library of the argument `first`."""
    if not library.owns(array):
        owner = library_of(name, array)
        raise TypeError(
            f"{name} is an array of {owner.name} but {first} is one of {library.name}; convert one of them"
        )


#: What lengths, offsets and tables are.
INTEGERS = ("int32", "int64")


def validate_tensor(name: str, t: Any, q: Any, shape: Sequence[int | str], *dtypes: str) -> None:
    """An error unless the argument `name` is a PyTorch tensor on the device of q, of one of these dtypes and
    of this shape, in which a word stands for any size."""
    if not is_torch(t):
        raise InvalidArgumentError(f"{name} is a {type(t).__name__}; pass a torch.Tensor")
    if t.is_nested:
        raise InvalidArgumentError(f"{name} is a nested tensor; pass a plain one")
    fits = len(t.shape) == len(shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(t.shape, shape, strict=True)
    )
    dtype = str(t.dtype).removeprefix("torch.")
    if not fits or dtype not in dtypes:
        sizes = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
        raise InvalidArgumentError(
            f"{name} is {dtype} of shape {tuple(t.shape)}; it must be {' or '.join(dtypes)} of "
            f"shape ({sizes})"
        )
    if t.device != q.device:
        raise InvalidArgumentError(f"{name} is on {t.device}, but q is on {q.device}; move it")


def dtype_named(value: Any) -> DType:
    """The DType that `out_dtype` means: "bf16", or a library's own name, dtype object or scalar class."""
    try:
        name = value if isinstance(value, str) else dtype_name(value)
    except TypeError:  # not hashable, as every dtype is
        name = ""
    dtype = _SHORT.get(name) or _DTYPES.get(name)
    if dtype is None:
        raise InvalidArgumentError(f"out_dtype is {value!r}; pass 'f32', 'f16', 'bf16' or a library's dtype")
    return dtype


def view(name: str, array: Any, q: Any, writable: bool) -> _core.Tensor:
    """The view of `array`, the argument `name` of a call whose q is `q`; all arrays are of one library.

    The C++ side asks for what it does not read itself: any array but plain PyTorch tensors.
    """
    library = library_of("q", q)
    expect(name, array, library)
    return library.view(name, array, writable=writable)


@functools.cache
def meet_torch() -> None:
    """Tells the C++ side how to read PyTorch's tensors. Called by what imports PyTorch."""
    import torch

    dtypes = {getattr(torch, name): dtype for name, dtype in _DTYPES.items()}
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # from PyTorch 2.11 on
    types = (torch.Tensor, torch.nn.Parameter)
    _core.know_torch(types, torch.strided, dtypes, exchange)
