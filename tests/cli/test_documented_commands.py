"""The commands of the documentation that call `tandem` run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from program import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCKS = [b for page in PAGES for b in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)]
COMMANDS = sorted({line for block in BLOCKS for line in block.splitlines() if line.startswith("tandem ")})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_runs(
    command: str,
    run: Callable[..., subprocess.CompletedProcess],
    tensors: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    for name in ("q", "k", "v"):
        np.save(tmp_path / f"{name}.npy", tensors[name])
    (tmp_path / "data").symlink_to(ROOT / "data")
    assert run(*shlex.split(command)[1:], cwd=tmp_path, timeout=300).stdout


def test_there_are_documented_commands() -> None:
    assert {"run", "verify", "bench", "explain", "info"} <= {command.split()[1] for command in COMMANDS}
