"""What sees PyTorch's tensors indexed by proxies while a function is traced."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tandem.functions._trace import Value
from tandem.functions._trace_calls import call_torch

#: What tells the dtype or the shape of a tensor, and none of its numbers.
_OF_SHAPES: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("dtype", "ndim", "shape")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
    )
)


class Watching(TorchFunctionMode):
    """Sees what PyTorch's functions are called with while a function of the user's is traced."""

    def __init__(self) -> None:
        super().__init__()
        #: Whether one was called on tensors alone, whose numbers may be in the trace then.
        self.read_values = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(_has_value(a) for a in (*args, *kwargs.values())):
            return call_torch(func, args, kwargs)
        self.read_values |= func not in _OF_SHAPES
        return func(*args, **kwargs)


def _has_value(x: Any) -> bool:
    return isinstance(x, Value) or (isinstance(x, (tuple, list)) and any(isinstance(i, Value) for i in x))
