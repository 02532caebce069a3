"""Transformers models on Tandem.

import tandem.integrations.transformers

tandem.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tandem")

Prefill, generation with a cache, training, sliding windows, softcap, sinks, grouped queries, padding on
either side, sequences packed by cu_seq_lens or position_ids, and cross-attention. What Tandem lacks (dropout
in attention, position biases, mask tensors made elsewhere, keys chosen for each query, the attention's
weights as an output) is an error that says what to do; so are models that compute their attention themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as makers

from tandem._api import attention
from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.integrations import _masks

__all__ = ["Mask", "attention_forward", "attention_mask", "register"]


def register(name: str = "tandem") -> None:
    """Makes ``attn_implementation=name`` known to Transformers (5 or later): attention and its masks."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


class _NoTensorError(UnsupportedError, AttributeError):
    """A mask used as the tensor that it is not. An AttributeError too: accelerate's hooks ask hasattr."""


def _no_tensor(*_: Any) -> NoReturn:
    raise _NoTensorError(
        "this model computes its attention itself, from a mask tensor, and Tandem's mask is none; load the "
        'model with attn_implementation="eager"'
    )


@dataclass(frozen=True, eq=False)
class Mask:
    """What stands for the mask in a model's layers: a rule and lengths, worked out once for all of them.

    `generate` makes masks before it calls a model, and hands them on as it would a 4D tensor. A model that
    takes it for one (in arithmetic, in PyTorch's functions, by its attributes) gets an error.
    """

    pattern: _masks.Pattern
    shape: tuple[int, int, int, int]  # of the tensor that it stands for: (batch, 1, queries, keys)
    #: sequences that do not fill their rows, or None: every row of the batch is one sequence
    rows: _masks.Rows | None = None
    #: without rows: ``(batch,)``, how many first keys there are and how many first queries ask
    seqused_k: Tensor | None = None
    seqused_q: Tensor | None = None

    ndim = 4

    def contiguous(self) -> Mask:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy, pickle and others look for, and do without
            raise AttributeError(f"Mask has no attribute {name}")
        _no_tensor()

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:  # Tensor + Mask, masked_fill, where and all others
        _no_tensor()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, Tensor)):
            _no_tensor()
        return self is other

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_tensor
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __invert__ = __neg__ = _no_tensor
    __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = _no_tensor


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = makers.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    device: Any = "cpu",
    **unused: Any,
) -> Mask:
    """The mask function: Transformers' description of a mask, as a `Mask`.

    Query i stands at position q_offset + i, key j at kv_offset + j. ``attention_mask`` is (batch, positions),
    true where there is a token. Whether all are is asked once a mask, which on a GPU waits for it; without a
    padding mask nothing does, and a compiled model asks nothing: it takes every batch for a padded one.
    """
    if isinstance(attention_mask, Mask):  # made earlier in this forward pass
        return attention_mask
    pattern = _masks.read(mask_function)
    mask = Mask(pattern, (batch_size, 1, q_length, kv_length))
    if pattern.packed is not None:
        return replace(mask, rows=_masks.packed_rows(pattern.packed))
    offset = q_offset - kv_offset
    # Keys that causal queries can see; a static cache has room for more.
    present = offset + q_length if pattern.causal else kv_length
    valid = None
    if attention_mask is not None and not _is_full(attention_mask, present, kv_length, kv_offset):
        valid = makers.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        positions = torch.arange(kv_length, device=valid.device)
        valid = valid[:, positions + kv_offset].bool() & (positions < present)
        if not torch.compiler.is_compiling() and bool((valid == (positions < present)).all()):
            valid = None
    if valid is None:
        if isinstance(present, int) and present == kv_length:
            return mask
        return replace(mask, seqused_k=torch.zeros(batch_size, dtype=torch.int64, device=device) + present)
    return _padded(mask, valid, offset)


def _is_full(attention_mask: Tensor, present: int | Tensor, kv_length: int, kv_offset: int) -> bool:
    """Whether a padding mask plainly hides nothing, by one operation: generation asks at every token."""
    if torch.compiler.is_compiling() or isinstance(present, Tensor):
        return False
    return attention_mask.shape[-1] - kv_offset >= min(present, kv_length) and bool(attention_mask.all())


def _padded(mask: Mask, valid: Tensor, offset: Any) -> Mask:
    """`mask` with the padding that `valid`, (batch, keys), leaves out. Query i stands at key offset + i."""
    pattern, (_, _, queries, keys) = mask.pattern, mask.shape
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
        return replace(mask, rows=_masks.padded_rows(valid, begin, end, queries, offset, pattern.causal))
    if bool((end - begin != count).any()):
        if pattern.window != (-1, -1):
            raise UnsupportedError(
                "the attention mask has padding between tokens of one sequence, under a sliding window; "
                'pad at one end (padding_side="left" to generate)'
            )
        return replace(mask, rows=_masks.chosen_rows(valid, queries, offset, pattern.causal))
    if bool((begin == 0).all()):
        seqused_q = (end - offset).clamp(0, queries) if pattern.causal else None
        return replace(mask, seqused_k=end, seqused_q=seqused_q)
    rows = _masks.padded_rows(valid, begin, end, queries, offset, pattern.causal)
    return replace(mask, rows=rows)


