"""tandem.distributed on gloo, on 2 and 4 processes: within the bounds of one device."""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import distributed_cases as cases
import pytest
import tandem
import torch
import torch.distributed as dist
import torch.multiprocessing
from distributed_pool import Pool, on_every_rank
from tandem.distributed import Layout, _comm, context_parallel_attention, gather
from tandem.distributed._chunks import chunk_heads
from tandem.distributed._machine import CPU, Shape
from tandem.distributed._mask import Mask
from tandem.distributed._routes import received, sent
from torch.distributed.device_mesh import init_device_mesh

PAIR = (1, 3)  # ranks of a group are not those of all processes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [cases.DENSE, cases.PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("feature", cases.FEATURES)
@pytest.mark.parametrize("members", [PAIR, None], ids=["2", "4"])
def test_right(
    pool: Pool, members: Any, feature: str, lengths: int | tuple[int, ...], dtype: torch.dtype
) -> None:
    pool.run(cases.right, feature, lengths, dtype, members, "cpu")


@pytest.mark.parametrize("lengths", [cases.DENSE, cases.PACKED], ids=["dense", "packed"])
def test_right_on_one(pool: Pool, lengths: int | tuple[int, ...]) -> None:
    pool.run(cases.right, "all", lengths, torch.float32, (2,), "cpu")


@pytest.mark.parametrize("lengths", [cases.DENSE, cases.PACKED], ids=["dense", "packed"])
def test_right_where_ranks_have_many_runs(pool: Pool, lengths: int | tuple[int, ...]) -> None:
    pool.run(cases.right_of_many_runs, lengths, torch.float32, "cpu")


def test_right_on_eight(tmp_path: Path) -> None:
    """Bounds are not looser with more ranks."""
    eight = Pool(8, tmp_path)
    try:
        eight.run(cases.right_on_eight, cases.DENSE, torch.bfloat16, timeout=240)
        eight.run(cases.right_on_eight, cases.PACKED, torch.float32, timeout=240)
    finally:
        eight.close()


def test_same_bits_in_every_run(pool: Pool) -> None:
    pool.run(cases.same_bits, "cpu")


def _shards(rank: int, layout: Layout, heads: tuple[int, int] = (4, 2)) -> list[torch.Tensor]:
    rows = layout.rows(rank)
    lead = (rows,) if layout.packed else (1, rows)
    return [torch.randn(*lead, h, 16) for h in (heads[0], heads[1], heads[1])]


_refused = functools.partial(cases.refused, context_parallel_attention)


def _disagreements(rank: int) -> dict[str, str]:
    """What each rank is told where rank 2 asks for something else, and where it passes something wrong."""
    layout = Layout.zigzag(64, 4)
    odd = rank == 2
    q, k, v = _shards(rank, layout)
    told = {
        "causal": _refused(q, k, v, layout=layout, causal=odd),
        "dtype": _refused(*((t.bfloat16() if odd else t) for t in (q, k, v)), layout=layout),
        "window": _refused(q, k, v, layout=layout, window=(3 if odd else 4, 0)),
        "scale": _refused(q, k, v, layout=layout, scale=2.0 if odd else None),
        "strategy": _refused(q, k, v, layout=layout, strategy="ring" if odd else "gather"),
        "layout": _refused(q, k, v, layout=Layout.striped(64, 4) if odd else layout),
        "heads": _refused(*_shards(rank, layout, (2, 2) if odd else (4, 2)), layout=layout),
        "gradients": _refused(q.clone().requires_grad_(odd), k, v, layout=layout),
        "rows": _refused(q[:, :-1] if odd else q, k, v, layout=layout),
        "head_dim": _refused(q[..., :12] if odd else q, k, v, layout=layout),
        "type": _refused(None if odd else q, k, v, layout=layout),
    }
    out = context_parallel_attention(q, k, v, layout=layout)  # the group works as before
    assert out.shape == q.shape
    return told


def test_ranks_that_disagree_are_told_on_every_rank(pool: Pool) -> None:
    values = {
        "causal": ("causal", "False", "True"),
        "dtype": ("dtype", "float32", "bfloat16"),
        "window": ("window", "(4, 0)", "(3, 0)"),
        "scale": ("scale", "None", "2.0"),
        "strategy": ("strategy", "gather", "ring"),
        "layout": ("layout", "zigzag", "striped"),
        "heads": ("shape of q but rows", "(1, 4, 16)", "(1, 2, 16)"),
        "gradients": ("whether gradients are wanted", "False", "True"),
    }
    rows = "q has 15 rows, but the layout gives rank 2 16"
    wrong = {"rows": rows, "head_dim": "12", "type": "NoneType"}
    cases.assert_told(pool.run(_disagreements), values, wrong)


