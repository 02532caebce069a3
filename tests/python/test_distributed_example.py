"""examples/context_parallel.py, as its documentation says to run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"


def _start(processes: int, *options: str) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *launch, str(EXAMPLE), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _losses(program: subprocess.Popen[str]) -> list[float]:
    said, errors = program.communicate(timeout=600)
    assert program.returncode == 0, errors
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", said, re.M)]


def test_a_transformer_trains_on_four_processes_as_on_one() -> None:
    one = _losses(_start(1))
    assert len(one) == 10 and one[-1] < 0.6 * one[0]
    for options in (["--strategy", "ring"], ["--within", "2"]):
        four = _losses(_start(4, *options))
        assert all(abs(a - b) <= 1e-4 * a for a, b in zip(one, four, strict=True)), (options, one, four)


def test_its_documentation_says_how_to_run_it() -> None:
    command = "python -m torch.distributed.run --standalone --nproc-per-node 4 examples/context_parallel.py"
    guide = EXAMPLE.parents[1] / "docs" / "guides" / "context-parallel.md"
    assert command in EXAMPLE.read_text() and command in guide.read_text()
