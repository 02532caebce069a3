"""Functions of scores, masks and biases over ranks on gloo: against the plain formula in float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import distributed_cases as cases
import oracle
import pytest
import torch
import torch.distributed as dist
from distributed_pool import Pool, on_every_rank
from tandem.distributed import Layout, context_parallel_attention, gather
from tandem.distributed._comm import Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

PAIR = (1, 3)  # ranks of a group are not those of all processes
BATCH, HEADS, DIM = 2, 4, 16
DENSE, PACKED = 61, (5, 0, 33, 1, 30)
LENGTHS = {"dense": DENSE, "packed": PACKED}
MOST = 61  # rows of the longest sequence


def randn(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


DOCUMENT = torch.arange(MOST) // 13
PREFIX = torch.tensor([7, 20, 3, 1, 11])
SEEN = randn(MOST, MOST) > -0.4
DEVICE = "cpu"


def use(device: str) -> None:
    """Has this process's calls run there. What functions read has no gradients on a GPU."""
    global DEVICE, DOCUMENT, PREFIX, SEEN
    DEVICE = device
    DOCUMENT, PREFIX, SEEN = (t.to(device) for t in (DOCUMENT, PREFIX, SEEN))


@dataclass(frozen=True)
class Case:
    """What is asked of pairs. ``read`` learns; ``options`` has the keywords of an attention that reads it,
    ``score`` and ``mask`` the same of all pairs at once: (scores or nothing, read, b, h, q, k)."""

    options: Callable[[Tensor], dict[str, Any]]
    score: Callable[..., Tensor] | None = None
    mask: Callable[..., Tensor] | None = None
    read: Tensor | None = None
    plain: tuple[tuple[str, Any], ...] = ()
    sink: bool = False
    only: str = ""  #: the LENGTHS that it is for, if not all


def _table(t: Tensor) -> Any:
    return lambda s, b, h, q, k: s + t[h, q - k + MOST - 1]


def _document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENT[q] == DOCUMENT[k]


def _by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(h < 2, q % 3 != k % 3, k < PREFIX[b])


CAUSAL = (("causal", True),)
CASES = {
    "alibi": Case(
        lambda t: {"alibi_slopes": t},
        lambda s, t, b, h, q, k: s - t[h] * (q - k).abs(),
        read=randn(HEADS),
        plain=CAUSAL,
    ),
    "alibi by sequence": Case(
        lambda t: {"alibi_slopes": t[:BATCH], "mask_mod": lambda b, h, q, k: q >= k},
        lambda s, t, b, h, q, k: s - t[b, h] * (q - k).abs(),
        lambda b, h, q, k: q >= k,
        read=randn(BATCH, HEADS),
        only="dense",
    ),
    "alibi by packed sequence": Case(
        lambda t: {"alibi_slopes": t},
        lambda s, t, b, h, q, k: s - t[b, h] * (q - k).abs(),
        read=randn(len(PACKED), HEADS),
        plain=CAUSAL,
        only="packed",
    ),
    "bias, mask": Case(
        lambda t: {"bias": t, "mask": SEEN},
        lambda s, t, b, h, q, k: s + t[b, h, q, k],
        lambda b, h, q, k: SEEN[q, k],
        read=randn(BATCH, HEADS, MOST, MOST),
        only="dense",
    ),
    "bias of keys": Case(
        lambda t: {"bias": t},
        lambda s, t, b, h, q, k: s + t[h, 0, k],
        read=randn(HEADS, 1, MOST),
        plain=(("window", (20, 3)), ("softcap", 4.0)),
        sink=True,
        only="dense",
    ),
    "table": Case(
        lambda t: {"score_mod": _table(t)},
        lambda s, t, b, h, q, k: _table(t)(s, b, h, q, k),
        read=randn(HEADS, 2 * MOST),
        plain=CAUSAL,
    ),
    "table, document": Case(
        lambda t: {"score_mod": _table(t), "mask_mod": _document},
        lambda s, t, b, h, q, k: _table(t)(s, b, h, q, k),
        lambda b, h, q, k: _document(b, h, q, k),
        read=randn(HEADS, 2 * MOST),
        sink=True,
    ),
    "by sequence": Case(
        lambda t: {"score_mod": lambda s, b, h, q, k: s * t[b]},
        lambda s, t, b, h, q, k: s * t[b],
        read=randn(len(PACKED)),
        plain=(("window", (30, -1)),),
    ),
    "by head": Case(
        lambda t: {"mask_mod": _by_head},
        mask=_by_head,
        plain=(("softcap", 3.0), ("scale", 0.4)),
        sink=True,
    ),
    "nothing seen": Case(  # by a rank's first keys, or by whole rows
        lambda t: {"score_mod": lambda s, b, h, q, k: torch.where(q % 5 == 0, -float("inf"), s)},
        lambda s, t, b, h, q, k: torch.where(q % 5 == 0, -math.inf, s),
        plain=CAUSAL,
    ),
}
NAMES = [(name, kind) for name, case in CASES.items() for kind in LENGTHS if case.only in ("", kind)]


