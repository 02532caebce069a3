"""vLLM on Tandem: an attention backend, and the plugin that makes vLLM know it.

    vllm serve MODEL --attention-backend TANDEM
    vllm serve MODEL --attention-backend TANDEM_MLA --attention-config.mla_prefill_backend CUSTOM

The second is for models with latent attention (MLA): TANDEM_MLA takes their decoding steps, and what is
registered as CUSTOM among vLLM's backends for their prompts is Tandem too.

An installed tandem-attention has an entry point in ``vllm.general_plugins``, so that every process of vLLM
calls `register`. vLLM on a CPU has one backend and takes no wish for another: there, and wherever vLLM's own
choice is to run on Tandem, the environment variable TANDEM_VLLM names the backend that Tandem takes the place
of (``TANDEM_VLLM=CPU_ATTN``).

Decoder attention in pages of any layout and any multiple of 16 rows, prompts in chunks beside decoding steps,
sliding windows, softcap, sinks, grouped queries, non-causal steps, caches of float8_e4m3fn
(``--kv-cache-dtype fp8``), and batch invariance (VLLM_BATCH_INVARIANT). What Tandem lacks is an error as a
model's layers are made.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from tandem._errors import UnsupportedError

__all__ = ["register"]

NAME, NAME_MLA = "TANDEM", "TANDEM_MLA"


class Backend:
    """What vLLM asks of each of Tandem's backends, which say what they are made of."""

    _name: str
    _impl: Any
    _builder: Any

    @classmethod
    def get_name(cls) -> str:
        return cls._name

    @classmethod
    def get_impl_cls(cls) -> Any:
        return cls._impl

    @classmethod
    def get_builder_cls(cls) -> Any:
        return cls._builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) == (9, 0)


def refuse_scales(*of_output: Any) -> None:
    """An error where vLLM asks for a scaled result."""
    if any(scale is not None for scale in of_output):
        raise UnsupportedError(
            "output_scale is given, but Tandem writes results in the queries' dtype; turn vLLM's fusion of "
            "attention and quantisation off"
        )


def register(instead_of: str | None = None) -> None:
    """Makes vLLM know the backends TANDEM and TANDEM_MLA, and one for the prompts of the latter's models.

    Args:
      instead_of: vLLM's name of a backend whose place Tandem takes ("CPU_ATTN", "FLASH_ATTN",
        "FLASH_ATTN_MLA"). Default: what the environment variable TANDEM_VLLM says; without it none.

    Raises:
      ValueError, from vLLM: it has no backend of that name.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # vLLM imports them when it needs them.
    path, path_mla = (
        f"tandem.integrations.{name}" for name in ("_vllm.TandemBackend", "_vllm_mla.TandemMLABackend")
    )
    for name, where in ((NAME, path), (NAME_MLA, path_mla)):
        if name not in AttentionBackendEnum.__members__:  # vLLM may call more than once in a process
            register_backend(name, where)
    _register_prompts()
    instead_of = instead_of or os.environ.get("TANDEM_VLLM")
    if instead_of:
        register_backend(AttentionBackendEnum[instead_of], path_mla if "MLA" in instead_of else path)
        logging.getLogger("tandem").info("vLLM's %s is Tandem", instead_of)


def _register_prompts() -> None:
    """The backend for prompts of models with latent attention."""
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
    except ImportError:  # a release without a choice of them
        return
    register_mla_prefill_backend(
        MLAPrefillBackendEnum.CUSTOM, "tandem.integrations._vllm_mla.TandemMLAPrefillBackend"
    )
