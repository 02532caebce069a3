"""tandem.attention on a cache of keys and values: pages, chosen entries, padding on the left."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import tandem
import torch
from pages import paged, used
from tandem import _call
from tandem.torch import _operators
from test_forward import DTYPES, qkv
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

LENGTHS = [53, 20, 0]
SINK = torch.tensor([-1.0, 0.5, 2.0, 7.0])


def cache(
    page_size: int = 8, dtype: torch.dtype = torch.float32, seqlen_q: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """q, and k and v in pages, with what tells the pages."""
    q, k, v = qkv(batch=3, seqlen_q=seqlen_q, head_dim_v=16, dtype=dtype)
    k, v, table = paged(k, v, LENGTHS, page_size)
    return q, k, v, {"page_table": table, "seqused_k": used(LENGTHS)}


def gathered(*pools: torch.Tensor, page_table: torch.Tensor, **_: Any) -> list[torch.Tensor]:
    """The rows of each sequence, and behind them any."""
    return [pool[page_table.clamp_min(0).long()].flatten(1, 2) for pool in pools]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_pages(dtype: torch.dtype, page_size: int) -> None:
    q, k, v, where = cache(page_size, dtype)
    options: dict[str, Any] = {"causal": True, "window": (30, -1), "softcap": 3.0, "sink": SINK}
    got = tandem.attention(q, k, v, **where, **options, return_lse=True, check=True)
    assert got[0].dtype == dtype and got[0].shape == (3, 5, 4, 16)
    oracle.assert_sequences_close(got, q, *gathered(k, v, **where), LENGTHS, **options)


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.int64], ids=str)
def test_causal_by_sequence(kind: torch.dtype) -> None:
    q, k, v, where = cache()
    flags = torch.tensor([True, False, True]).to(kind)
    out, lse = tandem.attention(q, k, v, **where, causal_by_sequence=flags, return_lse=True)
    arrays = {name: t.numpy() for name, t in where.items()} | {"causal_by_sequence": flags.numpy()}
    assert np.array_equal(out.numpy(), tandem.attention(q.numpy(), k.numpy(), v.numpy(), **arrays))
    tensors = out, lse, q, *gathered(k, v, **where)
    for b in range(3):
        *got, queries, keys, values = (t[b : b + 1] for t in tensors)
        causal = bool(flags[b])
        oracle.assert_sequences_close(tuple(got), queries, keys, values, LENGTHS[b : b + 1], causal=causal)
    for wrong, message in (
        ({"causal": True}, "^causal and causal_by_sequence are both given"),
        ({"causal_by_sequence": flags[:2]}, r"^causal_by_sequence has shape \(2\); it must be \(batch\)"),
        ({"causal_by_sequence": flags.float()}, "^causal_by_sequence is f32; convert it to i32 or i64"),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            tandem.attention(q, k, v, **where | {"causal_by_sequence": flags} | wrong)


def test_causal_by_sequence_compiled() -> None:
    q, k, v, where = cache()
    flags = torch.tensor([True, False, True])
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(
        lambda q, flags: tandem.attention(q, k, v, **where, causal_by_sequence=flags),
        backend=counter,
        fullgraph=True,
    )
    assert torch.equal(step(q, flags), tandem.attention(q, k, v, **where, causal_by_sequence=flags))
    assert counter.frame_count == 1


def test_packed_queries_of_pages() -> None:
    q, k, v, where = cache()
    cu = torch.tensor([0, 2, 2, 5])
    packed = torch.cat([q[0, :2], q[2, :3]])
    out, lse = tandem.attention(packed, k, v, cu_seqlens_q=cu, **where, causal=True, return_lse=True)
    rows = (t[:1, : LENGTHS[0]] for t in gathered(k, v, **where))
    expected, expected_lse = oracle.exact(q[:1, :2], *rows, causal=True)
    oracle.assert_close(out[:2], expected[0])
    oracle.assert_close(lse[:, :2], expected_lse[0])
    assert torch.equal(out[2:], torch.zeros(3, 4, 16)) and (lse[:, 2:] == -torch.inf).all()


def test_entries_chosen_and_behind_padding() -> None:
    q, k, v = qkv(batch=3)
    index, padding, lengths = torch.tensor([2, 0, 2]), torch.tensor([7, 0, 53]), torch.tensor([20, 53, 53])
    where = {"cache_batch_idx": index, "leftpad_k": padding, "seqused_k": lengths}
    out = tandem.attention(q, k, v, **where, causal=True, check=True)
    for b in range(3):
        rows = (slice(index[b], index[b] + 1), slice(padding[b], lengths[b]))
        oracle.assert_close(out[b : b + 1], oracle.exact(q[b : b + 1], k[rows], v[rows], causal=True)[0])
    # as many sequences as one asks for
    four = tandem.attention(q[:1].expand(4, -1, -1, -1), k, v, cache_batch_idx=torch.tensor([1] * 4))
    assert torch.equal(four[3:], tandem.attention(q[:1], k[1:2], v[1:2]))


def test_numpy_gives_what_pytorch_gives() -> None:
    q, k, v, where = cache()
    arrays = {name: t.numpy() for name, t in where.items()}
    out = tandem.attention(q.numpy(), k.numpy(), v.numpy(), **arrays, causal=True)
    assert np.array_equal(out, tandem.attention(q, k, v, **where, causal=True).numpy())
    wide = {name: np.asarray(t, np.int64) for name, t in arrays.items()}
    wide["page_table"] = np.repeat(wide["page_table"], 2, 1)[:, ::2]  # any strides
    assert np.array_equal(tandem.attention(q.numpy(), k.numpy(), v.numpy(), **wide, causal=True), out)


def test_views_of_one_buffer() -> None:
    """k and v of every layer in one tensor, as engines have them, and a slice of a wider table."""
    q, k, v, where = cache(16)
    v = torch.cat([v, v], -1)
    both = torch.full(
        (k.shape[0], 2, 3, 2, 16, 32), torch.nan
    )  # pages, k and v, layers, heads, rows, dimensions
    both[:, 0, 1], both[:, 1, 1] = k.transpose(1, 2), v.transpose(1, 2)
    table = torch.full((5, 9), 1 << 30, dtype=torch.int32)
    table[1:4, 2:6] = where["page_table"]
    views = (t.transpose(1, 2) for t in (both[:, 0, 1], both[:, 1, 1]))
    out = tandem.attention(q, *views, page_table=table[1:4, 2:6], seqused_k=where["seqused_k"])
    assert torch.equal(out, tandem.attention(q, k, v, **where))


def test_a_result_of_the_callers() -> None:
    q, k, v, where = cache()
    buffer = torch.full((4, 5, 4, 20), torch.nan)
    out = tandem.attention(q, k, v, **where, out=buffer[1:, ..., 4:])
    assert torch.equal(out, tandem.attention(q, k, v, **where))
    assert buffer[0].isnan().all() and buffer[..., :4].isnan().all() and not buffer[1:, ..., 4:].isnan().any()


def test_contents_are_checked_on_request() -> None:
    q, k, v, where = cache()
    wrong = where["page_table"].clone()
    wrong[1, 2] = k.shape[0]
    with pytest.raises(
        tandem.InvalidArgumentError, match=r"^page_table\[1, 2\] is 24; the 20 rows of sequence 1"
    ):
        tandem.attention(q, k, v, **where | {"page_table": wrong}, check=True)
    tandem.attention(q, k, v, **where | {"page_table": wrong})  # nothing is read out of bounds
    for name, other, message in (
        ("cu_seqlens_k", torch.tensor([0, 1, 2, 3]), "page_table and cu_seqlens_k are both given"),
        ("cache_batch_idx", torch.tensor([0, 1, 2]), "page_table and cache_batch_idx are both given"),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{message}"):
            tandem.attention(q, k, v, **where, **{name: other})
    with pytest.raises(TypeError, match="^page_table is an array of numpy but q is one of torch"):
        tandem.attention(q, k, v, page_table=where["page_table"].numpy())


@pytest.mark.parametrize("packed", [False, True])
def test_pages_that_no_query_sees_may_be_freed(packed: bool) -> None:
    """Engines free pages before the window of the first query; pages of padding count as freed, too."""
    q, k, v, where = cache(8, seqlen_q=3)
    expected = tandem.attention(q, k, v, **where, causal=True, window=(10, -1))
    table, lengths = where["page_table"].clone(), where
    table[0, : (53 - 3 - 10) // 8], table[1, :0] = -1, -1
    if packed:
        q, lengths = q.flatten(0, 1), where | {"cu_seqlens_q": used([0, 3, 6, 9])}
    given = lengths | {"page_table": table}
    out = tandem.attention(q, k, v, **given, causal=True, window=(10, -1), check=True)
    assert torch.equal(out.view(expected.shape), expected)
    table[1, 0] = -1
    padded = given | {"leftpad_k": used([0, 8, 0])}
    tandem.attention(q, k, v, **padded, causal=True, window=(10, -1), check=True)
    for options in ({"window": (18, -1)}, {"window": (-1, 0)}):
        with pytest.raises(tandem.InvalidArgumentError, match=r"^page_table\[0, [40]\] is -1; the 53 rows"):
            tandem.attention(q, k, v, **given, **options, check=True)


def test_a_cache_has_no_gradients() -> None:
    q, k, v, where = cache()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    message = (
        "^page_table is given with inputs that require gradients, but a cache has none; call under torch.no"
    )
    for inputs in ((leaves[0], k, v), (q, leaves[1], v), (q, k, leaves[2])):
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            tandem.attention(*inputs, **where)
    for name in ("leftpad_k", "cache_batch_idx"):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{name} is given with inputs that require"):
            tandem.attention(*(t.requires_grad_() for t in qkv()), **{name: torch.tensor([0, 1])})
    with pytest.raises(tandem.InvalidArgumentError, match="^causal_by_sequence is given .* has none"):
        tandem.attention(*(t.requires_grad_() for t in qkv()), causal_by_sequence=torch.tensor([0, 1]))
    metadata = tuple(where.get(name) for name in _call.METADATA)
    with pytest.raises(tandem.InvalidArgumentError, match=message):
        torch.ops.tandem.attention(
            leaves[0], k, v, None, *_operators.flat(_call.Call(metadata=metadata)), None
        )
    with pytest.raises(tandem.InvalidArgumentError, match=message):
        torch.func.grad(lambda q: tandem.attention(q, k, v, **where).sum())(q)
    with torch.no_grad():
        assert torch.equal(tandem.attention(*leaves, **where), tandem.attention(q, k, v, **where))


def test_compiled_in_one_graph() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, n: torch.Tensor) -> Any:
        return tandem.attention(q * 2, k, v, page_table=table, seqused_k=n, causal=True, return_lse=True)

    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for page_size in (8, 16, 5):
        q, k, v, where = cache(page_size)
        oracle.assert_equal(graph(q, k, v, *where.values()), step(q, k, v, *where.values()))
    assert sum("tandem.attention" in graph.code for graph in counter.graphs) == 1


@pytest.mark.parametrize("kind", ["pages", "packed queries of pages", "chosen entries", "padding"])
def test_opcheck(kind: str) -> None:
    q, k, v, where = cache()
    if "packed" in kind:
        q, where = q.flatten(0, 1), where | {"cu_seqlens_q": torch.tensor([0, 5, 10, 15])}
    elif "pages" not in kind:
        q, k, v = qkv(batch=3)
        name = "cache_batch_idx" if "chosen" in kind else "leftpad_k"
        where = {name: torch.tensor([2, 0, 2])}
    flat = _operators.flat(
        _call.Call(causal=True, metadata=tuple(where.get(name) for name in _call.METADATA))
    )
    torch.library.opcheck(torch.ops.tandem.attention, (q, k, v, None, *flat, None))
    out = torch.empty(*q.shape[:-1], v.shape[-1])
    torch.library.opcheck(torch.ops.tandem.attention_out, (q, k, v, None, *flat, out))


def test_the_meta_device_and_plans() -> None:
    q, k, v, where = cache()
    text = tandem.explain(q, k, v, **where)
    assert "batch 3, seqlen_q 5, seqlen_k 56" in text and "page_table (24 pages of 8 rows)" in text
    there = {name: t.to("meta") for name, t in where.items()}
    out, lse = tandem.attention(*(t.to("meta") for t in (q, k, v)), **there, return_lse=True)
    assert out.shape == (3, 5, 4, 16) and lse.shape == (3, 4, 5) and out.is_meta
    with pytest.raises(tandem.InvalidArgumentError, match=r"^page_table .*\(batch of q, max_pages\)"):
        tandem.attention(*(t.to("meta") for t in (q, k, v)), page_table=there["page_table"][:2])
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (q, k, v)]
        assert (
            tandem.attention(*fake, **{n: mode.from_tensor(t) for n, t in where.items()}).shape == out.shape
        )
    half = [t.to("meta", torch.bfloat16) for t in (q, k, v)]
    assert "page_table (24 pages of 8 rows)" in tandem.explain(*half, **there, device="H200")
    padded = tandem.explain(*half, **there, leftpad_k=there["seqused_k"], device="H200")
    assert "a row of a page at a time, behind leftpad_k" in padded
    eight = [t.to("meta", torch.float8_e4m3fn) for t in (k, v)]
    assert "k and v are read in e4m3" in tandem.explain(half[0], *eight, **there, device="H200")


def test_operations_are_counted_by_the_rows_in_use() -> None:
    q, k, v, where = cache()
    for lengths, pairs in ((where["seqused_k"], 5 * 73), (None, 5 * 3 * 56)):
        with FlopCounterMode(display=False) as counter:
            tandem.attention(q, k, v, page_table=where["page_table"], seqused_k=lengths, return_lse=True)
        assert counter.get_total_flops() == 2 * 4 * pairs * (32 + 16)
    q, k, v = qkv(batch=3)
    for name in ("leftpad_k", "cache_batch_idx"):
        with FlopCounterMode(display=False) as counter:
            tandem.attention(q, k, v, **{name: torch.tensor([0, 1, 2])})
        assert counter.get_total_flops() == 2 * 4 * 3 * 37 * 53 * 64
