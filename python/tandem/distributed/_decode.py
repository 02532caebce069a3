"""Attention of few queries over a cache whose keys are divided among the ranks of a process group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem import _arrays, _cache, _call
from tandem._errors import InvalidArgumentError
from tandem.distributed import _agree
from tandem.distributed._begin import validate_tensor
from tandem.distributed._cache_layout import CacheLayout
from tandem.distributed._comm import Ranks
from tandem.torch import _derivatives

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tandem._api import Options

#: What it takes of the options of calls over ranks: dropout would need to know which keys are a rank's.
_OPTIONS = tuple(name for name in _call.PARTS if not name.startswith("dropout_"))


@dataclass(frozen=True)
class _Asked:
    """A call as the caller made it."""

    call: _call.Call  #: its options
    q: Any
    k: Any
    v: Any
    cache: Any
    seqused_k: Any
    page_table: Any
    k_scale: Any
    v_scale: Any
    sink: Any


def context_parallel_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache: CacheLayout,
    group: Any = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Exact attention of the same queries on every rank over a cache of which each rank has some keys.

    Each rank attends to its own keys, with results in float32, and the results of all are merged: what one
    device with the whole cache would have given, within the same bounds, and the same bits on every rank.
    What is sent does not depend on how long the sequences are. For decoding: there are no gradients, and with
    a mask several queries of a sequence read its keys once each.

    Args:
      q: ``(batch, seqlen_q, heads_q, head_dim)``, the last tokens of the sequences; the same on every rank.
      k, v: the rank's own cache, ``(batch, rows, heads_kv, head_dim)`` with ``cache.rows(rank)`` rows at
        least, or with ``page_table`` ``(pages, page_size, heads_kv, head_dim)``, in its own pages. Also of 8
        bits, as for ``tandem.attention``. A rank may be without rows.
      cache: which rank holds which rows; the same on every rank.
      group: a ProcessGroup, or a DeviceMesh of one or two dimensions; None is all processes.
      seqused_k: ``(batch,)`` int32 or int64: rows of each sequence on all ranks together, the new tokens'
        among them; the same on every rank. Default: ``cache.seqlen``. More are an error, but with lengths on
        a GPU and without ``check``, which take no more than there are.
      page_table: ``(batch, max_pages)`` of this rank: the i-th of its rows of sequence b is row ``i %
        page_size`` of page ``page_table[b, i // page_size]``. Entries past a sequence's end may hold
        anything.
      k_scale, v_scale: of an 8-bit cache, as for ``tandem.attention``: ``(1,)`` or ``(batch, heads_kv)``.
      sink: ``(heads_q,)`` float32, the same on every rank; it joins once.
      return_lse: also return the log-sum-exp, float32 ``(batch, heads_q, seqlen_q)``.
      options: as for ``tandem.attention`` (``causal``, ``scale``, ...), of whole sequences: a causal query i
        sees keys up to ``i + seqused_k - seqlen_q``. Those that are not taken are an error that says so.
      check: compare the arguments of all ranks, as `context_parallel_attention` does. Among them are
        seqused_k's numbers, for which a GPU's stream is waited for. On by default; it has to be the same on
        every rank.

    torch.compile leaves the call out of its graphs.

    Returns:
      The result, on every rank, in q's dtype; with ``return_lse`` a pair of it and the LSE. A query that sees
      no key gives 0 and -inf (with a sink: 0 and the sink).

    Raises:
      TandemError: on every rank where one of them has passed something wrong or two disagree, before results
        are sent (with ``check``). ExecutionError as `context_parallel_attention` does.
    """
    given: dict[str, Any] = {"check": True, **options}
    call = _call.of_options("context_parallel_decode", given, _OPTIONS)
    asked = _Asked(call, q, k, v, cache, seqused_k, page_table, k_scale, v_scale, sink)
    return _run(asked, Ranks.of(group), return_lse)


def _decode(asked: _Asked, ranks: Ranks, return_lse: Any) -> Any:
    """`context_parallel_decode`."""
    check = asked.call.check
    with _agree.agreed(ranks, "context_parallel_decode", check) as same:
        return_lse, check = _call.flag("return_lse", return_lse), _call.flag("check", check)
        same |= _validate(ranks, asked, check)
        # Before ranks are compared, so that what only the call itself can find wrong is told to all.
        out, lse = _of_rank(ranks.rank, asked)
    outs, lses = _of_all(ranks, out, lse)
    merged, whole_lse = _cache.merge(outs, lses, out_dtype=asked.q.dtype)
    return (merged, whole_lse) if return_lse else merged


#: What it does depends on what other ranks tell, which torch.compile does not follow.
_run: Any = torch.compiler.disable(_decode)  # type: ignore[no-untyped-call]