@dataclass
class Problem:
    """Whole tensors, the same on every rank."""

    tensors: list[Tensor]  #: q, k, v, dout
    sink: Tensor | None
    lengths: list[int]


@functools.cache
def problem(name: str, kind: str, dtype: torch.dtype, heads_kv: int = 2) -> Problem:
    lengths = LENGTHS[kind]
    lead = (BATCH, lengths) if isinstance(lengths, int) else (sum(lengths),)
    tensors = [
        randn(*lead, h, DIM, seed=i).to(DEVICE, dtype)
        for i, h in enumerate((HEADS, heads_kv, heads_kv, HEADS))
    ]
    sink = randn(HEADS).to(DEVICE) if CASES[name].sink else None
    return Problem(tensors, sink, [lengths] * BATCH if isinstance(lengths, int) else list(lengths))


def _out(p: Problem, case: Case, tensors: list[Tensor], sink: Tensor | None, read: Tensor | None) -> Tensor:
    """By the plain formula, in the tensors' dtype."""
    score, options = case.score, dict(case.plain)
    if score is not None:
        options["score_mod"] = lambda s, *at: score(s, read, *at)
    if tensors[0].ndim == 3:
        cu = torch.tensor([0, *itertools.accumulate(p.lengths)])
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    return oracle.attention(*tensors, sink=sink, mask_mod=case.mask, **options)[0]


def formula(name: str, kind: str, dtype: torch.dtype, wide: bool) -> list[Tensor]:
    """Out, and the gradients of q, k, v, the sink and what is read: in fp64, or in the dtype itself."""
    p, case = problem(name, kind, dtype), CASES[name]
    to = torch.float64 if wide else dtype
    tensors = [t.clone().to(to).requires_grad_() for t in p.tensors[:3]]
    sink = None if p.sink is None else p.sink.clone().to(to).requires_grad_()
    read = None if case.read is None else case.read.clone().to(DEVICE, to).requires_grad_(DEVICE == "cpu")
    out = _out(p, case, tensors, sink, read)
    out.backward(p.tensors[3].to(to))
    return [out.detach(), *(t.grad for t in (*tensors, sink, read) if t is not None and t.grad is not None)]


