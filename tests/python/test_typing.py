"""The type hints: the package is strictly typed, and a user's calls get the types of what they pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy checks the hints")

ROOT = Path(__file__).resolve().parents[2]
USE = """
import numpy as np, torch, tandem
import tandem.flash_attn, tandem.flash_attn2, tandem.integrations.transformers, tandem.jax, tandem.selftest
import tandem.integrations._sglang, tandem.integrations._vllm, tandem.vllm_flash_attn
a = np.zeros((1, 2, 3, 8), np.float32)
t = torch.zeros(1, 2, 3, 8)
reveal_type(tandem.attention(t, t, t, causal=True))
reveal_type(tandem.attention(a, a, a, return_lse=True))
tandem.attention(t, a, t)
tandem.attention(t, t, t, casual=True)
"""


def test_hints(tmp_path: Path) -> None:
    """One run of mypy checks the user's file and the package, imported from its source."""
    source = tmp_path / "use.py"
    source.write_text(USE)
    cache = ROOT / "build" / "mypy"  # torch takes most of a minute the first time
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        ROOT / "pyproject.toml",
        "--cache-dir",
        cache,
        source,
    ]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    output = result.stdout + result.stderr
    errors = [line for line in output.splitlines() if ": error: " in line]
    assert all("use.py:" in line for line in errors), output  # the package itself is clean
    assert 'Revealed type is "torch._tensor.Tensor"' in output, output
    assert 'Revealed type is "tuple[numpy.ndarray' in output, output
    assert any('cannot be "object"' in line for line in errors), output  # arrays of two libraries in one call
    assert any("casual" in line for line in errors), output
