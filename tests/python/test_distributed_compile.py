"""context_parallel_attention as an operator: torch.compile without a graph break, on gloo."""

from __future__ import annotations

import distributed_cases as cases
import pytest
import tandem
import torch
import torch.distributed as dist
from distributed_pool import Pool, on_every_rank
from tandem import _call
from tandem.distributed import Layout, context_parallel_attention
from torch.distributed.device_mesh import init_device_mesh

PAIR = (0, 1)


def _compiled(rank: int, strategy: str, kind: str) -> int:
    group = cases.subgroup(PAIR)
    return cases.one_graph(rank, strategy, kind, group, "cpu") if rank in PAIR else 0


@pytest.mark.parametrize("kind", ["zigzag", "balanced"])
@pytest.mark.parametrize("strategy", ["gather", "ring", "heads", "auto"])
def test_one_graph_without_breaks(pool: Pool, strategy: str, kind: str) -> None:
    assert pool.run(_compiled, strategy, kind) == [1, 1, 0, 0]


@on_every_rank
def test_meshes_in_a_graph(rank: int) -> None:
    """By inductor; groups that are meshes, of one dimension and of two; dense tensors, no gradients."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    compiled = torch.compile(context_parallel_attention, fullgraph=True)
    for group, ranks, mine in ((mesh["within"], 2, rank % 2), (mesh, 4, rank)):
        layout = Layout.zigzag(64, ranks)
        inputs = [t.detach() for t in cases.inputs(layout, mine)[:3]]
        wanted = context_parallel_attention(*inputs, layout=layout, group=group, causal=True)
        got = compiled(*inputs, layout=layout, group=group, causal=True)
        torch.testing.assert_close(got, wanted)


def _refusals(rank: int) -> tuple[str, str]:
    """What a graph finds as it runs: ranks that disagree, and one whose rows are not the layout's."""
    torch.compiler.reset()
    compiled = torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager")
    layout = Layout.zigzag(64, 4)
    q, k, v, _ = (t.detach() for t in cases.inputs(layout, rank))
    with pytest.raises(tandem.TandemError) as disagree:
        compiled(q, k, v, layout=layout, causal=rank == 3)
    odd = q[:, :-1] if rank == 1 else q
    with pytest.raises(tandem.TandemError) as rows:
        compiled(odd, k, v, layout=layout)
    dist.barrier()
    return str(disagree.value), str(rows.value)


def test_ranks_that_disagree_are_told(pool: Pool) -> None:
    for disagree, rows in pool.run(_refusals):
        assert "ranks disagree on causal: rank 0 of the group has False, rank 3 has True" in disagree
        assert "q has 15 rows, but the layout gives rank 1 16" in rows


@on_every_rank
def test_opcheck(rank: int) -> None:
    """PyTorch's own checks of the operator and its derivative."""
    layout = Layout.balanced([20, 44], 4)
    q, k, v, sink = cases.inputs(layout, rank)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    call = _call.Call(causal=True, deterministic=True, check=True)
    options = (layout.code, [name], *call.flat()[: _call.FLAT_OPTIONS])
    arguments = (q, k, v, sink, *options, None, "ring", True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.tandem_distributed.attention, arguments, test_utils=tests)


def test_a_layout_is_what_its_code_says() -> None:
    for lengths in (61, (5, 0, 33, 1), ()):
        for kind in ("contiguous", "zigzag", "striped", "balanced"):
            layout = getattr(Layout, kind)(lengths, 3)
            code = layout.code.clone()
            assert Layout.of_code(code) is layout
            runs, digest = layout.runs, layout.digest
            del layout
            again = Layout.of_code(code)
            assert (again.runs, again.kind, again.digest) == (runs, kind, digest)
            assert again.packed == (lengths != 61) and again.lengths == (lengths if lengths != 61 else (61,))