def _validate(ranks: Ranks, asked: _Asked, check: bool) -> dict[str, Any]:
    """What has to be the same on every rank; an error where this rank's arguments break a rule."""
    cache, q, k = asked.cache, asked.q, asked.k
    if not isinstance(cache, CacheLayout):
        raise InvalidArgumentError(f"cache is {cache!r}; make one with tandem.distributed.CacheLayout")
    if cache.ranks != ranks.size:
        raise InvalidArgumentError(f"cache is for {cache.ranks} ranks, but the group has {ranks.size}")
    for name in ("q", "k", "v"):
        t = getattr(asked, name)
        validate_tensor(name, t, ranks)
        if t.ndim != 4:
            rows = "seqlen_q" if name == "q" else "rows"
            raise InvalidArgumentError(
                f"{name} has shape {tuple(t.shape)}; it must be (batch, {rows}, heads, head_dim)"
            )
    _validate_rows(ranks.rank, asked, check)
    tensors = (q, k, asked.v, asked.sink)
    _derivatives.validate_unrecorded(
        "distributed.context_parallel_decode", dict(zip(("q", "k", "v", "sink"), tensors, strict=True))
    )
    call = asked.call.plain()
    window = call.window
    if any(isinstance(side, bool) or not isinstance(side, int) or side < -1 for side in window):
        raise InvalidArgumentError(f"window is {window}; sides are integers, at least 0, or -1 for unbounded")
    lengths = asked.seqused_k
    return _agree.options_of(call) | {
        "dtype of q": str(q.dtype).removeprefix("torch."),
        "dtype of k": str(k.dtype).removeprefix("torch."),
        "device": q.device.type,
        "shape of q": tuple(q.shape),
        "heads and head_dim of k": tuple(k.shape[2:]),
        "heads and head_dim of v": tuple(asked.v.shape[2:]),
        "sink": asked.sink is not None,
        "cache": cache,
        "seqused_k": tuple(lengths.tolist()) if check and lengths is not None else lengths is not None,
    }


def _validate_rows(rank: int, asked: _Asked, check: bool) -> None:
    """An error where the rank's cache has not the room for its rows, or lengths are none."""
    batch, rows, table = asked.q.shape[0], asked.cache.rows(rank), asked.page_table
    lengths, seqlen = asked.seqused_k, asked.cache.seqlen
    if lengths is not None:
        _arrays.validate_tensor("seqused_k", lengths, asked.q, (batch,), *_arrays.INTEGERS)
        if check or lengths.is_cpu:
            for b in ((lengths < 0) | (lengths > seqlen)).nonzero()[:1].flatten().tolist():
                raise InvalidArgumentError(
                    f"seqused_k[{b}] is {int(lengths[b])}, but cache has 0 to {seqlen} rows of a sequence; "
                    "end the sequence, or make a cache of more rows"
                )
    if table is not None:
        _arrays.validate_tensor("page_table", table, asked.q, (batch, "max_pages"), *_arrays.INTEGERS)
    elif asked.k.shape[0] != batch:
        raise InvalidArgumentError(f"k has a batch of {asked.k.shape[0]}, but q one of {batch}; pass as many")
    room = asked.k.shape[1] * (1 if table is None else table.shape[1])
    if room < rows:
        raise InvalidArgumentError(
            f"k has room for {room} rows of a sequence, but cache gives rank {rank} {rows}; pass a cache of "
            "cache.rows(rank) rows at least"
        )


def _of_rank(rank: int, asked: _Asked) -> tuple[Tensor, Tensor]:
    """Attention over the rank's own keys, in f32, and its LSE. The sink joins on the first rank."""
    cache, (batch, queries, heads, _) = asked.cache, asked.q.shape
    left, right = asked.call.window
    right = 0 if asked.call.causal else right
    given = asked.seqused_k
    if given is None:
        lengths = torch.full((batch,), cache.seqlen, device=asked.q.device)
    else:
        lengths = given.to(torch.int64).clamp(0, cache.seqlen)
    # A mask leaves a query a range of the sequence's rows, and so a range of the rank's rows, which another
    # query's need not be at an equal distance of: each is a sequence of its own.
    apart = queries > 1 and (left >= 0 or right >= 0)
    begin, end = _seen(lengths, queries if apart else 1, left, right)
    used, padding = (cache.before(rank, t).to(torch.int32) for t in (end, begin))
    q = asked.q.reshape(-1, 1, *asked.q.shape[2:]) if apart else asked.q
    table, entries = asked.page_table, None
    if apart and table is None:
        entries = torch.arange(batch, dtype=torch.int32, device=q.device).repeat_interleave(queries)
    k_scale, v_scale, table = (
        t.repeat_interleave(queries, 0) if apart and t is not None and t.ndim == 2 else t
        for t in (asked.k_scale, asked.v_scale, table)
    )
    metadata = dict(
        seqused_k=used,
        k_scale=k_scale,
        v_scale=v_scale,
        page_table=table,
        leftpad_k=padding if left >= 0 else None,
        cache_batch_idx=entries,
    )
    of_rank = tuple(metadata.get(name) for name in _call.METADATA)
    call = replace(asked.call, causal=False, window=(-1, -1), check=False, metadata=of_rank)
    out = q.new_empty((*q.shape[:-1], asked.v.shape[-1]), dtype=torch.float32)
    sink = asked.sink if rank == 0 else None
    _, lse, _ = _call.forward(call, q, asked.k, asked.v, sink, return_lse=True, out=out)
    if apart:
        out = out.view(batch, queries, heads, -1)
        lse = lse.view(batch, queries, heads).transpose(1, 2).contiguous()
    return out, lse


def _seen(lengths: Tensor, queries: int, left: int, right: int) -> tuple[Tensor, Tensor]:
    """The first row and the last one + 1 that each query of each sequence sees."""
    place = lengths[:, None] - queries + torch.arange(queries, device=lengths.device)
    length = lengths[:, None].expand_as(place)
    end = length if right < 0 else (place + right + 1).clamp(min=0).minimum(length)
    begin = torch.zeros_like(end) if left < 0 else (place - left).clamp(min=0).minimum(end)
    return begin.reshape(-1), end.reshape(-1)


def _of_all(ranks: Ranks, out: Tensor, lse: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The results of every rank, by rank."""
    came = ranks.gather_equal(torch.cat([out.reshape(-1), lse.reshape(-1)]))
    outs, lses = torch.split(came, [out.numel(), lse.numel()], 1)
    return [t.view(out.shape) for t in outs], [t.view(lse.shape) for t in lses]
