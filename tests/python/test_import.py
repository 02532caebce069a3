"""Importing the package more than once in a process: it works, or is one ImportError that says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tandem

USE = """
import gc, importlib, sys
import numpy as np

def modules():
    return [name for name in sys.modules if name == "tandem" or name.startswith("tandem.")]

def forget():
    return {name: sys.modules.pop(name) for name in modules()}

def use():
    "Calls by every way in, and an error of the class that the package has now."
    import tandem
    array = np.ones((1, 4, 2, 8), np.float32)
    assert (tandem.attention(array, array, array) == 1).all()
    try:
        tandem.attention(array[..., :7], array[..., :7], array)
    except tandem.InvalidArgumentError as error:
        assert "head_dim 7" in str(error)
    assert len(tandem.quantize(array)) == 2
    lines = []
    tandem._core.set_log(2, lambda level, message: lines.append(message))
    tandem.attention(array, array, array)
    tandem.set_log_level("off")
    assert lines
    if "torch" in sys.modules:
        import torch
        t = torch.ones(1, 4, 2, 8, requires_grad=True)
        tandem.attention(t, t, t).sum().backward()
        assert torch.isfinite(t.grad).all()
        torch.func.vmap(lambda t: tandem.attention(t, t, t))(t.detach()[None])
        from tandem.flash_attn import flash_attn_func
        flash_attn_func(t, t, t)
    if "jax" in sys.modules:
        import jax
        from tandem.jax import attention
        jax.jit(jax.grad(lambda t: attention(t, t, t).sum()))(array)

for name in sys.argv[2].split():
    importlib.import_module(name)
import tandem
use()
"""

AGAIN = """
importlib.reload(tandem)
use()
for name in sorted(modules()):
    importlib.reload(sys.modules[name])
importlib.reload(tandem)
use()
first = forget()
use()
del first, tandem
gc.collect()
use()
forget()
gc.collect()
use()
"""
ANOTHER_COPY = """
old = forget()
sys.path.insert(0, sys.argv[1])
for _ in range(2):
    try:
        import tandem
    except ImportError as error:
        print(error)
    assert not modules()
sys.path.pop(0)
sys.modules.update(old)
use()
"""


def run(program: str, *arguments: str) -> str:
    package = str(Path(tandem.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package, "PYTHONWARNINGS": "error::RuntimeWarning"}
    command = [sys.executable, "-c", USE + program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("libraries", ["", "torch", "jax"])
def test_importing_again_works(libraries: str) -> None:
    """After importlib.reload, and after its removal from sys.modules, with the first still in use or not."""
    if libraries == "jax":
        pytest.importorskip("tandem.jax")
    run(AGAIN, "", libraries)


@pytest.mark.parametrize("libraries", ["", "torch"])
def test_another_copy_is_one_import_error(libraries: str, tmp_path: Path) -> None:
    """And the first goes on working."""
    shutil.copytree(Path(tandem.__file__).parent, tmp_path / "tandem")
    first, second = run(ANOTHER_COPY, str(tmp_path), libraries).splitlines()
    assert first == second
    assert first.startswith("tandem is imported already, from ")
    assert f"; this is another copy, {tmp_path}/tandem/_core" in first
    assert first.endswith("and a process can have one: take one of them off sys.path")


@pytest.mark.parametrize("theirs", ["__version__ = '0.4'\n", None])
def test_another_distribution_in_the_package_is_an_import_error(theirs: str | None, tmp_path: Path) -> None:
    """Its __init__.py over Tandem's, or none, since that distribution was uninstalled."""
    shutil.copytree(Path(tandem.__file__).parent, tmp_path / "tandem")
    (tmp_path / "tandem" / "__init__.py").unlink()
    if theirs:
        (tmp_path / "tandem" / "__init__.py").write_text(theirs)
    # Without the installed package, which is found before a folder that has no __init__.py.
    (last,) = failing("import tandem._errors", tmp_path, flags="-S")
    assert last == (
        f"ImportError: the package tandem in ['{tmp_path}/tandem'] is of another distribution than "
        "tandem-attention, which is installed there, too: uninstall that one, then pip install "
        "--force-reinstall tandem-attention"
    )


@pytest.mark.parametrize("theirs", ["tandem.py", "tandem/__init__.py"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_say_that_another_tandem_shadows_it(engine: str, theirs: str, tmp_path: Path) -> None:
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).touch()
    package = Path(tandem.__file__).parent
    (last,) = failing(f"import _tandem_attention; _tandem_attention.{engine}()", tmp_path, package.parent)
    assert last == (
        f"ImportError: `import tandem` finds {tmp_path / theirs}, another package than tandem-attention's, "
        f"which is {package}: rename that one, or take its folder off sys.path"
    )


def failing(program: str, *path: Path, flags: str = "-B") -> list[str]:
    """The errors of a program that finds modules in `path` first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, flags, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    return [line for line in result.stderr.splitlines() if "Error: " in line]
