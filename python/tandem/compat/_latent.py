"""FlashAttention's ``qv``, the second query product of latent attention: scores are q k + qv v.

Tandem has one product. Caches of latent vectors have k and v side by side in one tensor, so that both
products are one: of qv and q, concatenated, with the columns of v and k, which are read where they lie. Where
k and v are tensors of their own, a copy has the rows in use side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem import _cache, _call
from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.compat import _flash
from tandem.torch import _derivatives


def one_product(
    call: _call.Call, q: Any, k: Any, v: Any, qv: Any, *, described: bool = False
) -> tuple[_call.Call, Any, Any, Any]:
    """The call with `qv`, if it is given, joined to q, and v to k. `described`: nothing is copied, for a call
    that is not run."""
    if qv is None:
        return call, q, k, v
    given = dict(zip(_call.METADATA, call.metadata, strict=True))
    _validate(q, k, v, qv, given)
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


def _validate(q: Any, k: Any, v: Any, qv: Any, given: dict[str, Any]) -> None:
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


class InUse(NamedTuple):
    """Which rows of a cache a call reads, and where they are in a copy of its entries (or pages): of those in
    use alone on the CPU. What is on a GPU is not looked at: there the copy has as many as the call names, or
    all of the cache where these are fewer."""

    rows: Tensor  # (entries,): so many first ones of each are read
    place: Tensor | None  # (entries,): in the copy; None: the same
    pages: Tensor  # what the call names, as entries of the copy; -1 where the cache has none
    size: int  # entries of the copy

    def copy(self, k: Tensor, v: Tensor | None, k_to: Tensor, v_to: Tensor | None, scale: Any = None) -> None:
        """Writes these rows of k and v to the copy, codes times their scales. Its time follows the rows."""
        options: Any = {
            "cache_seqlens": self.rows.new_zeros(1).expand_as(self.rows),
            "seqused_new": self.rows,
        }
        _cache.append_kv(k, v, k_to, v_to, **options, cache_batch_idx=self.place, k_scale=scale)


def in_use(cache: Tensor, pages: Tensor, used: Tensor) -> InUse:
    """Rows 0 to ``used[b]`` of each sequence b, whose entries of the cache are ``pages[b]``."""
    entries, rows = cache.shape[:2]
    begins = torch.arange(pages.shape[1], device=cache.device) * rows
    counts = (used.long()[:, None] - begins).clamp(0, rows).int()
    named = (pages >= 0) & (pages < entries) & (counts > 0)
    # What is not named says 0 of entries all over the cache: atomics to one address take their time.
    others = torch.arange(pages.numel(), device=cache.device).view_as(pages) % max(entries, 1)
    longest = torch.zeros(max(entries, 1), dtype=torch.int32, device=cache.device).scatter_reduce(
        0, torch.where(named, pages, others).flatten(), (counts * named).flatten(), "amax"
    )
    place = None
    count = min(entries, pages.numel())
    readable = _flash.is_readable(longest)
    if readable:
        count = int((longest > 0).sum())
    if readable or count < entries:
        place = ((longest > 0).cumsum(0, dtype=torch.int32) - 1).clamp_min(0)
        pages = place[torch.where(named, pages, 0)]
        place = place[:entries]
    return InUse(longest[:entries], place, torch.where(named, pages, -1), count)


def _rows_in_use(call: _call.Call, given: dict[str, Any], k: Tensor, v: Tensor) -> tuple[_call.Call, Tensor]:
    """The call on a copy of the pages, or entries, that it reads, with v and k side by side: of each only as
    many rows as the longest of its sequences has there."""
    entries, rows = k.shape[:2]
    table, index = given["page_table"], given["cache_batch_idx"]
    pages = torch.arange(entries, device=k.device) if index is None else index
    pages = pages[:, None] if table is None else table
    used = given["seqused_k"]
    if used is None:
        used = torch.full((len(pages),), pages.shape[1] * rows, device=k.device)
    if used.shape != pages.shape[:1]:
        return call, torch.cat((v, k), -1)  # an error of the call
    found = in_use(k, pages, used)
    if table is None and _flash.is_readable(used):
        rows = int(found.rows.max()) if entries > 0 else 0
    both = v.new_empty(found.size, rows, k.shape[2], v.shape[-1] + k.shape[-1])
    to_v, to_k = both[..., : v.shape[-1]], both[..., v.shape[-1] :]
    found.copy(_flash.gathered(k), _flash.gathered(v), to_k, to_v)
    name = "cache_batch_idx" if table is None else "page_table"
    changed = {name: found.pages.flatten() if table is None else found.pages, "seqused_k": used}
    call.metadata = tuple((given | changed).values())
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
