"""The SGLang backend, in SGLang's own classes where it can be imported, and in small copies of what it uses
of SGLang 0.5.23 elsewhere. Pools of memory, batches and layers are always copies."""

from __future__ import annotations

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
from pages import used

HEADS, HEADS_KV, HEAD_DIM, CONTEXT = 4, 2, 32, 96


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode_or_idle(self) -> bool:
        return self.name in ("decode", "idle")

    def is_target_verify(self) -> bool:
        return self.name == "target_verify"

    def is_draft_extend_v2(self) -> bool:
        return self.name == "draft_extend"


class KVWriteLoc:
    def __init__(self, loc: torch.Tensor) -> None:
        self.loc = loc

    @classmethod
    def for_layer(cls, forward_batch: Any, layer: Any) -> Any:
        return cls(forward_batch.out_cache_loc)


class Pool:
    """MHATokenToKVPool: a row a slot, and a page of padding."""

    def __init__(self, slots: int, dtype: torch.dtype) -> None:
        self.k, self.v = torch.full((2, slots, HEADS_KV, HEAD_DIM), torch.nan).to(dtype)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer_id == 5
        return self.k, self.v

    def set_kv_buffer(
        self, layer: Any, at: KVWriteLoc, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        for cache, t, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            if scale is not None:
                t.div_(scale)  # in place, as SGLang's
            cache[at.loc] = t.to(cache.dtype)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """tandem.integrations.sglang and ._sglang beside the copies, and what was registered."""
    backends: dict[str, Any] = {}
    choices = ["triton", "fa3"]

    def register_attention_backend(name: str) -> Any:
        return lambda factory: backends.setdefault(name, factory)

    copies: dict[str, dict[str, Any]] = {
        "sglang.srt.layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": backends,
            "register_attention_backend": register_attention_backend,
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": object},
        "sglang.srt.server_args": {
            "ATTENTION_BACKEND_CHOICES": choices,
            "add_attention_backend_choices": choices.extend,
        },
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
    }
    registry, _, arguments, _ = engines.modules(monkeypatch, copies)[0].values()
    plugin = importlib.import_module("tandem.integrations.sglang")
    yield SimpleNamespace(
        plugin=plugin,
        backends=registry.ATTENTION_BACKENDS,
        choices=arguments.ATTENTION_BACKEND_CHOICES,
    )
    sys.modules.pop("tandem.integrations._sglang", None)


def test_the_package_tells_sglang_of_itself() -> None:
    (point,) = (p for p in entry_points(group="sglang.srt.plugins") if p.name == "tandem")
    assert point.value == "_tandem_attention:sglang"


def runner(page_size: int = 1, dtype: torch.dtype = torch.float32, **other: Any) -> Any:
    """A model runner with requests in rows 0 to 5 of the request pool."""
    slots = 6 * CONTEXT
    pages = torch.randperm(slots // page_size)[:, None] * page_size + torch.arange(page_size)
    tokens = page_size + pages.flatten().view(6, CONTEXT)  # slot 0 to page_size - 1: padding
    return SimpleNamespace(
        **{
            "use_mla_backend": False,
            "kv_cache_dtype": dtype,
            "model_config": SimpleNamespace(attention_chunk_size=None, context_len=CONTEXT),
            "req_to_token_pool": SimpleNamespace(req_to_token=tokens.int()),
            "token_to_kv_pool": Pool(slots + page_size, dtype),
            "page_size": page_size,
            "device": "cpu",
            **other,
        }
    )


def layer(**other: Any) -> Any:
    return SimpleNamespace(
        **{
            "layer_id": 5,
            "tp_q_head_num": HEADS,
            "qk_head_dim": HEAD_DIM,
            "v_head_dim": HEAD_DIM,
            "scaling": HEAD_DIM**-0.5,
            "logit_cap": 0.0,
            "sliding_window_size": -1,
            "is_cross_attention": False,
            "attn_type": SimpleNamespace(value="decoder"),
            "use_irope": False,
            "xai_temperature_len": -1,
            "k_scale": None,
            "v_scale": None,
            **other,
        }
    )


def batch(of: Any, mode: str, requests: list[int], before: list[int], new: list[int]) -> Any:
    """A step in which requests of these rows of the pool get `new` tokens each."""
    after = [a + b for a, b in zip(before, new, strict=True)]
    tokens = of.req_to_token_pool.req_to_token
    slots = [tokens[r, a:b] for r, a, b in zip(requests, before, after, strict=True)]
    return SimpleNamespace(
        forward_mode=Mode(mode),
        spec_info=None,
        batch_size=len(requests),
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(after),
        seq_lens_cpu=torch.tensor(after),
        extend_seq_lens=used(new),
        out_cache_loc=torch.cat(slots).long(),
        out_cache_loc_is_physical=True,
    )


def expected(k: Any, v: Any, q: Any, b: int, rows: slice, **options: Any) -> Any:
    """Of query rows `rows` of request b, which has no keys behind them."""
    inputs = q[None], k[b : b + 1, : rows.stop], v[b : b + 1, : rows.stop]
    same = () if k.dtype == torch.float32 else oracle.same_dtype(*inputs, **options)[:1]
    return oracle.exact(*inputs, **options)[0], *same


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("feature", ["plain", "window", "softcap and sink"])
def test_prompts_in_chunks_and_decoding(sglang: Any, feature: str, page_size: int) -> None:
    """Prefixes around the edges of pages, rows of the pools in any order, decoding eager and in the memory of
    a captured graph."""
    sglang.plugin.register()
    sglang.plugin.register()
    assert sglang.choices.count("tandem") == 1 and "fa3" in sglang.choices
    of = runner(page_size)
    backend = sglang.backends["tandem"](of)
    backend.init_cuda_graph_state(8, 8)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 7.0]).bfloat16() if "sink" in feature else None
    one = layer(
        sliding_window_size=9 if feature == "window" else -1, logit_cap=5.0 if "softcap" in feature else 0.0
    )
    options: dict[str, Any] = {
        "causal": True,
        "softcap": one.logit_cap,
        "window": (one.sliding_window_size, -1),
    }
    options["sink"] = None if sinks is None else sinks.float()
    k, v = torch.randn(2, 4, CONTEXT, HEADS_KV, HEAD_DIM)
    q = torch.randn(4, CONTEXT, HEADS, HEAD_DIM)
    requests, at = [4, 0, 5, 2], [0, 0, 0, 0]
    for mode, new in (
        ("extend", [14, 15, 16, 40]),
        ("extend", [3, 1, 33, 2]),
        ("decode", [1, 1, 1, 1]),
        ("graph", [1, 1, 1, 1]),
    ):
        step = batch(of, "decode" if mode == "graph" else mode, requests, at, new)
        if mode == "graph":
            backend.init_forward_metadata_out_graph(step, in_capture=True)
            assert step.batch_size == 4 and backend.get_cuda_graph_seq_len_fill_value() == 1
            captured = backend.forward_metadata.page_table.data_ptr()
            backend.init_forward_metadata_out_graph(step)
            assert backend.forward_metadata.page_table.data_ptr() == captured
        else:
            backend.init_forward_metadata(step)
        rows = [slice(a, a + n) for a, n in zip(at, new, strict=True)]
        flat = (torch.cat([t[b, r] for b, r in enumerate(rows)]) for t in (q, k, v))
        forward = backend.forward_extend if mode == "extend" else backend.forward_decode
        queries, *rest = flat
        more = {} if sinks is None else {"sinks": sinks}
        out = forward(queries.flatten(1), *rest, one, step, **more)
        assert out.shape == (sum(new), HEADS * HEAD_DIM)
        parts = out.view(-1, HEADS, HEAD_DIM).split(new)
        for b, (part, r) in enumerate(zip(parts, rows, strict=True)):
            oracle.assert_close(part[None], *expected(k, v, q[b, r], b, r, **options))
        at = [a + n for a, n in zip(at, new, strict=True)]


