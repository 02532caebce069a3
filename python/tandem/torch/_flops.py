"""Formulas for torch.utils.flop_counter. Masks do not count, as in PyTorch's own for its attention, so that
counts compare; packed sequences count each for itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tandem import _call
from tandem.torch import _derivatives


def register() -> None:
    """Registers FLOP formulas for the operators as they are now."""
    for name, formula in (
        ("attention", _forward),
        ("attention_out", _forward),
        ("attention_with_functions", _forward),
        ("attention_backward", _backward),
        ("attention_with_functions_backward", _backward),
        ("attention_backward_out", _backward_out),
    ):
        formula = _derivatives.filled("tandem", name, formula)
        register_flop_formula([getattr(torch.ops.tandem, name)], get_raw=True)(formula)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    *rest: Any,
    out_val: Any = None,
) -> int:
    """S and O."""
    cu_seqlens_q, cu_seqlens_k, *others = rest[_call.FLAT_OPTIONS :]
    of_cache = _rows_of_cache(k, *others[1:2], *others[8:11])
    pairs = _pairs(q, k, cu_seqlens_q, cu_seqlens_k, of_cache, others[5])
    return 2 * pairs * (q.shape[-1] + v.shape[-1])


def _rows_of_cache(
    k: Tensor,
    seqused_k: Tensor | None,
    page_table: Tensor | None,
    leftpad_k: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> list[Any] | None:
    """The rows of each sequence of a cache, as far as they are known; None where k is none."""
    if page_table is not None:
        capacity = [page_table.shape[1] * k.shape[1]] * page_table.shape[0]
    elif cache_batch_idx is not None:
        capacity = [k.shape[1]] * cache_batch_idx.shape[0]
    elif leftpad_k is not None:
        capacity = [k.shape[1]] * leftpad_k.shape[0]
    else:
        return None
    return capacity if seqused_k is None or _is_unknown(seqused_k) else list(seqused_k.tolist())


def _is_unknown(lengths: Tensor) -> bool:
    return lengths.is_meta or type(lengths) is not Tensor


def _backward(*arguments: Any, out_val: Any = None) -> int:
    """S again and dP, and of dQ, dK and dV those that are needed."""
    _, _, q, k, v, _, _, _, _, *rest = arguments
    cu_seqlens_q, cu_seqlens_k, *rest = rest[_call.FLAT_OPTIONS :]
    need_dq, need_dk, need_dv, _ = rest[-4:]
    head_dims = q.shape[-1] * (1 + need_dq + need_dk) + v.shape[-1] * (1 + need_dv)
    return int(2 * _pairs(q, k, cu_seqlens_q, cu_seqlens_k, indices=rest[5]) * head_dims)


def _backward_out(*arguments: Any, out_val: Any = None) -> int:
    return _backward(*arguments[:-4], True, True, True, True)


def _pairs(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    of_k: list[Any] | None = None,
    indices: Tensor | None = None,
) -> int:
    """Pairs of a query and a key, of all heads. `of_k`: the keys of each sequence, where k is a cache.
    `indices`: the keys of each query, where it has chosen them."""
    if indices is not None:
        return int(q.shape[:-1].numel() * indices.shape[-1])
    of_q, of_k = _lengths(q, cu_seqlens_q), _lengths(k, cu_seqlens_k) if of_k is None else of_k
    return q.shape[-2] * int(sum(a * b for a, b in zip(of_q, of_k, strict=True)))


def _lengths(t: Tensor, cu_seqlens: Tensor | None) -> list[Any]:
    """The rows of each sequence; equal shares where nothing but shapes is known."""
    if cu_seqlens is None:
        return [t.shape[1]] * t.shape[0]
    if _is_unknown(cu_seqlens):
        batch = cu_seqlens.shape[0] - 1
        return [t.shape[0] / max(batch, 1)] * batch
    lengths: list[Any] = cu_seqlens.diff().tolist()
    return lengths
