"""The vLLM backends for latent attention, in vLLM's own classes where it can be imported, and in small copies
of what they use of vLLM 0.33 elsewhere."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import engines
import oracle
import pytest
import tandem
import torch
from pages import paged, used

HEADS, RANK, ROPE, NOPE, HEAD_DIM_V = 4, 64, 16, 24, 32
SCALE = (NOPE + ROPE) ** -0.5
SIZES = {"kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": HEAD_DIM_V}


class AttentionCGSupport(enum.Enum):
    UNIFORM_BATCH = 2


class QueryLenSupport(enum.Enum):
    VARLEN = "varlen"


@dataclass
class MLACommonDecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


class MLACommonImpl:
    def __init__(self, num_heads: int, head_size: int, scale: float, *given: Any, **of_mla: Any) -> None:
        self.scale, self.kv_lora_rank = scale, of_mla["kv_lora_rank"]


class MLAPrefillBackend:
    def __init__(self, *, scale: float, **more: Any) -> None:
        self.scale = scale

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self._prefill_metadata = prefill_metadata


@pytest.fixture
def mla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """tandem.integrations._vllm_mla, on vLLM's modules or copies, and `ContextChunk`."""
    copies: dict[str, dict[str, Any]] = {
        "vllm.model_executor.layers.attention.mla_attention": {
            "MLACommonBackend": object,
            "MLACommonDecodeMetadata": MLACommonDecodeMetadata,
            "MLACommonImpl": MLACommonImpl,
            "MLACommonMetadataBuilder": object,
            "MLACommonPrefillMetadata": SimpleNamespace(ContextChunk=SimpleNamespace),
            "QueryLenSupport": QueryLenSupport,
        },
        "vllm.v1.attention.backend": {
            "AttentionCGSupport": AttentionCGSupport,
            "MultipleOf": lambda base: ("multiple of", base),
        },
        "vllm.v1.attention.backends.mla.prefill.base": {"MLAPrefillBackend": MLAPrefillBackend},
    }
    modules, _ = engines.modules(monkeypatch, copies)
    common, own, _ = modules.values()
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1))
    monkeypatch.setattr(common, "get_current_vllm_config", lambda: config, raising=False)
    backends = importlib.import_module("tandem.integrations._vllm_mla")
    chunk = common.MLACommonPrefillMetadata.ContextChunk
    yield SimpleNamespace(**vars(backends), ContextChunk=chunk, MultipleOf=own.MultipleOf)
    del sys.modules["tandem.integrations._vllm_mla"]


