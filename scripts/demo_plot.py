#!/usr/bin/env python3
"""Draws what `tandem demo --data FIGURES.json` found: how widely each attention head of a real model looks,
how exact and how fast its computation was.

    python scripts/demo_plot.py FIGURES.json PICTURE.png
"""

import argparse
import json
import math
import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

INK, MUTED, GRID = "#1f2430", "#697080", "#e4e6eb"
LAYER_COLORS = ("#0b6e8f", "#c8553d", "#6a4c93", "#588157", "#b08900", "#3a5a9b")
DTYPE_COLORS = {"f32": "#31486f", "bf16": "#e09f3e"}
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")

plt.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
    }
)


def draw_layer(axes, heads, color, title, tokens):
    """A head a column: the queries' effective number of tokens, e to the entropy, as a range and a median."""
    order = sorted(range(len(heads)), key=lambda head: heads[head][2])
    for x, head in enumerate(order):
        low, quarter, median, three_quarters, high = (math.exp(h) for h in heads[head])
        axes.plot([x, x], [low, high], color=color, alpha=0.35, linewidth=1.6, solid_capstyle="round")
        axes.plot(
            [x, x], [quarter, three_quarters], color=color, alpha=0.75, linewidth=6, solid_capstyle="round"
        )
        axes.plot(x, median, "o", color="white", markeredgecolor=color, markeredgewidth=1.4, markersize=5.5)
    axes.axhline(tokens, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_title(title, color=color)
    axes.set_xticks(range(len(order)), [str(head) for head in order])
    axes.set_xlabel("head, by median", color=MUTED)
    axes.set_yscale("log", base=2)
    ticks = [2**n for n in range(0, int(math.log2(tokens)) + 1, 1 if tokens < 64 else 2)] + [tokens]
    axes.yaxis.set_major_locator(FixedLocator(sorted(set(ticks))))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(0.9, tokens * 1.25)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def draw_errors(axes, results):
    """Each output's worst error as a share of its bound."""
    outputs = [entry["output"] for entry in results[0]["outputs"]]
    height = 0.8 / len(results)
    for n, result in enumerate(results):
        shares = [entry["share_of_bound"] for entry in result["outputs"]]
        rows = [y + (n - (len(results) - 1) / 2) * height for y in range(len(outputs))]
        axes.barh(rows, shares, height * 0.86, color=DTYPE_COLORS[result["dtype"]], label=result["dtype"])
        for y, share, entry in zip(rows, shares, result["outputs"], strict=True):
            axes.text(share + 0.012, y, f"{entry['largest_error']:.0e}", va="center", fontsize=7, color=MUTED)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(outputs)), outputs)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.06)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "bound"])
    axes.set_title("Largest error against the fp64 oracle, as a share of its bound")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(0.92, 0.5), fontsize=8)


def draw_speed(axes, results):
    """GFLOP/s by pass and dtype, with the share of the dtype's peak."""
    rows = [(pass_, result) for pass_ in ("forward", "backward") for result in results]
    fastest = max(result[pass_]["gflops"] for pass_, result in rows)
    for y, (pass_, result) in enumerate(rows):
        speed = result[pass_]
        axes.barh(y, speed["gflops"], 0.7, color=DTYPE_COLORS[result["dtype"]])
        note = (
            f"{speed['gflops']:.0f}   {speed['best_ms']:.1f} ms, {100 * speed['share_of_peak']:.0f} % of peak"
        )
        axes.text(speed["gflops"] + fastest * 0.02, y, note, va="center", fontsize=8, color=MUTED)
    axes.set_yticks(range(len(rows)), [f"{pass_} {result['dtype']}" for pass_, result in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, fastest * 1.9)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("GFLOP/s")
    axes.tick_params(length=0)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    figures = json.loads(args.figures.read_text(encoding="utf-8"))
    entropy, results, metadata = figures["entropy_nats"], figures["results"], figures.get("metadata") or {}
    tokens = figures["tensors"]["shape"][1]
    layers = json.loads(metadata.get("layers", json.dumps(list(range(len(entropy))))))

    figure = plt.figure(figsize=(12, 7.6), dpi=150, facecolor="white")
    top = figure.add_gridspec(1, len(entropy), left=0.065, right=0.98, top=0.80, bottom=0.45, wspace=0.08)
    bottom = figure.add_gridspec(
        1, 2, left=0.065, right=0.98, top=0.31, bottom=0.075, wspace=0.28, width_ratios=(1.25, 1)
    )

    first = None
    for n, heads in enumerate(entropy):
        axes = first = (
            figure.add_subplot(top[n]) if first is None else figure.add_subplot(top[n], sharey=first)
        )
        name = ORDINALS[layers[n]] if layers[n] < len(ORDINALS) else str(layers[n] + 1)
        draw_layer(axes, heads, LAYER_COLORS[n % len(LAYER_COLORS)], f"{name.capitalize()} layer", tokens)
        if n > 0:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel("tokens attended to\n(e to the entropy)")
    draw_errors(figure.add_subplot(bottom[0]), results)
    draw_speed(figure.add_subplot(bottom[1]), results)

    machine, peak = figures["machine"], figures["peak"]
    model = metadata.get("model", figures["file"]).split("/")[-1]
    source = f" of {metadata['text'].split(';')[0]}" if "text" in metadata else ""
    dashed = "dashed: all tokens alike"
    peaks = f"f32 {peak['f32_gflops']:.0f}"
    peaks += f", bf16 {peak['bf16_gflops']:.0f} GFLOP/s" if peak["bf16_gflops"] else " GFLOP/s"
    setting = (
        f"{machine['processor']}, {peak['threads']} threads, {machine['target']}; measured peak: {peaks}"
    )
    for y, size, weight, color, text in (
        (0.945, 16, "bold", INK, f"How widely the heads of {model} look"),
        (0.895, 9.5, "normal", MUTED, f"{tokens} tokens{source}."),
        (
            0.870,
            9.5,
            "normal",
            MUTED,
            f"Dot: a head's median token; bar: middle half; line: 5 to 95 %; {dashed}.",
        ),
        (0.015, 8, "normal", MUTED, f"tandem {figures['version']} on {setting}"),
    ):
        figure.text(0.065, y, text, fontsize=size, fontweight=weight, color=color)
    # A reader never sees half a picture.
    partial = args.picture.with_suffix(".partial.png")
    figure.savefig(partial)
    os.replace(partial, args.picture)
    print(f"picture: {args.picture.resolve()}")


if __name__ == "__main__":
    main()
