"""The vLLM backend, in vLLM's own classes where it can be imported, and in small copies of what it uses of
vLLM 0.33 elsewhere: vLLM is too large to be installed for these tests.

What a whole engine gave is in records/gpu-runs.md.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import engines
import oracle
import pytest
import tandem
import torch
from pages import paged, used

HEADS, HEADS_KV, HEAD_DIM, PAGE = 4, 2, 32, 16


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.FlashAttentionBackend"
    FLASH_ATTN_MLA = "vllm.FlashAttnMLABackend"
    CPU_ATTN = "vllm.CPUAttentionBackend"


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.given = (kv_cache_spec, layer_names, vllm_config, device)


class AttentionCGSupport(enum.Enum):
    UNIFORM_BATCH = 2


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """tandem.integrations.vllm and ._vllm beside the copies, and where backends were registered."""
    overrides: dict[Any, str] = {}
    prompts: dict[Any, str] = {}
    members = dict(AttentionBackendEnum.__members__)

    class Enum:
        __members__ = members

        def __class_getitem__(cls, name: str) -> Any:
            if name not in members:
                raise ValueError(f"Unknown attention backend: '{name}'")
            return members[name]

    def register_backend(backend: Any, class_path: str | None = None) -> None:
        if isinstance(backend, str):
            if backend in members:
                raise ValueError(f"Backend {backend} already exists")
            members[backend] = backend  # type: ignore[assignment]
        overrides[backend] = str(class_path)

    copies: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.v1.attention.backend": {
            "AttentionBackend": object,
            "AttentionImpl": object,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionCGSupport": AttentionCGSupport,
            "CommonAttentionMetadata": SimpleNamespace,
            "MultipleOf": lambda base: ("multiple of", base),
        },
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": Enum,
            "_ATTN_OVERRIDES": overrides,
            "register_backend": register_backend,
        },
        "vllm.v1.attention.backends.mla.prefill.registry": {
            "MLAPrefillBackendEnum": SimpleNamespace(CUSTOM="CUSTOM"),
            "_MLA_PREFILL_OVERRIDES": prompts,
            "register_mla_prefill_backend": prompts.__setitem__,
        },
    }
    modules, is_vllms_own = engines.modules(monkeypatch, copies)
    envs, backends, registry, prefill = modules.values()
    if is_vllms_own:
        monkeypatch.setattr(registry, "_ATTN_OVERRIDES", overrides)
        monkeypatch.setattr(prefill, "_MLA_PREFILL_OVERRIDES", prompts)
    monkeypatch.delenv("TANDEM_VLLM", raising=False)
    plugin = importlib.import_module("tandem.integrations.vllm")
    backend = importlib.import_module("tandem.integrations._vllm")
    yield SimpleNamespace(
        plugin=plugin,
        backend=backend,
        overrides=overrides,
        prompts=prompts,
        enum=registry.AttentionBackendEnum,
        custom=prefill.MLAPrefillBackendEnum.CUSTOM,
        own=backends,
        envs=envs,
    )
    del sys.modules["tandem.integrations._vllm"]


def test_the_package_tells_vllm_of_itself() -> None:
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "tandem")
    assert point.value == "_tandem_attention:vllm"


def by_name(registered: dict[Any, str]) -> dict[str, str]:
    return {getattr(backend, "name", backend): path for backend, path in registered.items()}


def test_registering(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "tandem.integrations._vllm.TandemBackend"
    latent = "tandem.integrations._vllm_mla.TandemMLABackend"
    for _ in range(2):  # every process does, some twice
        vllm.plugin.register()
    assert by_name(vllm.overrides) == {"TANDEM": path, "TANDEM_MLA": latent}
    assert by_name(vllm.prompts) == {"CUSTOM": "tandem.integrations._vllm_mla.TandemMLAPrefillBackend"}
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name).get_name() in vllm.enum.__members__
    monkeypatch.setenv("TANDEM_VLLM", "CPU_ATTN")
    vllm.plugin.register()
    vllm.plugin.register("FLASH_ATTN")
    vllm.plugin.register("FLASH_ATTN_MLA")
    instead = {"CPU_ATTN": path, "FLASH_ATTN": path, "FLASH_ATTN_MLA": latent}
    assert by_name(vllm.overrides) == instead | {"TANDEM": path, "TANDEM_MLA": latent}
    with pytest.raises(ValueError, match="Unknown attention backend: 'TPU'"):
        vllm.plugin.register("TPU")


def layer(vllm: Any, **options: Any) -> Any:
    return vllm.backend.TandemBackend.get_impl_cls()(HEADS, HEAD_DIM, HEAD_DIM**-0.5, HEADS_KV, **options)


def metadata(
    vllm: Any, cu: Any, lengths: Any, table: Any, slots: Any, tokens: int, causal: Any = True
) -> Any:
    common = vllm.own.CommonAttentionMetadata(
        num_actual_tokens=tokens,
        num_reqs=len(lengths),
        max_query_len=int(cu.diff().max()),
        max_seq_len=int(lengths.max()),
        query_start_loc=cu,
        query_start_loc_cpu=cu,
        seq_lens=lengths,
        block_table_tensor=table,
        slot_mapping=slots,
        causal=causal,
    )
    builder = vllm.backend.TandemBackend.get_builder_cls()(None, [], None, "cpu")
    return builder.build(0, common)


def step(vllm: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Of four requests: 20 tokens of a prompt, a token, none (padding for graphs), three tokens. Returns k
    and v of all, a cache in vLLM's layout without the step's rows, and what vLLM hands over.
    """
    before, new = [33, 19, 0, 4], [20, 1, 0, 3]
    after = [a + b for a, b in zip(before, new, strict=True)]
    k, v = torch.randn(2, 4, 53, HEADS_KV, HEAD_DIM, dtype=dtype)
    k_pages, v_pages, table = paged(k, v, after, PAGE)
    cache = torch.cat([k_pages, v_pages], -1).transpose(1, 2).contiguous()  # blocks, heads, rows, k and v
    rows, slots = [], []
    for b, n in enumerate(before):
        for t in range(n, after[b]):
            page, row = int(table[b, t // PAGE]), t % PAGE
            cache[page, :, row] = torch.nan
            slots.append(page * PAGE + row)
            rows.append((k[b, t], v[b, t]))
    table[table < 0] = 0  # vLLM's null block
    key, value = (torch.stack(t) for t in zip(*rows, strict=True))
    cu = torch.tensor([0, *new]).cumsum(0).int()
    return k, v, cache, key, value, cu, used(after), table, torch.tensor(slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "feature", ["plain", "window", "softcap and sink", "not causal", "causal by request", "slopes"]
)
def test_a_step(vllm: Any, feature: str, dtype: torch.dtype) -> None:
    k, v, cache, key, value, cu, lengths, table, slots = step(vllm, dtype)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 7.0]).bfloat16() if "sink" in feature else None
    by_request = feature == "causal by request"
    flags = [False, True, True, True] if by_request else [feature != "not causal"] * 4
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if feature == "slopes" else None
    impl = layer(
        vllm,
        alibi_slopes=None if slopes is None else slopes.tolist(),
        sliding_window=10 if feature == "window" or by_request else None,
        logits_soft_cap=5.0 if "softcap" in feature else None,
        sinks=sinks,
    )
    padding = torch.full((8, HEADS_KV, HEAD_DIM), torch.nan, dtype=dtype)
    impl.do_kv_cache_update(None, torch.cat([key, padding]), torch.cat([value, padding]), cache, slots)
    q = torch.randn(32, HEADS, HEAD_DIM, dtype=dtype)
    output = torch.full_like(q, 9.0)
    at = metadata(vllm, cu, lengths, table, slots, 24, torch.tensor(flags) if by_request else flags[0])
    at = vllm.backend.TandemMetadataBuilder(None, [], None, "cpu").update_block_table(
        at, table.clone(), slots
    )
    assert impl.forward(None, q, key, value, cache, at, output) is output
    options: dict[str, Any] = {"sink": None if sinks is None else sinks.float(), "alibi_slopes": slopes}
    options |= {"softcap": 5.0 if "softcap" in feature else 0.0}
    options |= {"window": (9, 9) if feature == "window" or by_request else (-1, -1)}
    for b in range(4):
        options["causal"] = flags[b]
        rows, n = slice(int(cu[b]), int(cu[b + 1])), int(lengths[b])
        inputs = q[None, rows], k[b : b + 1, :n], v[b : b + 1, :n]
        same = () if dtype == torch.float32 else oracle.same_dtype(*inputs, **options)[:1]
        oracle.assert_close(output[None, rows], oracle.exact(*inputs, **options)[0], *same)
    assert (output[24:] == 9).all()


