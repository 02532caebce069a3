"""What every rank does in the tests of tandem.distributed, on gloo or NCCL."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import oracle
import pytest
import tandem
import torch
import torch.distributed as dist
from tandem.distributed import Layout, context_parallel_attention, gather
from tandem.distributed._comm import Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

STRATEGIES = ("gather", "ring", "heads")
LEVELS = ("heads+gather", "heads+ring")
KINDS = ("zigzag", "striped", "balanced")
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced", "of_ranges")
DENSE, PACKED = 61, (5, 0, 33, 1, 70, 2)


@dataclass(frozen=True)
class Feature:
    """A kind of attention: heads, head dimensions and options."""

    heads_q: int = 4
    heads_kv: int = 2
    head_dim_qk: int = 32
    head_dim_v: int = 32
    options: tuple[tuple[str, Any], ...] = ()
    sink: bool = False

    def arguments(self) -> dict[str, Any]:
        return dict(self.options)


FEATURES = {
    "causal": Feature(options=(("causal", True),)),
    "full, d_v": Feature(heads_q=4, heads_kv=4, head_dim_v=16),
    "window": Feature(options=(("window", (9, 4)),)),
    "all": Feature(
        head_dim_qk=48,
        options=(("causal", True), ("window", (20, -1)), ("softcap", 4.0), ("scale", 0.3)),
        sink=True,
    ),
    "mqa, sink": Feature(heads_kv=1, options=(("causal", True),), sink=True),
}
#: As many query heads as there are ranks in the largest group.
EIGHT_HEADS = Feature(heads_q=8, options=(("causal", True), ("window", (40, -1))), sink=True)


@dataclass
class Problem:
    """Whole tensors, the same on every rank, and what one device makes of them."""

    tensors: list[Tensor]  #: q, k, v
    sink: Tensor | None
    dout: Tensor
    dlse: Tensor
    options: dict[str, Any]
    cu: dict[str, Tensor] = field(default_factory=dict)


@functools.cache
def problem(feature: Feature, lengths: int | tuple[int, ...], dtype: torch.dtype) -> Problem:
    generator = torch.Generator().manual_seed(3)
    lead = (2, lengths) if isinstance(lengths, int) else (sum(lengths),)
    f = feature

    def draw(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=generator).to(dtype)

    q, k = draw(f.heads_q, f.head_dim_qk), draw(f.heads_kv, f.head_dim_qk)
    v, dout = draw(f.heads_kv, f.head_dim_v), draw(f.heads_q, f.head_dim_v)
    dlse = torch.randn(*lead[:-1], f.heads_q, lead[-1], generator=generator)
    sink = torch.randn(f.heads_q, generator=generator) if f.sink else None
    found = Problem([q, k, v], sink, dout, dlse, f.arguments())
    if not isinstance(lengths, int):
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        found.cu = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    return found


@functools.cache
def expected(
    feature: Feature, lengths: int | tuple[int, ...], dtype: torch.dtype
) -> list[tuple[Tensor, ...]]:
    """Of out, LSE, dq, dk, dv and dsink the fp64 reference, and what PyTorch makes of it in 16 bits."""
    from test_gpu import yardsticks

    p = problem(feature, lengths, dtype)
    options: dict[str, Any] = {**p.options, **p.cu}
    if p.sink is not None:
        options["sink"] = p.sink
    out, lse = oracle.exact(*p.tensors, **options)
    exact = oracle.gradients(oracle.exact, *p.tensors, p.dout, p.dlse, **options)
    if dtype == torch.float32:
        return [(t,) for t in (out, lse, *exact)]
    eager = oracle.eager(*p.tensors, **options)[0]
    same = yardsticks(exact, *p.tensors, p.dout, p.dlse, **options)
    return [(out, eager), (lse,), *((e, *s) for e, s in zip(exact, same, strict=True))]


@functools.cache
def layout_of(kind: str, lengths: int | tuple[int, ...], ranks: int) -> Layout:
    if kind == "of_ranges":  # the last rank but one has nothing, and others rows from several places
        total = lengths if isinstance(lengths, int) else sum(lengths)
        cuts = [0, 7, 8, total // 2, total // 2 + 11, total - 3, total]
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for i, cut in enumerate(itertools.pairwise(cuts)):
            owner = (i * 5) % ranks
            ranges[owner if ranks == 1 or owner != ranks - 2 else ranks - 1].append(cut)
        return Layout.of_ranges(lengths, ranges)
    if kind == "dealt":  # every other row of the first half, more runs than are sent one by one
        total = lengths if isinstance(lengths, int) else sum(lengths)
        half, others = total // 2, range(2, ranks)
        ends = (
            [half + (total - half) * i // len(others) for i in range(len(others) + 1)] if others else [half]
        )
        dealt = [[(row, row + 1) for row in range(first, half, 2)] for first in (0, 1)]
        dealt[0].append((ends[-1], total))
        return Layout.of_ranges(lengths, [*dealt, *([run] for run in itertools.pairwise(ends))])
    made: Layout = getattr(Layout, kind)(lengths, ranks)
    return made


def results(
    feature: Feature,
    lengths: int | tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    strategy: str,
    group: Any = None,
    device: str = "cpu",
    **more: Any,
) -> list[Tensor]:
    """Out, LSE, dq, dk, dv and dsink of the whole, on every rank, on the CPU."""
    p = problem(feature, lengths, dtype)
    rank = Ranks.of(group).rank
    q, k, v = (layout.shard(t, rank).to(device).requires_grad_() for t in p.tensors)
    sink = None if p.sink is None else p.sink.clone().to(device).requires_grad_()
    out, lse = context_parallel_attention(
        q,
        k,
        v,
        layout=layout,
        group=group,
        sink=sink,
        return_lse=True,
        strategy=strategy,
        **p.options,
        **more,
    )
    dout, dlse = layout.shard(p.dout, rank), layout.shard(p.dlse, rank, -1)
    torch.autograd.backward((out, lse), (dout.to(device), dlse.to(device)))
    found = [gather(t, layout=layout, group=group) for t in (out, q.grad, k.grad, v.grad) if t is not None]
    found.insert(1, gather(lse, layout=layout, group=group, dim=-1))
    if sink is not None and sink.grad is not None:
        levels = Ranks.of(group).levels
        for each in levels or (Ranks.of(group),):
            dist.all_reduce(sink.grad, group=each.group)
        found.append(sink.grad)
    return [t.cpu() for t in found]


def assert_all_close(
    what: str,
    names: Sequence[str],
    found: Sequence[Tensor],
    wanted: Sequence[tuple[Tensor, ...]],
    close: Callable[..., None] = oracle.assert_close,
) -> None:
    """Results against what `close` takes beside each; ``names`` may be more than there are."""
    assert len(found) == len(wanted), what
    for name, got, want in zip(names, found, wanted, strict=False):
        try:
            close(got, *want)
        except AssertionError as error:
            raise AssertionError(f"{name} of {what}: {error}") from None


def refused(call: Callable[..., Any], *tensors: Any, **options: Any) -> str:
    """What is said of a call that cannot be."""
    with pytest.raises((tandem.TandemError, TypeError)) as caught:
        call(*tensors, **options)
    return str(caught.value)


def assert_told(
    of_ranks: list[dict[str, str]], disagreements: dict[str, tuple[str, str, str]], wrong: dict[str, str]
) -> None:
    """Of every rank: what rank 0 and rank 2 have where they disagree, and what is wrong on rank 2 alone."""
    for rank, told in enumerate(of_ranks):
        for name, (what, first, other) in disagreements.items():
            message = told[name]
            assert message.startswith(f"ranks disagree on {what}: rank 0 of the group has {first}"), message
            assert f"rank 2 has {other}" in message, message
        for name, part in wrong.items():
            assert part in told[name], told[name]
            assert told[name].startswith("rank 2 of the group: ") == (rank != 2)


def right(
    rank: int, feature: str, lengths: int | tuple[int, ...], dtype: torch.dtype, members: Any, device: str
) -> None:
    """Every strategy over every layout, within the bounds of one device."""
    group = subgroup(members)
    if members is not None and rank not in members:
        return
    right_of(group, STRATEGIES, feature, lengths, dtype, device)


def right_of_levels(
    rank: int, feature: str, lengths: int | tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """The strategies of two levels, on nodes of two ranks."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("across", "within"))
    right_of(mesh, LEVELS, feature, lengths, dtype, device)


