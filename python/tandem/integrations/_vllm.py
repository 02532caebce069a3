"""The backend that vLLM takes for TANDEM; see `tandem.integrations.vllm`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem._api import attention
from tandem._cache import append_kv
from tandem._call import widest_head
from tandem._errors import UnsupportedError
from tandem.integrations.vllm import NAME, Backend, refuse_scales

if TYPE_CHECKING:  # vLLM is not where the hints are checked

    class AttentionMetadataBuilder:
        def __init__(self, *given: Any) -> None: ...

    class AttentionImpl: ...

    class AttentionBackend: ...
else:
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

#: What keys are cut at for results that do not depend on the batch.
SPLIT_SIZE = 1024
#: vLLM's names of float8_e4m3fn caches, whose tensors are of bytes.
_8_BIT = ("fp8", "fp8_e4m3")


def is_8_bit(kv_cache_dtype: str) -> bool:
    return kv_cache_dtype in _8_BIT


def stored(kv_cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """The cache by the dtype of what it holds."""
    return kv_cache.view(torch.float8_e4m3fn) if is_8_bit(kv_cache_dtype) else kv_cache


@dataclass
class TandemMetadata:
    """What all layers of a group share in a step."""

    #: tokens without padding
    num_actual_tokens: int
    #: (requests + 1,): request b's tokens are rows ``query_start_loc[b]:query_start_loc[b + 1]``
    query_start_loc: Tensor
    #: (requests,): tokens of each, those of this step included
    seq_lens: Tensor
    #: (requests, blocks): where in the cache they are
    block_table: Tensor
    slot_mapping: Tensor
    #: of all requests, or (requests,) flags
    causal: bool | Tensor


class TandemMetadataBuilder(AttentionMetadataBuilder):
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Any batch: a plan reads shapes alone, so that a captured call is right for other lengths."""
        from vllm.v1.attention.backend import AttentionCGSupport

        return AttentionCGSupport.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        given = common_attn_metadata
        return TandemMetadata(
            num_actual_tokens=given.num_actual_tokens,
            query_start_loc=given.query_start_loc,
            seq_lens=given.seq_lens,
            block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
            causal=given.causal,
        )

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class TandemImpl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        for name, value, lacking in (
            ("attn_type", attn_type, attn_type != "decoder"),
            ("kv_cache_dtype", kv_cache_dtype, kv_cache_dtype not in TandemBackend.supported_kv_cache_dtypes),
        ):
            if lacking:
                raise UnsupportedError(
                    f"{name} is {value!r}, which Tandem has no cache or mask for in vLLM; choose another "
                    "attention backend for this model"
                )
        from vllm import envs

        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = float(logits_soft_cap or 0.0)
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.split_size = SPLIT_SIZE if envs.VLLM_BATCH_INVARIANT else 0

    def _halves(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, (blocks, rows, heads_kv, head_dim), of a cache (blocks, heads_kv, rows, 2 * head_dim)."""
        both = stored(kv_cache, self.kv_cache_dtype).transpose(1, 2)
        return both[..., : self.head_size], both[..., self.head_size :]

    def _scales(self, layer: Any) -> dict[str, Any]:
        """The scales of an 8-bit cache, which vLLM keeps in the layer: one for keys, one for values."""
        if not is_8_bit(self.kv_cache_dtype):
            return {}
        return {"k_scale": layer._k_scale.reshape(1), "v_scale": layer._v_scale.reshape(1)}

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """The new tokens' rows, where the slots say; key and value may have padding behind."""
        tokens = slot_mapping.shape[0]
        append_kv(
            key[:tokens],
            value[:tokens],
            *self._halves(kv_cache),
            slot_mapping=slot_mapping,
            **self._scales(layer),
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TandemMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of ``query`` (tokens, heads, head_dim) to the cache, which has this step's rows."""
        refuse_scales(output_scale, output_block_scale)
        if self.slopes is not None:
            self.slopes = self.slopes.to(query.device)  # once, before a graph is captured
        if attn_metadata is None:  # memory is being measured
            return output.zero_()
        tokens, reach = attn_metadata.num_actual_tokens, self.sliding_window
        k_cache, v_cache = self._halves(kv_cache)
        causal = attn_metadata.causal
        flags, causal = (causal, False) if isinstance(causal, Tensor) else (None, causal)
        # A causal request's window ends at its diagonal whatever is said here.
        window = (-1, -1) if reach is None else (reach - 1, reach - 1)
        attention(
            query[:tokens],
            k_cache,
            v_cache,
            cu_seqlens_q=attn_metadata.query_start_loc,
            seqused_k=attn_metadata.seq_lens,
            page_table=attn_metadata.block_table,
            scale=self.scale,
            causal=causal,
            causal_by_sequence=flags,
            window=window,
            softcap=self.softcap,
            sink=None if self.sinks is None else self.sinks.float(),
            alibi_slopes=self.slopes,
            split_size=self.split_size,
            out=output[:tokens],
            **self._scales(layer),
        )
        return output


class TandemBackend(Backend, AttentionBackend):
    """What vLLM asks before it takes a backend."""

    _name, _impl, _builder = NAME, TandemImpl, TandemMetadataBuilder
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *_8_BIT]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= widest_head("cuda")

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    supports_sliding_window = supports_non_causal = supports_batch_invariance = supports_sink
