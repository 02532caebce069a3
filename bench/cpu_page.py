"""What `python bench cpu` leaves behind: a page of tables, a JSON file and a plot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import harness
import tandem
import torch
from tandem import _core

PASSES = ("forward", "backward")

METHOD = """\
Both sides in one process, in turn, on the same memory, laid out (batch, heads, seqlen, head_dim); Tandem
reads it through a transposed view. Both allocate their results in the timed call. PyTorch's backward is
autograd's, without its forward pass. Times are the best of all calls and, in brackets, the median, in
milliseconds. Speedup is PyTorch's time over Tandem's, best over best and, in brackets, median over median.
Operations are 4 b h s^2 d forward, half of that if causal, 2.5 times that backward. Errors are the largest
on sampled rows against fp64; every cell's result was within the contract's bound"""


class Report:
    """The cells of a run and what they were measured on. Times are seconds, speeds GFLOP/s."""

    def __init__(self, threads: int, target: str) -> None:
        self.start = time.perf_counter()
        self.threads = threads
        self.cells: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {
            "machine": harness.machine(),
            "commit": harness.commit(),
            "command": harness.command(),
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "threads": threads,
            "tandem": f"{tandem.__version__} ({target})",
            "torch": f"{torch.__version__} ({torch.backends.cpu.get_cpu_capability()})",
            "peak": _core.measure_peak(threads),
        }

    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def finish(self) -> None:
        """Takes the peak again: the machine may have been disturbed at the start."""
        again = _core.measure_peak(self.threads)
        peak = self.meta["peak"]
        for key in ("f32_gflops", "bf16_gflops"):
            peak[key] = max(peak[key], again[key])
        self.meta["seconds"] = round(self.elapsed())

    def peak(self, dtype: str) -> float:
        """The bf16 dot product's peak for bf16 where the processor has it, else f32's."""
        peak = self.meta["peak"]
        return float(
            peak["bf16_gflops"] if dtype == "bf16" and peak["bf16_gflops"] > 0 else peak["f32_gflops"]
        )

    def share(self, cell: dict[str, Any], side: str = "tandem", of: str = "best") -> float:
        return float(1e-9 * cell["flops"] / cell[side][of] / self.peak(cell["dtype"]))

    @staticmethod
    def ratio(cell: dict[str, Any], of: str = "best") -> float:
        return float(cell["torch"][of] / cell["tandem"][of])

    def markdown(self) -> str:
        meta, peak = self.meta, self.meta["peak"]
        bf16 = f", bf16 dot product {peak['bf16_gflops']:.0f}" if peak["bf16_gflops"] else ""
        right = all(c["right"] for c in self.cells)
        lines = [
            "# Tandem against PyTorch on the CPU",
            "",
            f"- Machine: {meta['machine']}; {self.threads} threads on both sides",
            f"- Peak of these threads, measured, in GFLOP/s: f32 multiply-add {peak['f32_gflops']:.0f}{bf16}",
            f"- Commit: {meta['commit']}; Tandem {meta['tandem']}; PyTorch {meta['torch']}",
            f"- Command: `{meta['command']}` ({meta['date']}, {meta['seconds']} s)",
            "",
            METHOD + ("." if right else ", **except where marked WRONG**."),
            "",
            *self._summary(),
        ]
        for direction in PASSES:
            for dtype in ("f32", "bf16"):
                cells = [c for c in self.cells if (c["direction"], c["dtype"]) == (direction, dtype)]
                if cells:
                    lines += self._table(f"{direction.capitalize()}, {dtype}", cells)
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        lines = [
            "## Summary",
            "",
            "| pass | dtype | cells | geometric mean speedup | least | cells below 1.0 "
            "| share of peak, d=128, seqlen >= 1024 |",
            "|---|---|--:|--:|--:|--:|--:|",
        ]
        for direction in PASSES:
            for dtypes in (("f32",), ("bf16",), ("f32", "bf16")):
                cells = [c for c in self.cells if c["direction"] == direction and c["dtype"] in dtypes]
                if not cells:
                    continue
                ratios = [self.ratio(c) for c in cells]
                medians = [self.ratio(c, "median") for c in cells]
                large = [self.share(c) for c in cells if c["head_dim"] == 128 and c["seqlen"] >= 1024]
                shares = f"{min(large):.0%} to {max(large):.0%}" if large and len(dtypes) == 1 else ""
                mean, mean_of_medians = map(harness.geometric_mean, (ratios, medians))
                lines.append(
                    f"| {direction} | {' and '.join(dtypes)} | {len(cells)} "
                    f"| {mean:.2f} ({mean_of_medians:.2f}) | {min(ratios):.2f} "
                    f"| {sum(r < 1.0 for r in ratios)} | {shares} |"
                )
        return [*lines, ""]

    def _table(self, title: str, cells: list[dict[str, Any]]) -> list[str]:
        lines = [
            f"## {title}",
            "",
            "| d | mask | batch | heads | seqlen | PyTorch ms | Tandem ms | speedup "
            "| PyTorch GFLOP/s | Tandem GFLOP/s | share of peak | PyTorch error | Tandem error |",
            "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for c in cells:
            times = [f"{1e3 * c[s]['best']:.2f} ({1e3 * c[s]['median']:.2f})" for s in ("torch", "tandem")]
            speeds = [f"{1e-9 * c['flops'] / c[s]['best']:.0f}" for s in ("torch", "tandem")]
            wrong = "" if c["right"] else " WRONG"
            mask = "causal" if c["causal"] else "full"
            lines.append(
                f"| {c['head_dim']} | {mask} | {c['batch']} | {c['heads']} | {c['seqlen']} "
                f"| {times[0]} | {times[1]} | {self.ratio(c):.2f} ({self.ratio(c, 'median'):.2f}) "
                f"| {speeds[0]} | {speeds[1]} | {self.share(c):.0%} "
                f"| {c['torch']['error']:.1e} | {c['tandem']['error']:.1e}{wrong} |"
            )
        return [*lines, ""]

    def save(self, folder: Path, stem: str = "cpu") -> list[Path]:
        """Writes the JSON and the plot; returns where."""
        data = folder / f"{stem}.json"
        harness.write_json({**self.meta, "cells": self.cells}, data)
        picture = folder / f"{stem}.png"
        self.plot(picture)
        return [data, picture]

    def record(self) -> list[Path]:
        """Writes records/cpu.*; returns where."""
        return self.save(harness.RECORDS)

    def plot(self, path: Path) -> None:
        """GFLOP/s by seqlen at the largest batch of each, a panel for each pass, dtype, head_dim and mask."""
        plt = harness.pyplot()
        kinds = sorted(
            {(c["direction"], c["dtype"]) for c in self.cells},
            key=lambda k: (k[0] != "forward", k[1] != "f32"),
        )
        shapes = sorted({(c["head_dim"], c["causal"]) for c in self.cells})
        size = (4.2 * len(shapes), 3.0 * len(kinds))
        figure, axes = plt.subplots(
            len(kinds), len(shapes), figsize=size, squeeze=False, layout="constrained"
        )
        for row, (direction, dtype) in zip(axes, kinds, strict=True):
            for axis, (head_dim, causal) in zip(row, shapes, strict=True):
                largest: dict[int, dict[str, Any]] = {}
                for c in self.cells:
                    if (c["direction"], c["dtype"], c["head_dim"], c["causal"]) == (
                        direction,
                        dtype,
                        head_dim,
                        causal,
                    ):
                        if c["batch"] >= largest.get(c["seqlen"], c)["batch"]:
                            largest[c["seqlen"]] = c
                self._panel(axis, [largest[s] for s in sorted(largest)], self.peak(dtype))
                mask = "causal" if causal else "full"
                axis.set_title(f"{direction}, {dtype}, head_dim {head_dim}, {mask}", fontsize=9)
        axes[0][0].legend(fontsize=8, loc="lower right")
        figure.suptitle(
            f"{self.meta['machine']}, {self.threads} threads, commit {self.meta['commit']}", fontsize=9
        )
        figure.savefig(path, dpi=110)
        plt.close(figure)

    @staticmethod
    def _panel(axis: Any, cells: list[dict[str, Any]], peak: float) -> None:
        for shift, side, label, colour in (
            (-0.2, "torch", "PyTorch", "#9aa5b1"),
            (0.2, "tandem", "Tandem", "#1f6fb2"),
        ):
            speeds = [1e-9 * c["flops"] / c[side]["best"] for c in cells]
            bars = axis.bar(
                [i + shift for i in range(len(cells))], speeds, width=0.4, label=label, color=colour
            )
            axis.bar_label(bars, fmt="%.0f", fontsize=6)
        axis.axhline(peak, color="#c0392b", linewidth=1, linestyle="--", label="peak")
        axis.set_ylim(0, 1.12 * peak)
        axis.set_xticks(range(len(cells)), [f"{c['seqlen']}\nb={c['batch']}" for c in cells], fontsize=7)
        axis.set_ylabel("GFLOP/s", fontsize=8)
        axis.tick_params(axis="y", labelsize=7)
