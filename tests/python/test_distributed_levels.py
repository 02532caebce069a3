"""Strategies of two levels on four gloo processes: within the bounds of one device, and what is wrong."""

from __future__ import annotations

from typing import Any

import distributed_cases as cases
import pytest
import tandem
import torch
from distributed_pool import Pool
from tandem.distributed import H200, H200_HOSTS, Layout, _comm, context_parallel_attention, explain
from tandem.distributed._levels import of_nodes
from tandem.distributed._machine import CPU, Links
from torch.distributed.device_mesh import init_device_mesh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [cases.DENSE, cases.PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("feature", cases.FEATURES)
def test_right(pool: Pool, feature: str, lengths: int | tuple[int, ...], dtype: torch.dtype) -> None:
    pool.run(cases.right_of_levels, feature, lengths, dtype, "cpu")


def _shards(rank: int, layout: Layout, heads: tuple[int, int] = (4, 2)) -> list[torch.Tensor]:
    return [torch.randn(1, layout.rows(rank), h, 16) for h in (heads[0], heads[1], heads[1])]


def _sizes(rank: int) -> list[int]:
    """Bytes that go across nodes and within one, of a forward pass."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    sizes = [0, 0]
    exchange = _comm.Ranks.exchange

    def counting(ranks: Any, sends: Any, receives: Any, tag: int) -> Any:
        which = 0 if ranks.group == mesh.get_group(0) else 1
        sizes[which] += sum(t.nbytes for r, each in enumerate(sends) if r != ranks.rank for t in each)
        return exchange(ranks, sends, receives, tag)

    _comm.Ranks.exchange = counting  # type: ignore[method-assign]
    try:
        layout = Layout.zigzag(64, 4)
        context_parallel_attention(
            *_shards(rank, layout), layout=layout, group=mesh, causal=True, strategy="heads+gather"
        )
    finally:
        _comm.Ranks.exchange = exchange  # type: ignore[method-assign]
    return sizes


def test_each_link_carries_its_heads_alone(pool: Pool) -> None:
    rows, row = 16, 2 * 16 * 4  # of a rank; a head of K and V in f32
    for across, within in pool.run(_sizes):
        # q, k, v of half of the heads to the other rank, out and LSE of half of them back
        assert within == rows * (2 * 16 * 4 + row) + rows * (2 * 16 * 4 + 2 * 4)
        # A node's keys but those that the other node's queries don't see, of one head of two
        assert 0 < across <= 2 * rows * row


def _wrong(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    column = init_device_mesh("cpu", (4, 1), mesh_dim_names=("across", "within"))
    layout = Layout.zigzag(64, 4)

    def told(*tensors: torch.Tensor, **options: Any) -> str:
        given = {"layout": layout, "group": mesh, **options}
        return cases.refused(context_parallel_attention, *tensors, **given)

    q, k, v = _shards(rank, layout)
    out = context_parallel_attention(q, k, v, layout=layout, group=column, strategy="heads+ring")
    assert out.shape == q.shape  # nodes of one rank
    return {
        "flat": told(q, k, v, strategy="gather"),
        "levels": told(q, k, v, strategy="heads+gather", group=None),
        "heads": told(*_shards(rank, layout, (3, 1))),
        "ranks": told(q, k, v, layout=Layout.zigzag(64, 2)),
        "disagree": told(q, k, v, causal=rank == 3),
    }


def test_what_is_wrong_is_named_on_every_rank(pool: Pool) -> None:
    parts = {
        "flat": "strategy is 'gather', which takes a group of one; this group has 'heads+gather' or",
        "levels": "strategy is 'heads+gather', which takes a DeviceMesh of two dimensions",
        "heads": "no strategy is available: 3 query heads on 1 key heads cannot be divided among 2 ranks",
        "ranks": "layout is for 2 ranks, but the group has 4",
        "disagree": "rank 0 of the group has False, rank 3 has True",
    }
    for told in pool.run(_wrong):
        assert all(part in told[name] for name, part in parts.items()), told


def test_nodes_of_neighbours_are_a_layout_of_their_own() -> None:
    for kind in ("contiguous", "zigzag"):
        nodes = of_nodes(getattr(Layout, kind)(96, 6), 2)
        assert nodes.runs == getattr(Layout, kind)(96, 3).runs
    striped = of_nodes(Layout.striped(96, 6), 2)
    assert [len(held) for held in striped.runs] == [2, 2, 2] and striped.total == 96


def test_the_model_counts_each_link() -> None:
    layout = Layout.zigzag(4096 * 16, 16)
    sizes: dict[str, Any] = {"heads_q": 64, "heads_kv": 8, "head_dim_qk": 128, "causal": True}
    # A rank of eight has one head of K and V, which makes no chunks to compute beside: short sequences go
    # around, of long ones a ring's merging costs more.
    text = explain(layout, within=8, **sizes)
    assert text.startswith("heads+ring: the quickest by the model\n")
    assert "  heads+gather" in text and "\n  gather" not in text
    text = explain(Layout.zigzag(16384 * 16, 16), within=8, **sizes)
    assert text.startswith("heads+gather: the quickest by the model\n")
    # Under a window a rank needs its neighbour's rows, which a ring sends all around.
    rows = Layout.contiguous(8192 * 16, 16)
    window = explain(rows, within=2, **{**sizes, "window": (1024, 0)})
    assert window.startswith("heads+gather: the quickest by the model\n")
    with pytest.raises(tandem.TandemError, match="within is 5; it must divide the layout's 16 ranks"):
        explain(layout, within=5, **sizes)
    # Hosts tell which links there are.
    two, one = (1,) * 8 + (2,) * 8, (1,) * 16
    assert Links.of("cuda", two, 8) == Links(8, H200, H200_HOSTS)
    assert Links.of("cuda", two, 0) == Links(0, H200, H200_HOSTS)
    assert Links.of("cuda", (1, 2) * 8, 8) == Links(8, H200_HOSTS, H200_HOSTS)
    assert Links.of("cuda", one, 8) == Links(8, H200, H200) and Links.of("cpu", two, 0).far == CPU
