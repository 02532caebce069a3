"""What stands for a mask in a model's layers: a rule, and the lengths of the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils as makers

from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.integrations import _patterns
from tandem.integrations._patterns import EAGER, SDPA, Pattern


@dataclass(frozen=True)
class Rows:
    """How the rows of (batch, seqlen) tensors make sequences, once flattened to (batch * seqlen)."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    chosen_q: Tensor | None = None  # indices: only these rows take part, in this order
    chosen_k: Tensor | None = None


def packed_rows(packed: Tensor) -> Rows:
    """Every run of equal numbers in a row of `packed` is a sequence; so is every row's start."""
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    cu_seqlens = pad(starts.flatten().nonzero().flatten(), (0, 1), value=packed.numel())
    return Rows(cu_seqlens, cu_seqlens)


def padded_rows(valid: Tensor, begin: Tensor, end: Tensor, queries: int, offset: Any, cut: bool) -> Rows:
    """Rows of padded sequences whose valid keys are `begin` to `end` (each (batch,)) of valid's seqlen.

    Query row i stands at key `offset` + i, and with `cut` those that stand at padding are left out. The rows
    before the first begin are a sequence of their own, and what follows a sequence's end is past its seqused,
    so padding neither sees nor is seen, without a copy.
    """
    batch, keys = valid.shape
    numbers = torch.arange(batch, device=valid.device)
    if cut:  # the queries that are tokens; their last stands at the last valid key
        begin_q, end_q = ((t - offset).clamp(0, queries) for t in (begin, end))
    else:
        begin_q, end_q = torch.zeros_like(begin), torch.full_like(end, queries)

    def bounds(starts: Tensor, seqlen: int) -> Tensor:
        return pad(pad(starts + numbers * seqlen, (1, 0)), (0, 1), value=batch * seqlen)

    def used(length: Tensor) -> Tensor:
        return pad(length, (1, 0))

    return Rows(bounds(begin_q, queries), bounds(begin, keys), used(end_q - begin_q), used(end - begin))


def chosen_rows(valid: Tensor, queries: int, offset: Any, cut: bool) -> Rows:
    """Rows of sequences with padding inside them: the valid rows are gathered, and the rest left out."""
    batch, _ = valid.shape
    asks = torch.ones(batch, queries, dtype=torch.bool, device=valid.device)
    if cut:
        asks = valid[:, torch.arange(queries, device=valid.device) + offset]

    def ends(mask: Tensor) -> Tensor:
        return pad(mask.sum(1).cumsum(0), (1, 0))

    return Rows(
        ends(asks),
        ends(valid),
        chosen_q=asks.flatten().nonzero().flatten(),
        chosen_k=valid.flatten().nonzero().flatten(),
    )


class _NoTensorError(UnsupportedError, AttributeError):
    """A mask used as the tensor that it is not. An AttributeError too, for those who ask hasattr."""


def _no_tensor(*_: Any) -> NoReturn:
    raise _NoTensorError(
        "this model computes its attention itself, from a mask tensor, and Tandem's mask is none; " + EAGER
    )


