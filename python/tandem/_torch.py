"""PyTorch autograd through Tandem. Imported only when a tensor that needs a gradient comes in."""

from __future__ import annotations

from typing import Any

import torch

from tandem import _call
from tandem._errors import InvalidArgumentError, UnsupportedError


def forward(
    call: _call.Call, q: Any, k: Any, v: Any, sink: Any, *, return_lse: bool, out: Any, out_dtype: Any
) -> tuple[Any, Any]:
    """As _call.forward, recorded by autograd."""
    if out is not None:
        raise InvalidArgumentError(
            "out= cannot be combined with inputs that require gradients: autograd owns the result; "
            "leave out unset, or call under torch.no_grad()"
        )
    result, lse = _Attention.apply(call, q, k, v, sink, out_dtype)  # type: ignore[no-untyped-call]
    return result, (lse if return_lse else None)


def _rows_contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    """Autograd hands over expanded gradients (of a sum, for one); the last dimension must be dense."""
    return t if t is None or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _call.Call, q: Any, k: Any, v: Any, sink: Any, out_dtype: Any
    ) -> tuple[Any, Any]:
        out, lse = _call.forward(call, q, k, v, sink, return_lse=True, out_dtype=out_dtype)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        if dout is None and dlse is None:
            return None, None, None, None, None, None
        gradients = _AttentionBackward.apply(ctx.call, dout, dlse, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, *gradients, None


class _AttentionBackward(torch.autograd.Function):
    """The gradients, as a function of its own so that a second derivative fails with a reason."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _call.Call,
        dout: Any,
        dlse: Any,
        q: Any,
        k: Any,
        v: Any,
        sink: Any,
        out: Any,
        lse: Any,
    ) -> Any:
        dout = torch.zeros_like(out) if dout is None else _rows_contiguous(dout)
        return _call.backward(call, dout, q, k, v, out, lse, sink, _rows_contiguous(dlse))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(
            "tandem.attention has no second derivative; "
            "use torch's math attention where gradients of gradients are needed"
        )
