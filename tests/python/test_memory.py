"""Memory beyond inputs and outputs: what workspace_bytes says, and never a matrix of scores."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tandem
import torch

MEASURE = """
import resource, sys
import numpy as np
import tandem

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def tensors(seqlen, n):
    return [np.full((1, seqlen, 1, 64), 0.01, np.float32) for _ in range(n)]

direction, seqlen = sys.argv[1], int(sys.argv[2])
for rows in (64, seqlen):  # the first, small, starts the threads and touches the code
    q, k, v, out, dq, dk, dv = tensors(rows, 7)
    lse = np.zeros((1, 1, rows), np.float32)  # any: only memory is looked at
    before = peak()
    if direction == "forward":
        tandem.attention(q, k, v, out=out, threads=2)
    else:
        tandem.attention_backward(out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, threads=2)
print(peak() - before, tandem.workspace_bytes(q, k, v, backward=direction == "backward", threads=2))
"""


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_call_takes_its_workspace_and_no_more(direction: str) -> None:
    seqlen = 8192
    command = [sys.executable, "-c", MEASURE, direction, str(seqlen)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, workspace = map(int, output.split())
    assert grown <= workspace + 2**20  # and some pages of the allocator
    assert workspace < seqlen * seqlen * 4 // 16  # a matrix of scores takes 256 MiB


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_workspace_is_at_most_linear_in_seqlen(dtype: torch.dtype, backward: bool) -> None:
    def workspace(seqlen: int) -> int:
        q = torch.empty(1, 1, 1, 64, dtype=dtype).expand(1, seqlen, 4, 64)
        return tandem.workspace_bytes(q, q, q, backward=backward, threads=2)

    sizes = [workspace(2**n) for n in range(12, 18)]
    assert all(b <= 2 * a + 2**16 for a, b in zip(sizes, sizes[1:], strict=False)), sizes


def test_workspace_grows_with_threads_not_with_batch() -> None:
    def workspace(batch: int, threads: int) -> int:
        q = torch.empty(batch, 1024, 4, 64)
        return tandem.workspace_bytes(q, q, q, threads=threads)

    assert workspace(64, 2) <= 2 * workspace(1, 2)
    assert workspace(16, 2) <= 2 * workspace(16, 1) + 2**16
