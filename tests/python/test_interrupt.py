"""Ctrl-C ends a long call on the CPU, and an interpreter that ends amid one says nothing of it."""

from __future__ import annotations

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


@pytest.mark.parametrize("call", ["forward", "backward"])
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
