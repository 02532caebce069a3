"""Numbers of the documentation come out of records/*.json: tables everywhere, and all of README.md and
docs/performance.md."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "records"

sys.path.insert(0, str(ROOT / "bench"))
gpu_pages = pytest.importorskip("gpu_pages", reason="the benchmarks' packages are not installed")
harness = importlib.import_module("harness")
tables = importlib.import_module("gpu_tables")
mean = harness.geometric_mean

#: What README and performance.md say of their own: names, and what was measured, not what came out.
SETTINGS = (
    r"C\+\+20",
    r"Debian 12, Ubuntu 24\.04",
    r"\[\d{4}\.\d{5}\]",
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
    return json.loads((RECORDS / f"{name}.json").read_text())


@pytest.mark.parametrize("page", gpu_pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_what_its_results_say(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- from ") == len(gpu_pages.BLOCK.findall(text)), "a block has no end"
    assert text == gpu_pages.page_from_json(text, page.parent), "stale; run python bench gpu-pages"


def test_a_record_has_each_measurement_on_a_line() -> None:
    cells = ['{"seqlen": 1, "us": {"tandem": [1, 2]}}', '{"seqlen": 2, "us": {}}']
    document = {"device": "GPU", "cells": [json.loads(cell) for cell in cells]}
    lines = ["{", ' "device": "GPU",', ' "cells": [', f"  {cells[0]},", f"  {cells[1]}", " ]", "}"]
    assert harness.json_lines(document).split("\n") == lines
    records = [path.read_text() for path in sorted(RECORDS.glob("*.json"))]
    assert len(records) > 40
    assert [text for text in records if text != harness.json_lines(json.loads(text)) + "\n"] == []


def unsourced(text: str) -> list[str]:
    """Numbers outside of blocks that results fill, code and links."""
    text = gpu_pages.BLOCK.sub("", text)
    text = re.sub(r"<!-- plans -->.*?<!-- plans end -->", "", text, flags=re.DOTALL)
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
    assert "at 1.00 or more: 1 of 2" in tables.comes_to([0.999, 1.0])


def span(values: list[float]) -> list[str]:
    return [harness.ratio(min(values)), harness.ratio(max(values))]


def of_cudnn(gpu: str, name: str) -> list[float]:
    return [c["us"]["cudnn"] / c["us"][name] for c in result(f"gpu-decode-{gpu}")["cells"]]


def tokens_of_e4m3(gpu: str) -> list[float]:
    us = [c["us"] for c in result(f"gpu-decode-{gpu}")["cells"]]
    return [u["tandem, lengths"] / u["tandem, e4m3"] for u in us]


def beside_fa3(which: str) -> list[str]:
    shares = [tables.of_best(c) for c in result("gpu-head-to-head-h200")[which]]
    return [f"{mean(shares):.3f}", f"{min(shares):.3f}"]


def from_2048() -> str:
    cells = [c for c in result("gpu-head-to-head-h200")["forward"] if c["seqlen"] >= 2048]
    return f"{mean([tables.of(c, 'fa3') for c in cells]):.3f}"


def of_gemm(head_dims: tuple[int, ...]) -> list[str]:
    document = result("gpu-backward-h200")
    cells = [c for c in document["cells"] if c["head_dim"] in head_dims and c["seqlen"] >= 8192]
    return span([c["tflops"]["tandem"] / document["gemm_tflops"] for c in cells])


def varlen(shortest: bool) -> list[str]:
    cells = result("gpu-forward-varlen-h200")["varlen"]
    short = [c["sequences"].endswith(" of 34") for c in cells]
    if shortest:
        return span([c["ratio"] for c, is_short in zip(cells, short, strict=True) if is_short])
    return span(
        [c["ratio"] for c, is_short in zip(cells, short, strict=True) if not (is_short or c["causal"])]
    )


def ablation() -> list[str]:
    speeds = {e["variant"]: e["tflops"] for e in result("gpu-forward-ablation-h200")["ablation"]}
    names = ("no warp specialisation", "all", "no overlap in a warpgroup")
    return [f"{speeds[name]:.0f}" for name in names]


def million() -> list[str]:
    (cell,) = (c for c in result("gpu-forward-long-h200")["cells"] if c["seqlen"] == 1 << 20)
    seconds = sorted(cell["us"]["tandem"])[len(cell["us"]["tandem"]) // 2] / 1e6
    return [f"{seconds:.1f}", f"{cell['memory_bytes'] / 2**30:.1f}"]


def functions() -> list[str]:
    cells = result("gpu-functions-h200")["cells"]
    return [f"{mean([c[w]['times_flex_attention'] for c in cells]):.2f}" for w in ("forward", "backward")]


def whole(gpu: str, setting: str) -> list[float]:
    entries = result(f"gpu-low-precision-{gpu}")["precision"]
    return [e["tflops"][f"{setting} whole"] / e["tflops"]["16-bit"] for e in entries]


def faster(gpu: str, setting: str) -> list[str]:
    shares = whole(gpu, setting)
    return [str(sum(share > 1 for share in shares)), harness.ratio(max(shares))]


def sixteen_by_32k() -> list[str]:
    us = result("gpu-decode-h100")["cells"][5]["us"]
    wide, narrow = us["tandem, lengths"], us["tandem, e4m3"]
    return [f"{narrow:.0f}", f"{wide:.0f}", harness.ratio(wide / narrow)]


def latent() -> list[str]:
    return [f"{row['tflops']:.0f}" for row in result("gpu-decode-h200")["latent"][3:5]]


def appended() -> list[str]:
    cells = result("gpu-append-h200")["cells"]
    return [harness.ratio(c["of_copy_rate"]["tandem"]) for c in (cells[-1], cells[-2])]


def most_e4m3() -> str:
    return f"{max(e['tflops']['fp8 codes'] for e in result('gpu-low-precision-codes-h200')['codes']):.0f}"


#: Figures that pages quote in prose: the page below docs/, the sentence, the figures in it.
QUOTES: tuple[tuple[str, str, Callable[[], list[str]]], ...] = (
    (
        "how-it-works.md",
        "reaches {} TFLOP/s in place of {}, without the overlap inside a warpgroup {}",
        ablation,
    ),
    ("guides/long-context.md", "took {} seconds on an H200, with {} GiB", million),
    ("guides/varlen.md", "takes {} to {} of a dense call's time without a mask", lambda: varlen(False)),
    ("guides/varlen.md", "and {} to {} for 8192 sequences of 34 tokens", lambda: varlen(True)),
    ("guides/eight-bits.md", "by up to {}. `int8`", lambda: faster("h200", "fp8")[1:]),
    ("guides/eight-bits.md", "is faster in {} cells", lambda: faster("h200", "int8")[:1]),
    ("guides/eight-bits.md", "up to {} TFLOP/s in e4m3", lambda: [most_e4m3()]),
    ("guides/eight-bits.md", "in the mean {} of the rate", lambda: beside_fa3("fp8")[:1]),
    ("kernels/functions.md", "{} times its rate forward and {} backward", functions),
    ("results/gpu-functions-h200.md", "geometric means are {} forward and {} backward", functions),
    (
        "results/gpu-decode.md",
        "Tandem has {} to {} of it with lengths known, {} to {} with lengths on the device",
        lambda: span(of_cudnn("h200", "tandem")) + span(of_cudnn("h200", "tandem, lengths")),
    ),
    (
        "kernels/eight-bit-caches.md",
        "{} us for {} ([record](../results/gpu-decode.md#h100)), {} times",
        sixteen_by_32k,
    ),
    ("kernels/wide-heads.md", "{} TFLOP/s at 64 x 8192 and {} at 128 x 4096", latent),
    ("results/gpu-append-h200.md", "reach {} of it at 65,536 tokens and {} at 16,384", appended),
    (
        "results/gpu-forward.md",
        "{} of the fastest, {} in the least cell, and from 2048 tokens on {} of FlashAttention-3",
        lambda: [*beside_fa3("forward"), from_2048()],
    ),
    (
        "results/gpu-backward.md",
        "{} of the fastest, {} in the least cell",
        lambda: beside_fa3("backward"),
    ),
    (
        "results/gpu-backward.md",
        "at {} to {} of a large GEMM of the same run at head dimensions 64 and 128 and at {} to {} at 256",
        lambda: of_gemm((64, 128)) + of_gemm((256,)),
    ),
    (
        "results/gpu-low-precision.md",
        "{} of its rate, {} in the least cell",
        lambda: beside_fa3("fp8"),
    ),
    (
        "results/gpu-low-precision.md",
        "fp8 is faster than bf16 in {} of 18 cells",
        lambda: faster("h200", "fp8")[:1],
    ),
    (
        "results/gpu-decode.md",
        "Tandem is at {} to {} of cuDNN's rate, with lengths on the device at {} to {}.",
        lambda: span(of_cudnn("h100", "tandem")) + span(of_cudnn("h100", "tandem, lengths")),
    ),
)


@pytest.mark.parametrize(
    ("page", "sentence", "figures"), QUOTES, ids=[f"{p}: {s[:30]}" for p, s, _ in QUOTES]
)
def test_prose_quotes_its_results(page: str, sentence: str, figures: Callable[[], list[str]]) -> None:
    text = " ".join((ROOT / "docs" / page).read_text().split())
    assert sentence.format(*figures()) in text


def test_what_runs_where_is_what_plans_say() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tandem")
    command = [sys.executable, str(ROOT / "scripts" / "support.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_readme_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    assert len(text.split()) <= 500
