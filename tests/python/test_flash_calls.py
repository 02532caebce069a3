"""FlashAttention's functions as engines call them: more names and arguments than its own, errors with the
caller's names, caches of which little is in use, FP8 on a GPU."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from pages import paged, used
from tandem import _call, flash_attn, flash_attn2
from tandem.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tandem.torch import _calls, _record
from test_flash_cache import LENGTHS, SINK, cache, vllm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def test_sglangs_call() -> None:
    """Lengths of what is not appended, more names of the sink, and a choice of versions."""
    (k, v), cu = cache(), torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)
    k_pages, v_pages, table = paged(k, v, LENGTHS, 16)
    q, lengths = torch.randn(6, 4, 32), used(LENGTHS)
    given: dict[str, Any] = {"page_table": table, "cu_seqlens_q": cu, "max_seqlen_q": 3, "causal": True}
    expected = flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths, sink=SINK, **given)
    more = {"cu_seqlens_k_new": torch.arange(5), "rotary_seqlens": lengths, "sinks": SINK, "ver": 3}
    given |= {"window_size": (-1, -1), "attention_chunk": None, "scheduler_metadata": None}
    mine = torch.empty_like(expected)
    out = flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths, out=mine, **given, **more)
    assert out is mine and torch.equal(out, expected)
    varlen = {"seqused_k": lengths, "page_table": table, "causal": True, "sinks": SINK, "ver": 4}
    out, _ = flash_attn_varlen_func(q, k_pages, v_pages, cu, None, **varlen, return_softmax_lse=True)
    assert torch.equal(out, expected)
    with pytest.raises(tandem.InvalidArgumentError, match="^page_table and block_table are both given"):
        flash_attn_varlen_func(q, k_pages, v_pages, cu, None, block_table=table, **varlen)


def test_rows_of_a_table_that_are_chosen() -> None:
    """As FlashAttention-3's own test passes them: a table of more sequences than the call has."""
    q, (k, v), index = torch.randn(3, 2, 4, 32), cache(), torch.tensor([3, 0, 9])
    k_pages, v_pages, table = paged(k, v, [53] * 4, 16)
    lengths = used([40, 53, 7])
    given: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table, "cache_batch_idx": index}
    out = flash_attn_with_kvcache(q, k_pages, v_pages, causal=True, **given)
    for b, entry in enumerate((3, 0)):
        rows = slice(entry, entry + 1), slice(int(lengths[b]))
        oracle.assert_close(out[b : b + 1], oracle.exact(q[b : b + 1], k[rows], v[rows], causal=True)[0])
    assert torch.equal(out[2], torch.zeros(2, 4, 32))  # no such row of the table
    packed = given | {"cu_seqlens_q": torch.tensor([0, 2, 4, 6])}
    same = flash_attn_with_kvcache(q.flatten(0, 1), k_pages, v_pages, causal=True, **packed)
    assert torch.equal(same, out.flatten(0, 1))


