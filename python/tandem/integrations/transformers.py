"""Transformers models on Tandem.

import tandem.integrations.transformers

tandem.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tandem")

Prefill, generation with a cache, training, sliding windows, softcap, sinks, grouped queries, padding on
either side, sequences packed by cu_seq_lens or position_ids, cross-attention and dropout in attention;
position biases (T5) and mask tensors (Swin, 4D masks), with their gradients. What Tandem lacks
(those in a compiled model, keys chosen for each query, the attention's weights as an output) is an error that
says what to do; so are other models that compute their attention themselves.
`register(unsupported="sdpa")` hands what PyTorch's attention can do to it instead, and says so in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as makers

from tandem._api import attention
from tandem._errors import InvalidArgumentError, UnsupportedError
from tandem.integrations import _batching, _instead, _masks, _ranks
from tandem.integrations._masks import Mask
from tandem.integrations._patterns import EAGER, Pattern
from tandem.integrations._ranks import context_parallel

__all__ = ["Mask", "attention_forward", "attention_mask", "context_parallel", "register"]


def register(
    name: str = "tandem",
    unsupported: str = "error",
    precision: str = "exact",
    backward_precision: str = "exact",
) -> None:
    """Makes ``attn_implementation=name`` known to Transformers (5 or later): attention and its masks.

    Args:
      name: what models are loaded with. One with "flash" in it, "tandem_flash" say, is taken by Transformers'
        continuous batching (``generate_batch``) too, which refuses other names.
      unsupported: what becomes of a call that Tandem lacks something for. "error" raises UnsupportedError.
        "sdpa" hands it to PyTorch's scaled_dot_product_attention where that computes the same: masks that
        Tandem does not know, head dimensions above 256 on a GPU or 1024 on the CPU, float64, and in a
        compiled model position biases, 4D masks and dropout. Each such reason is said once, as a warning to
        ``logging.getLogger("tandem")``; what PyTorch lacks too stays an error.
      precision, backward_precision: those of ``tandem.attention``, for every call of the model.

    Raises:
      InvalidArgumentError: another choice of ``unsupported``.
    """
    if unsupported not in ("error", "sdpa"):
        raise InvalidArgumentError(f'unsupported is {unsupported!r}; it must be "error" or "sdpa"')
    _instead.forget()
    _instead.refuse_where_attention_is_chosen_by_class(name)
    forward: Callable[..., Any] = attention_forward
    mask: Callable[..., Any] = attention_mask
    if (precision, backward_precision) != ("exact", "exact"):
        forward = partial(forward, precision=precision, backward_precision=backward_precision)
    if unsupported == "sdpa":
        forward, mask = partial(forward, unsupported=unsupported), partial(mask, unsupported=unsupported)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    _instead.refuse_weights_of_pix2struct()
    if "flash" in name:
        _batching.serve(name)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = makers.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    device: Any = "cpu",
    unsupported: str = "error",
    **said: Any,
) -> Mask | Tensor:
    """The mask function: Transformers' description of a mask, as a `Mask`.

    Query i stands at position q_offset + i, key j at kv_offset + j. ``attention_mask`` is (batch, positions),
    true where there is a token. Whether all are is asked once a mask, which on a GPU waits for it; without a
    padding mask nothing does, and a compiled model asks nothing: it takes every batch for a padded one.
    """
    if isinstance(attention_mask, Mask):  # made earlier in this forward pass
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    try:
        mask = _masks.make(mask_function, shape, q_offset, kv_offset, attention_mask, device, said)
        return replace(mask, joins=device) if unsupported == "sdpa" else mask
    except UnsupportedError as error:
        if unsupported != "sdpa":
            raise
        reason = str(error).partition("; ")[0]
    _instead.say(reason)
    seen: Tensor = makers.sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        use_vmap=said.get("use_vmap", False),
        device=device,
    )
    return seen


#: What helps where a model makes no mask at all.
NO_MASK = "pass a 2D mask if the model takes one, or " + EAGER

#: What models and their callers pass on to every layer, and no attention works with.
_HARMLESS = frozenset(
    "position_ids position_embeddings cache_position num_items_in_batch max_length_q max_length_k seq_idx "
    "token_type_ids mm_token_type_ids input_ids inputs_embeds labels shift_labels decoder_input_ids "
    "encoder_hidden_states encoder_attention_mask logits_to_keep output_hidden_states vision_feature_layer "
    "vision_feature_select_strategy".split()
)


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
    context_parallel: _ranks.Divided | None = None,
    deterministic: bool = False,
    unsupported: str = "error",
    precision: str = "exact",
    backward_precision: str = "exact",
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function: (batch, heads, seqlen, head_dim) in, (batch, seqlen, heads, head_dim) out."""
    _instead.refuse_weights(output_attentions)
    if isinstance(scaling, Tensor):
        _instead.refuse("a scale that is a tensor", EAGER)
    for name, given in unused.items():
        told = name in _HARMLESS or (cache is not None and name in _batching.TOLD)
        if given is None or isinstance(given, bool) or told:
            continue
        kind = ", a tensor" if isinstance(given, Tensor) else f"{given!r}" if isinstance(given, int) else ""
        _instead.refuse(f"attention with {name}={kind}", EAGER)
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sink": None if s_aux is None else s_aux.float(),
        "deterministic": deterministic,
    }
    if (precision, backward_precision) != ("exact", "exact"):
        options |= {"precision": precision, "backward_precision": backward_precision}
    if cache is not None:
        if dropout != 0.0 or position_bias is not None:
            wish = "a position bias" if dropout == 0.0 else "dropout in attention"
            _instead.refuse(f"{wish} in continuous batching", EAGER)
        options["window"] = (-1 if sliding_window is None else sliding_window - 1, -1)
        options["cu_seqlens_q"] = cu_seq_lens_q
        said = {**unused, "cu_seq_lens_k": cu_seq_lens_k}
        return _batching.attend(module, query, key, value, cache, said, options)
    mask = _mask_of(module, query, key, attention_mask, is_causal, sliding_window)
    rows = mask.rows if isinstance(mask, Mask) else None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        rows = _packed(mask, cu_seq_lens_q, cu_seq_lens_k, query.shape[2], key.shape[2])
    lacking = _instead.lacking(query, value, mask, dropout, position_bias)
    if lacking is not None:
        if unsupported != "sdpa":
            _instead.refuse(*lacking)
        if softcap or s_aux is not None:
            beside = "a softcap" if softcap else "attention sinks"
            _instead.refuse(f"{lacking[0]} beside {beside}, which PyTorch's sdpa lacks", EAGER)
        _instead.say(f"this model asks for {lacking[0]}, which Tandem does not have")
        seen = mask if isinstance(mask, Tensor) else _masks.dense(mask, query.device, rows)
        wanted = {"dropout": dropout, "scaling": scaling, "position_bias": position_bias}
        return _instead.sdpa(module, query, key, value, seen, **wanted)
    if context_parallel is not None:
        _instead.refuse_beside_ranks(mask, dropout, position_bias)
    # Attention between channels hands on views whose head dimension is not the innermost.
    q, k, v = ((t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in (query, key, value))
    if dropout != 0.0:
        options["dropout_p"] = dropout
    if isinstance(mask, Tensor) or (rows is not None and position_bias is not None):
        seen = mask if isinstance(mask, Tensor) else _masks.dense(mask, query.device, rows)
        return attention(q, k, v, **options, **_by_pair(seen, position_bias)), None
    options |= {"causal": mask.pattern.causal, "window": mask.pattern.window}
    if context_parallel is not None:
        return _ranks.attend(context_parallel, q, k, v, options), None
    if rows is None:
        options |= {"seqused_q": mask.seqused_q, "seqused_k": mask.seqused_k}
        options |= _by_pair(None, position_bias)
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


def _by_pair(mask: Tensor | None, position_bias: Tensor | None) -> dict[str, Any]:
    """The options of attention() for a mask tensor, of booleans or of numbers to be added, and a bias."""
    options: dict[str, Any] = {}
    if mask is not None and mask.dtype == torch.bool:
        options["mask"] = mask
    elif mask is not None:
        position_bias = mask if position_bias is None else position_bias + mask
    if position_bias is not None:
        options["bias"] = position_bias
    return options


def _mask_of(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    given: Any,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Mask | Tensor:
    """The mask of one layer's call, whose shape is that of the query and the key."""
    for name, tensor in (("query", query), ("key", key)):
        if tensor.ndim != 4:
            _instead.refuse(f"a {name} of {tensor.ndim} dimensions", EAGER)
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if key.shape[0] != batch:
        _instead.refuse(f"a batch of {batch} queries and {key.shape[0]} keys", EAGER)
    if isinstance(given, Tensor):
        return given
    if isinstance(given, Mask):
        if given.pattern.later:
            _instead.refuse("a window of no keys", EAGER)
        of_batch, _, of_queries, of_keys = given.shape
        # A mask that tells neither batches nor queries apart counts for each, as a tensor of size 1 would.
        each_batch = of_batch == 1 and given.valid is None and given.pattern.packed is None
        each_query = of_queries == 1 and not given.pattern.positional
        if (
            of_keys != keys
            or (of_queries != queries and not each_query)
            or (of_batch != batch and not each_batch)
        ):
            _instead.refuse(
                f"{queries} queries and {keys} keys in a batch of {batch} under a mask of {of_queries} "
                f"queries and {of_keys} keys in a batch of {of_batch}",
                EAGER,
            )
        return given
    if given is not None:
        _instead.refuse(f"a mask that is a {type(given).__name__}", EAGER)
    # The model makes no mask: its layers say what they are.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None and sliding_window < keys:
        # eager and sdpa pay this no heed without a mask, FlashAttention does.
        _instead.refuse(f"a window of {sliding_window} in {keys} keys without a mask", EAGER)
    if causal and queries > 1 and (queries != keys or is_causal is None):
        # Where the layer alone says that it is causal, sdpa heeds it, and eager lets a query see all keys.
        _instead.refuse(f"{queries} causal queries of {keys} keys without a mask", NO_MASK)
    return Mask(Pattern(bool(causal) and queries > 1), (batch, 1, queries, keys))


def _packed(
    mask: Mask | Tensor, cu_q: Tensor | None, cu_k: Tensor | None, queries: int, keys: int
) -> _masks.Rows:
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
    if isinstance(mask, Tensor) or (
        (mask.rows is not None and mask.pattern.packed is None) or mask.seqused_k is not None
    ):
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
