"""Models of Transformers with random weights, and what computes their attention: for gpu-models."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

os.environ["HF_HUB_OFFLINE"] = "1"
import tandem.integrations.transformers  # noqa: E402
import transformers  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `needs_mask`: PyTorch's attention gets a mask tensor, or cannot compute it at all."""

    config: str
    hidden: int
    intermediate: int
    heads: tuple[int, int]  #: of queries and of keys
    head_dim: int
    needs_mask: bool = False
    more: tuple[tuple[str, Any], ...] = ()


SHAPES = {
    "llama": Shape("LlamaConfig", 2048, 5632, (16, 4), 128),
    "qwen3": Shape("Qwen3Config", 2048, 6144, (16, 8), 128),  # Qwen3-1.7B's
    "gemma3": Shape(  # Gemma-3-4B's: of six layers, five have a window
        "Gemma3TextConfig", 2560, 10240, (8, 4), 256, True, (("sliding_window", 1024),)
    ),
    "gpt-oss": Shape(  # gpt-oss-20b's with 8 of its 32 experts: sinks, and a window in every other layer
        "GptOssConfig", 2880, 2880, (64, 8), 64, True, (("sliding_window", 128), ("num_local_experts", 8))
    ),
}
VOCABULARY = 32000

#: What computes attention: the name in Transformers, and the backend that PyTorch's is held to. "none" puts
#: three tensors' sum in attention's place, so that what is left of the time is the rest of the model.
KINDS: dict[str, tuple[str, SDPBackend | None]] = {
    "tandem": ("tandem", None),
    "sdpa": ("sdpa", None),
    "cudnn": ("sdpa", SDPBackend.CUDNN_ATTENTION),
    "fa2": ("sdpa", SDPBackend.FLASH_ATTENTION),
    "fa3": ("flash_attention_3", None),
    "flex": ("flex_attention", None),
    "none": ("none", None),
}


def _no_attention(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    """The queries with keys and values added, which gives each a gradient at the cost of one addition."""
    own = slice(-query.shape[2], None)  # of a static cache, which has more
    of_keys = key[:, :, None, own] + value[:, :, None, own]
    grouped = query.unflatten(1, (key.shape[1], -1)) + of_keys
    return grouped.flatten(1, 2).transpose(1, 2), None


def register() -> None:
    transformers.logging.set_verbosity_error()
    tandem.integrations.transformers.register()
    transformers.AttentionInterface.register("none", _no_attention)
    transformers.AttentionMaskInterface.register("none", lambda *_, **__: None)


def make_model(name: str, layers: int, seqlen: int, device: str, small: bool) -> Any:
    """The model on Tandem, in bf16. `small` ones try the program itself."""
    shape = SHAPES[name]
    shrink = 32 if small else 1
    sizes = {
        "hidden_size": shape.hidden // shrink // 8 * 8,
        "intermediate_size": shape.intermediate // shrink // 8 * 8,
        "num_attention_heads": shape.heads[0],
        "num_key_value_heads": shape.heads[1],
        "head_dim": shape.head_dim // (8 if small else 1),
        "num_hidden_layers": layers,
        "vocab_size": 128 if small else VOCABULARY,
        "max_position_embeddings": 2 * seqlen,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "attn_implementation": "tandem",
        **dict(shape.more),
    }
    if small and "sliding_window" in sizes:
        sizes["sliding_window"] = 8
    torch.manual_seed(0)
    config = getattr(transformers, shape.config)(**sizes)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@contextlib.contextmanager
def attention_by(model: Any, kind: str) -> Iterator[None]:
    """Within it the model's attention is that kind's. Raises what Transformers raises where it has none."""
    implementation, backend = KINDS[kind]
    model.set_attn_implementation(implementation)
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        yield
