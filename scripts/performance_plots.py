"""The plots of README.md and docs/performance.md, from records/gpu-head-to-head-h200.json.

    python scripts/performance_plots.py            writes docs/drawings/speed-*.svg
    python scripts/performance_plots.py --into DIR

A test compares the drawings with what this writes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "records" / "gpu-head-to-head-h200.json"

#: What a line is called, its colour and its dash.
Lines = dict[str, tuple[str, str, str]]
SPEED: Lines = {
    "tandem": ("Tandem", "#1f5fbf", "-"),
    "fa3": ("FlashAttention-3", "#d1495b", "-"),
    "cudnn": ("cuDNN", "#6c8a3a", "-"),
}
FP8: Lines = {
    "tandem": ("Tandem, e4m3", "#1f5fbf", "-"),
    "fa3": ("FlashAttention-3, e4m3", "#d1495b", "-"),
    "bf16": ("Tandem, bf16", "#6c8a3a", "-"),
}


def drawings() -> dict[str, tuple[list[dict[str, Any]], Lines]]:
    """The cells and the lines of each drawing."""
    document = json.loads(RESULT.read_text())
    for cell, wide in zip(document["fp8"], document["forward"], strict=True):
        cell["tflops"]["bf16"] = wide["tflops"]["tandem"]
    causal = [cell for cell in document["forward"] if cell["causal"]]
    return {
        "readme": (causal, SPEED),
        "forward": (document["forward"], SPEED),
        "backward": (document["backward"], SPEED),
        "fp8": (document["fp8"], FP8),
    }


def draw(cells: list[dict[str, Any]], lines: Lines, path: Path) -> None:
    head_dims = sorted({cell["head_dim"] for cell in cells})
    masks = sorted({cell["causal"] for cell in cells})
    top = max(cell["tflops"].get(line, 0) for cell in cells for line in lines)
    figure, axes = plt.subplots(
        len(masks),
        len(head_dims),
        figsize=(9, 2.5 * len(masks)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for row, causal in zip(axes, masks, strict=True):
        for axis, head_dim in zip(row, head_dims, strict=True):
            panel(axis, [c for c in cells if (c["head_dim"], c["causal"]) == (head_dim, causal)], lines)
            axis.set_title(f"{'causal' if causal else 'full'}, head dimension {head_dim}", fontsize=9)
            axis.set_ylim(0, 1.08 * top)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    path.write_text(re.sub(r" \n(?=[A-Zz\"])", " ", path.read_text()))  # a path on a line


def panel(axis: Any, cells: list[dict[str, Any]], lines: Lines) -> None:
    places = range(len(cells))
    for line, (label, colour, dash) in lines.items():
        speeds = [cell["tflops"].get(line, math.nan) for cell in cells]
        axis.plot(places, speeds, dash, color=colour, label=label, marker="o", markersize=3, linewidth=1.4)
    axis.set_xticks(places, [str(cell["seqlen"]) for cell in cells], fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.grid(axis="y", linewidth=0.4, color="#dddddd")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "drawings")
    folder = parser.parse_args().into
    # The same bytes in every run; text stays text.
    plt.rcParams |= {"svg.hashsalt": "tandem", "svg.fonttype": "none", "font.family": "sans-serif"}
    for name, (cells, lines) in drawings().items():
        draw(cells, lines, folder / f"speed-{name}.svg")


if __name__ == "__main__":
    main()
