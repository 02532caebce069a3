"""Models that compute their attention themselves and yet ask for Transformers' mask: BLOOM and MPT. Where
that mask is Tandem's, their attention goes through it; else it is what it was. And modules that ask no layer
for the weights that they give.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from tandem.integrations import _instead
from tandem.integrations._masks import Mask
from tandem.integrations._patterns import EAGER

_Attend = Callable[..., Any]


def _bloom(
    attend: _Attend, layer: Any, hidden_states: Any, residual: Any, alibi: Any, mask: Mask, cache: Any
) -> Any:
    if layer.pretraining_tp > 1 and layer.slow_but_exact:
        _instead.refuse("BLOOM's slow_but_exact products of several ranks", EAGER)
    q, k, v = layer._reshape(layer.query_key_value(hidden_states))
    if cache is not None:
        k, v = cache.update(k, v, layer.layer_idx)
    bias = layer.beta * alibi.view(q.shape[0], layer.num_heads, -1, k.shape[2])
    dropout = layer.attention_dropout.p if layer.training else 0.0
    options = {"dropout": dropout, "scaling": layer.inv_norm_factor, "position_bias": bias}
    out, _ = attend(layer, q, k, v, mask, **options, unsupported=_wish(mask))
    out = layer.dense(out.flatten(2))
    out = torch.nn.functional.dropout(out, p=layer.hidden_dropout, training=layer.training)
    return residual + out, None


def _mpt(attend: _Attend, layer: Any, hidden_states: Any, position_bias: Any, cache: Any, mask: Mask) -> Any:
    qkv = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        qkv = qkv.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
    shape = (*hidden_states.shape[:2], layer.n_heads, layer.head_dim)
    q, k, v = (t.reshape(shape).transpose(1, 2) for t in qkv.chunk(3, dim=2))
    if cache is not None:
        k, v = cache.update(k, v, layer.layer_idx)
    bias = None
    if position_bias is not None:  # (heads, 1, max_seq_len): those of the last keys
        bias = position_bias[:, -q.shape[2] :, -k.shape[2] :].to(q.dtype)
    dropout = layer.attn_dropout_p if layer.training else 0.0
    options = {"dropout": dropout, "scaling": layer.softmax_scale, "position_bias": bias}
    out, _ = attend(layer, q, k, v, mask, **options, unsupported=_wish(mask))
    return layer.out_proj(out.flatten(2)), None


def _wish(mask: Mask) -> str:
    """What becomes of a call that Tandem lacks something for: as register() was told for the mask's name."""
    return "error" if mask.joins is None else "sdpa"


def _of_bloom(own: _Attend, attend: _Attend) -> _Attend:
    @functools.wraps(own)
    def forward(
        self: Any,
        hidden_states: Any,
        residual: Any,
        alibi: Any,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(attention_mask, Mask):
            return own(
                self,
                hidden_states,
                residual,
                alibi,
                attention_mask,
                layer_past,
                use_cache,
                output_attentions,
                **kwargs,
            )
        _instead.refuse_weights(output_attentions)
        return _bloom(attend, self, hidden_states, residual, alibi, attention_mask, layer_past)

    return forward


def _of_mpt(own: _Attend, attend: _Attend) -> _Attend:
    @functools.wraps(own)
    def forward(
        self: Any,
        hidden_states: Any,
        position_bias: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(attention_mask, Mask):
            return own(self, hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
        return _mpt(attend, self, hidden_states, position_bias, past_key_values, attention_mask)

    return forward


def _that_asks(own: _Attend, attend: _Attend) -> _Attend:
    """A module that has the attention's weights as an output, of layers that it does not tell."""

    @functools.wraps(own)
    def forward(self: Any, *given: Any, **options: Any) -> Any:
        if any(isinstance(argument, Mask) for argument in (*given, *options.values())):
            _instead.refuse_weights(bool(options.get("output_attentions")))
        return own(self, *given, **options)

    return forward


_SERVED = (
    ("bloom", "BloomAttention", _of_bloom),
    ("mpt", "MptAttention", _of_mpt),
    ("mpt", "MptBlock", _that_asks),
    ("pix2struct", "Pix2StructVisionEncoder", _that_asks),
)


def serve(name: str) -> None:
    """Has those models call the attention function `name` where their mask is Tandem's."""

    def attend(*tensors: Any, **options: Any) -> Any:
        return AttentionInterface()[name](*tensors, **options)

    for model, layer_name, make in _SERVED:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        layer: Any = getattr(module, layer_name)
        own = getattr(layer.forward, "_tandem_own", layer.forward)
        served: Any = make(own, attend)
        served._tandem_own = own
        layer.forward = served