def _wrong(rank: int) -> dict[str, str]:
    layout, packed = Layout.zigzag(64, 4), Layout.balanced([20, 44], 4)
    q, k, v = _shards(rank, layout)
    pair = cases.subgroup(PAIR)
    told = {
        "layout": _refused(q, k, v, layout="zigzag"),
        "ranks": _refused(q, k, v, layout=Layout.zigzag(64, 2)),
        "shape": _refused(q[0], k, v, layout=layout),
        "strategy": _refused(q, k, v, layout=layout, strategy="tree"),
        "heads": _refused(*_shards(rank, layout, (6, 3)), layout=layout, strategy="heads"),
        "window": _refused(q, k, v, layout=layout, window=(-2, 0)),
        "return_lse": _refused(q, k, v, layout=layout, return_lse="no"),
        "offsets": _refused(*_shards(rank, packed), layout=packed, cu_seqlens=[0, 20, 64]),
        "lengths": _refused(
            *_shards(rank, packed), layout=packed, cu_seqlens=torch.tensor([0, 10, 64], dtype=torch.int32)
        ),
    }
    if rank not in PAIR:
        told["group"] = _refused(q, k, v, layout=Layout.zigzag(64, 2), group=pair)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("data", "context", "model"))
    told["mesh"] = _refused(q, k, v, layout=layout, group=mesh)
    return told


def test_what_is_wrong_is_named(pool: Pool) -> None:
    parts = {
        "layout": "layout is 'zigzag'; make one with tandem.distributed.Layout",
        "ranks": "layout is for 2 ranks, but the group has 4",
        "shape": "the layout's tensors are (batch, rows, heads, head_dim)",
        "strategy": "strategy is 'tree'; it must be one of 'auto', 'gather', 'ring', 'heads', "
        "'heads+gather', 'heads+ring'",
        "heads": "6 query heads on 3 key heads cannot be divided among 4 ranks",
        "window": "-2",
        "return_lse": "return_lse is 'no'; pass True or False",
        "offsets": "cu_seqlens is a list; pass a torch.Tensor",
        "lengths": "cu_seqlens has sequences of (10, 54) rows, but the layout of (20, 44)",
        "mesh": "DeviceMesh of 3 dimensions",
    }
    for rank, told in enumerate(pool.run(_wrong)):
        for name, part in parts.items():
            assert part in told[name], told[name]
        assert (rank not in PAIR) == ("group" in told)
        if rank not in PAIR:
            assert f"group does not hold this process, rank {rank} of all" in told["group"]


@on_every_rank
def test_a_dimension_of_a_device_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    layout = Layout.zigzag(64, 2)
    torch.manual_seed(int(mesh["data"].get_local_rank()))
    q, k, v = (torch.randn(1, 64, 4, 16) for _ in range(3))
    mine = mesh["context"].get_local_rank()
    out = context_parallel_attention(
        *(layout.shard(t, mine) for t in (q, k, v)), layout=layout, group=mesh["context"], causal=True
    )
    whole = gather(out, layout=layout, group=mesh["context"])
    torch.testing.assert_close(whole, tandem.attention(q, k, v, causal=True), atol=1e-5, rtol=1e-5)


@on_every_rank
def test_shards_of_torchs_context_parallel(rank: int) -> None:
    """PyTorch's context manager divides buffers as Layout.zigzag does: attention inside may be ours."""
    from torch.distributed.tensor.experimental import context_parallel

    torch.manual_seed(2)
    whole = [torch.randn(2, 64, heads, 16) for heads in (4, 2, 2)]
    wanted = tandem.attention(*whole, causal=True)
    mesh = init_device_mesh("cpu", (4,))
    layout = Layout.zigzag(64, 4)
    q, k, v = (t.clone() for t in whole)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[1, 1, 1]):
        assert torch.equal(q, layout.shard(whole[0], rank))
        out = context_parallel_attention(q, k, v, layout=layout, group=mesh, causal=True)
    torch.testing.assert_close(out, layout.shard(wanted, rank), atol=1e-5, rtol=1e-5)


