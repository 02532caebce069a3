"""The Python in the documentation runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if page.exists()]
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_a_pages_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)


def test_there_is_python_in_the_documentation() -> None:
    assert ROOT / "docs" / "python.md" in WITH_PYTHON
