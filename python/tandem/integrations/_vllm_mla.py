"""The backends that vLLM takes for TANDEM_MLA and for prompts of its models; see `tandem.integrations.vllm`.

Latent attention (MLA) has two forms in vLLM. Decoding steps attend to the cached latent vectors themselves,
one head of keys whose first columns are the values. Prompts expand them to heads of keys and values, and
merge chunks of what was cached before with the new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem._api import attention
from tandem._call import widest_head
from tandem._errors import UnsupportedError
from tandem.integrations.vllm import NAME_MLA, Backend, refuse_scales

if TYPE_CHECKING:  # vLLM is not where the hints are checked

    class MLACommonBackend: ...

    @dataclass
    class MLACommonDecodeMetadata:
        block_table: Tensor
        seq_lens: Tensor
        dcp_tot_seq_lens: Tensor | None

    class MLACommonImpl:
        scale: float
        kv_lora_rank: int

        def __init__(self, *given: Any, **more: Any) -> None: ...

    class MLACommonMetadataBuilder: ...

    class MLAPrefillBackend:
        scale: float
        _prefill_metadata: Any

    class AttentionCGSupport:
        UNIFORM_BATCH: Any

    class QueryLenSupport:
        VARLEN: Any
else:
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonBackend,
        MLACommonDecodeMetadata,
        MLACommonImpl,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

#: Requests with more new tokens in a step are prompts.
_LONGEST_STEP = 16


@dataclass
class TandemMLADecodeMetadata(MLACommonDecodeMetadata):
    #: (requests + 1,): request b's tokens are rows ``query_start_loc[b]:query_start_loc[b + 1]``
    query_start_loc: Tensor


class TandemMLAMetadataBuilder(MLACommonMetadataBuilder):
    #: Steps with prompts are not captured: vLLM cuts their context into chunks on the host.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = _LONGEST_STEP

    def _build_decode(
        self,
        *,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        query_start_loc_device: Tensor,
        dcp_tot_seq_lens_device: Tensor | None = None,
        **_: Any,
    ) -> TandemMLADecodeMetadata:
        """The metadata of the requests that decode."""
        return TandemMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
        )


class TandemMLAImpl(MLACommonImpl):
    #: Ranks that share a request's keys would need each query's position among all of them: vLLM refuses
    #: decode context parallelism for a backend without an LSE.
    can_return_lse_for_decode = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **of_mla: Any,
    ) -> None:
        of_cache = kv_cache_dtype not in TandemMLABackend.supported_kv_cache_dtypes
        for name, value, lacking in (
            ("alibi_slopes", alibi_slopes, alibi_slopes is not None),
            ("sliding_window", sliding_window, sliding_window is not None),
            ("logits_soft_cap", logits_soft_cap, bool(logits_soft_cap)),
            ("attn_type", attn_type, attn_type != "decoder"),
            ("kv_cache_dtype", kv_cache_dtype, of_cache),
        ):
            if lacking:
                raise UnsupportedError(
                    f"{name} is {value!r}, which Tandem lacks for latent attention in vLLM; choose another "
                    "attention backend for this model"
                )
        given = (num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype)
        super().__init__(*given, logits_soft_cap, attn_type, kv_sharing_target_layer_name, **of_mla)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, None]:
        """Attention of q (tokens, heads, kv_lora_rank + rope), or its two parts, to the latent cache (blocks,
        rows, kv_lora_rank + rope), which has this step's rows."""
        rows = q if isinstance(q, Tensor) else torch.cat(q, dim=-1)
        keys = kv_c_and_k_pe_cache.unsqueeze(2)
        at = attn_metadata.decode
        out = attention(
            rows,
            keys,
            keys[..., : self.kv_lora_rank],
            cu_seqlens_q=at.query_start_loc,
            seqused_k=at.seq_lens,
            page_table=at.block_table,
            scale=self.scale,
            causal=True,
        )
        return out, None


class TandemMLABackend(Backend, MLACommonBackend):
    """What vLLM asks before it takes a backend for a model with latent attention."""

    _name, _impl, _builder = NAME_MLA, TandemMLAImpl, TandemMLAMetadataBuilder
    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]


class TandemMLAPrefillBackend(Backend, MLAPrefillBackend):
    """Attention of prompts to expanded keys and values. vLLM merges the parts by their LSEs."""

    _name = NAME_MLA

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        of_keys = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        widths = (of_keys, mla_dimensions.v_head_dim)
        return all(width % 8 == 0 and width <= widest_head("cuda") for width in widths)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any) -> Any:
        return attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=self.scale, **options)

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """Attends from new tokens to one another; with return_softmax_lse also the LSE, (heads, tokens)."""
        refuse_scales(output_scale)
        cu = self._prefill_metadata.query_start_loc
        return self._attend(q, k, v, cu, cu, causal=True, return_lse=return_softmax_lse, out=out)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> Any:
        """Attends from new tokens of some requests to a chunk of the keys cached before them, all of them."""
        return self._attend(q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, return_lse=True, out=out)
