"""PyTorch's flex_attention, for programs that change one import."""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from tandem import _api, _arrays
from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.functions import _functions, _kept_traces


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention with a function of scores and a mask function, as torch.nn.attention.flex_attention has it.

    Forward and backward, on the CPU and on a GPU. Arrays are PyTorch's or NumPy's, ``(batch, heads,
    seqlen, head_dim)``.

    Args:
      query: ``(batch, heads_q, seqlen_q, head_dim)``. A key or value of batch 1 is that of all entries.
      key: ``(batch, heads_kv, seqlen_k, head_dim)``.
      value: ``(batch, heads_kv, seqlen_k, head_dim_v)``.
      score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, from the scaled score to the logit.
      block_mask: PyTorch's BlockMask, or a mask function ``mask_mod(b, h, q_idx, kv_idx)`` itself. Of a
        BlockMask, as in the compiled FlexAttention, pairs of listed blocks are visible where its mask_mod
        says so, and all pairs of full blocks.
      scale: multiplies ``query @ key.T``. Default ``head_dim ** -0.5``.
      enable_gqa: heads_kv may be fewer than heads_q, which they divide.
      return_lse: also return the log-sum-exp, ``(batch, heads_q, seqlen_q)`` float32.
      kernel_options: PyTorch's kernels' tiles; results do not depend on them, and they are not looked at.
      return_aux: PyTorch's AuxRequest; its lse is what return_lse returns, in an AuxOutput.

    Returns:
      The result, ``(batch, heads_q, seqlen_q, head_dim_v)``, or a pair of it and what was asked for. A query
      that sees no key gives 0 and -inf.

    Raises:
      As `attention`.

    Method: FlexAttention (arXiv:2412.05496).
    """
    for name, array in (("query", query), ("key", key), ("value", value)):
        if len(getattr(array, "shape", ())) != 4:
            raise InvalidArgumentError(f"{name} must be an array of (batch, heads, seqlen, head_dim)")
    key, value = _for_queries(query, key, value, enable_gqa)
    wants_lse = return_lse
    if return_aux is not None:
        if getattr(return_aux, "max_scores", False):
            raise UnsupportedError("return_aux asks for max_scores, which Tandem does not keep; ask for lse")
        wants_lse = bool(return_aux.lse)
    mask_mod = block_mask
    if block_mask is not None and hasattr(block_mask, "mask_mod"):
        mask_mod = _mask_of(block_mask, query, key)
    out, lse = _api.attention(
        query.swapaxes(1, 2),
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        scale=scale,
        return_lse=True,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    out = out.swapaxes(1, 2)
    if return_aux is not None:
        flex = sys.modules["torch.nn.attention.flex_attention"]
        return out, flex.AuxOutput(lse=lse if wants_lse else None, max_scores=None)
    return (out, lse) if wants_lse else out


def _for_queries(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Any, Any]:
    """Key and value with the queries' batch; errors of shapes, in the caller's order of dimensions."""
    for axis, what in ((1, "heads"), (2, "rows")):
        if key.shape[axis] != value.shape[axis]:
            raise InvalidArgumentError(
                f"key has {key.shape[axis]} {what} (shape {tuple(key.shape)}) and value {value.shape[axis]} "
                f"(shape {tuple(value.shape)}); pass as many, (batch, heads, seqlen, head_dim)"
            )
    heads, of_keys = query.shape[1], key.shape[1]
    if heads != of_keys and not enable_gqa:
        raise InvalidArgumentError(
            f"query has {heads} heads and key {of_keys}; pass enable_gqa=True where query heads share "
            "key heads"
        )
    if heads != of_keys and (of_keys == 0 or heads % of_keys):
        raise InvalidArgumentError(
            f"query has {heads} heads, no multiple of key's {of_keys}; pass (batch, heads, seqlen, head_dim)"
        )
    if query.shape[3] != key.shape[3]:
        raise InvalidArgumentError(
            f"query has head_dim {query.shape[3]} (shape {tuple(query.shape)}) and key {key.shape[3]} "
            f"(shape {tuple(key.shape)}); pass the same, (batch, heads, seqlen, head_dim)"
        )
    for name, array in (("key", key), ("value", value)):
        if array.shape[0] not in (1, query.shape[0]):
            raise InvalidArgumentError(
                f"{name} has batch {array.shape[0]} and query {query.shape[0]}; pass as many, or 1 for all"
            )
    return _expanded(key, query.shape[0]), _expanded(value, query.shape[0])


def _expanded(array: Any, batch: int) -> Any:
    shape = (batch, *array.shape[1:])
    return array.expand(shape) if hasattr(array, "expand") else np.broadcast_to(array, shape)


def _mask_of(block_mask: Any, query: Any, key: Any) -> Callable[..., Any]:
    """The mask function that a BlockMask stands for."""
    lengths = tuple(getattr(block_mask, "seq_lengths", (query.shape[2], key.shape[2])))
    if lengths != (query.shape[2], key.shape[2]):
        raise InvalidArgumentError(
            f"block_mask is of {lengths[0]} queries and {lengths[1]} keys, but there are "
            f"{query.shape[2]} and {key.shape[2]}; make it for these"
        )
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    if batch not in (1, query.shape[0]) or heads not in (1, query.shape[1]):
        raise InvalidArgumentError(
            f"block_mask is of batch {batch} and {heads} heads, but query has {query.shape[0]} and "
            f"{query.shape[1]}; make it for these, or for all by 1"
        )
    rows, columns = block_mask.BLOCK_SIZE
    wanted, last = -(-query.shape[2] // rows), -(-key.shape[2] // columns)
    found = block_mask.kv_num_blocks.shape[2]
    if found != wanted:
        raise InvalidArgumentError(
            f"block_mask has {found} rows of blocks, but {query.shape[2]} queries are {wanted} of {rows}; "
            "list the blocks of as many"
        )
    mask_mod: Callable[..., Any] = block_mask.mask_mod
    masked = mask_mod is not sys.modules["torch.nn.attention.flex_attention"].noop_mask
    if masked and _is_of_its_function(block_mask, query, key):
        return mask_mod
    listed = _blocks_of(block_mask, last)
    has_full = block_mask.full_kv_num_blocks is not None

    def by_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        block = listed[b if batch > 1 else 0, h if heads > 1 else 0, q_idx // rows, kv_idx // columns]
        visible = (block != 0) & mask_mod(b, h, q_idx, kv_idx) if masked else block != 0
        return visible | (block == 2) if masked and has_full else visible

    return by_blocks


#: By mask: what was looked at (sizes, what its function reaches, versions of tensors; the tensors), and what
#: was found.
_kept: weakref.WeakKeyDictionary[Any, tuple[Any, list[Any], bool]] = weakref.WeakKeyDictionary()
#: Pairs that are looked at together, and at most.
_TOGETHER, _MOST = 1 << 26, 1 << 32


def _is_of_its_function(block_mask: Any, query: Any, key: Any) -> bool:
    """Whether the lists of blocks say no more than the mask function, as those of create_block_mask do. Then
    the function alone is the mask, which can be a window, or documents, for which there are faster ways.
    This is found out by the function's value for all pairs, once for a mask, and outside of graphs, which
    take other masks, too."""
    torch = sys.modules["torch"]
    if torch.compiler.is_dynamo_compiling():
        return False
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = [getattr(block_mask, name) for name in names]
    sizes = (*query.shape[:3], key.shape[2])
    reached = _kept_traces.reached("torch", None, block_mask.mask_mod)
    tensors = [x for x in (*lists, *(reached.arrays if reached else ())) if x is not None]
    if reached is None or any(isinstance(x, np.ndarray) or x.is_inference() for x in tensors):
        return False  # by the blocks, since nothing tells when what is found now has changed
    state, known = (sizes, reached.key, [x._version for x in tensors]), _kept.get(block_mask)
    if (
        known is not None
        and known[0] == state
        and all(x is y for x, y in zip(known[1], tensors, strict=True))
    ):
        return known[2]
    if 0 in sizes or (lists[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    library = _arrays.library_of("query", query)
    traced = _functions.trace_functions(sizes, library, mask_mod=block_mask.mask_mod)
    text = (traced and traced.mask) or ""
    shape = [n if re.search(rf"\b{leaf}\b", text) else 1 for n, leaf in zip(sizes[:2], "bh", strict=True)]
    result = math.prod((*shape, *sizes[2:])) <= _MOST and _agrees(block_mask, shape, *sizes[2:])
    _kept[block_mask] = state, tensors, result
    return result


def _agrees(block_mask: Any, shape: list[int], queries: int, keys: int) -> bool:
    """Whether every pair that the function shows is in a listed block, and it shows all of the full ones."""
    flex = sys.modules["torch.nn.attention.flex_attention"]
    rows, columns = block_mask.BLOCK_SIZE
    blocks = _blocks_of(block_mask, -(-keys // columns))
    step = max(_TOGETHER // (shape[0] * shape[1] * keys) // rows, 1) * rows
    agrees = True
    for first in range(0, queries, step):
        count = min(step, queries - first)

        def moved(b: Any, h: Any, q_idx: Any, kv_idx: Any, first: int = first) -> Any:
            return block_mask.mask_mod(b, h, q_idx + first, kv_idx)

        try:
            shown = flex.create_mask(moved, *shape, count, keys, device=blocks.device)
        except Exception:  # it takes proxies, but no tensors, as one that reads NumPy's arrays
            return False
        listed = blocks[:, :, first // rows : -(-(first + count) // rows)]
        listed = listed.repeat_interleave(rows, 2)[:, :, :count].repeat_interleave(columns, 3)[..., :keys]
        agrees = agrees & ((listed != 0) >= shown).all() & ((listed == 2) <= shown).all()
    return bool(agrees)


def _blocks_of(block_mask: Any, columns: int) -> Any:
    """(batch, heads, rows, columns) int8: 0 of blocks that are hidden, 1 of listed ones, 2 of full ones."""
    listed = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
        listed = listed.masked_fill_(full != 0, 2)
    return listed


def _listed(counts: Any, indices: Any, columns: int) -> Any:
    """(batch, heads, rows, columns) int8: 1 of the blocks among the first `counts` of `indices`."""
    torch = sys.modules["torch"]
    given = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # Behind the first ones there may be anything: it goes to a column that is cut off.
    where = torch.where(given & (indices >= 0) & (indices < columns), indices, columns)
    blocks = torch.zeros((*counts.shape, columns + 1), dtype=torch.int8, device=indices.device)
    return blocks.scatter_(-1, where.long(), 1)[..., :columns]