@pytest.mark.parametrize(
    "new, calls",
    [
        ((1, 3, 8, 20, 0, 2), ["packed", "packed"]),
        ((1, 1, 12), ["dense", "dense"]),
        ((2, 2, 2), ["dense"]),
        ((9, 1), ["packed"]),
        ((1, 0, 0), ["packed"]),
        ((0, 12), ["packed", "dense"]),
    ],
    ids=[
        "steps and prompts",
        "even steps and a prompt",
        "drafts",
        "a prompt first",
        "padding",
        "no token and a prompt",
    ],
)
def test_steps_and_prompts_are_calls_of_their_own(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, new: tuple[int, ...], calls: list[str]
) -> None:
    """Each with its tiles, and without lengths where requests have as many tokens."""
    torch.manual_seed(0)
    requests, tokens = len(new), sum(new)
    lengths = [30 + n for n in new]
    k, v = torch.randn(2, requests, 50, HEADS_KV, HEAD_DIM)
    k_pages, v_pages, table = paged(k, v, lengths, PAGE)
    cache = torch.cat([k_pages, v_pages], -1).transpose(1, 2).contiguous()
    cu = torch.tensor([0, *new]).cumsum(0).int()
    q = torch.randn(tokens, HEADS, HEAD_DIM)
    seen = []

    def attention(*tensors: Any, cu_seqlens_q: Any, **options: Any) -> Any:
        seen.append("dense" if cu_seqlens_q is None else "packed")
        return tandem.attention(*tensors, cu_seqlens_q=cu_seqlens_q, **options)

    monkeypatch.setattr(vllm.backend, "attention", attention)
    flags = torch.tensor([b % 2 == 0 for b in range(requests)])
    at = metadata(vllm, cu, used(lengths), table.clamp(min=0), torch.zeros(tokens), tokens, flags)
    output = torch.full_like(q, torch.nan)
    layer(vllm).forward(None, q, q, q, cache, at, output)
    assert seen == calls
    for b in range(requests):
        rows, n = slice(int(cu[b]), int(cu[b + 1])), lengths[b]
        wanted = tandem.attention(q[None, rows], k[b : b + 1, :n], v[b : b + 1, :n], causal=bool(flags[b]))
        torch.testing.assert_close(output[None, rows], wanted)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_an_8_bit_cache(vllm: Any, name: str) -> None:
    """Bytes in the cache are e4m3 codes: values over the layer's scales, one of keys and one of values."""
    assert name in vllm.backend.TandemBackend.supported_kv_cache_dtypes
    k, v, cache, key, value, cu, lengths, table, slots = step(vllm)
    scales = torch.tensor([0.02] * HEAD_DIM + [0.05] * HEAD_DIM)
    codes = (cache / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    at = SimpleNamespace(_k_scale=scales[0].clone(), _v_scale=scales[-1].clone())
    impl = layer(vllm, kv_cache_dtype=name)
    impl.do_kv_cache_update(at, key, value, codes, slots)
    q = torch.randn(24, HEADS, HEAD_DIM)
    output = torch.full_like(q, torch.nan)
    impl.forward(at, q, key, value, codes, metadata(vllm, cu, lengths, table, slots, 24), output)
    k, v = (
        (t / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s
        for t, s in ((k, scales[0]), (v, scales[-1]))
    )
    oracle.assert_sequences_close(output, q, k, v, lengths.tolist(), cu, causal=True)


def test_what_else_is_in_the_batch(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under VLLM_BATCH_INVARIANT a request's bits do not depend on it, and its tokens' chunks change none."""
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    assert vllm.backend.TandemBackend.supports_batch_invariance()
    impl = layer(vllm)
    assert impl.split_size > 0 and impl.split_size % 128 == 0
    k, v, cache, key, value, cu, lengths, table, slots = step(vllm)
    impl.do_kv_cache_update(None, key, value, cache, slots)
    q = torch.randn(24, HEADS, HEAD_DIM)
    beside, alone, last = torch.empty_like(q), torch.empty_like(q[:20]), torch.empty_like(q[:1])
    impl.forward(None, q, key, value, cache, metadata(vllm, cu, lengths, table, slots, 24), beside)
    one = metadata(vllm, cu[:2], lengths[:1], table[:1], slots, 20)
    impl.forward(None, q[:20], key, value, cache, one, alone)
    one = metadata(vllm, torch.tensor([0, 1], dtype=torch.int32), lengths[:1], table[:1], slots, 1)
    impl.forward(None, q[19:20], key, value, cache, one, last)
    assert torch.equal(beside[:20], alone) and torch.equal(alone[19:], last)


def test_where_memory_is_measured(vllm: Any) -> None:
    q = torch.randn(3, HEADS, HEAD_DIM)
    output = torch.full_like(q, torch.nan)
    layer(vllm).forward(None, q, q, q, torch.empty(0), None, output)
    assert not output.any()


def test_what_tandem_lacks(vllm: Any) -> None:
    for name, value in (
        ("attn_type", "encoder_only"),
        ("kv_cache_dtype", "fp8_e5m2"),
    ):
        with pytest.raises(tandem.UnsupportedError, match=f"^{name} is .*; choose another attention backend"):
            layer(vllm, **{name: value})
    q = torch.randn(3, HEADS, HEAD_DIM)
    with pytest.raises(tandem.UnsupportedError, match="^output_scale is given"):
        layer(vllm).forward(None, q, q, q, q, None, q, output_scale=torch.ones(1))


def test_what_vllm_asks(vllm: Any) -> None:
    backend = vllm.backend.TandemBackend
    assert [backend.supports_head_size(n) for n in (8, 64, 256, 264, 60, 0)] == [True] * 3 + [False] * 3
    for major, minor, ours in ((9, 0, True), (10, 0, False), (8, 0, False)):
        assert backend.supports_compute_capability(SimpleNamespace(major=major, minor=minor)) is ours
    assert backend.supports_sink() and backend.supports_sliding_window() and backend.supports_non_causal()
    assert backend.get_supported_kernel_block_sizes() == [vllm.own.MultipleOf(16)]
    assert not backend.forward_includes_kv_cache_update
    builder = backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is vllm.own.AttentionCGSupport.UNIFORM_BATCH
