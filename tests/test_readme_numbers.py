"""Every measured number of README follows from the results that it links."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
README = " ".join((ROOT / "README.md").read_text().split())
GPUS = ("h100", "h200")

sys.path.insert(0, str(ROOT / "bench"))
gpu_pages = pytest.importorskip("gpu_pages", reason="the benchmarks' packages are not installed")


def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def mean_and_least(ratios: list[float]) -> str:
    return f"{gpu_pages.geometric_mean(ratios):.2f} ({min(ratios):.2f})"


def row(what: str, gpu: str) -> list[str]:
    """The cells of README's table of speeds for a GPU; a row without a name goes on with the one before."""
    name = ""
    for line in (ROOT / "README.md").read_text().splitlines():
        found = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(found) == 7:
            name = found[0] or name
            if name == what and found[1] == gpu.upper():
                return found[2:6]
    raise AssertionError(f"README has no row of {what} on {gpu}")


def there(entries: list[dict], speeds: list[float], device: str, kind: str) -> str:
    """Against what FlashAttention-3 reached in its own run, where that is known."""
    reached = [gpu_pages.fa3_there(entry, device, kind) for entry in entries]
    known = [speed / other for speed, other in zip(speeds, reached, strict=True) if other]
    return mean_and_least(known) if known else ""


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_speed_in_16_bits(which: str, gpu: str) -> None:
    document = result(f"gpu-{which}-{gpu}")
    cells = document["cells"]
    assert len(cells) == 36
    speeds = [gpu_pages.with_fa3(cell, document["device"], False) for cell in cells]
    cudnn = [tflops["tandem"] / tflops["cudnn"] for tflops in speeds]
    best = [tflops["tandem"] / max(tflops["cudnn"], tflops["fa3"]) for tflops in speeds]
    mine = [tflops["tandem"] for tflops in speeds]
    assert row(which, gpu) == [
        f"{gpu_pages.geometric_mean(cudnn):.2f}",
        mean_and_least(best),
        there(cells, mine, document["device"], which),
        f"{max(mine):.0f}",
    ]


@pytest.mark.parametrize("gpu", GPUS)
def test_speed_in_8_bits(gpu: str) -> None:
    document = result(f"gpu-low-precision-{gpu}")
    entries, device = document["precision"], document["device"]
    speeds = [entry["tflops"]["fp8 kernel"] for entry in entries]
    peers = [gpu_pages.fa3_fp8(entry, document["gemm_fp8_tflops"], device) for entry in entries]
    by_ratio = [speed / peer for speed, peer in zip(speeds, peers, strict=True)]
    assert row("forward in fp8, the kernel alone", gpu) == [
        "",
        mean_and_least(by_ratio),
        there(entries, speeds, device, "fp8"),
        f"{max(speeds):.0f}",
    ]


def test_speed_of_quantized_values() -> None:
    document = result("gpu-low-precision-codes-h200")
    speeds = [entry["tflops"]["fp8 codes"] for entry in document["codes"]]
    own = there(document["codes"], speeds, document["device"], "fp8")
    what = "the same with e4m3 tensors of the caller's"
    assert row(what, "h200") == ["", "", own, f"{max(speeds):.0f}"]


@pytest.mark.parametrize("gpu", GPUS)
def test_whole_calls_in_8_bits(gpu: str) -> None:
    entries = [e for e in result(f"gpu-low-precision-{gpu}")["precision"] if e["seqlen"] >= 1024]
    assert len(entries) == 30
    faster = {
        setting: [e for e in entries if e["tflops"][f"{setting} whole"] > e["tflops"]["16-bit"]]
        for setting in ("fp8", "int8", "int8-accurate")
    }
    assert [len(some) for some in faster.values()] == [14, 3, 0]
    assert min(e["seqlen"] for e in faster["fp8"]) >= 4096
    text = "14 of the 30 cells from 1024 keys on with `fp8` (none below 4096), in 3 with `int8` and in none"
    assert text in README


def test_speed_on_the_cpu() -> None:
    def speedup(which: str) -> float:
        cells = [cell for cell in result("cpu")["cells"] if cell["direction"] == which]
        return gpu_pages.geometric_mean([c["torch"]["best"] / c["tandem"]["best"] for c in cells])

    text = f"forward {speedup('forward'):.1f} times as fast, backward {speedup('backward'):.1f} times"
    assert text in README


def test_errors_in_8_bits() -> None:
    errors = result("low-precision-h100")["precision"]

    def better(inputs: str, setting: str) -> float:
        return errors[inputs]["fp8 tensor"] / errors[inputs][setting]

    on_paper = [f"{better('paper', setting):.1f}" for setting in ("fp8", "int8", "int8-accurate")]
    assert (
        "errs {} times as much as `fp8`, {} times as much as `int8` and {} times".format(*on_paper) in README
    )
    layers = [name for name in errors if name.startswith("minilm")]
    ranges = []
    for setting in ("fp8", "int8", "int8-accurate"):
        ratios = [better(layer, setting) for layer in layers]
        ranges.append(f"{min(ratios):.1f} to {max(ratios):.1f}")
    assert "{}, {} and {} times".format(*ranges) in README


def test_time_to_build() -> None:
    """README rounds up what build.md measured."""
    page = (RESULTS / "build.md").read_text()
    minutes, seconds = re.search(r"(\d+) min (\d+) s for the library", page).groups()
    assert 60 * int(minutes) + int(seconds) < 180
    text = "build in [under three minutes](docs/results/build.md) on two cores"
    assert text in README
