"""Caches of keys and values that grow by tokens, and attention merged from parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tandem import _arrays, _call, _run
from tandem._errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = TypeVar("Array", np.ndarray[Any, Any], torch.Tensor)


def append_kv(
    k_new: Array,
    v_new: Array | None,
    k_cache: Array,
    v_cache: Array | None,
    *,
    cache_seqlens: Array | None = None,
    cu_seqlens_new: Array | None = None,
    seqused_new: Array | None = None,
    page_table: Array | None = None,
    cache_batch_idx: Array | None = None,
    leftpad_k: Array | None = None,
    slot_mapping: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = False,
    rotary_offsets: Array | None = None,
    q: Array | None = None,
    check: bool = False,
    threads: int = 0,
) -> Array | None:
    """Write new keys and values into a cache, in place.

    New token j of sequence b goes to row ``cache_seqlens[b] + j`` of the sequence. Every other byte of the
    caches stays as it was. cache_seqlens is not changed: the caller adds the new tokens to it.

    Args:
      k_new: ``(batch, seqlen_new, heads_kv, head_dim)``, or ``(total_new, heads_kv, head_dim)`` with
        ``cu_seqlens_new`` or ``slot_mapping``; float32, float16, bfloat16, float8_e4m3fn or int8.
      v_new: likewise with its own head_dim; None, with ``v_cache``, where only keys are kept.
      k_cache: ``(batch, seqlen, heads_kv, head_dim)``, with ``cache_batch_idx`` ``(entries, seqlen, heads_kv,
        head_dim)``, with ``page_table`` ``(pages, page_size, heads_kv, head_dim)``. Any strides, the last
        dimension contiguous: K and V may alternate in one array. Any of the same dtypes, but float8_e4m3fn
        and int8 do not become one another. Codes of 8 bits become ``code * scale``.
      v_cache: likewise.
      cache_seqlens: ``(batch,)`` int32 or int64, rows before the append. Below 0 nothing of the sequence is
        appended.
      cu_seqlens_new: ``(batch + 1,)`` int32 or int64, ascending from 0: sequence b is rows
        ``cu[b]:cu[b + 1]`` of k_new.
      seqused_new: ``(batch,)``: only so many first tokens of each sequence are appended.
      page_table: ``(batch, max_pages)`` int32 or int64: row t of sequence b is row ``t % page_size`` of page
        ``page_table[b, t // page_size]``. Entries that no new token needs may hold anything.
      cache_batch_idx: ``(batch,)``: the entry that sequence b is written to.
      leftpad_k: ``(batch,)``: rows of padding at the start of each sequence. It moves no row; ``check``
        compares it with cache_seqlens.
      slot_mapping: ``(total_new,)`` int32 or int64, in place of all lengths and tables above: token t goes to
        row ``slot % seqlen`` of entry (or page) ``slot // seqlen``. Below 0: it is not appended.
      k_scale: float32 scales of an 8-bit cache, ``(1,)`` or ``(batch, heads_kv)``, with slot_mapping ``(1,)``
        or ``(1, heads_kv)``: codes are ``value / scale``, rounded to nearest even and saturated. Default 1.
        NaN and infinities become float8_e4m3fn's NaN, and 0 in int8, which has none. Where codes become
        values, those of k_new: of rows that are not packed also ``(batch, heads_kv, seqlen_new)``.
      v_scale: likewise.
      k_scale_cache: float32, written, in place of k_scale: a scale for each row and head of an 8-bit cache,
        found as ``quantize(..., granularity="row")`` finds it. ``(entries or pages, heads_kv, rows)`` of
        k_cache with any strides: what ``attention`` takes as ``k_scale``. Those of rows that are not appended
        stay as they are. A row of zeros has scale 0; an int8 row that holds a NaN or an infinity, NaN.
      v_scale_cache: likewise.
      rotary_cos: ``(positions, rotary_dim / 2)`` float32 or k_new's dtype, with ``rotary_sin``: a rotary
        embedding of k_new, and of ``q``, at positions ``cache_seqlens[b] + j``. rotary_dim is a multiple of
        16 up to head_dim.
      rotary_sin: likewise.
      rotary_interleaved: pairs are channels 2 c and 2 c + 1, not c and c + rotary_dim / 2.
      rotary_offsets: ``(batch,)``, in place of cache_seqlens for positions; with slot_mapping
        ``(total_new,)``, the position of each token, and needed.
      q: queries of the same tokens, ``(batch, seqlen_new, heads_q, head_dim)`` or ``(total_new, heads_q,
        head_dim)``, to be embedded too.
      check: also check what the integers contain: lengths fit, pages and positions exist, no two tokens go to
        one row. Without it a token without a row is left out, a position outside the tables takes their
        nearest row, and of tokens that go to one row the last is kept, whole.
      threads: as in ``attention``.

    Returns:
      The embedded queries, with 0 in rows of no token in use; None without ``q``.

    Raises:
      As ``attention``. No gradient flows through a cache: inputs that require one are an error.
    """
    interleaved, check = _call.flag("rotary_interleaved", rotary_interleaved), _call.flag("check", check)
    inputs: dict[str, Any] = {
        "k_new": k_new,
        "v_new": v_new,
        "cu_seqlens_new": cu_seqlens_new,
        "seqused_new": seqused_new,
        "page_table": page_table,
        "cache_batch_idx": cache_batch_idx,
        "leftpad_k": leftpad_k,
        "cache_seqlens": cache_seqlens,
        "slot_mapping": slot_mapping,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_offsets": rotary_offsets,
        "q": q,
    }
    library = _arrays.library_of("k_new", k_new)
    caches: dict[str, Any] = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_scale_cache": k_scale_cache,
        "v_scale_cache": v_scale_cache,
    }
    for name, array in (*inputs.items(), *caches.items()):
        if array is not None or name == "k_cache":
            _arrays.expect(name, array, library, "k_new")
    arguments = (*inputs.values(), *caches.values(), interleaved, check, threads)
    embedded: Any
    if _arrays.is_torch(k_new):
        from tandem.torch import _calls

        embedded = _calls.append_kv(*arguments)
    else:
        embedded = _run.append_kv(*arguments)
    return None if q is None else embedded


def merge(
    outs: Array | Sequence[Array],
    lses: Array | Sequence[Array],
    *,
    out_dtype: Any = None,
    threads: int = 0,
) -> tuple[Array, Array]:
    """Attention of the same queries over disjoint sets of keys, merged into attention over all of them.

    ``lse = log(sum(exp(lses)))`` and ``out = sum(exp(lses - lse) * outs)``, whatever the size of the logits.
    A part whose LSE is -inf is empty: its out counts for nothing, whatever it holds. Where all parts of a row
    are empty, out is 0 and the LSE -inf; where one alone is not, its values are kept as they are. An LSE of
    +inf or NaN makes its row NaN.

    Args:
      outs: results of ``attention`` of one shape and dtype, float32, float16 or bfloat16, as a sequence or as
        one array with the parts in its first dimension.
      lses: their LSEs, natural logarithms, in the same order; float32.
      out_dtype: "f32", "f16" or "bf16" (or the library's dtype) of the result. Default: that of outs.
      threads: as in ``attention``.

    Returns:
      ``(out, lse)``.

    Raises:
      As ``attention``. The result has no gradient: inputs that require one are an error.
    """
    parts, statistics = _parts("outs", outs), _parts("lses", lses)
    if not parts:
        raise InvalidArgumentError("outs has no parts; pass one at least")
    library = _arrays.library_of("outs", parts[0])
    for name, arrays in (("outs", parts), ("lses", statistics)):
        for i, array in enumerate(arrays):
            _arrays.expect(f"{name}[{i}]", array, library, "outs")
    dtype = None if out_dtype is None else _arrays.dtype_named(out_dtype)
    results: Any
    if _arrays.is_torch(parts[0]):
        from tandem.torch import _calls

        results = _calls.merge(parts, statistics, dtype, threads)
    else:
        results = _run.merge(parts, statistics, dtype, threads)
    return results  # type: ignore[no-any-return]


def _parts(name: str, arrays: Any) -> list[Any]:
    if isinstance(arrays, (list, tuple)):
        return list(arrays)
    _arrays.library_of(name, arrays)
    if arrays.ndim < 1:
        raise InvalidArgumentError(f"{name} has 0 dimensions; the first one is that of the parts")
    return [arrays[i] for i in range(arrays.shape[0])]
