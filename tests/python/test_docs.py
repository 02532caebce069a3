"""The Python in the documentation runs as written."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tandem

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text()]


@pytest.fixture(autouse=True)
def _serves_nobody_else() -> Iterator[None]:
    """A page may call tandem.flash_attn.serve(); the tests after it find what they would have found."""
    before = set(sys.modules)
    yield
    for name in {name for name in sys.modules if name.startswith("flash_attn")} - before:
        del sys.modules[name]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_pages_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)


def test_the_packages_example_runs() -> None:
    """What help(tandem) shows: the indented lines."""
    q, k, v = (np.ones((1, 3, 2, 8), np.float32) for _ in range(3))
    names = {"q": q, "k": k, "v": v}
    lines = [line for line in (tandem.__doc__ or "").splitlines() if line.startswith("    ")]
    exec("\n".join(line.strip() for line in lines), names)
    assert names["out"].shape == q.shape


def test_there_is_a_command_on_each_line() -> None:
    """In the docstrings of programs, which a filled paragraph would run together."""
    for path in [*ROOT.glob("bench/*.py"), *ROOT.glob("python/tandem/**/*.py")]:
        text = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        assert not re.findall(r"^    .*\S python(?: bench/| -m |$)", text, re.M), path


def test_there_is_python_in_the_documentation() -> None:
    guides = set((ROOT / "docs" / "guides").glob("*.md")) - {ROOT / "docs" / "guides" / "cpp.md"}
    assert {ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "python.md", *guides} <= set(
        WITH_PYTHON
    )
    assert len(guides) == 9
