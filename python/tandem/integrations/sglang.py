"""SGLang on Tandem: an attention backend, and the plugin that makes SGLang know it.

    python -m sglang.launch_server --model-path MODEL --attention-backend tandem

An installed tandem-attention has an entry point in ``sglang.srt.plugins``, so that every process of SGLang
calls `register`.

Prompts in chunks, shared prefixes, decoding (in CUDA graphs, too), sliding windows, softcap, sinks, grouped
queries, any page size, caches of float8_e4m3fn (``--kv-cache-dtype fp8_e4m3``), and latent attention (MLA)
with caches of 16 bits. What Tandem lacks (speculative decoding, encoders, cross-attention, pools of their own
for sliding windows, other 8-bit caches) is an error, as the backend is made or as a step begins.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "tandem"


def register() -> None:
    """Makes SGLang know the attention backend "tandem": for the models, and for its command line."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    register_attention_backend(NAME)(_backend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _backend(model_runner: Any) -> Any:
    from tandem.integrations._sglang import TandemBackend

    return TandemBackend(model_runner)
