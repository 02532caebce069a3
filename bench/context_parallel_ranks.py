"""What `context-parallel --measure` times: attention over the ranks of one host, beside one GPU and PyTorch.

Every rank runs every contender at the same time, and a round lasts as long as the slowest rank takes. What a
rank reaches of one GPU's rate is against `alone`: the same sequences, of which each rank computes its share
of the heads without sending anything. That is a rank's mean work, number for number.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import harness
import tandem
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tandem.distributed import CPU, H200, Layout, _gather, balance, context_parallel_attention, explain
from timeline import overlap
from torch import Tensor

STRATEGIES = ("gather", "ring", "heads")
#: PyTorch's context parallel: the SDPA backend, and how keys reach the other ranks.
PEERS = (("CUDNN_ATTENTION", "allgather"), ("FLASH_ATTENTION", "allgather"), ("FLASH_ATTENTION", "alltoall"))
ALONE, OWN, CHECKED, REPEATED = "alone", "alone, a rank's tokens", "auto, checked", ", keys repeated"
#: The most that a result may differ from the first strategy's, as a share of the largest number: 16 bits
#: are rounded once or, merged, twice.
MOST = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}

SLOW = 1e6  #: microseconds of a call that is not made a second time to see how long it takes

Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Cell:
    """One problem: the sequences of all ranks, and the tensors of a rank."""

    tokens: int  #: of a rank
    documents: str
    lengths: tuple[int, ...]
    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def drawn(rows: int, heads: tuple[int, int], head_dim: int, packed: bool, like: Any) -> list[Tensor]:
    """q, k, v and dout, of which the first three want gradients."""
    lead = (rows,) if packed else (1, rows)
    found = [torch.randn(*lead, h, head_dim, **like) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [t.requires_grad_(i < 3) for i, t in enumerate(found)]


def cell_of(tokens: int, documents: str, arguments: argparse.Namespace, like: Any) -> Cell:
    """A sequence of all ranks' tokens, or a mixture of documents; its tensors drawn on this rank."""
    from context_parallel import DENSE, mixture

    ranks = dist.get_world_size()
    lengths = [tokens * ranks] if documents == DENSE else mixture(documents, 0, tokens * ranks)
    packed = documents != DENSE
    layout = Layout.balanced(lengths, ranks) if packed else Layout.zigzag(lengths[0], ranks)
    torch.manual_seed(dist.get_rank())
    rows = layout.rows(dist.get_rank())
    heads = (arguments.heads, arguments.heads_kv)
    tensors = drawn(rows, heads, arguments.head_dim, packed, like)
    return Cell(tokens, documents, tuple(lengths), layout, *tensors)


