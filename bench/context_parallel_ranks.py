"""What `context-parallel --measure` times: attention over the ranks of one host, beside one GPU and PyTorch.

Every rank runs every contender at the same time, and a round lasts as long as the slowest rank takes. What a
rank reaches of one GPU's rate is against `alone`: the same sequences, of which each rank computes its share
of the heads without sending anything. That is a rank's mean work, number for number.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import harness
import torch
import torch.distributed as dist
from ranks_contenders import ALONE, OWN, REPEATED, Cell, Contender, contenders
from tandem.distributed import CPU, H200, balance, explain
from timeline import overlap
from torch import Tensor

#: The most that a result may differ from the first strategy's, as a share of the largest number: 16 bits
#: are rounded once or, merged, twice.
MOST = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}

SLOW = 1e6  #: microseconds of a call that is not made a second time to see how long it takes


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
