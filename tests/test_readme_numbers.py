"""Numbers of the documentation come out of docs/results/*.json: tables everywhere, and all of README.md and
docs/performance.md."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"

sys.path.insert(0, str(ROOT / "bench"))
gpu_pages = pytest.importorskip("gpu_pages", reason="the benchmarks' packages are not installed")
harness = importlib.import_module("harness")

#: What README and performance.md say of their own: names, and what was measured, not what came out.
SETTINGS = (
    r"C\+\+20",
    r"Debian 12, Ubuntu 24\.04",
    r"\[\d{4}\.\d{5}\]",
    r"to 1024, in 8 bits to 256",
    r"to 256; forward in 16 bits to 576 \(v: 512\)",
    r"to 256 ",
    r"(## 8 bits from 16-bit tensors|in 8 bits|\[8 bits)",
    r"16,384 tokens in all, hidden size 2048 \(heads = 2048 / head_dim\), 512 to 16,384 tokens a sequence",
    r"head dimensions 64, 128 and 256,",
    r"at head dimension 256 it",
    r"or 1, that it does not reach",
    r"Below 4096 keys none",
    r"of 32 heads over 8 of 128, bf16, 512 to 32,768 keys, batches of 1 to 128",
    r"of 8 heads over one",
    r"A Llama of 4 layers",
    r"PyTorch 2\.13",
)


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("page", gpu_pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_what_its_results_say(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- from ") == len(gpu_pages.BLOCK.findall(text)), "a block has no end"
    assert text == gpu_pages.page_from_json(text, page.parent), "stale; run python bench gpu-pages"


def unsourced(text: str) -> list[str]:
    """Numbers outside of blocks that results fill, code and links."""
    text = gpu_pages.BLOCK.sub("", text)
    text = re.sub(r"^```.*?^```$|^ {4}.*$|`[^`]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    text = " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())
    for setting in SETTINGS:
        text = re.sub(setting, "", text)
    return re.findall(r"(?<![\w+-])\d[\w.,]*", text)


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_every_number_has_a_source(page: str) -> None:
    assert unsourced((ROOT / page).read_text()) == []


def test_a_number_without_source_is_found() -> None:
    block = "<!-- from figures: speed -->\n1.17\n<!-- end -->\n"
    assert unsourced(f"H100, FlashAttention-3, `0.5`\n{block}[a](b-2.md): 1.05 of it") == ["1.05"]


def test_a_missed_goal_is_not_rounded_up_to() -> None:
    assert harness.ratio(0.896, goals=(0.9, 1.0)) == "0.896"
    assert harness.ratio(0.9996) == "0.9996"
    assert [harness.ratio(x) for x in (0.896, 0.9, 1.0, 1.004, 1.996)] == [
        "0.90",
        "0.90",
        "1.00",
        "1.00",
        "2.00",
    ]
    assert "at 1.00 or more: 1 of 2" in importlib.import_module("gpu_tables").comes_to([0.999, 1.0])


#: Pages that a benchmark writes as it ends.
WRITTEN = ("cpu-decode", "cpu-functions", "cpu", "low-precision-accuracy")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_page_has_the_tables_of_its_results(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tandem")
    if name == "cpu":
        report = object.__new__(importlib.import_module("cpu_page").Report)
        report.meta = result(name)
        report.cells, report.threads = report.meta["cells"], report.meta["threads"]
        made = report.markdown()
    elif name == "low-precision-accuracy":
        made = importlib.import_module("accuracy").markdown(result(name), result(name))
    else:
        made = importlib.import_module(name.replace("-", "_")).page(result(name))
    page = (RESULTS / f"{name}.md").read_text().splitlines()
    assert [line for line in made.splitlines() if line.startswith("|") and line not in page] == []


def test_readme_and_start_here_say_alike_what_runs_where() -> None:
    def table(page: Path) -> list[str]:
        found = re.search(r"^\| \| CPU \|.*?(?=\n\n)", page.read_text(), re.MULTILINE | re.DOTALL)
        assert found
        return found.group().replace("](docs/", "](").splitlines()

    assert table(ROOT / "README.md") == table(ROOT / "docs" / "index.md")
