"""Ranks that disagree in a gather, that know different machines, and that die: on gloo."""

from __future__ import annotations

import functools
import os
import signal
import time
from datetime import timedelta
from typing import Any

import distributed_cases as cases
import pytest
import tandem
import torch
import torch.distributed as dist
import torch.multiprocessing
from distributed_pool import Pool
from tandem import _call
from tandem.distributed import (
    Layout,
    _begin,
    _comm,
    _cost,
    _machine,
    context_parallel_attention,
    explain,
    gather,
)
from torch.distributed.device_mesh import init_device_mesh


def _gathers(rank: int) -> dict[str, str]:
    """What each rank is told where rank 2 gathers something else, and where it passes something wrong."""
    layout, odd = Layout.zigzag(64, 4), rank == 2
    x = torch.randn(2, layout.rows(rank), 4, 8)

    def refused(x: Any, **options: Any) -> str:
        return cases.refused(gather, x, **{"layout": layout, **options})

    tensors, call = ([x] * 3, context_parallel_attention) if odd else ([x], gather)

    told = {
        "dtype": refused(x.double() if odd else x),
        "shape": refused(x[:1] if odd else x),
        "dim": refused(x.transpose(1, 2) if odd else x, dim=2 if odd else 1),
        "layout": refused(x, layout=Layout.striped(64, 4) if odd else layout),
        "call": cases.refused(call, *tensors, layout=layout),
        "rows": refused(x[:, 1:] if odd else x),
        "type": refused("x" if odd else x),
        "far": refused(x, dim=7 if odd else 1),
    }
    assert gather(x, layout=layout).shape == (2, 64, 4, 8)  # the group works as before
    return told


def test_ranks_that_gather_different_things_are_told_on_every_rank(pool: Pool) -> None:
    values = {
        "dtype": ("dtype", "float32", "float64"),
        "shape": ("shape of x but rows", "(2, 4, 8)", "(1, 4, 8)"),
        "dim": ("dim", "1", "2"),
        "layout": ("layout", "zigzag", "striped"),
        "call": ("call", "gather", "context_parallel_attention"),
    }
    rows = "x has 15 rows, but the layout gives rank 2 16"
    wrong = {"rows": rows, "type": "x is a str", "far": "dim is 7"}
    cases.assert_told(pool.run(_gathers), values, wrong)


def _beside_a_group(rank: int) -> tuple[dict[str, str], int]:
    """What each rank is told by a group that sends from GPUs alone, as far as it knows, so that another one
    beside it compares; and how many of those there are."""
    before = _comm.sends_from_host
    _comm.sends_from_host = lambda devices: False
    try:
        group = dist.new_group([0, 1, 2, 3])
        layout, odd = Layout.zigzag(64, 4), rank == 2
        q, k, v = (torch.randn(1, layout.rows(rank), heads, 16) for heads in (4, 2, 2))
        call = functools.partial(context_parallel_attention, k=k, v=v, layout=layout, group=group)
        told = {
            "scale": cases.refused(call, q, scale=2.0 if odd else 1.0),
            "heads": cases.refused(call, q[:, :, :2] if odd else q),
            "rows": cases.refused(call, q[:, 1:] if odd else q),
        }
        assert call(q, dropout_p=0.1).shape == q.shape  # the group works as before; all take one seed
        return told, len(_comm._on_host)
    finally:
        _comm.sends_from_host = before


def test_a_group_of_gpus_compares_between_hosts(pool: Pool) -> None:
    found = pool.run(_beside_a_group)
    heads = ("shape of q but rows", "(1, 4, 16)", "(1, 2, 16)")
    rows = "q has 15 rows, but the layout gives rank 2 16"
    values = {"scale": ("scale", "1.0", "2.0"), "heads": heads}
    cases.assert_told([told for told, _ in found], values, {"rows": rows})
    assert [beside for _, beside in found] == [1] * 4


SIZES = {"heads_q": 8, "heads_kv": 2, "head_dim_qk": 64}
DIVIDED = Layout.zigzag(2**16, 4)


def _on_different_machines(rank: int) -> tuple[Any, str]:
    """The hosts that a rank takes the group to be on, and what it chooses. Each sees other GPUs."""
    before = _comm.host, torch.cuda.device_count, _machine.Links.of
    _comm.host = lambda: 1000 + rank // 2
    torch.cuda.device_count = lambda: (4, 1, 8, 2)[rank]
    _machine.Links.of = classmethod(  # type: ignore[assignment, method-assign]
        lambda cls, device, *rest: before[2]("cuda", *rest)
    )
    try:
        group = dist.new_group([0, 1, 2, 3])
        hosts = _comm.Ranks.of(group).hosts()
        q, k = (torch.empty(1, DIVIDED.rows(rank), heads, 64, dtype=torch.bfloat16) for heads in (8, 2))
        asked = _begin.Asked(_call.Call(causal=True, check=True), DIVIDED, None, "auto")
        _, chosen = _begin.begin(asked, _comm.Ranks.of(group), q, k, k, None)
        return hosts, chosen
    finally:
        _comm.host, torch.cuda.device_count, _machine.Links.of = before  # type: ignore[method-assign]


def test_ranks_that_see_different_machines_choose_the_same(pool: Pool) -> None:
    found = pool.run(_on_different_machines)
    near, far = (
        explain(DIVIDED, causal=True, machine=machine, **SIZES).split(":")[0]
        for machine in (_machine.H200, _machine.H200_HOSTS)
    )
    assert near != far  # it does depend on the machine
    assert found == [((1000, 1000, 1001, 1001), far)] * 4


def _dying(rank: int, store: str, told: Any, strategy: str, fatal: int) -> None:
    """Rank 3 is killed in its ``fatal``-th exchange, some of which are over."""
    dist.init_process_group("gloo", store, rank=rank, world_size=4, timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    group = mesh if "+" in strategy else None
    layout = Layout.zigzag(64, 4)
    q, k, v = (torch.randn(1, 16, 4, 16, requires_grad=True) for _ in range(3))
    context_parallel_attention(q, k, v, layout=layout, group=group, causal=True, strategy=strategy)
    calls = 0

    def counting(send: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if rank == 3 and calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(*arguments)

        return counted

    for name in ("exchange", "shift"):
        setattr(_comm.Ranks, name, counting(getattr(_comm.Ranks, name)))
    began = time.monotonic()
    try:
        out = context_parallel_attention(q, k, v, layout=layout, group=group, causal=True, strategy=strategy)
        out.sum().backward()
        told.put((rank, "no error", 0.0))
    except tandem.ExecutionError as error:
        told.put((rank, str(error), time.monotonic() - began))


@pytest.mark.parametrize(("strategy", "fatal"), [("gather", 3), ("ring", 5), ("heads+gather", 3)])
def test_a_rank_that_is_killed_is_an_error_on_the_others(tmp_path: Any, strategy: str, fatal: int) -> None:
    context = torch.multiprocessing.get_context("spawn")
    told = context.Queue()
    store = f"file://{tmp_path}/store"
    processes = [context.Process(target=_dying, args=(r, store, told, strategy, fatal)) for r in range(4)]
    for process in processes:
        process.start()
    found = [told.get(timeout=120) for _ in range(3)]
    assert sorted(rank for rank, _, _ in found) == [0, 1, 2]
    for _, message, seconds in found:
        assert "since a rank has ended" in message and seconds < 40, (message, seconds)
    for process in processes:
        process.join(30)
    assert processes[3].exitcode == -signal.SIGKILL


def test_cases_name_every_strategy() -> None:
    assert {*cases.STRATEGIES, *cases.LEVELS} == set(_cost.STRATEGIES)