@functools.cache
def expected(name: str, kind: str, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    exact = formula(name, kind, dtype, True)
    if dtype == torch.float32:
        return [(t,) for t in exact]
    return list(zip(exact, formula(name, kind, dtype, False), strict=True))


@functools.cache
def summed(name: str, kind: str) -> float:
    """The largest sum of sizes that an element of the gradient of what is read adds up: those of single query
    rows. Rows of either sign can leave a gradient that is far smaller."""
    p, case = problem(name, kind, torch.float32), CASES[name]
    assert case.read is not None
    read, total = case.read.double().requires_grad_(), torch.zeros_like(case.read, dtype=torch.float64)
    *tensors, dout = (t.double() for t in p.tensors)
    out = _out(p, case, tensors, None if p.sink is None else p.sink.double(), read)
    for one in (out * dout).flatten(0, -3).sum((1, 2)):
        total += torch.autograd.grad(one, read, retain_graph=True)[0].abs()
    return float(total.max())


def assert_sums_close(got: Tensor, exact: Tensor, size: float) -> None:
    """`oracle.assert_close` in f32, or 1e-6 (16 roundings) of what an element adds up, where that is so much
    more than is left."""
    error = (got.double() - exact).abs().max().item()
    bound = max(1e-5 * max(1.0, exact.abs().max().item()), 1e-6 * size)
    assert got.shape == exact.shape and error <= bound, f"{error:.3g} > {bound:.3g}"


def results(
    name: str, kind: str, dtype: torch.dtype, layout: Layout, strategy: str, group: Any
) -> list[Tensor]:
    """The same of `context_parallel_attention`, whole, on every rank."""
    p, case, ranks = problem(name, kind, dtype), CASES[name], Ranks.of(group)
    q, k, v = (layout.shard(t, ranks.rank).requires_grad_() for t in p.tensors[:3])
    sink = None if p.sink is None else p.sink.clone().requires_grad_()
    read = None if case.read is None else case.read.clone().to(DEVICE).requires_grad_(DEVICE == "cpu")
    options = {**case.options(read), **dict(case.plain), "sink": sink, "strategy": strategy}  # type: ignore[arg-type]
    out = context_parallel_attention(q, k, v, layout=layout, group=group, **options)
    out.backward(layout.shard(p.tensors[3], ranks.rank))
    found = [gather(t, layout=layout, group=group) for t in (out, q.grad, k.grad, v.grad) if t is not None]
    for t in (sink, read):
        if t is not None and t.requires_grad:
            share = torch.zeros_like(t) if t.grad is None else t.grad
            for level in ranks.levels or (ranks,):
                dist.all_reduce(share, group=level.group)
            found.append(share)
    return found


def right(rank: int, name: str, kind: str, dtype: torch.dtype, members: Any) -> None:
    """Every strategy over every layout."""
    group = cases.subgroup(members)
    if members is not None and rank not in members:
        return
    _right_of(group, cases.STRATEGIES, name, kind, dtype)


def right_of_levels(rank: int, name: str, kind: str) -> None:
    """The strategies of two levels, on nodes of two ranks."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("across", "within"))
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    _right_of(mesh, cases.LEVELS, name, kind, dtype)


def _right_of(group: Any, strategies: tuple[str, ...], name: str, kind: str, dtype: torch.dtype) -> None:
    ranks = Ranks.of(group)
    for layout_kind, strategy in itertools.product(cases.LAYOUTS, strategies):
        layout = cases.layout_of(layout_kind, LENGTHS[kind], ranks.size)
        found = results(name, kind, dtype, layout, strategy, group)
        if ranks.rank != 0:
            continue
        what, wanted = f"{strategy} over {layout_kind}", expected(name, kind, dtype)
        if dtype == torch.float32 and CASES[name].read is not None and DEVICE == "cpu":
            bounds = [(wanted[-1][0], summed(name, kind))]
            cases.assert_all_close(what, ("dread",), found[-1:], bounds, assert_sums_close)
            found, wanted = found[:-1], wanted[:-1]
        cases.assert_all_close(what, ("out", "dq", "dk", "dv", "dsink or dread", "dread"), found, wanted)


@pytest.mark.parametrize(("name", "kind"), NAMES)
@pytest.mark.parametrize("members", [PAIR, None], ids=["2", "4"])
def test_right(pool: Pool, members: Any, name: str, kind: str) -> None:
    pool.run(right, name, kind, torch.float32, members)


@pytest.mark.parametrize(("name", "kind"), [("bias, mask", "dense"), ("table, document", "packed")])
def test_right_in_16_bits(pool: Pool, name: str, kind: str) -> None:
    pool.run(right, name, kind, torch.bfloat16, PAIR)


@pytest.mark.parametrize(("name", "kind"), NAMES)
def test_right_of_levels(pool: Pool, name: str, kind: str) -> None:
    pool.run(right_of_levels, name, kind)


@on_every_rank
def test_more_ways_to_call(rank: int) -> None:
    """A bias whose derivative goes on; a compiled model around a call; a backward pass that runs twice."""
    layout = Layout.zigzag(64, 4)
    q, k, v = (layout.shard(randn(1, 64, 4, DIM, seed=i), rank) for i in range(3))
    logs = randn(4, 1, 1).requires_grad_()

    def call(q: Tensor, strategy: str = "ring") -> Tensor:
        out: Tensor = context_parallel_attention(q, k, v, layout=layout, bias=logs.exp(), strategy=strategy)
        return out

    for strategy in cases.STRATEGIES:
        loss = call(q, strategy).square().sum()
        first, again = (torch.autograd.grad(loss, logs, retain_graph=more)[0] for more in (True, False))
        assert torch.equal(first, again)
    for options in ({"bias": logs.exp()}, {"dropout_p": 0.5, "alibi_slopes": torch.ones(4)}):
        nothing = torch.zeros(1, 0, 4, DIM, requires_grad=True)
        out = context_parallel_attention(*[nothing] * 3, layout=Layout.zigzag(0, 4), **options)
        out.sum().backward()
        assert out.shape == nothing.shape and nothing.grad is not None
    compiled = torch.compile(lambda q: 2 * call(q), backend="eager")
    torch.testing.assert_close(compiled(q), 2 * call(q))
    logs.requires_grad_(False)
    call(q.requires_grad_()).sum().backward()  # q alone
    assert q.grad is not None and logs.grad is None


@on_every_rank
def test_copies_that_hooks_have_saved_count(rank: int) -> None:
    """As save_on_cpu makes them: what the caller writes to captured tensors is too late."""
    layout = Layout.zigzag(DENSE, dist.get_world_size())
    q, k, v = (randn(1, layout.rows(rank), 2, DIM, seed=i).requires_grad_() for i in range(3))
    slopes = randn(2)
    found = []
    for factor in (1.0, 3.0):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            out = context_parallel_attention(q, k, v, layout=layout, alibi_slopes=slopes)
        slopes.mul_(factor)
        found.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