@pytest.mark.parametrize("scales", [(None, None), (torch.tensor(0.02), torch.tensor([0.05])), (0.02, 0.05)])
def test_an_8_bit_cache(sglang: Any, scales: tuple[Any, Any]) -> None:
    sglang.plugin.register()
    of = runner(16, torch.float8_e4m3fn)
    backend = sglang.backends["tandem"](of)
    one = layer(k_scale=scales[0], v_scale=scales[1])
    k, v = torch.randn(2, 2, 41, HEADS_KV, HEAD_DIM)
    kept = k.clone(), v.clone()
    q = torch.randn(2, 41, HEADS, HEAD_DIM)
    read = [
        (t / s).to(torch.float8_e4m3fn).float() * s
        for t, s in ((t, 1.0 if s is None else s) for t, s in zip((k, v), scales, strict=True))
    ]
    for mode, rows in (("extend", slice(0, 40)), ("decode", slice(40, 41))):
        new = rows.stop - rows.start
        now = batch(of, mode, [3, 1], [rows.start] * 2, [new] * 2)
        backend.init_forward_metadata(now)
        given = (t[:, rows].flatten(0, 1) for t in (q, k, v))
        out = backend.forward_extend(*given, one, now).view(2, new, HEADS, HEAD_DIM)
        for b in range(2):
            oracle.assert_close(out[b : b + 1], *expected(*read, q[b, rows], b, rows, causal=True))
    assert torch.equal(k, kept[0]) and torch.equal(v, kept[1])  # the model's own are as they were


