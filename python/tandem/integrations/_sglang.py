"""The backend that SGLang takes for "tandem"; see `tandem.integrations.sglang`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem._api import attention
from tandem._errors import UnsupportedError

if TYPE_CHECKING:  # SGLang is not where the hints are checked

    class AttentionBackend: ...
else:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

#: What a cache may hold. That of 8 bits has one scale for a layer's keys and one for its values.
_8_BIT = torch.float8_e4m3fn
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, _8_BIT)


@dataclass
class TandemMetadata:
    """What all layers share in a step."""

    #: (requests, pages): where in the cache they are
    page_table: Tensor
    #: (requests,): tokens of each, those of this step included
    lengths: Tensor
    #: (requests + 1,): request b's tokens are rows ``cu[b]:cu[b + 1]``; None where each has one
    cu_seqlens_q: Tensor | None


def _refuse(what: str, remedy: str = "choose another attention backend for this model") -> None:
    raise UnsupportedError(f"{what}, which Tandem lacks in SGLang; {remedy}")


class TandemBackend(AttentionBackend):
    forward_metadata: TandemMetadata

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if model_runner.kv_cache_dtype not in _DTYPES:
            _refuse(
                f"the cache is {model_runner.kv_cache_dtype}",
                "pass --kv-cache-dtype fp8_e4m3, or leave it out",
            )
        if model_runner.model_config.attention_chunk_size is not None:
            _refuse("the model attends in chunks (attention_chunk_size)")
        self.is_8_bit = model_runner.kv_cache_dtype == _8_BIT
        if self.is_8_bit and model_runner.use_mla_backend:
            _refuse(f"the cache of latent attention is {_8_BIT}", "leave out --kv-cache-dtype")
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        if hasattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa"):
            _refuse("sliding windows have a pool of their own", "pass --disable-hybrid-swa-memory")
        #: Columns of the values of latent attention (MLA); 0 for other models.
        self.kv_lora_rank = self.token_to_kv_pool.kv_lora_rank if model_runner.use_mla_backend else 0
        self.page_size = model_runner.page_size
        self.context = model_runner.model_config.context_len
        self.device = model_runner.device

    def _tables(self, forward_batch: Any, tokens: int) -> Tensor:
        """(requests, pages) of the first `tokens` tokens of each request."""
        pool: Tensor = self.req_to_token_pool.req_to_token
        slots = pool[forward_batch.req_pool_indices, : tokens : self.page_size]
        return slots.div(self.page_size, rounding_mode="floor").int()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if forward_batch.spec_info is not None or mode.is_target_verify() or mode.is_draft_extend_v2():
            _refuse("the step is one of speculative decoding", "leave speculative decoding out")
        on_host = forward_batch.seq_lens_cpu
        longest = self.context if on_host is None else int(on_host.max()) if len(on_host) else 0
        cu = None
        if not mode.is_decode_or_idle():
            cu = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0), (1, 0)).int()
        table = self._tables(forward_batch, longest)
        self.forward_metadata = TandemMetadata(table, forward_batch.seq_lens.int(), cu)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory that captured decoding steps read: tables of as many pages as a request may have."""
        pages = -(-self.context // self.page_size)
        empty = {"dtype": torch.int32, "device": self.device}
        self._graph = torch.zeros(max_bs, pages, **empty), torch.ones(max_bs, **empty)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a decoding step is captured or replayed: the step's tables, in that memory."""
        if not forward_batch.forward_mode.is_decode_or_idle() or forward_batch.spec_info is not None:
            _refuse("a captured graph is not of decoding", "leave speculative decoding out")
        requests = forward_batch.batch_size
        table, lengths = (t[:requests] for t in self._graph)
        table.copy_(self._tables(forward_batch, self.context))
        lengths.copy_(forward_batch.seq_lens[:requests])
        self.forward_metadata = TandemMetadata(table, lengths, None)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return str(self.device) != "cpu"

    def _scales(self, layer: Any, like: Tensor) -> dict[str, Any]:
        """Scales of an 8-bit cache, tensors of one element; none if the checkpoint has none."""
        if not self.is_8_bit or layer.k_scale is None or layer.v_scale is None:
            return {}
        given = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        return {
            name: torch.as_tensor(scale, dtype=torch.float32, device=like.device).reshape(1)
            for name, scale in given.items()
        }

    def _expanded(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, options: Any) -> Tensor:
        """Latent attention of whole prompts: to the given keys and values, heads of which were expanded from
        the latent vectors that the model itself has put into the cache."""
        if k is None or v is None or any(forward_batch.extend_prefix_lens_cpu):
            _refuse("a prompt of latent attention has expanded keys of a part alone")
        cu = self.forward_metadata.cu_seqlens_q
        out: Tensor = attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim),
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            **options,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_decode(self, *arguments: Any, **options: Any) -> Tensor:
        return self.forward_extend(*arguments, **options)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Attention of ``q``, (tokens, heads * head_dim), to the cache, in which k and v are put first."""
        for name, value in more.items():
            if value is not None and value is not False:
                _refuse(f"{name} is given to an attention layer")
        if layer.is_cross_attention or layer.attn_type.value != "decoder":
            _refuse("an attention layer is not a decoder's own")
        if layer.xai_temperature_len > 0 or layer.use_irope:
            _refuse("an attention layer scales its scores by position")
        reach = layer.sliding_window_size
        options: dict[str, Any] = {
            "scale": layer.scaling,
            "causal": True,
            "window": (-1 if reach is None else reach, -1),
            "softcap": layer.logit_cap or 0.0,
            "sink": None if sinks is None else sinks.float(),
        }
        if self.kv_lora_rank and (layer.tp_k_head_num, layer.v_head_dim) != (1, self.kv_lora_rank):
            if save_kv_cache:
                _refuse("expanded keys are to be put into a latent cache")
            return self._expanded(q, k, v, layer, forward_batch, options)
        scales = self._scales(layer, q)
        if save_kv_cache and k is not None and v is not None:
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            at = KVWriteLoc.for_layer(forward_batch, layer)
            if scales:  # the pool divides in place, and k and v are the model's
                k, v = k.clone(), v.clone()
            self.token_to_kv_pool.set_kv_buffer(layer, at, k, v, *scales.values())
        buffers = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        k_cache, v_cache = (t.unflatten(0, (-1, self.page_size)) for t in buffers)
        step = self.forward_metadata
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out: Tensor = attention(
            rows.unsqueeze(1) if step.cu_seqlens_q is None else rows,
            k_cache,
            v_cache,
            cu_seqlens_q=step.cu_seqlens_q,
            seqused_k=step.lengths,
            page_table=step.page_table,
            **options,
            **scales,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
