"""Dropout over ranks on gloo, and what calls with functions or dropout cannot be."""

from __future__ import annotations

import itertools
from typing import Any

import distributed_cases as cases
import oracle
import pytest
import tandem
import torch
import torch.distributed as dist
from distributed_pool import Pool, on_every_rank
from tandem.distributed import Layout, _comm, context_parallel_attention, gather
from tandem.distributed._comm import Ranks
from test_distributed_functions import BATCH, DIM, LENGTHS, MOST, PAIR, SEEN, randn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


def dropped(rank: int, heads: tuple[int, int], members: Any, dtype: torch.dtype, device: str) -> None:
    """The entries that one device keeps, forward and backward, with functions and without."""
    group = cases.subgroup(members)
    if members is None or rank in members:
        _dropped_of(group, cases.STRATEGIES, heads, dtype, device)


def dropped_of_levels(rank: int, heads: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """The same of the strategies of two levels, on nodes of two ranks."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("across", "within"))
    _dropped_of(mesh, cases.LEVELS, heads, dtype, device)


def _asked(heads: int, device: str) -> tuple[dict[str, Any], ...]:
    """What calls have beside dropout; arrays lie on `device`."""
    table, seen = randn(heads, 2 * MOST).to(device), SEEN.to(device)
    return (
        {},
        {"causal": True, "sink": randn(heads).to(device)},
        {"score_mod": lambda s, b, h, q, k: s * (b + 1) + table[h, q - k + MOST - 1], "softcap": 4.0},
        {"bias": table[:, None, :MOST], "mask": seen},
    )


def _one_device(whole: list[Tensor], dtype: torch.dtype, device: str, **options: Any) -> list[Tensor]:
    """Out, dq, dk and dv of one call there, on the CPU."""
    *inputs, dout = (t.to(device, dtype) for t in whole)
    leaves = [t.requires_grad_() for t in inputs]
    out = tandem.attention(*leaves, **options)
    return [t.cpu() for t in (out.detach(), *torch.autograd.grad(out, leaves, dout))]


def _close(got: Tensor, exact: Tensor, *one: Tensor) -> None:
    """In f32 parts and the one call beside them, which is no exact result, are each within the contract's
    1e-5 of what is exact, and so within twice that of each other. In 16 bits parts have twice the call's
    error."""
    if one:
        oracle.assert_close(got, exact, *one)
    else:
        torch.testing.assert_close(got, exact, atol=2e-5, rtol=2e-5)


def _dropped_of(
    group: Any, strategies: tuple[str, ...], heads: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    ranks = Ranks.of(group)
    here, on_cpu = (_asked(heads[0], each) for each in (device, "cpu"))
    for (kind, lengths), (more, same) in itertools.product(LENGTHS.items(), zip(here, on_cpu, strict=True)):
        if kind == "packed" and "bias" in more:
            continue
        lead = (BATCH, lengths) if isinstance(lengths, int) else (sum(lengths),)
        each = enumerate((heads[0], heads[1], heads[1], heads[0]))
        whole = [randn(*lead, h, DIM, seed=i).to(dtype) for i, h in each]
        dropout: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": 2**40 + 7, "dropout_offset": 2**33 + 5}
        cu: dict[str, Tensor] = {}
        if not isinstance(lengths, int):
            ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            cu = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        on_one = _one_device(whole, torch.float32, "cpu", **same, **dropout, **cu)
        wanted: list[tuple[Tensor, ...]] = [(t,) for t in on_one]
        if dtype != torch.float32:
            there = {name: t.to(device) for name, t in cu.items()}
            one = _one_device(whole, dtype, device, **more, **dropout, **there)
            wanted = [(*exact, t) for exact, t in zip(wanted, one, strict=True)]
        for layout_kind, strategy in itertools.product(("zigzag", "striped", "of_ranges"), strategies):
            layout = cases.layout_of(layout_kind, lengths, ranks.size)
            q, k, v, dout = (layout.shard(t.to(device), ranks.rank) for t in whole)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            options = {"layout": layout, "group": group, "strategy": strategy, **more, **dropout}
            out = context_parallel_attention(*leaves, **options)
            mine = out.detach(), *torch.autograd.grad(out, leaves, dout)
            found = [gather(t, layout=layout, group=group).cpu() for t in mine]
            what = f"{strategy} over {layout_kind}, {kind}, {', '.join(more) or 'nothing else'}"
            cases.assert_all_close(what, ("out", "dq", "dk", "dv"), found, wanted, _close)


@pytest.mark.parametrize(
    ("heads", "members"),
    [((4, 2), PAIR), ((6, 3), PAIR), ((4, 2), None), ((8, 2), None), ((5, 5), None)],
    ids=str,
)
def test_dropout_keeps_what_one_device_keeps(pool: Pool, heads: tuple[int, int], members: Any) -> None:
    pool.run(dropped, heads, members, torch.float32, "cpu")


@pytest.mark.parametrize("heads", [(4, 2), (6, 2)], ids=str)
def test_dropout_of_two_levels(pool: Pool, heads: tuple[int, int]) -> None:
    pool.run(dropped_of_levels, heads, torch.float32, "cpu")


def test_dropout_in_16_bits(pool: Pool) -> None:
    pool.run(dropped, (8, 4), None, torch.bfloat16, "cpu")


@on_every_rank
def test_ranks_take_one_seed(rank: int) -> None:
    """Without a seed that of the first rank; the bits follow from it."""
    layout = Layout.zigzag(64, 4)
    whole = [randn(1, 64, 4, DIM, seed=i) for i in range(3)]
    mine = [layout.shard(t, rank) for t in whole]
    torch.manual_seed(100 + rank)
    out = context_parallel_attention(*mine, layout=layout, dropout_p=0.5)
    again = context_parallel_attention(*mine, layout=layout, dropout_p=0.5)
    torch.manual_seed(100)
    for got in (out, again):
        wanted = layout.shard(tandem.attention(*whole, dropout_p=0.5), rank)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.equal(out, again)


def _refusals(rank: int) -> dict[str, str]:
    """What each rank is told where rank 2 asks for something else, and where all ask for what is not."""
    layout, packed, odd = Layout.zigzag(64, 4), Layout.balanced([20, 44], 4), rank == 2
    q, k, v = (torch.randn(1, 16, 4, 16) for _ in range(3))
    rows = [torch.randn(packed.rows(rank), 4, 16) for _ in range(3)]
    sends = _comm.Ranks.exchange, _comm.Ranks.shift
    _comm.Ranks.exchange = _comm.Ranks.shift = None  # type: ignore[method-assign, assignment]

    def refused(*tensors: Any, layout: Layout = layout, **options: Any) -> str:
        return cases.refused(context_parallel_attention, *(tensors or (q, k, v)), layout=layout, **options)

    def bent(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score if i > j else -score

    try:
        return {
            "score": refused(score_mod=lambda s, b, h, i, j: s * (2.0 if odd else 3.0)),
            "mask": refused(
                mask_mod=(lambda b, h, i, j: i >= j) if odd else None, alibi_slopes=torch.ones(4)
            ),
            "arrays": refused(bias=torch.zeros(64, dtype=torch.float16 if odd else None)),
            "gradients": refused(bias=torch.zeros(64, requires_grad=odd)),
            "p": refused(dropout_p=0.5 if odd else 0.25, dropout_seed=1),
            "seed": refused(dropout_p=0.5, dropout_seed=1 + odd),
            "offset": refused(dropout_p=0.5, dropout_seed=1, dropout_offset=3 * odd),
            "traced": refused(score_mod=bent if odd else lambda s, b, h, i, j: s),
            "shape": refused(bias=torch.zeros(63 if odd else 64)),
            "slopes": refused(alibi_slopes=torch.ones(3 if odd else 4)),
            "boolean": refused(mask=torch.zeros(64, 64, dtype=None if odd else torch.bool)),
            "probability": refused(dropout_p=1.5 if odd else 0.5, dropout_seed=1),
            "packed": refused(*rows, layout=packed, bias=torch.zeros(64)),
            "heads": refused(*(t[:, :, :3] for t in (q, k, v)), dropout_p=0.5, strategy="heads"),
        }
    finally:
        _comm.Ranks.exchange, _comm.Ranks.shift = sends  # type: ignore[method-assign]


def test_what_cannot_be_is_told_on_every_rank_before_anything_is_sent(pool: Pool) -> None:
    values = {
        "score": ("score function", "$0=mul(s, 3.0); $0", "$0=mul(s, 2.0); $0"),
        "mask": ("mask function", "None", "$"),
        "arrays": ("arrays that functions read", "[('float32', (64,))]", "[('float16', (64,))]"),
        "gradients": ("whether gradients are wanted", "False", "True"),
        "p": ("dropout_p", "0.25", "0.5"),
        "seed": ("dropout_seed", "1", "2"),
        "offset": ("dropout_offset", "0", "3"),
    }
    of_rank_2 = {
        "traced": "a condition depends on a score or a position",
        "shape": "bias has shape (63,), which does not broadcast to (batch, heads_q, seqlen_q, seqlen_k) = "
        "(1, 4, 64, 64)",
        "slopes": "alibi_slopes has shape torch.Size([3]); it must be (heads_q,) = (4,)",
        "boolean": "mask has dtype torch.float32; it must be boolean",
        "probability": "dropout_p is 1.5",
    }
    of_all = {
        "packed": "bias is given with cu_seqlens, but positions count in each sequence; use score_mod",
        "heads": "3 query heads on 3 key heads cannot be divided among 4 ranks",
    }
    of_ranks = pool.run(_refusals)
    cases.assert_told(of_ranks, values, of_rank_2)
    assert all(part in told[name] for told in of_ranks for name, part in of_all.items())