def test_layers_that_share_anothers_cache_write_nothing(sglang: Any) -> None:
    sglang.plugin.register()
    of = runner()
    backend = sglang.backends["tandem"](of)
    step = batch(of, "extend", [1], [0], [7])
    backend.init_forward_metadata(step)
    q, k, v = torch.randn(7, HEADS * HEAD_DIM), *torch.randn(2, 7, HEADS_KV, HEAD_DIM)
    first = backend.forward_extend(q, k, v, layer(), step)
    kept = of.token_to_kv_pool.k.clone()
    assert torch.equal(backend.forward_extend(q, None, None, layer(), step), first)
    assert torch.equal(backend.forward_extend(q, k + 1, v, layer(), step, save_kv_cache=False), first)
    assert torch.equal(of.token_to_kv_pool.k.nan_to_num(), kept.nan_to_num())


def test_what_tandem_lacks(sglang: Any) -> None:
    sglang.plugin.register()
    make = sglang.backends["tandem"]
    chunks = SimpleNamespace(attention_chunk_size=8192, context_len=CONTEXT)
    windows = SimpleNamespace(translate_loc_from_full_to_swa=None)
    for other, message in (
        (
            {"kv_cache_dtype": torch.float8_e5m2},
            "the cache is torch.float8_e5m2, .*--kv-cache-dtype fp8_e4m3",
        ),
        ({"model_config": chunks}, "the model attends in chunks"),
        ({"token_to_kv_pool": windows}, "sliding windows have a pool .*--disable-hybrid-swa-memory"),
    ):
        with pytest.raises(tandem.UnsupportedError, match=f"^{message}"):
            make(runner(**other))
    of = runner()
    backend = make(of)
    for mode in ("target_verify", "draft_extend"):
        with pytest.raises(tandem.UnsupportedError, match="^the step is one of speculative decoding"):
            backend.init_forward_metadata(batch(of, mode, [0], [0], [3]))
    with pytest.raises(tandem.UnsupportedError, match="^a captured graph is not of decoding"):
        backend.init_forward_metadata_out_graph(batch(of, "target_verify", [0], [0], [3]), in_capture=True)
    step = batch(of, "extend", [0], [0], [3])
    backend.init_forward_metadata(step)
    q, k, v = torch.randn(3, HEADS * HEAD_DIM), *torch.randn(2, 3, HEADS_KV, HEAD_DIM)
    for odd, message in (
        (layer(is_cross_attention=True), "an attention layer is not a decoder's own"),
        (layer(attn_type=SimpleNamespace(value="encoder_only")), "an attention layer is not a decoder's own"),
        (layer(xai_temperature_len=8), "an attention layer scales its scores by position"),
        (layer(use_irope=True), "an attention layer scales its scores by position"),
    ):
        with pytest.raises(tandem.UnsupportedError, match=f"^{message}"):
            backend.forward_extend(q, k, v, odd, step)
    with pytest.raises(tandem.UnsupportedError, match="^q_rope is given to an attention layer"):
        backend.forward_extend(q, k, v, layer(), step, q_rope=q)
    backend.forward_extend(q, k, v, layer(), step, q_rope=None, return_lse=False)  # asks for nothing