def _refuse(wish: str, remedy: str) -> NoReturn:
    raise UnsupportedError(f"this model asks for {wish}, which Tandem does not have; {remedy}")


#: What models and their callers pass on to every layer, and no attention works with.
_HARMLESS = frozenset(
    "position_ids position_embeddings cache_position num_items_in_batch max_length_q max_length_k seq_idx "
    "token_type_ids mm_token_type_ids input_ids inputs_embeds labels decoder_input_ids encoder_hidden_states "
    "encoder_attention_mask".split()
)


def _packed(mask: Mask, cu_q: Tensor | None, cu_k: Tensor | None, queries: int, keys: int) -> _masks.Rows:
    """The sequences that FlashAttention's cu_seq_lens_q and cu_seq_lens_k make of the one row of a batch."""
    if cu_q is None or cu_k is None:
        given, lacking = ("k", "q") if cu_q is None else ("q", "k")
        raise InvalidArgumentError(
            f"cu_seq_lens_q and cu_seq_lens_k belong together, but only cu_seq_lens_{given} is given; "
            f"pass cu_seq_lens_{lacking} too"
        )
    batch = mask.shape[0]
    if batch != 1:
        raise InvalidArgumentError(
            f"cu_seq_lens_q and cu_seq_lens_k take a batch of 1, in whose row all sequences lie, not "
            f"{batch}; put the sequences into one row, or leave these arguments out"
        )
    if (mask.rows is not None and mask.pattern.packed is None) or mask.seqused_k is not None:
        raise InvalidArgumentError(
            "cu_seq_lens_q and cu_seq_lens_k come with a mask that has padding, or with a static cache; "
            "packed sequences have neither: leave attention_mask and cache_implementation out"
        )
    rule = "cu_seq_lens_q and cu_seq_lens_k must end at the number of queries and of keys"
    remedy = "pass them to the call whose tokens they divide only (not to generate)"
    if cu_q.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = int(cu_q[-1]), int(cu_k[-1])
        if ends != (queries, keys):
            raise InvalidArgumentError(
                f"{rule}, {queries} and {keys}, not at {ends[0]} and {ends[1]}; {remedy}"
            )
    else:  # without waiting for the device
        torch._assert_async((cu_q[-1] == queries) & (cu_k[-1] == keys), f"{rule}; {remedy}")
    return _masks.Rows(cu_q, cu_k)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool = False,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function: (batch, heads, seqlen, head_dim) in, (batch, seqlen, heads, head_dim) out."""
    if dropout != 0.0:
        _refuse("dropout in attention", "set the configuration's attention dropout to 0")
    if position_bias is not None:
        _refuse("a position bias", 'load the model with attn_implementation="sdpa"')
    if cache is not None:
        _refuse("a paged cache of Transformers", "generate without continuous batching")
    if output_attentions:
        _refuse("the attention's weights", 'load the model with attn_implementation="eager"')
    for name, given in unused.items():
        if isinstance(given, Tensor) and name not in _HARMLESS:
            _refuse(f"attention with {name}=, a tensor", 'load the model with attn_implementation="eager"')
    if isinstance(attention_mask, Tensor):
        _refuse("a mask tensor", 'pass a 2D mask, or use "sdpa"')
    if attention_mask is None:  # the model makes no mask: its layers say what they are
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = (sliding_window - 1, 0 if causal else sliding_window - 1) if sliding_window else (-1, -1)
        shape = (query.shape[0], 1, query.shape[2], key.shape[2])
        attention_mask = Mask(_masks.Pattern(causal, window), shape)
    assert isinstance(attention_mask, Mask)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    pattern = attention_mask.pattern
    options: dict[str, Any] = {
        "scale": scaling,
        "causal": pattern.causal,
        "window": pattern.window,
        "softcap": softcap or 0.0,
        "sink": None if s_aux is None else s_aux.float(),
        "pad": True,
    }
    rows = attention_mask.rows
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        rows = _packed(attention_mask, cu_seq_lens_q, cu_seq_lens_k, query.shape[2], key.shape[2])
    if rows is None:
        options |= {"seqused_q": attention_mask.seqused_q, "seqused_k": attention_mask.seqused_k}
        return attention(q, k, v, **options), None
    batch, queries = q.shape[:2]
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    if rows.chosen_q is not None:
        q, k, v = q[rows.chosen_q], k[rows.chosen_k], v[rows.chosen_k]
    options |= {"cu_seqlens_q": rows.cu_seqlens_q, "cu_seqlens_k": rows.cu_seqlens_k}
    out = attention(q, k, v, **options, seqused_q=rows.seqused_q, seqused_k=rows.seqused_k)
    if rows.chosen_q is not None:
        whole = out.new_zeros(batch * queries, *out.shape[1:])
        out = whole.index_copy(0, rows.chosen_q, out)
    return out.unflatten(0, (batch, queries)), None
