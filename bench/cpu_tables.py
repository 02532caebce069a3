"""Tables of the documentation, each from the JSON of one benchmark on a CPU (`gpu_pages.py` writes them)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import cpu_decode
from gpu_tables import RECIPES, Document, mask_of, right
from harness import geometric_mean, ratio


def mean_and_least(shares: list[float], goal: float = 1.0) -> str:
    if not shares:
        return "-"
    return ", ".join(ratio(share, goals=(1, goal)) for share in (geometric_mean(shares), min(shares)))


def speedups(document: Document) -> list[str]:
    """Rows of cpu: PyTorch's time over Tandem's, and the share of the measured peak from 1024 keys on."""
    groups: dict[tuple[str, str, int, str], list[Document]] = {}
    for c in document["cells"]:
        groups.setdefault((c["direction"], c["dtype"], c["head_dim"], mask_of(c)), []).append(c)
    rows = []
    for key, cells in groups.items():
        peak = 1e9 * document["peak"][f"{key[1]}_gflops"]
        long = [c["flops"] / c["tandem"]["best"] / peak for c in cells if c["seqlen"] >= 1024]
        times = [c["torch"]["best"] / c["tandem"]["best"] for c in cells]
        shares = f"{min(long):.0%} to {max(long):.0%}"
        rows.append([*key, len(cells), mean_and_least(times), f"{max(times):.2f}", shares])
    return right(["pass", "dtype", "head_dim", "mask", "cells", "mean, least", "most", "of the peak"], rows)


def beside_matrix_unit(document: Document) -> list[str]:
    """Rows of cpu-amx: both sides' rates, in GFLOP/s, and PyTorch's time over Tandem's."""
    groups: dict[tuple[str, int, str], list[Document]] = {}
    for c in document["cells"]:
        groups.setdefault((c["direction"], c["head_dim"], mask_of(c)), []).append(c)
    rows = []
    for key, cells in groups.items():
        rates = {side: [c["flops"] / c[side]["best"] / 1e9 for c in cells] for side in ("tandem", "torch")}
        said = [f"{min(of_side):.0f} to {max(of_side):.0f}" for of_side in rates.values()]
        shares = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
        rows.append([*key, len(cells), *said, mean_and_least(shares)])
    header = ["pass", "head_dim", "mask", "cells", "Tandem, GFLOP/s", "PyTorch, GFLOP/s", "mean, least"]
    return right(header, rows)


def decode(document: Document) -> list[str]:
    return cpu_decode.table(document["cells"])


def functions(document: Document) -> list[str]:
    """Rows of cpu-functions: the others' times over Tandem's."""
    columns = [("forward", "flex_attention", 2.0), ("forward", "sdpa", 1.0), ("backward", "sdpa", 1.0)]
    rows = []
    for name in dict.fromkeys(c["function"] for c in document["cells"]):
        for dtype in ("f32", "bf16"):
            cells = [c for c in document["cells"] if (c["function"], c["dtype"]) == (name, dtype)]
            row = [name, dtype]
            for which, other, goal in columns:
                ms = [c["ms"] for c in cells if c["pass"] == which and other in c["ms"]]
                row.append(mean_and_least([m[other] / m["tandem"] for m in ms], goal))
            rows.append(row)
    return right(["function", "dtype", *(f"{which}, {other}" for which, other, _ in columns)], rows)


def beside_compiled(document: Document) -> list[str]:
    """cpu-functions-amx in words: compiled flex_attention's times over Tandem's."""
    shares: dict[str, list[float]] = {}
    for c in document["cells"]:
        shares.setdefault(c["function"], []).append(c["ms"]["flex_attention"] / c["ms"]["tandem"])
    by_name = sorted((geometric_mean(of_name), name) for name, of_name in shares.items())
    every = [share for of_name in shares.values() for share in of_name]
    said = (
        f"Tandem has {geometric_mean(every):.2f} times `flex_attention`'s rate in the mean, from "
        f"{by_name[0][0]:.2f} ({by_name[0][1]}) to {by_name[-1][0]:.2f} ({by_name[-1][1]}); "
        f"{sum(share < 2 for share in every)} of {len(every)} cells are below 2, the least {min(every):.2f}."
    )
    return textwrap.wrap(said, 110, break_on_hyphens=False, break_long_words=False)


def errors_by_context(document: Document) -> list[str]:
    contexts = document["contexts"]
    header = ["recipe", *(f"{c['input']}, {c['seqlen']}" for c in contexts)]
    return right(header, ([name, *(f"{c['errors'][name]:.2e}" for c in contexts)] for name in RECIPES))


def errors_of_gradients(document: Document) -> list[str]:
    columns = ("dq", "dk", "dv")
    gradients = document["gradients"]
    rows = ([name, *(f"{gradients[name][c]:.1e}" for c in columns)] for name in ("fp8", "int8", "exact"))
    return right(["forward", *columns], rows)


TABLES: dict[str, Callable[[Document], list[str]]] = {
    "cpu": speedups,
    "cpu-amx": beside_matrix_unit,
    "cpu-decode": decode,
    "cpu-decode-amx": decode,
    "cpu-functions": functions,
    "cpu-functions-amx": beside_compiled,
    "errors-by-context": errors_by_context,
    "errors-of-gradients": errors_of_gradients,
}