@on_every_rank
def test_more_ways_to_call(rank: int) -> None:
    """No gradients; autocast; a compiled model around it; a result that nothing flows back from."""
    layout = Layout.zigzag(64, 4)
    torch.manual_seed(1)
    whole = [torch.randn(1, 64, 4, 16) for _ in range(3)]
    wanted = tandem.attention(*whole, causal=True)
    shards = [layout.shard(t, rank) for t in whole]
    own = layout.shard(wanted, rank)

    def call(*tensors: torch.Tensor, **more: Any) -> Any:
        return context_parallel_attention(*tensors, layout=layout, causal=True, **more)

    torch.testing.assert_close(call(*shards), own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(call(*shards, check=False), own, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*shards).dtype == torch.bfloat16
    compiled = torch.compile(lambda q, k, v: 2 * call(q, k, v), backend="eager")
    torch.testing.assert_close(compiled(*shards), 2 * own, atol=1e-5, rtol=1e-5)
    for strategy in cases.STRATEGIES:
        q, k, v = (t.clone().requires_grad_() for t in shards)
        _, lse = call(q, k, v, return_lse=True, strategy=strategy)
        lse.sum().backward()
        assert v.grad is not None and not v.grad.any() and q.grad is not None and q.grad.any()


@on_every_rank
def test_no_row_is_sent_that_is_not_counted(rank: int) -> None:
    """Rows that arrive, of each chunk of heads: those that Layout's tables count, forward and backward."""
    rows: list[int] = []
    exchange = _comm.Ranks.exchange

    def counting(ranks: Any, sends: Any, receives: Any, tag: int) -> Any:
        rows.append(sum(len(t) for each in receives for t in each))
        return exchange(ranks, sends, receives, tag)

    _comm.Ranks.exchange = counting  # type: ignore[method-assign]
    try:
        for kind in cases.LAYOUTS:
            layout = cases.layout_of(kind, cases.PACKED, 4)
            q, k, v = (t.requires_grad_() for t in _shards(rank, layout))
            rows.clear()
            context_parallel_attention(
                q, k, v, layout=layout, causal=True, strategy="gather"
            ).sum().backward()
            mask = Mask(-1, 0)
            came, went = (of(layout, mask)[rank] for of in (received, sent))
            shape = Shape(1, q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size())
            ahead, back = (len(chunk_heads(layout, mask, shape, CPU, backward)) for backward in (False, True))
            wanted = [came] * (ahead + back) + [went] * back
            assert sorted(filter(None, rows)) == sorted(filter(None, wanted)), (kind, rows)
    finally:
        _comm.Ranks.exchange = exchange  # type: ignore[method-assign]


@on_every_rank
def test_whole_sequences_send_nothing(rank: int) -> None:
    """Whole sequences on every rank: nothing is sent, forward or backward."""
    exchange = _comm.Ranks.exchange
    # The last rank has its two in the other order than they follow one another.
    layout = Layout.of_ranges([9, 20, 4, 30], [[(29, 33)], [], [(33, 63)], [(9, 29), (0, 9)]])
    torch.manual_seed(6)
    whole = [torch.randn(63, heads, 16) for heads in (4, 2, 2)]
    shards = [layout.shard(t, rank).requires_grad_() for t in whole]
    _comm.Ranks.exchange = None  # type: ignore[method-assign, assignment]
    try:
        out = context_parallel_attention(*shards, layout=layout, causal=True, strategy="gather")
        out.square().sum().backward()
    finally:
        _comm.Ranks.exchange = exchange  # type: ignore[method-assign]
    mine = [t.clone().requires_grad_() for t in whole]
    cu = torch.tensor([0, 9, 29, 33, 63], dtype=torch.int32)
    wanted = tandem.attention(*mine, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    wanted.square().sum().backward()
    torch.testing.assert_close(out, layout.shard(wanted, rank))
    for got, want in zip(shards, mine, strict=True):
        assert got.grad is not None and want.grad is not None
        torch.testing.assert_close(got.grad, layout.shard(want.grad, rank))


@on_every_rank
def test_the_negative_bit_is_read(rank: int) -> None:
    """The shards of one rank, and the gradient that comes to it, are views of their negatives."""
    layout = Layout.zigzag(64, 4)
    torch.manual_seed(rank)
    plain, seed, sink = _shards(rank, layout), torch.randn(1, 16, 4, 16), torch.linspace(-1, 1, 4)
    found = []
    for bit in (False, rank == 2):
        tensors = [torch._neg_view(-t) if bit else t.clone() for t in (*plain, sink, seed)]
        inputs = [t.requires_grad_() for t in tensors[:4]]
        out = context_parallel_attention(*inputs[:3], layout=layout, sink=inputs[3], causal=True)
        found.append([out.detach(), *torch.autograd.grad(out, inputs, tensors[4])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _meeting(rank: int) -> int:
    """Exchanges of all ranks in two calls of a new group, of which the last rank has no rows."""
    group = dist.new_group([0, 1, 2])
    if rank == 3:
        return 1
    layout = Layout.of_ranges([64], [[(0, 16), (48, 64)], [(16, 48)], []])
    q, k, v = _shards(rank, layout)
    counted = []
    all_reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, **options: Any) -> Any:
        counted.append(tensor.numel())
        return all_reduce(tensor, **options)

    dist.all_reduce = counting
    try:
        for _ in range(2):
            call: Any = context_parallel_attention
            call(q, k, v, layout=layout, group=group, causal=True, strategy="gather", check=False)
    finally:
        dist.all_reduce = all_reduce
    return len(counted)


def test_all_ranks_meet_before_the_first_message(pool: Pool) -> None:
    """NCCL demands it of a group's first call, whether a rank has messages or not."""
    assert pool.run(_meeting) == [1, 1, 1, 1]


def _late(rank: int) -> float:
    """How long a rank waits for another that does not come, in a group with a time-out of 2 s."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank != 0:
        return 0.0
    layout = Layout.zigzag(64, 2)
    began = time.monotonic()
    with pytest.raises(tandem.ExecutionError, match="a rank has ended"):
        context_parallel_attention(*_shards(0, layout), layout=layout, group=group)
    return time.monotonic() - began


def test_a_rank_that_does_not_come_is_an_error_in_time(pool: Pool) -> None:
    assert 1.0 < pool.run(_late)[0] < 10.0
