"""vLLM on Tandem: an attention backend, and the plugin that makes vLLM know it.

    vllm serve MODEL --attention-backend TANDEM

An installed tandem has an entry point in ``vllm.general_plugins``, so that every process of vLLM calls
`register`. vLLM on a CPU has one backend and takes no wish for another: there, and wherever vLLM's own choice
is to run on Tandem, the environment variable TANDEM_VLLM names the backend that Tandem takes the place of
(``TANDEM_VLLM=CPU_ATTN``).

Decoder attention in pages of any layout and any multiple of 16 rows, prompts in chunks beside decoding steps,
sliding windows, softcap, sinks, grouped queries, non-causal steps, caches of float8_e4m3fn
(``--kv-cache-dtype fp8``), and batch invariance (VLLM_BATCH_INVARIANT). What Tandem lacks is an error as a
model's layers are made.
"""

from __future__ import annotations

import logging
import os

__all__ = ["register"]

NAME = "TANDEM"


def register(instead_of: str | None = None) -> None:
    """Makes vLLM know the backend TANDEM.

    Args:
      instead_of: vLLM's name of a backend whose place Tandem takes ("CPU_ATTN", "FLASH_ATTN"). Default: what
        the environment variable TANDEM_VLLM says; without it none.

    Raises:
      ValueError, from vLLM: it has no backend of that name.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = "tandem.integrations._vllm.TandemBackend"  # vLLM imports it when it needs it
    if NAME not in AttentionBackendEnum.__members__:  # vLLM may call more than once in a process
        register_backend(NAME, path)
    instead_of = instead_of or os.environ.get("TANDEM_VLLM")
    if instead_of:
        register_backend(AttentionBackendEnum[instead_of], path)
        logging.getLogger("tandem").info("vLLM's %s is Tandem", instead_of)
