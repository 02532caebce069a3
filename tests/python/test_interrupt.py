"""Ctrl-C ends a long call on the CPU, JAX's too; an interpreter that ends amid one says nothing of it."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time

import pytest

# Tens of seconds of work.
# A child of a shell's background job ignores SIGINT, and Python then leaves it so.
LONG_CALL = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np
import tandem

q = np.full((1, 60000, 8, 128), 0.1, np.float32)
out, lse = np.zeros_like(q), np.zeros((1, 8, 60000), np.float32)
def forward():
    tandem.attention(q, q, q)
def backward():
    tandem.attention_backward(q, q, q, q, out, lse)
def quantize():
    x = np.broadcast_to(q[0, :1, :1], (10_000_000, 1, 128))  # codes of 1.3 GB, written after 3 passes over x
    tandem.quantize(x, "s8", granularity="tensor", hadamard=True, smooth=True, threads=1)
"""

IN_FRONT = """
print("ready", flush=True)
try:
    {call}()
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert tandem.attention(q[:, :64], q[:, :64], q[:, :64]).shape == (1, 64, 8, 128)
"""

IN_A_DAEMON = """
thread = threading.Thread(target={call}, daemon=True)
thread.start()
time.sleep(0.5)
assert thread.is_alive()
"""


@pytest.mark.parametrize("call", ["forward", "backward", "quantize"])
def test_ctrl_c_ends_a_call_on_the_cpu(call: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", LONG_CALL + IN_FRONT.format(call=call)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(1.0)
    start = time.perf_counter()
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "interrupted\n"
    assert time.perf_counter() - start < 5.0
    assert child.wait(timeout=60) == 0


def test_a_daemon_thread_amid_a_call_leaves_no_messages() -> None:
    program = LONG_CALL + IN_A_DAEMON.format(call="forward")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# XLA runs `alone` in Python's main thread, and `among_others`, whose products are work of its own, in another
# thread, for which block_until_ready waits. The first calls, of one query and key, compile.
LONG_CALL_IN_JAX = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax
from tandem.jax import attention

q = jax.numpy.full((1, 60000, 8, 128), 0.1)
few, all = (jax.numpy.array([n], "int32") for n in (1, 60000))
def alone(q, rows):
    return attention(q, q, q, seqused_q=rows, seqused_k=rows, threads=2)
def among_others(q, rows):
    return alone(q @ q[0, :128, 0], rows)
compiled, among_others = jax.jit(alone), jax.jit(among_others)
{call}(q, few).block_until_ready()
print("ready", flush=True)
{call}(q, all).block_until_ready()
"""


@pytest.mark.parametrize("call", ["alone", "compiled", "among_others"])
def test_ctrl_c_ends_a_program_amid_a_call_in_jax(call: str) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    child = subprocess.Popen(
        [sys.executable, "-c", LONG_CALL_IN_JAX.format(call=call)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(1.0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=300)
    # On a core's 200 GFLOP/s in f32, which is much, the whole call takes 70 seconds of work. The rest of the
    # program takes some, and a machine with other work to do leaves it little of each second.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 25.0
    assert child.returncode != 0
    # A compiled function that runs in the main thread reports JAX's error first.
    assert "KeyboardInterrupt" in said or (call == "compiled" and "the call was interrupted" in said), said