def right_of_many_runs(rank: int, lengths: int | tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Rows that are picked into one message, and in the same exchange rows that are sent as they lie."""
    for feature in ("full, d_v", "all"):
        right_of(None, ("gather",), feature, lengths, dtype, device, ("dealt",))


def right_on_eight(rank: int, lengths: int | tuple[int, ...], dtype: torch.dtype) -> None:
    right_of(None, STRATEGIES, EIGHT_HEADS, lengths, dtype, "cpu")


def right_of(
    group: Any,
    strategies: tuple[str, ...],
    feature: str | Feature,
    lengths: int | tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    kinds: tuple[str, ...] = LAYOUTS,
) -> None:
    ranks = Ranks.of(group)
    asked = FEATURES[feature] if isinstance(feature, str) else feature
    for kind, strategy in itertools.product(kinds, strategies):
        layout = layout_of(kind, lengths, ranks.size)
        found = results(asked, lengths, dtype, layout, strategy, group, device)
        if ranks.rank == 0:
            names = ("out", "lse", "dq", "dk", "dv", "dsink")
            assert_all_close(f"{strategy} over {kind}", names, found, expected(asked, lengths, dtype))


def inputs(layout: Layout, rank: int, device: str = "cpu") -> list[Tensor]:
    """q, k, v of the rank and a sink, all of which want gradients."""
    generator = torch.Generator().manual_seed(5)
    lead = (layout.total,) if layout.packed else (2, layout.total)
    whole = [torch.randn(*lead, h, 32, generator=generator) for h in (4, 2, 2)]
    sink = torch.randn(4, generator=generator)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shards = [layout.shard(t, rank).to(device, dtype) for t in whole]
    return [t.requires_grad_() for t in (*shards, sink.to(device))]


def graph_step(layout: Layout, group: Any, strategy: str, *inputs: Tensor) -> Tensor:
    q, k, v, sink = inputs
    options: dict[str, Any] = {"causal": True, "window": (40, -1), "softcap": 5.0, "sink": sink}
    options["deterministic"] = True  # on GPUs, too, the same with and without a graph
    out, lse = context_parallel_attention(
        q * 2, k, v, layout=layout, group=group, strategy=strategy, return_lse=True, **options
    )
    return out.square().sum() + lse.sigmoid().sum()


def one_graph(rank: int, strategy: str, kind: str, group: Any, device: str) -> int:
    """How many graphs serve several layouts, forward and backward, with the results of none."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(graph_step, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ((51, 21, 41), (64, 40), (37, 35, 30, 50)):
        layout = getattr(Layout, kind)(lengths, dist.get_world_size(group))
        tensors = inputs(layout, rank, device)
        wanted = graph_step(layout, group, strategy, *tensors)
        got = compiled(layout, group, strategy, *tensors)
        torch.testing.assert_close(got, wanted)
        gradients = (torch.autograd.grad(loss, tensors) for loss in (got, wanted))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    found: int = counter.frame_count
    return found


_groups: dict[Any, Any] = {}


def subgroup(members: tuple[int, ...] | None) -> Any:
    """A group of these ranks, made once; every rank has to ask for it."""
    if members is None:
        return None
    if members not in _groups:
        _groups[members] = dist.new_group(list(members))
    return _groups[members]


def same_bits(rank: int, device: str, times: int = 3, kinds: tuple[str, ...] = KINDS) -> None:
    """With ``deterministic`` gradients do not depend on which rank is late."""
    chance = random.Random(rank)
    for kind, strategy in itertools.product(kinds, STRATEGIES):
        for lengths in (DENSE, PACKED):
            layout = layout_of(kind, lengths, dist.get_world_size())
            first: list[Tensor] = []
            for _ in range(times):
                time.sleep(chance.random() * 0.01)
                got = results(
                    FEATURES["all"],
                    lengths,
                    torch.bfloat16,
                    layout,
                    strategy,
                    None,
                    device,
                    deterministic=True,
                )[:-1]  # dsink's all-reduce is this test's own
                first = first or got
                assert all(torch.equal(a, b) for a, b in zip(first, got, strict=True)), (kind, strategy)