def passes(call: Callable[[], Tensor], tensors: tuple[Tensor, ...], dout: Tensor) -> dict[str, Call]:
    """A forward pass, and one with a backward pass."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (call(),)

    def both() -> tuple[Tensor, ...]:
        out = call()
        return (out.detach(), *torch.autograd.grad(out, tensors, dout))

    return {"forward": forward, "both": both}


@dataclass(frozen=True)
class Contender:
    """What can be timed, by pass; what it runs in, and how its results become those of the others."""

    passes: dict[str, Call]
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    read: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple


def of_ranks(cell: Cell, strategy: str, check: bool) -> Contender:
    def call() -> Tensor:
        found: Tensor = context_parallel_attention(
            *cell.tensors, layout=cell.layout, causal=True, strategy=strategy, check=check
        )
        return found

    return Contender(passes(call, cell.tensors, cell.dout))


def in_chunks(cell: Cell, chunks: str) -> Contender:
    """`gather` in chunks of so many heads, forward and, after a slash, backward: 1,7/4,4."""
    ways = [tuple(map(int, way.split(","))) for way in chunks.split("/")]
    found = of_ranks(cell, "gather", False)

    def in_these(call: Call) -> Call:
        def called() -> tuple[Tensor, ...]:
            with mock.patch.object(_gather, "chunk_heads", lambda *about: ways[-1 if about[-1] else 0]):
                return call()

        return called

    return Contender({name: in_these(call) for name, call in found.passes.items()})


def of_one(lengths: tuple[int, ...], heads: tuple[int, int], head_dim: int, like: Any) -> Contender:
    """A GPU alone."""
    packed = len(lengths) > 1  # a sequence alone is the same work either way
    q, k, v, dout = drawn(sum(lengths), heads, head_dim, packed, like)
    options: dict[str, Any] = {}
    if packed:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(like["device"])
        options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}

    def call() -> Tensor:
        found: Tensor = tandem.attention(q, k, v, causal=True, **options)
        return found

    return Contender(passes(call, (q, k, v), dout))


def of_torch(cell: Cell, backend: str, rotation: str, grouped: bool) -> Contender:
    """PyTorch's SDPA in its context_parallel, whose shards are those of `Layout.zigzag`. With ``grouped``
    keys keep their heads; otherwise they are repeated for it, as where a backend has no groups."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    times = 1 if grouped else cell.q.shape[2] // cell.k.shape[2]
    q, k, v = (
        t.detach().repeat_interleave(times if i else 1, 2).transpose(1, 2).contiguous().requires_grad_()
        for i, t in enumerate(cell.tensors)
    )
    dout = cell.dout.transpose(1, 2).contiguous()
    mesh = dist.device_mesh.init_device_mesh(q.device.type, (dist.get_world_size(),))

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        # It takes the number of rows from a buffer, which it divides in place.
        rows = torch.empty(1, cell.layout.total, device=q.device)
        set_rotate_method(rotation)
        with sdpa_kernel(getattr(SDPBackend, backend)):
            with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[1], no_restore_buffers={rows}):
                yield

    def read(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tensors = [t.transpose(1, 2) for t in found]
        return tuple(t if i < 2 else t.unflatten(2, (-1, times)).sum(3) for i, t in enumerate(tensors))

    return Contender(passes(call, (q, k, v), dout), inside, read)


class OnRanks:
    """Microseconds of a call on all ranks at the same time, by the slowest of them: the mean of a round."""

    def __init__(self, contender: Contender, which: str, device: torch.device) -> None:
        self.call, self.inside = contender.passes[which], contender.inside
        self.device, self.calls, self.memory = device, 1, 0.0

    def slowest(self, microseconds: float) -> float:
        return most(microseconds, self.device)

    def time(self, calls: int) -> float:
        with self.inside():
            dist.barrier()
            if self.device.type == "cpu":
                began = time.perf_counter()
                for _ in range(calls):
                    self.call()
                return self.slowest((time.perf_counter() - began) * 1e6 / calls)
            torch.cuda.synchronize()
            return self.slowest(harness.OnGpu(self.call).time(calls) * 1e3 / calls)

    def warm(self, milliseconds: float) -> None:
        """Finds out how many calls a round has, the same on all ranks, and what a call allocates."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # without a GPU 0
        took = self.time(1)
        if took < SLOW:  # the first call has the host's part of starting, too
            took = self.time(1)
        self.calls = max(1, int(milliseconds * 1e3 / took))
        self.memory = most(torch.cuda.max_memory_allocated() - before, self.device)

    def round(self, milliseconds: float) -> list[float]:
        return [self.time(self.calls)]


def timeline(measured: OnRanks, arguments: argparse.Namespace, name: str) -> dict[str, float]:
    """Of one call on the first rank, profiled, what `overlap` says; the trace goes into a file."""
    if arguments.trace is None:
        return {}
    with measured.inside(), torch.profiler.profile() as profile:
        measured.call()
        if measured.device.type == "cuda":
            torch.cuda.synchronize()
    if dist.get_rank():
        return {}
    arguments.trace.mkdir(parents=True, exist_ok=True)
    path = arguments.trace / (re.sub(r"\W+", "-", name) + ".json")
    profile.export_chrome_trace(str(path))
    return overlap(json.loads(path.read_text()))


def agreed(failure: str) -> str:
    """Why some rank has failed, or nothing, on every rank."""
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, failure)
    return next((each for each in told if each), "")


def most(number: float, device: torch.device) -> float:
    """The largest of all ranks."""
    found = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def difference(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """The largest, as a share of the largest number of the tensor; of all tensors and ranks."""
    worst = 0.0
    for got, want in zip(found, wanted, strict=True):
        if want.numel():
            top = float(want.abs().amax()) or 1.0
            worst = max(worst, float((got.float() - want.float()).abs().amax()) / top)
    return most(worst, found[0].device)


def contenders(
    cell: Cell, arguments: argparse.Namespace, like: Any, peers: bool
) -> dict[str, Callable[[], Contender]]:
    """Of each contender what makes it: all strategies, or with ``peers`` the first of them and PyTorch's."""
    ranks = dist.get_world_size()
    heads, heads_kv, head_dim = arguments.heads, arguments.heads_kv, arguments.head_dim
    share = (heads // ranks, max(1, heads_kv // ranks))
    made: dict[str, Callable[[], Contender]] = {
        name: functools.partial(of_ranks, cell, name, False)
        for name in arguments.strategies[: 1 if peers else None]
    }
    if not peers:
        made |= {f"gather in {each}": functools.partial(in_chunks, cell, each) for each in arguments.chunks}
    made[ALONE] = functools.partial(of_one, cell.lengths, share, head_dim, like)
    if not peers:
        if arguments.strategies_alone:
            return made
        made[CHECKED] = functools.partial(of_ranks, cell, "auto", True)
        if not cell.layout.packed:
            made[OWN] = functools.partial(of_one, (cell.tokens,), (heads, heads_kv), head_dim, like)
        return made
    for (backend, rotation), grouped in itertools.product(PEERS, (True, False)):
        name = f"pytorch {backend.split('_')[0].lower()} {rotation}"
        made[name + ("" if grouped else REPEATED)] = functools.partial(
            of_torch, cell, backend, rotation, grouped
        )
    return made


def flops(cell: Cell, name: str, which: str, arguments: argparse.Namespace) -> float:
    """Of a rank, on average; a backward pass has 2.5 times those of a forward pass."""
    pairs = sum(cell.layout.pairs(causal=True)) / cell.layout.ranks
    if name == OWN:
        pairs = cell.tokens * (cell.tokens + 1) / 2
    return 4 * pairs * arguments.heads * arguments.head_dim * (3.5 if which == "both" else 1.0)


def prepared(
    cell: Cell, which: str, arguments: argparse.Namespace, like: Any, peers: bool
) -> tuple[dict[str, OnRanks], dict[str, float], dict[str, str]]:
    """Those who can do it, how far their results are from the first one's, and why others cannot."""
    able: dict[str, OnRanks] = {}
    failed: dict[str, str] = {}
    differences: dict[str, float] = {}
    first: tuple[Tensor, ...] = ()
    for name, make in contenders(cell, arguments, like, peers).items():
        if name.removesuffix(REPEATED) in able:
            continue
        failure = ""
        found: tuple[Tensor, ...] = ()
        try:
            contender = make()
            with contender.inside():
                found = contender.read(contender.passes[which]())
        except Exception as error:  # whatever a peer raises: the others are measured all the same
            failure = f"{type(error).__name__}: {str(error).split(chr(10))[0]}"
        if reason := agreed(failure):
            failed[name] = reason
            continue
        if name not in (ALONE, OWN):
            first = first or found
            differences[name] = difference(found, first)
        able[name] = OnRanks(contender, which, like["device"])
        del found
        able[name].warm(arguments.round_ms)
    return able, differences, failed


def measure(cell: Cell, which: str, arguments: argparse.Namespace, like: Any, peers: bool) -> dict[str, Any]:
    """One cell and pass."""
    able, differences, failed = prepared(cell, which, arguments, like, peers)
    timelines = {name: timeline(able[name], arguments, f"{cell.tokens}-{which}-{name}") for name in able}
    times = harness.in_turn(able, arguments.rounds, arguments.round_ms)
    rates = {
        name: flops(cell, name, which, arguments) / statistics.median(us) / 1e6 for name, us in times.items()
    }
    return {
        "tokens": cell.tokens,
        "documents": cell.documents,
        "sequences": len(cell.lengths),
        "layout": cell.layout.kind,
        "balance": balance(cell.layout, causal=True).splitlines()[-1],
        "chosen": chosen(cell, arguments),
        "pass": which,
        "peers": peers,
        "us": times,
        "tflops": rates,
        "share": {name: rate / rates[ALONE] for name, rate in rates.items() if ALONE in rates},
        "timeline": {name: found for name, found in timelines.items() if found},
        "bytes": {name: one.memory for name, one in able.items()},
        "difference": differences,
        "wrong": [name for name, off in differences.items() if not off <= MOST[like["dtype"]]],
        "failed": failed,
    }


def chosen(cell: Cell, arguments: argparse.Namespace) -> str:
    sizes = {
        "heads_q": arguments.heads,
        "heads_kv": arguments.heads_kv,
        "head_dim_qk": arguments.head_dim,
        "itemsize": cell.q.element_size(),
    }
    machine = H200 if cell.q.is_cuda else CPU
    return explain(cell.layout, causal=True, machine=machine, **sizes).split(":")[0]


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The table of one cell and pass."""
    what = "forward" if found["pass"] == "forward" else "forward and backward"
    what += " beside PyTorch's" if found["peers"] else ""
    yield f"\n## {found['tokens']} tokens a rank, {found['documents']}, {what}\n"
    yield f"{found['sequences']} sequences, {found['layout']}: {found['balance']}"
    yield f"auto is {found['chosen']}\n"
    header = ["contender", "ms", "TFLOP/s a GPU", "share of one GPU", "GB allocated", "difference"]
    rows = [
        [
            name,
            f"{statistics.median(us) / 1e3:.3f}",
            f"{found['tflops'][name]:.1f}",
            f"{found['share'][name]:.3f}" if found["share"] else "-",
            f"{found['bytes'][name] / 1e9:.2f}",
            f"{found['difference'][name]:.1e}" if name in found["difference"] else "-",
        ]
        for name, us in found["us"].items()
    ]
    yield from harness.markdown_table(header, rows, "--:|")
    for name, parts in found["timeline"].items():
        told = ", ".join(f"{what} {us / 1e3:.2f}" for what, us in parts.items())
        yield f"\nprofiled {name}, ms: {told}"
    yield from (f"\nnot measured: {name}: {why}" for name, why in found["failed"].items())
    yield from (f"\nWRONG: {name}" for name in found["wrong"])


@contextlib.contextmanager
def group() -> Iterator[torch.device]:
    """The process group of this run, and this rank's device."""
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit(
            "bench: --measure runs on every rank: python -m torch.distributed.run --standalone "
            "--nproc-per-node 2 bench context-parallel --measure"
        )
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=120))
    try:
        yield device
    finally:
        gc.collect()  # a DeviceMesh that is left keeps gloo's threads, and they must not outlive Python
        dist.destroy_process_group()
