"""Transformers' continuous batching (generate_batch) on Tandem.

Transformers lets three kinds of attention into it: its own eager and sdpa, and what has "flash" in its name,
whose layers get the lengths of sequences in place of a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem._api import attention
from tandem.integrations import _instead

_names: set[str] = set()

#: What Transformers tells every layer of the requests, which its cache or its logits work with.
TOLD = frozenset("block_table logits_indices logits_processor_args read_index write_index".split())


def serve(name: str) -> None:
    """Makes Transformers take `name`, of a registered attention, although it has "flash" in it: models would
    otherwise look for a kernel of that name to download, or take one that they prefer."""
    _names.add(name)
    adjust: Callable[..., str] = PreTrainedModel._check_and_adjust_attn_implementation
    if getattr(adjust, "knows_tandem", False):
        return

    @functools.wraps(adjust)
    def adjusted(model: Any, attn_implementation: str | None, *arguments: Any, **options: Any) -> str:
        if attn_implementation in _names:
            return attn_implementation
        return adjust(model, attn_implementation, *arguments, **options)

    adjusted.knows_tandem = True  # type: ignore[attr-defined]
    PreTrainedModel._check_and_adjust_attn_implementation = adjusted


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    said: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """One layer's tokens of all requests, (1, heads, tokens, head_dim), behind what its paged cache has of
    them; the cache takes the new ones first. `said` is what Transformers tells of the requests, `options` are
    attention()'s."""
    if options["cu_seqlens_q"] is None or said.get("cu_seq_lens_k") is None:
        _instead.refuse("a cache without the lengths of requests", "leave the cache to the model")
    if said.get("block_table") is not None:
        _instead.refuse("a block table in continuous batching", "set max_blocks_per_request=0")
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=said)
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    # The cache has put the layer's own lengths in their place.
    out = attention(q, k, v, cu_seqlens_k=said["cu_seq_lens_k"], causal=True, **options)
    return out.unsqueeze(0), None
