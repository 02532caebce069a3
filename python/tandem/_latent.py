"""FlashAttention's ``qv``, the second query product of latent attention: scores are q k + qv v.

Tandem has one product. Caches of latent vectors have k and v side by side in one tensor, so that both
products are one: of qv and q, concatenated, with the columns of v and k, which are read where they lie. Where
k and v are tensors of their own, a copy has the rows in use side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem import _cache, _call, _derivatives, _flash
from tandem._errors import InvalidArgumentError, UnsupportedError


def one_product(
    call: _call.Call, q: Any, k: Any, v: Any, qv: Any, *, described: bool = False
) -> tuple[_call.Call, Any, Any, Any]:
    """The call with `qv`, if it is given, joined to q, and v to k. `described`: nothing is copied, for a call
    that is not run."""
    if qv is None:
        return call, q, k, v
    given = dict(zip(_call.METADATA, call.metadata, strict=True))
    _judge(q, k, v, qv, given)
    columns = k.shape[-1] + v.shape[-1]
    is_recorded = _derivatives.is_recorded(q, k, v, qv)
    if not is_recorded and _follows(v, k):
        return call, torch.cat((q, qv), -1), k.as_strided((*k.shape[:-1], columns), k.stride()), v
    if not is_recorded and _follows(k, v):
        keys = v.as_strided((*v.shape[:-1], columns), v.stride())
    elif described:
        keys = k.new_empty((*k.shape[:-1], columns))
    elif is_recorded or k.ndim != 4 or (given["seqused_k"] is None and given["page_table"] is None):
        keys = torch.cat((v, k), -1)
    else:
        call, keys = _rows_in_use(call, given, k, v)
    return call, torch.cat((qv, q), -1), keys, keys[..., : v.shape[-1]]


def _judge(q: Any, k: Any, v: Any, qv: Any, given: dict[str, Any]) -> None:
    """The errors of `qv`, which goes without scales."""
    _flash.only_tensors(q=q, k=k, v=v, qv=qv)
    for option in ("q_scale", "k_scale", "v_scale"):
        if given[option] is not None:
            raise UnsupportedError(
                f"qv is given with {option}; leave {option} out, or concatenate qv to q and v to k"
            )
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        raise InvalidArgumentError(
            f"qv has shape {tuple(qv.shape)}; pass {(*q.shape[:-1], v.shape[-1])}, the shape of q with the "
            "head dimension of v"
        )
    if qv.dtype != q.dtype:
        raise InvalidArgumentError(f"qv is {qv.dtype} but q is {q.dtype}; convert it to {q.dtype}")
    if k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype:
        raise InvalidArgumentError(
            f"qv is given with k, {k.dtype} of shape {tuple(k.shape)}, and v, {v.dtype} of shape "
            f"{tuple(v.shape)}; pass as many rows and heads of both, in one dtype"
        )


def _rows_in_use(call: _call.Call, given: dict[str, Any], k: Tensor, v: Tensor) -> tuple[_call.Call, Tensor]:
    """The call on a copy of the pages, or entries, that it reads, with v and k side by side: of each only as
    many rows as the longest of its sequences has there. Nothing is read from the device."""
    entries, rows = k.shape[:2]
    table, index = given["page_table"], given["cache_batch_idx"]
    pages = torch.arange(entries, device=k.device) if index is None else index
    pages = pages[:, None] if table is None else table
    used = given["seqused_k"]
    if used is None:
        used = torch.full((len(pages),), pages.shape[1] * rows, device=k.device)
    if used.shape != pages.shape[:1]:
        return call, torch.cat((v, k), -1)  # an error of the call
    counts = (used.long()[:, None] - torch.arange(pages.shape[1], device=k.device) * rows).clamp(0, rows)
    named = (pages >= 0) & (pages < entries) & (counts > 0)
    pages = torch.where(named, pages, entries).long()
    longest = torch.zeros(entries + 1, dtype=torch.int64, device=k.device)
    longest = longest.scatter_reduce(0, pages.flatten(), counts.flatten(), "amax")
    longest[entries] = 0
    place = (longest > 0).cumsum(0) - 1  # in the copy
    count = min(entries, pages.numel())
    if _flash.is_readable(place):
        count = int(place[-1]) + 1
        rows = rows if table is not None else int(longest.max())
    both = v.new_empty(count, rows, k.shape[2], v.shape[-1] + k.shape[-1])
    _cache.append_kv(
        _flash.gathered(k),
        _flash.gathered(v),
        both[..., v.shape[-1] :],
        both[..., : v.shape[-1]],
        cache_seqlens=torch.zeros_like(longest[:entries]),
        seqused_new=longest[:entries],
        cache_batch_idx=place[:entries].clamp_min(0),
    )
    name = "cache_batch_idx" if table is None else "page_table"
    place = torch.where(named, place[pages], -1)
    found = given | {name: place.flatten() if table is None else place, "seqused_k": used}
    call.metadata = tuple(found.values())
    return call, both


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
