"""The Python in the documentation runs as written."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tandem
from tandem import _api, _call, _core

ROOT = Path(__file__).resolve().parents[2]
FRONT = ("README.md", "CONTRIBUTING.md", "monitoring/README.md")
PAGES = [*map(ROOT.joinpath, FRONT), *sorted((ROOT / "docs").rglob("*.md"))]
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


def test_every_option_is_on_the_page_of_python() -> None:
    signature = inspect.signature(tandem.attention)
    options = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    page = (ROOT / "docs" / "python.md").read_text()
    (listed,) = re.findall(r"^All options are keywords:.*?`help", page, re.MULTILINE | re.DOTALL)
    assert [name for name in options if not re.search(rf"`{name}\b", listed)] == []


def test_the_table_of_options_is_what_the_docstring_lists() -> None:
    """A row of Call is a parameter of that default, described, and one of C++'s list."""
    parameters = inspect.signature(tandem.attention).parameters
    rows = {name: getattr(_call.Call(), name) for name, _ in _call.KINDS}
    assert set(rows) == set(_core.OPTIONS)
    assert {name: parameters[name].default for name in rows} == rows
    assert not any(isinstance(default, float) for default in rows.values())  # torch.compile: a variable
    arguments = inspect.getdoc(tandem.attention).split("Args:\n")[1].split("Returns:\n")[0]
    assert re.findall(r"^  (\w+): ", arguments, re.MULTILINE) == list(parameters)
    typed = inspect.getsource(_api).split("class Options(")[1].split("__version__")[0]
    options, others = (re.findall(r"^ {8}(\w+): ", text, re.MULTILINE) for text in typed.split("class "))
    returned = [name for name in rows if name.startswith("return_")]
    assert sorted([*options, *returned]) == sorted(rows)
    assert sorted(["q", "k", "v", "return_lse", *returned, *options, *others]) == sorted(parameters)


@pytest.mark.parametrize("device", ["cpu", "H200", "A100"])
def test_dropout_and_masks_run_where_pages_say(device: str) -> None:
    """On the CPU and on GPUs; no page and no docstring keeps them to the CPU."""
    torch = pytest.importorskip("torch")
    q = torch.empty(1, 64, 2, 64, dtype=torch.float16, device="meta")
    where = {} if device == "cpu" else {"device": device}
    for options in ({"dropout_p": 0.1, "dropout_seed": 1}, {"bias": torch.empty(64, 64, device="meta")}):
        assert "forward" in tandem.explain(q, q, q, **options, **where)
    said = [tandem.attention.__doc__, (ROOT / "docs" / "guides" / "from-sdpa.md").read_text()]
    said.append((ROOT / "python" / "tandem" / "flash_attn.py").read_text())
    for text in said:
        text = " ".join(text.split())
        assert not re.search(
            r"On the CPU\. dropout_seed|on the CPU `(dropout_p|mask)=`|on a GPU calls with a mask tensor",
            text,
        )
