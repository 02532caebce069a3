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


#: Tokens of a request, generated or drafts, up to which it is a step and not a prompt's chunk. vLLM puts
#: steps first in a batch.
FEW = 8


@dataclass
class Requests:
    """Requests that are attended to in one call: those of few tokens each, or the others."""

    #: their rows of the step's queries, without padding
    rows: slice
    #: tokens of every request; 0 if they are unequal, and then
    each: int
    #: (requests + 1,): request b's tokens are rows ``query_start_loc[b]:query_start_loc[b + 1]`` of those
    query_start_loc: Tensor | None
    #: (requests,): tokens of each, those of this step included
    seq_lens: Tensor
    #: which of the batch they are
    members: slice
    #: of all requests, or (requests,) flags
    causal: bool | Tensor


@dataclass
class TandemMetadata:
    """What all layers of a group share in a step."""

    requests: tuple[Requests, ...]
    #: (requests, blocks): where in the cache they are
    block_table: Tensor
    slot_mapping: Tensor


def some_requests(given: Any, first: int, last: int) -> Requests:
    """Requests [first, last) of vLLM's metadata."""
    starts = given.query_start_loc_cpu[first : last + 1]
    begin = int(starts[0])
    end = given.num_actual_tokens if last == given.num_reqs else int(starts[-1])
    each, rest = divmod(end - begin, last - first)
    equal = each > 0 and rest == 0 and bool((starts.diff() == each).all())
    members = slice(first, last)
    return Requests(
        rows=slice(begin, end),
        each=each if equal else 0,
        query_start_loc=None if equal else given.query_start_loc[first : last + 1] - begin,
        seq_lens=given.seq_lens[members],
        members=members,
        causal=given.causal[members] if isinstance(given.causal, Tensor) else given.causal,
    )


class TandemMetadataBuilder(AttentionMetadataBuilder):
    supports_update_block_table = True
    reorder_batch_threshold = FEW

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Batches whose requests have as many tokens each: a plan reads shapes alone, so that a captured call
        is right for other lengths of keys. Other batches are divided by what the host knows."""
        from vllm.v1.attention.backend import AttentionCGSupport

        return AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """A prompt's chunk takes tiles of many queries of one head, a step of generation those of all heads
        that share keys: each kind is a call of its own."""
        given = common_attn_metadata
        long = (given.query_start_loc_cpu.diff() > FEW).nonzero()
        steps = int(long[0]) if len(long) else given.num_reqs
        parts = [(0, steps), (steps, given.num_reqs)]
        return TandemMetadata(
            requests=tuple(some_requests(given, *part) for part in parts if part[0] < part[1]),
            block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
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
        k_cache, v_cache = self._halves(kv_cache)
        # A causal request's window ends at its diagonal whatever is said here.
        reach = self.sliding_window
        window = (-1, -1) if reach is None else (reach - 1, reach - 1)
        sink = None if self.sinks is None else self.sinks.float()
        for requests in attn_metadata.requests:
            flags = requests.causal if isinstance(requests.causal, Tensor) else None
            causal = requests.causal if isinstance(requests.causal, bool) else False
            q, out = query[requests.rows], output[requests.rows]
            if requests.each > 0:
                q, out = (t.view(-1, requests.each, *t.shape[1:]) for t in (q, out))
            attention(
                q,
                k_cache,
                v_cache,
                cu_seqlens_q=requests.query_start_loc,
                seqused_k=requests.seq_lens,
                page_table=attn_metadata.block_table[requests.members],
                scale=self.scale,
                causal=causal,
                causal_by_sequence=flags,
                window=window,
                softcap=self.softcap,
                sink=sink,
                alibi_slopes=self.slopes,
                split_size=self.split_size,
                out=out,
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
