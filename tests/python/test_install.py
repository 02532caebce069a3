"""A wheel built from this tree, in an empty environment with NumPy alone, works."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USE = """
import sys
import numpy as np
import tandem

q, k, v = (np.random.default_rng(0).standard_normal((1, 33, 2, 16), np.float32) for _ in range(3))
out, lse = tandem.attention(q, k, v, causal=True, return_lse=True)
scores = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) / 4.0
weights = np.exp(scores) * np.tri(33)
expected = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)
assert np.abs(out - expected).max() < 1e-5
assert np.abs(lse - np.log(weights.sum(-1))).max() < 1e-5
gradients = tandem.attention_backward(out, q, k, v, out, lse, causal=True)
assert [g.shape for g in gradients] == [q.shape] * 3 and all(np.isfinite(g).all() for g in gradients)
try:
    tandem.attention(q[..., :15], k[..., :15], v)
except ValueError as error:
    assert "not a multiple of 8" in str(error)
else:
    raise AssertionError("no error")
assert "torch" not in sys.modules
print(tandem.__version__, tandem.info()["backends"]["cpu"]["target"])
"""


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--quiet"]
    if find_spec("nanobind") and find_spec("scikit_build_core"):
        # with the environment and flags of scripts/install_python, whose build this then finds done
        options += ["--no-build-isolation", "-C", "cmake.define.TANDEM_WERROR=ON"]
    run(sys.executable, "-m", "pip", "wheel", ROOT, *options, "-w", folder, cwd=folder)
    (built,) = folder.glob("tandem-*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "tandem/py.typed" in names and "tandem/_core.pyi" in names
    assert sum(name.startswith("tandem/_core.") and name.endswith(".so") for name in names) == 1
    assert all(name.startswith(("tandem/", "tandem-")) for name in names), names


def test_the_wheel_works_with_numpy_alone(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wheel, cwd=tmp_path)
    version, target = run(python, "-I", "-c", USE, cwd=tmp_path).split()  # -I: not the tandem of PYTHONPATH
    assert version == (ROOT / "VERSION").read_text().split()[0]
    assert target in ("portable", "avx2", "avx512", "avx512_bf16", "neon")
    tried = run(python, "-I", "-m", "tandem.selftest", cwd=tmp_path)
    assert "CPU          works: " in tried and "PyTorch      not tried: torch is not installed" in tried
