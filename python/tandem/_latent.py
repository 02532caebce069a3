"""FlashAttention's ``qv``, the second query product of latent attention: scores are q k + qv v.

Tandem has one product. Caches of latent vectors have k and v side by side in one tensor, so that both
products are one: of qv and q, concatenated, with the columns of v and k, which are read where they lie. Where
k and v are tensors of their own, a copy has them side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem import _flash
from tandem._errors import InvalidArgumentError, UnsupportedError


def judge(q: Any, k: Any, v: Any, qv: Any, name: str = "qv", **scales: Any) -> None:
    """The errors of `qv`, which the caller knows by `name`; `scales` are descales, which it goes without."""
    _flash.only_tensors(**{"q": q, "k": k, "v": v, name: qv})
    for option, scale in scales.items():
        if scale is not None:
            raise UnsupportedError(f"{name} is given with {option}; leave {option} out, or {_remedy(name)}")
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        raise InvalidArgumentError(
            f"{name} has shape {tuple(qv.shape)}; pass {(*q.shape[:-1], v.shape[-1])}, the shape of q with "
            "the head dimension of v"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, qv)):
        raise UnsupportedError(f"{name} has no gradients; call under torch.no_grad(), or {_remedy(name)}")
    if qv.dtype != q.dtype:
        raise InvalidArgumentError(f"{name} is {qv.dtype} but q is {q.dtype}; convert it to {q.dtype}")
    if k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype:
        raise InvalidArgumentError(
            f"{name} is given with k, {k.dtype} of shape {tuple(k.shape)}, and v, {v.dtype} of shape "
            f"{tuple(v.shape)}; pass as many rows and heads of both, in one dtype"
        )


def side_by_side(k: Tensor, v: Tensor) -> bool:
    """Whether k and v are columns of one tensor, one behind the other."""
    return _follows(k, v) or _follows(v, k)


def joined(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one product that has the scores of two, of what `judge` has seen."""
    columns = k.shape[-1] + v.shape[-1]
    if _follows(v, k):
        return torch.cat((q, qv), -1), k.as_strided((*k.shape[:-1], columns), k.stride()), v
    keys = v.as_strided((*v.shape[:-1], columns), v.stride()) if _follows(k, v) else torch.cat((v, k), -1)
    return torch.cat((qv, q), -1), keys, keys[..., : v.shape[-1]]


def _remedy(name: str) -> str:
    return f"concatenate {name} to q and v to k"


def _follows(b: Tensor, a: Tensor) -> bool:
    """Whether the columns of `b` are those behind `a`'s in one tensor."""
    steps_a, steps_b = (
        [step for step, size in zip(t.stride(), t.shape[:-1], strict=False) if size > 1] for t in (a, b)
    )
    return (
        a.shape[:-1] == b.shape[:-1]
        and a.dtype == b.dtype
        and a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() + a.shape[-1] == b.storage_offset()
        and steps_a == steps_b
        and a.stride(-1) == b.stride(-1) == 1
    )