class Bytes(TorchDispatchMode):
    """Counts the bytes that operators of PyTorch's own write."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = all(r.alias_info is None for r in func._schema.returns) and "empty" not in func.name()
        for t in out if isinstance(out, (tuple, list)) else (out,):
            self.count += t.nbytes if made and isinstance(t, torch.Tensor) else 0
        return out

    count = 0


@pytest.mark.parametrize("place", ["pages", "contiguous", "chosen entries"])
@pytest.mark.parametrize("what", ["chunks", "qv", "appended", "qv in chunks"])
def test_nothing_is_copied_that_is_not_in_use(what: str, place: str) -> None:
    rows = 1 << 12
    q, k, v = torch.randn(2, 1, 4, 32), torch.empty(2, rows, 2, 32), torch.empty(2, rows, 2, 32)
    k[:, :8], v[:, :8] = torch.randn(2, 2, 8, 2, 32)
    options: dict[str, Any] = {"cache_seqlens": used([7, 3]), "causal": True}
    if place == "pages":
        k, v = k.view(-1, 16, 2, 32), v.view(-1, 16, 2, 32)
        options["page_table"] = torch.arange(len(k), dtype=torch.int32).view(2, -1)
    elif place == "chosen entries":
        options["cache_batch_idx"] = torch.tensor([1, 0])
    if what == "appended":
        options |= {"k": torch.randn(2, 1, 2, 32), "v": torch.randn(2, 1, 2, 32)}
    if "qv" in what or what == "appended":
        options["qv"] = torch.randn(2, 1, 4, 32)
    if "chunks" in what:
        options["attention_chunk"] = 4
    with Bytes() as written:
        flash_attn_with_kvcache(q, k, v, **options)
    assert written.count < 1 << 17  # tables of integers; the caches have 2 MiB each


def test_errors_have_the_callers_names() -> None:
    q, (k, v), cu = torch.randn(4, 1, 4, 32), cache(rows=16), torch.arange(5, dtype=torch.int32)
    table, two, three = torch.tensor([[0], [1], [2], [3]]), torch.ones(2, 2), torch.ones(3).int()
    options: dict[str, Any] = {"cache_seqlens": 9}
    by_name: dict[str, Any] = {
        "softmax_scale is nan": {"softmax_scale": torch.nan},
        r"window_size\[0\] is -3": {"window_size": (-3, 0)},
        "k_descale is given but k_cache is f32": {"k_descale": two},
        r"cache_leftpad has shape \(3\)": {"cache_leftpad": three},
        "cache_leftpad is float32 of shape": {"cache_leftpad": torch.ones(4)},
        r"page_table has shape \(3, 1\)": {"page_table": three[:, None]},
        r"block_table has shape \(3, 1\)": {"block_table": three[:, None]},
        r"s_aux has shape \(3\)": {"s_aux": three.float()},
        r"rotary_seqlens is int32 of shape \(3,\)": {"k": k[:, :1], "v": v[:, :1], "rotary_seqlens": three},
        "k is torch.float16 but k_cache": {"k": k[:, :1].half(), "v": v[:, :1]},
    }
    for message, wrong in by_name.items():
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{message}"):
            flash_attn_with_kvcache(q, k, v, **options, **wrong)
    with pytest.raises(tandem.InvalidArgumentError, match=r"^v_cache has shape \(4, 16, 1, 32\); .* k_cache"):
        flash_attn_with_kvcache(q, k, v[:, :, :1], **options)
    packed = q[:, 0], k, v
    step: dict[str, Any] = {"seqused_k": used([9] * 4), "block_table": table}
    for message, wrong in {
        r"dynamic_causal has shape \(3\)": {"dynamic_causal": three},
        r"q_v has shape \(4, 1, 4, 32\); pass \(4, 4, 32\)": {"q_v": q},
        "block_table is f32": {"block_table": table.float()},
        "softmax_scale is inf": {"softmax_scale": torch.inf},
    }.items():
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{message}"):
            vllm(*packed, cu, **step | wrong)
    with pytest.raises(
        tandem.InvalidArgumentError, match=r"^cache_seqlens\[1\] is 17, but k_cache has 16 rows"
    ):
        flash_attn2.flash_attn_with_kvcache(q, k, v, cache_seqlens=used([1, 17, 1, 1]))
    with pytest.raises(tandem.InvalidArgumentError, match="^block_table is float32 of shape"):
        flash_attn2.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, block_table=table.float())
    with pytest.raises(tandem.InvalidArgumentError, match=r"^block_table has shape \(4, 1\)"):
        flash_attn2.flash_attn_varlen_func(q[:, 0], k, v, cu[:4], cu[:4], 1, 1, block_table=table)


@pytest.mark.parametrize("packed", [False, True])
def test_parts_are_combined(packed: bool) -> None:
    """FlashAttention's shapes: the heads are the last dimension of its LSE."""
    q, k, v = torch.randn(2, 5, 4, 32), torch.randn(2, 30, 2, 32), torch.randn(2, 30, 2, 32)
    rows = (slice(0, 10), slice(10, 11), slice(11, 30))
    parts = [tandem.attention(q, k[:, r], v[:, r], return_lse=True) for r in rows]
    out = torch.stack([part[0] for part in parts])
    lse = torch.stack([part[1].transpose(1, 2) for part in parts])
    expected = oracle.exact(q, k, v)
    if packed:
        out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    whole, whole_lse = flash_attn.flash_attn_combine(out, lse)
    oracle.assert_close(whole.view(q.shape), expected[0])
    oracle.assert_close(whole_lse.reshape(2, 5, 4).transpose(1, 2), expected[1])
    mine = torch.empty(out.shape[1:], dtype=torch.bfloat16)
    found, none = flash_attn.flash_attn_combine(out, lse, mine, return_lse=False)
    assert found is mine and none is None and torch.equal(mine, whole.bfloat16())
    halves, _ = flash_attn.flash_attn_combine(out, lse, out_dtype=torch.bfloat16)
    assert torch.equal(halves, mine)
    for wrong in ({"lse_partial": lse.transpose(-1, -2)}, {"out": mine[..., :16]}):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{[*wrong][0]} has shape "):
            flash_attn.flash_attn_combine(**{"out_partial": out, "lse_partial": lse} | wrong)


