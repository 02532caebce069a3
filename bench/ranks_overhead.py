"""Attention over ranks on the CPU: the share of the time that is neither attention nor communication.

    python bench ranks-overhead                  2 processes with gloo, every strategy
    python bench ranks-overhead --ranks 4

A forward and a backward pass of each rank, best of the rounds. Calls of the library and waits for messages
are timed where they are made; the rest is what copying, merging and planning take.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing
from tandem import _core
from tandem.distributed import Layout, _comm, _parts, context_parallel_attention

STRATEGIES = ("gather", "ring", "heads")
spent: dict[str, float] = defaultdict(float)


def timed(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timing(*arguments: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments, **more)
        finally:
            spent[kind] += time.perf_counter() - began

    return timing


class Timed:
    """The extension module with the time of its calls taken."""

    forward = staticmethod(timed("attention", _core.forward))
    backward = staticmethod(timed("attention", _core.backward))


def measure(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=arguments.ranks)
    _parts._core = Timed  # type: ignore[assignment]
    for owner, name in (
        (_comm.Waiting, "wait"),
        (_comm.Ranks, "exchange"),
        (_comm.Ranks, "shift"),
        (_comm.Ranks, "gather_small"),
    ):
        setattr(owner, name, timed("communication", getattr(owner, name)))
    layout = Layout.zigzag(arguments.seqlen, arguments.ranks)
    rows = layout.rows(rank)
    q, k, v = (
        torch.randn(1, rows, heads, 128).bfloat16().requires_grad_()
        for heads in (arguments.heads, arguments.heads_kv, arguments.heads_kv)
    )
    dout = torch.randn_like(q)
    for strategy in STRATEGIES:
        found = []
        for _ in range(arguments.rounds):
            dist.barrier()
            spent.clear()
            began = time.perf_counter()
            context_parallel_attention(q, k, v, layout=layout, causal=True, strategy=strategy).backward(dout)
            total = time.perf_counter() - began
            found.append((1 - sum(spent.values()) / total, total, dict(spent)))
        share, total, parts = min(found)
        if rank == 0:
            print(
                f"| {strategy} | {total:.2f} | {parts['attention']:.2f} | {parts['communication']:.2f} "
                f"| {100 * share:.1f} % |",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python bench ranks-overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=8192, help="rows of all ranks")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-kv", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{harness.machine()}; commit {harness.commit()}\n    {harness.command()}\n")
    print("| strategy | seconds | attention | communication | other |\n|---|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(measure, (f"{directory}/store", arguments), arguments.ranks)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