@dataclass(frozen=True, eq=False)
class Mask:
    """What stands for the mask in a model's layers: a rule and lengths, worked out once for all of them.

    `generate` makes masks before it calls a model, and hands them on as it would a 4D tensor. A model that
    takes it for one (in arithmetic, in PyTorch's functions, by its attributes) gets an error.
    """

    pattern: Pattern
    shape: tuple[int, int, int, int]  # of the tensor that it stands for: (batch, 1, queries, keys)
    offset: int | Tensor = 0  # the key at which query 0 stands
    valid: Tensor | None = None  # (batch, keys), false for padding; None: there is none
    #: sequences that do not fill their rows, or None: every row of the batch is one sequence
    rows: Rows | None = None
    #: without rows: ``(batch,)``, how many first keys there are and how many first queries ask
    seqused_k: Tensor | None = None
    seqused_q: Tensor | None = None
    #: where torch.cat makes a tensor of it, for PyTorch's attention; None: that is an error as all else
    joins: Any = None

    ndim = 4

    def contiguous(self) -> Mask:
        return self

    def to(self, *wanted: Any, **options: Any) -> Mask:
        """accelerate's hooks move it: the mask as it is. Of numbers it is an error."""
        to_numbers = any(isinstance(w, torch.dtype) for w in (*wanted, *options.values()))
        return _no_tensor() if to_numbers else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy, pickle and others look for, and do without
            raise AttributeError(f"Mask has no attribute {name}")
        _no_tensor()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        """Tensor + Mask, masked_fill, where and all others."""
        if function is not torch.cat or any(isinstance(m, Mask) and m.joins is None for m in given[0]):
            _no_tensor()
        masks = [dense(m, m.joins) if isinstance(m, Mask) else m for m in given[0]]
        return torch.cat(masks, *given[1:], **(options or {}))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, Tensor)):
            _no_tensor()
        return self is other

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_tensor
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __invert__ = __neg__ = _no_tensor
    __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = _no_tensor


def dense(mask: Mask, device: Any, rows: Rows | None = None) -> Tensor:
    """The boolean tensor that `mask` stands for, true where a query sees a key: PyTorch's attention takes it.

    `rows` are sequences that a caller packed into the one row of a batch, if any.
    """
    batch, _, queries, keys = mask.shape
    query = torch.arange(queries, device=device)[:, None] + mask.offset
    key = torch.arange(keys, device=device)[None]
    same = None
    if rows is not None and rows is not mask.rows:  # places count from each sequence's last
        ends_q, ends_k = rows.cu_seqlens_q[1:].to(device), rows.cu_seqlens_k[1:].to(device)
        of_query = torch.searchsorted(ends_q, query.flatten(), right=True)
        of_key = torch.searchsorted(ends_k, key.flatten(), right=True)
        same = of_query[:, None] == of_key[None]
        query = query - ends_q[of_query][:, None]
        key = key - ends_k[of_key][None]
    left, right = mask.pattern.window
    seen = key <= query if mask.pattern.causal else torch.ones_like(key <= query)
    if left >= 0:
        seen = seen & (key >= query - left)
    if right >= 0:
        seen = seen & (key <= query + right)
    if same is not None:
        return (seen & same)[None, None]
    seen = seen[None, None].expand(batch, 1, queries, keys)
    if (packed := mask.pattern.packed) is not None:
        seen = seen & (packed[:, None, :, None] == packed[:, None, None, :])
    return seen if mask.valid is None else seen & mask.valid[:, None, None, :]


