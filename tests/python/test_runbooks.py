"""What brings a reader to a runbook: each failure is provoked, and its words are on the page. What takes a
driver or a compiler of the GPU's is provoked in tests/gpu and tests/plan (tests/harness/runbook.hpp)."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tandem
import torch
import torch.distributed as dist
import torch.multiprocessing
from tandem.distributed import Layout, context_parallel_attention
from test_forward import qkv

PAGES = Path(__file__).resolve().parents[2] / "docs" / "runbooks"


def is_on(page: str, said: object) -> bool:
    """Whether the block at the head of a page has these words; "..." on the page is any."""
    (lines, *_) = re.findall(r"^```text\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    return any(fnmatch.fnmatchcase(str(said), line.replace("...", "*")) for line in lines.splitlines())


def test_no_kernel() -> None:
    def refused(dtype: torch.dtype, head_dim: int, device: str, **options: Any) -> str:
        q = torch.empty(1, 64, 4, head_dim, dtype=dtype, device="meta")
        with pytest.raises(tandem.UnsupportedError) as caught:
            tandem.explain(q, q, q, device=device, **options)
        return str(caught.value)

    assert is_on("no-kernel.md", refused(torch.float32, 64, "H100"))
    assert is_on("no-kernel.md", refused(torch.float16, 320, "H200", backward=True))
    assert is_on("no-kernel.md", refused(torch.bfloat16, 64, "A100", precision="fp8"))


@pytest.mark.filterwarnings("ignore")
def test_nan() -> None:
    q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    k.data[0, 5] = float("nan")
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError) as caught:
        tandem.attention(q, k, v, causal=True).sum().backward()
    assert is_on("nan.md", caught.value)


def test_nan_is_found_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (PAGES / "nan.md").read_text(), re.DOTALL)
    exec(block, {})
    printed = dict(re.findall(r"^(\w+) is first bad at (\S.*)$", capsys.readouterr().out, re.MULTILINE))
    assert printed == {"q": "[]", "k": "[[0, 40, 0, 0]]", "v": "[]", "out": "[[0, 40, 0, 0]]"}


NO_MEMORY = """
import resource
import numpy as np
import tandem

x = np.zeros((1, 65536, 8, 64), np.float16)
options = dict(window=(1, 1), threads=2)
out, lse = tandem.attention(x, x, x, return_lse=True, **options)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
needed = tandem.workspace_bytes(x, x, x, backward=True, **options)
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * x.nbytes + needed // 2,) * 2)
try:
    tandem.attention_backward(x, x, x, x, out, lse, **options)
except tandem.OutOfMemoryError as error:
    print(error)
"""


def test_out_of_memory() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=120)
    assert is_on("out-of-memory.md", done.stdout.strip()), done.stdout + done.stderr


def test_results_differ() -> None:
    """Beside PyTorch's causal mask, until it is aligned as the page says."""
    q, k, v = qkv(seqlen_q=5, seqlen_k=9, heads_kv=4)
    ours = tandem.attention(q, k, v, causal=True).transpose(1, 2)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(AssertionError) as caught:
        torch.testing.assert_close(sdpa(*heads, is_causal=True), ours)
    assert is_on("results-differ.md", caught.value)
    corner = torch.ones(5, 9, dtype=torch.bool).tril(4)
    torch.testing.assert_close(sdpa(*heads, attn_mask=corner), ours)


def _hanging(rank: int, store: str, told: Any) -> None:
    dist.init_process_group("gloo", store, rank=rank, world_size=2, timeout=timedelta(seconds=4))
    layout = Layout.zigzag(64, 2)
    q, k, v = (torch.randn(1, 32, 4, 16, requires_grad=True) for _ in range(3))
    for causal in (rank == 0, True):
        try:
            out = context_parallel_attention(q, k, v, layout=layout, causal=causal)
        except tandem.InvalidArgumentError as error:
            told.put(str(error))
    with pytest.raises(tandem.InvalidArgumentError) as wrong:
        context_parallel_attention(q[:, rank:], k, v, layout=layout)
    if rank == 0:  # rank 1 has an error of its own; then it leaves its backward pass out
        told.put(str(wrong.value))
        with pytest.raises(tandem.ExecutionError) as caught:
            out.sum().backward()
        told.put(str(caught.value))


def test_a_rank_hangs(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    told = context.Queue()
    store = f"file://{tmp_path}/store"
    processes = [context.Process(target=_hanging, args=(rank, store, told)) for rank in range(2)]
    for process in processes:
        process.start()
    said = [told.get(timeout=120) for _ in range(4)]
    for process in processes:
        process.join(30)
    assert [line for line in said if not is_on("a-rank-hangs.md", line)] == []
    for words, count in ((" failed, since a rank ", 1), ("ranks disagree on causal", 2), ("rank 1 of", 1)):
        assert sum(words in line for line in said) == count
