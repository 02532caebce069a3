"""The GIL is released while the library computes, and calls from several threads are independent."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import tandem
import torch
from test_forward import qkv


def steps_of_python_during(call: Callable[[], object]) -> tuple[int, float]:
    """How often another Python thread took a step while `call` ran, and for how many seconds it ran."""
    steps, stop, started = 0, threading.Event(), threading.Event()

    def count() -> None:
        nonlocal steps
        started.set()
        while not stop.is_set():
            steps += 1
            time.sleep(0.0005)

    counter = threading.Thread(target=count)
    counter.start()
    started.wait()
    before, start = steps, time.perf_counter()
    call()
    taken, seconds = steps - before, time.perf_counter() - start
    stop.set()
    counter.join()
    return taken, seconds


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_python_runs_while_the_library_computes(direction: str) -> None:
    q, k, v = (torch.randn(1, 2048, 8, 64) for _ in range(3))
    out, lse = tandem.attention(q, k, v, return_lse=True)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: tandem.attention(q, k, v, threads=1),
        "backward": lambda: tandem.attention_backward(out, q, k, v, out, lse, threads=1),
    }
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(
            1000.0
        )  # a call that held the GIL would let the other thread take no step at all
        taken, seconds = steps_of_python_during(calls[direction])
    finally:
        sys.setswitchinterval(interval)
    assert seconds > 0.01, "the call is too short to tell"
    assert taken >= 5


def test_calls_from_many_threads_are_independent() -> None:
    problems = [qkv(seqlen_q=40 + i, seqlen_k=70 - i) for i in range(12)]
    expected = [tandem.attention(*p, causal=True) for p in problems]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            results = list(pool.map(lambda p: tandem.attention(*p, causal=True, threads=2), problems))
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_process_forked_from_one_with_pytorch_s_threads_computes() -> None:
    program = """
import os, signal, tandem, torch
torch.set_num_threads(2)
x = torch.randn(1 << 20)
(x + x).sum()
child = os.fork()
if child == 0:
    signal.alarm(20)
    q = torch.randn(1, 300, 4, 64)
    tandem.attention(q, q, q, threads=2)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)
