"""The plots of docs/performance.md, from the tables of docs/results that `bench/gpu_pages.py` writes.

    python scripts/performance_plots.py            writes docs/drawings/speed-*.svg
    python scripts/performance_plots.py --into DIR

A table is read as it stands on its page, so that plot and page cannot differ; a test compares the drawings
with what this writes.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

#: A drawing: the page, what its table calls each line, and the line's name, colour and dash.
TANDEM, CUDNN, FA2 = ("#1f5fbf", "-"), ("#6c8a3a", "-"), ("#9aa0a6", "-")
FA3 = {
    "FA3 (by ratio)": ("FlashAttention-3, by ratio", "#d1495b", "--"),
    "FA3 (its own run)": ("FlashAttention-3, its own run", "#e8a0a9", "--"),
}
SPEED = {
    "Tandem": ("Tandem", *TANDEM),
    **FA3,
    "cuDNN": ("cuDNN", *CUDNN),
    "FA2": ("FlashAttention-2", *FA2),
}
DRAWINGS = {
    "forward": ("gpu-forward-h200.md", SPEED),
    "backward": ("gpu-backward-h200.md", SPEED),
    "fp8": (
        "gpu-low-precision-h200.md",
        {
            "fp8": ("Tandem, fp8, the kernel alone", *TANDEM),
            **FA3,
            "bf16": ("Tandem, bf16", *CUDNN),
        },
    ),
}


def first_table(page: Path) -> list[dict[str, str]]:
    """The rows of the page's first table of the grid, by column."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.search(r"^\| head_dim \|.*?(?=\n\n)", page.read_text(), re.M | re.S)
        .group()
        .splitlines()
    ]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def draw(page: str, lines: dict[str, tuple[str, str, str]], path: Path) -> None:
    table = first_table(ROOT / "docs" / "results" / page)
    head_dims = sorted({int(row["head_dim"]) for row in table})
    top = max(float(row[column]) for row in table for column in lines)
    figure, axes = plt.subplots(
        2, len(head_dims), figsize=(9, 5), sharex=True, sharey=True, layout="constrained"
    )
    for i, mask in enumerate(("full", "causal")):
        for axis, head_dim in zip(axes[i], head_dims, strict=True):
            rows = [r for r in table if int(r["head_dim"]) == head_dim and r["mask"] == mask]
            panel(axis, rows, lines)
            axis.set_title(f"{mask}, head dimension {head_dim}", fontsize=9)
            axis.set_ylim(0, 1.08 * top)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def panel(axis: Any, rows: list[dict[str, str]], lines: dict[str, tuple[str, str, str]]) -> None:
    places = range(len(rows))
    for column, (label, colour, dash) in lines.items():
        speeds = [float(row[column]) for row in rows]
        axis.plot(places, speeds, dash, color=colour, label=label, marker="o", markersize=3, linewidth=1.4)
    axis.set_xticks(places, [row["seqlen"] for row in rows], fontsize=7)
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
    for name, (page, lines) in DRAWINGS.items():
        draw(page, lines, folder / f"speed-{name}.svg")


if __name__ == "__main__":
    main()