def make(
    function: Callable[..., Any],
    shape: tuple[int, int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    device: Any,
    said: dict[str, Any],
) -> Mask:
    """The `Mask` for what this integration's mask function is asked for; `said` are its other arguments."""
    batch, _, queries, keys = shape
    offset = q_offset - kv_offset
    if padding is not None and (padding.ndim != 2 or padding.shape[0] != batch):
        raise InvalidArgumentError(
            f"attention_mask must be of shape (batch, positions) with a batch of {batch}, not "
            f"{tuple(padding.shape)}; pass a row for each sequence"
        )
    compiled_packing = (
        torch.compiler.is_compiling()
        and padding is None
        and queries == keys
        and isinstance(offset, int)
        and offset == 0
        and not said.get("allow_is_causal_skip", True)
        and "allow_is_bidirectional_skip" not in said  # those masks are never joined with one for packing
        and not said.get("use_vmap", False)  # a function of the user's own
        and _patterns.may_be_packed(function)
    )
    if compiled_packing:
        window = said.get("local_size")
        pattern = Pattern(True, (-1, -1) if window is None else (window - 1, -1))
        _patterns.assert_describes(function, pattern, batch, queries, device)
    else:
        pattern = _patterns.read(function)
    mask = Mask(pattern, shape, offset)
    if (packed := pattern.packed) is not None:
        if packed.shape != (batch, queries) or queries != keys or padding is not None:
            raise UnsupportedError(
                f"this model packs sequences of shape {tuple(packed.shape)} into {batch} rows of {queries} "
                f"queries and {keys} keys, or beside padding, which Tandem does not read; {SDPA}"
            )
        return replace(mask, rows=packed_rows(packed))
    # Keys that causal queries can see; a static cache has room for more.
    present = offset + queries if pattern.causal else keys
    _check_alignment(pattern, queries, keys, offset)
    valid = None
    if padding is not None and not _is_full(padding, present, keys, kv_offset):
        valid = makers.prepare_padding_mask(padding, keys, kv_offset)
        positions = torch.arange(keys, device=valid.device)
        valid = valid[:, positions + kv_offset].bool() & (positions < present)
        if not torch.compiler.is_compiling() and bool((valid == (positions < present)).all()):
            valid = None
    if valid is None:
        if isinstance(present, int) and present == keys:
            return mask
        return replace(mask, seqused_k=torch.zeros(batch, dtype=torch.int64, device=device) + present)
    return _padded(replace(mask, valid=valid), offset)


def _check_alignment(pattern: Pattern, queries: int, keys: int, offset: int | Tensor) -> None:
    """Whether the last query stands at a key that there is, and in a window without causality at the last."""
    if not pattern.positional or (pattern.causal and isinstance(offset, Tensor)):
        return  # a tensor is the length of a static cache, which has the room
    last = offset + queries
    if bool(last > keys) if pattern.causal else bool(last != keys):
        raise UnsupportedError(
            f"this model's {queries} queries stand at keys {int(offset)} to {int(last) - 1} of {keys}, under "
            f"{'a causal mask' if pattern.causal else 'a window without causality'} that Tandem aligns to "
            f"the last key; {SDPA}"
        )


def _is_full(padding: Tensor, present: int | Tensor, keys: int, kv_offset: int) -> bool:
    """Whether a padding mask plainly hides nothing, by one operation: generation asks at every token."""
    if torch.compiler.is_compiling() or isinstance(present, Tensor):
        return False
    return padding.shape[-1] - kv_offset >= min(present, keys) and bool(padding.all())


def _padded(mask: Mask, offset: Any) -> Mask:
    """`mask` with the rows that its padding leaves. Query i stands at key offset + i."""
    valid, (_, _, queries, keys) = mask.valid, mask.shape
    assert valid is not None
    # Rows are aligned by their last query and last key, so where places matter a query at padding is cut as
    # its key is.
    cut = mask.pattern.positional
    some = valid.any(1)
    count = valid.sum(1)
    begin = torch.where(some, valid.int().argmax(1), keys)
    end = torch.where(some, keys - valid.flip(1).int().argmax(1), keys)
    if torch.compiler.is_compiling():  # one graph for every padding at an end; the rest is found as it runs
        torch._assert_async(
            (end - begin == count).all(),
            "the attention mask has padding between tokens of one sequence, which a compiled model cannot "
            "tell in time; pad at one end, or do not compile",
        )
        return replace(mask, rows=padded_rows(valid, begin, end, queries, offset, cut))
    if bool((end - begin != count).any()):
        if mask.pattern.window != (-1, -1):
            raise UnsupportedError(
                "the attention mask has padding between tokens of one sequence, under a sliding window; pad "
                'at one end (padding_side="left" to generate), or register with unsupported="sdpa"'
            )
        return replace(mask, rows=chosen_rows(valid, queries, offset, cut))
    if bool((begin == 0).all()):
        seqused_q = (end - offset).clamp(0, queries) if cut else None
        return replace(mask, seqused_k=end, seqused_q=seqused_q)
    return replace(mask, rows=padded_rows(valid, begin, end, queries, offset, cut))