def layer(mla: Any, **changed: Any) -> Any:
    given = {
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "qk_head_dim": NOPE + ROPE,
        "kv_b_proj": None,
        **SIZES,
    }
    return mla.TandemMLABackend.get_impl_cls()(HEADS, RANK + ROPE, SCALE, **given | changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_parts", [True, False])
def test_steps_that_decode(mla: Any, in_parts: bool, dtype: torch.dtype) -> None:
    """A token, a speculative step, none (padding for graphs) and a token of a fresh request."""
    new, lengths = [1, 3, 0, 1], [33, 19, 0, 1]
    keys = torch.randn(4, 40, 1, RANK + ROPE, dtype=dtype)
    pages, _, table = paged(keys, keys, lengths, 16)
    cu = torch.tensor([0, *new]).cumsum(0).int()
    q = torch.randn(8, HEADS, RANK + ROPE, dtype=dtype)  # the last three are padding
    builder = object.__new__(mla.TandemMLABackend.get_builder_cls())  # a whole engine is what it is made of
    decode = builder._build_decode(
        block_table_tensor=table,
        seq_lens_device=used(lengths),
        max_seq_len=40,
        query_start_loc_cpu=cu,
        query_start_loc_device=cu,
        num_decode_tokens=5,
        max_query_len=3,
        dcp_tot_seq_lens_device=None,
    )
    given = tuple(q.split([RANK, ROPE], -1)) if in_parts else q
    out, lse = layer(mla).forward_mqa(given, pages.squeeze(2), SimpleNamespace(decode=decode), None)
    assert out.shape == (8, HEADS, RANK) and lse is None and not out[5:].any()
    values = keys[..., :RANK]
    oracle.assert_sequences_close(out, q, keys, values, lengths, cu, causal=True, scale=SCALE)


def context_chunk(mla: Any, index: int, requests: slice, cu: torch.Tensor, rows: list[int]) -> Any:
    """A chunk of so many cached rows of each of these requests, whose new tokens are those of `cu`."""
    tokens, counts = cu[requests.start : requests.stop + 1], torch.tensor(rows, dtype=torch.int32)
    begins = torch.tensor([0, *rows]).cumsum(0).int()
    return mla.ContextChunk(
        index=index,
        request_slice=requests,
        token_slice=slice(int(tokens[0]), int(tokens[-1])),
        continuation_token_end=0,
        is_continuation=index > 0,
        num_context_tokens=sum(rows),
        query_start_loc=tokens - tokens[0],
        max_query_len=int(tokens.diff().max()),
        cu_seq_lens=begins,
        starts=torch.zeros_like(counts),
        max_seq_len=max(rows),
        seq_lens=counts,
        token_to_seq=torch.arange(len(rows)).repeat_interleave(counts),
        all_rows_active=min(rows) > 0,
    )


def test_prompts_and_what_was_cached_before_them(mla: Any) -> None:
    """New tokens see one another, and chunks of what came before, as vLLM merges them."""
    before, new = [20, 0, 7], [5, 9, 1]
    cu = torch.tensor([0, *new]).cumsum(0).int()
    q = torch.randn(15, HEADS, NOPE + ROPE)
    k, v = torch.randn(3, 30, HEADS, NOPE + ROPE), torch.randn(3, 30, HEADS, HEAD_DIM_V)
    backend = mla.TandemMLAPrefillBackend(num_heads=HEADS, scale=SCALE, vllm_config=None, **SIZES)
    backend.prepare_metadata(SimpleNamespace(query_start_loc=cu))

    def rows(t: torch.Tensor, first: list[int], count: list[int]) -> torch.Tensor:
        return torch.cat([t[b, f : f + n] for b, (f, n) in enumerate(zip(first, count, strict=True))])

    given = q, rows(k, before, new), rows(v, before, new)
    parts = [backend.run_prefill_new_tokens(*given, return_softmax_lse=True)]
    # The first request's first rows, and then the rest of all three.
    for index, (first, count) in enumerate((([0], [16]), ([16, 0, 0], [4, 0, 7]))):
        chunk = context_chunk(mla, index, slice(0, len(count)), cu, count)
        seen = {"k": rows(k, first, count), "v": rows(v, first, count)}
        of_chunk = backend.run_prefill_context_chunk(chunk=chunk, q=q[chunk.token_slice], **seen)
        part = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -torch.inf)
        part[0][chunk.token_slice], part[1][:, chunk.token_slice] = of_chunk
        parts.append(part)
    assert all(lse.shape == (HEADS, 15) for _, lse in parts)
    out, _ = tandem.merge([part[0] for part in parts], [part[1] for part in parts])
    after = [a + b for a, b in zip(before, new, strict=True)]
    oracle.assert_sequences_close(out, q, k, v, after, cu, causal=True, scale=SCALE)
    into = torch.full_like(parts[0][0], torch.nan)
    alone = backend.run_prefill_new_tokens(*given, return_softmax_lse=False, out=into)
    assert alone is into and torch.equal(into, parts[0][0])
    with pytest.raises(tandem.UnsupportedError, match="^output_scale is given"):
        backend.run_prefill_new_tokens(*given, return_softmax_lse=False, output_scale=torch.ones(1))


def test_what_vllm_asks(mla: Any) -> None:
    backend, prompts = mla.TandemMLABackend, mla.TandemMLAPrefillBackend
    assert backend.get_name() == prompts.get_name() == "TANDEM_MLA"
    assert backend.get_supported_kernel_block_sizes() == [mla.MultipleOf(16)]
    for major, minor, ours in ((9, 0, True), (10, 0, False), (8, 0, False)):
        capability = SimpleNamespace(major=major, minor=minor)
        assert backend.supports_compute_capability(capability) is ours
        assert prompts.supports_compute_capability(capability) is ours
    for nope, rope, v, ours in ((128, 64, 128, True), (256, 64, 256, False), (128, 60, 128, False)):
        sizes = SimpleNamespace(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
        assert prompts.supports_mla_dimensions(sizes) is ours


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alibi_slopes", [1.0] * HEADS),
        ("sliding_window", 128),
        ("logits_soft_cap", 30.0),
        ("attn_type", "encoder_only"),
        ("kv_cache_dtype", "fp8"),
    ],
)
def test_what_tandem_lacks(mla: Any, name: str, value: Any) -> None:
    with pytest.raises(tandem.UnsupportedError, match=f"^{name} is .*; choose another attention backend"):
        layer(mla, **{name: value})
