"""Tables of records/gradients-in-8-bits.json: what `gradients-in-8-bits` prints and the documentation has."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Iterable

from gpu_tables import Document, right
from harness import ratio

PRODUCTS = {"s": "Q K^T", "dp": "dO V^T", "dv": "P^T dO", "dq": "dS K", "dk": "dS^T Q"}
NAMES = ("dq", "dk", "dv")
GOAL = 0.995
#: Recipes that the documentation shows.
SHOWN = (
    "bf16",
    "e4m3, e5m2, tensor",
    "e4m3, block, mended",
    "s8, tensor",
    "s8, line, mended",
    "s8, P and dS e4m3",
)
#: What is measured on long sequences, too.
LONG = (
    *SHOWN,
    "e4m3, block, mended, S s8",
    "e4m3, block, mended, S 16",
    "s8, block, mended",
    "s8, line",
)
RANDOM = ("normal", "outliers", "biased")


def is_real(row: Document) -> bool:
    return row["inputs"] not in RANDOM


def show(cosine: float) -> str:
    return ratio(cosine, 3, goals=(GOAL, 1.0))


def products(document: Document) -> list[str]:
    """One product in 8 bits, all else exact: the lowest cosine of a gradient in any real layer."""
    found: dict[tuple[str, str], float] = {}
    for row in filter(is_real, document["alone"]):
        key = row["product"], row["recipe"]
        found[key] = min(found.get(key, 1.0), *row["cosine"])
    names = dict.fromkeys(recipe for _, recipe in found)
    rows = [
        [name, *(show(found[product, name]) if (product, name) in found else "-" for product in PRODUCTS)]
        for name in names
    ]
    return right(["rounded to", *PRODUCTS.values()], rows)


def lowest(rows: Iterable[Document], name: str, figure: str = "cosine") -> float:
    return min(row[name][figure] for row in rows)


def cells_of_recipes(document: Document) -> dict[str, list[str]]:
    """By recipe: lowest cosines in real layers, of a head in any of them, and of random inputs."""
    found = {}
    for said in dict.fromkeys(row["recipe"] for row in document["together"]):
        of = [row for row in document["together"] if row["recipe"] == said]
        real = [row for row in of if is_real(row)]
        cells = [show(lowest(real, name)) for name in NAMES]
        cells.append(show(min(lowest(real, name, "worst_head") for name in NAMES)))
        for inputs in RANDOM:
            cells.append(show(min(lowest((r for r in of if r["inputs"] == inputs), n) for n in NAMES)))
        found[said] = cells
    return found


def recipes(document: Document) -> list[str]:
    rows = cells_of_recipes(document).items()
    return right(["recipe", *NAMES, "a head", *RANDOM], ([said, *cells] for said, cells in rows))


def shown_recipes(document: Document) -> list[str]:
    """The rows that the documentation has, without a head's cosine, and of random inputs the last alone."""
    cells = cells_of_recipes(document)
    rows = ([said, *cells[said][:3], cells[said][-1]] for said in SHOWN)
    return right(["recipe", *NAMES, RANDOM[-1]], rows)


def holding(document: Document) -> list[str]:
    """Recipes of 8 bits that reach the goal in every real layer, long ones among them."""
    real = [row for row in document["together"] if is_real(row)]
    layers = sum(row["recipe"] == "bf16" for row in real)
    found = []
    for said in dict.fromkeys(row["recipe"] for row in real if row["recipe"] != "bf16"):
        of = [row for row in real if row["recipe"] == said]
        if len(of) == layers and all(lowest(of, name) >= GOAL for name in NAMES):
            found.append(said)
    return found


def spikes(norms: list[float]) -> int:
    """Steps whose gradient norm is above four times the median of the fifty before, or is no number."""
    count, before = 0, list[float]()
    for norm in norms:
        spike = not math.isfinite(norm) or (len(before) >= 20 and norm > 4 * statistics.median(before[-50:]))
        count += spike
        if math.isfinite(norm):
            before.append(norm)
    return count


def ends(learned: list[Document]) -> dict[str, tuple[list[float], list[float], int]]:
    """By recipe: held-out losses at the end, their distances from bf16's of the same seed, and spikes."""
    runs: dict[str, list[Document]] = {}
    for run in learned:
        runs.setdefault(run["recipe"], []).append(run)
    base = {run["seed"]: run["held_out"][-1] for run in runs["bf16"]}
    found = {}
    for said, of in runs.items():
        last = [run["held_out"][-1] for run in of]
        gaps = [run["held_out"][-1] - base[run["seed"]] for run in of]
        found[said] = last, gaps, sum(spikes(run["norms"]) for run in of)
    return found


def learning(learned: list[Document]) -> list[str]:
    rows = []
    for said, (last, gaps, count) in ends(learned).items():
        cells = [f"{statistics.fmean(last):.4f}", f"{statistics.fmean(gaps):+.4f}"]
        cells += [f"{max(map(abs, gaps)):.4f}", f"{max(last) - min(last):.4f}", str(count)]
        rows.append([said, *cells])
    return right(["attention", "loss", "gap", "largest", "seeds", "spikes"], rows)


def learning_in_words(learned: list[Document]) -> list[str]:
    found = ends(learned)
    last, _, _ = found["bf16"]
    gaps = {
        said: f"`{said}` {max(map(abs, gaps)):.4f}" for said, (_, gaps, _) in found.items() if said != "bf16"
    }
    spiky = [f"`{said}` {n}" for said, (_, _, n) in found.items() if n]
    apart = max(last) - min(last)
    said = (
        f"bf16 ends at {statistics.fmean(last):.4f}; its seeds are {apart:.4f} apart. "
        f"Runs of one seed are at most so far from it: {', '.join(gaps.values())}. "
        f"Spikes: {', '.join(spiky) or 'none'}."
    )
    return textwrap.wrap(said, 110, break_on_hyphens=False, break_long_words=False)


TABLES: dict[str, Callable[[Document], list[str]]] = {
    "recipes-in-8-bits": shown_recipes,
    "learning-in-8-bits": lambda document: learning_in_words(document["learning"]),
    "kernels-in-8-bits": lambda document: learning_in_words(document["kernels"]),
}
