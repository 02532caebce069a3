"""The tests of tandem.distributed on GPUs and NCCL, started by ``scripts/gpu ranks N``.

``distributed_gpu.py WORD...`` runs those whose name has one of the words, so that several groups of processes
share the work, and the compiling of kernels: ``sink``, ``functions``, ``graph``.
``distributed_gpu.py --kill N`` starts N processes of its own, of which one is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import distributed_cases as cases
import test_distributed_decode as decode
import test_distributed_dropout as dropout
import test_distributed_functions as functions
import torch
import torch.distributed as dist
import torch.multiprocessing
from tandem.distributed import Layout, context_parallel_attention

TIMEOUT = 30  # seconds of the group whose rank is killed
REPEATS = 100  # calls whose gradients have the same bits


def told(what: str, test: Callable[..., Any], *arguments: Any) -> None:
    words = sys.argv[1:]
    if words and not any(word in what for word in words):
        return
    began = time.monotonic()
    test(dist.get_rank(), *arguments)
    if dist.get_rank() == 0:
        print(f"passed: {what} ({time.monotonic() - began:.1f} s)", flush=True)


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    size = dist.get_world_size()
    for dtype in (torch.bfloat16, torch.float16):
        for feature in cases.FEATURES:
            for name, lengths in (("dense", cases.DENSE), ("packed", cases.PACKED)):
                told(f"{feature}, {name}, {dtype}", cases.right, feature, lengths, dtype, None, "cuda")
                if size % 2 == 0:
                    what = f"{feature}, {name}, {dtype}, two levels"
                    told(what, cases.right_of_levels, feature, lengths, dtype, "cuda")
    for name, lengths in (("dense", cases.DENSE), ("packed", cases.PACKED)):
        told(f"many runs, {name}", cases.right_of_many_runs, lengths, torch.bfloat16, "cuda")
    functions.use("cuda")
    for name, kind in functions.NAMES:
        told(f"functions: {name}, {kind}", functions.right, name, kind, torch.bfloat16, None)
        if size % 2 == 0:
            told(f"functions: {name}, {kind}, two levels", functions.right_of_levels, name, kind)
    told("dropout", dropout.dropped, (2 * size, size), None, torch.bfloat16, "cuda")
    if size % 2 == 0:
        told("dropout, two levels", dropout.dropped_of_levels, (2 * size, size), torch.bfloat16, "cuda")
    for name in decode.CASES:
        told(f"decode: {name}", decode.right, name, torch.bfloat16, None, "cuda")
    told(f"same bits in {REPEATS} runs", cases.same_bits, "cuda", REPEATS, ("zigzag",))
    for strategy in cases.STRATEGIES:
        told(f"a graph of {strategy}", cases.one_graph, strategy, "balanced", None, "cuda")
    dist.destroy_process_group()


def _dying(rank: int, size: int, store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    layout = Layout.zigzag(1024 * size, size)
    q, k, v = (
        torch.randn(1, 1024, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    out = context_parallel_attention(q, k, v, layout=layout, causal=True, strategy="gather")
    torch.cuda.synchronize()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out.sum().backward()
    torch.cuda.synchronize()


def kill(size: int) -> None:
    """The others end with an error, by an exception or by NCCL's watchdog, and none of them waits on."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        arguments = (size, f"file://{directory}/store")
        processes = [context.Process(target=_dying, args=(rank, *arguments)) for rank in range(size)]
        for process in processes:
            process.start()
        processes[-1].join()
        began = time.monotonic()
        for process in processes[:-1]:
            process.join(max(0.0, began + 4 * TIMEOUT - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
    assert codes[-1] == -signal.SIGKILL and all(code not in (None, 0) for code in codes), codes
    print(f"passed: a rank is killed, the others end with {codes[:-1]} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--kill"]:
        kill(int(sys.argv[2]))
    else:
        main()