#: Shapes of e4m3 q and k, options, and the precision that each takes on a GPU.
FP8: list[tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...], str]] = [
    ("flash_attn_func", {}, (2, 300, 8, 128), (2, 500, 2, 128), "fp8"),
    ("flash_attn_func", {"causal": True, "window_size": (64, 0)}, (2, 300, 8, 64), (2, 300, 2, 64), "fp8"),
    ("flash_attn_varlen_func", {"cu_seqlens_q": 3, "cu_seqlens_k": 3}, (600, 8, 128), (900, 2, 128), "fp8"),
    ("flash_attn_with_kvcache", {"cache_seqlens": 2}, (2, 300, 8, 128), (2, 500, 2, 128), "exact"),
    ("flash_attn_with_kvcache", {"cache_seqlens": None}, (2, 300, 8, 128), (2, 500, 2, 128), "fp8"),
    (
        "flash_attn_with_kvcache",
        {"cache_seqlens": 2, "page_table": (2, 10), "cu_seqlens_q": 3},
        *((600, 8, 128), (20, 16, 2, 128), "exact"),
    ),
]


@pytest.mark.parametrize(("name", "options", "of_q", "of_k", "precision"), FP8)
def test_fp8_on_a_gpu(
    name: str, options: dict[str, Any], of_q: Any, of_k: Any, precision: str, monkeypatch: Any
) -> None:
    """What is called with CUDA tensors has a kernel there, exact for a cache and by the FP8 recipe else."""
    calls: list[Any] = []

    def attention(call: Any, q: Any, k: Any, v: Any, sink: Any, **_: Any) -> Any:
        calls.append((call, q, k, v))
        return q

    monkeypatch.setattr(_calls, "in_full", attention)
    monkeypatch.setattr(_record, "quick", lambda *_: None)
    with FakeTensorMode():

        def make(shape: Any, dtype: torch.dtype = torch.int32) -> Any:
            is_shape = isinstance(shape, tuple) or type(shape) is int
            return torch.empty(shape, dtype=dtype, device="cuda") if is_shape else shape

        q, k, v = (make(shape, torch.float8_e4m3fn) for shape in (of_q, of_k, of_k))
        descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), make((2, 2), torch.float32))
        lengths = ("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "page_table")
        given = {key: make(value) if key in lengths else value for key, value in options.items()}
        getattr(flash_attn, name)(q, k, v, **given, **descales)
    ((call, *tensors),) = calls
    assert call.precision == precision

    def described(t: Any) -> Any:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") if t is not None else t

    metadata = dict(zip(_call.METADATA, map(described, call.metadata), strict=True))
    q, k, v = map(described, tensors)
    plan = tandem.explain(q, k, v, device="H200", precision=call.precision, **metadata)
    assert ("eight_bit_forward" in plan) == (precision == "fp8")
