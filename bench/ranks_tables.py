"""Tables of the documentation, each from the JSON of context-parallel (`gpu_pages.py` writes them)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from gpu_tables import Document, number, right
from harness import ratio


def ranks_goals(cell: Document) -> tuple[float, ...]:
    """Shares of one GPU's rate that the pages of context parallel ask for."""
    if cell["documents"] != "one sequence":
        return (0.8, 1)
    return (0.9 if cell["tokens"] <= 8192 else 0.95, 1)


def ranks_cells(document: Document) -> list[Document]:
    """The cells of one run, or of several in one document, by tokens."""
    cells = [c for run in document.get("runs", [document]) for c in run["cells"]]
    return sorted(cells, key=lambda c: c["tokens"])


def milliseconds(cell: Document, name: str) -> str:
    if name not in cell["us"]:
        return "-"
    value = statistics.median(cell["us"][name]) / 1e3
    return number(value, 2 if value < 1000 else 0)


def pass_of(cell: Document) -> str:
    return "forward" if cell["pass"] == "forward" else "forward, backward"


def ranks(document: Document) -> list[str]:
    """Rows of context-parallel: every strategy's share of one GPU's rate."""
    rows = []
    for c in ranks_cells(document):
        longest = c["tokens"] == 262144 and c["pass"] == "both"
        if "ring" not in c["us"] and not longest:
            continue
        goals = ranks_goals(c)
        shares = [ratio(c["share"][n], goals=goals) if n in c["share"] else "-" for n in ("ring", "heads")]
        its = c["tflops"].get("alone, a rank's tokens")
        rows.append(
            [number(c["tokens"]), c["documents"], pass_of(c)]
            + [milliseconds(c, name) for name in ("alone", "gather")]
            + [ratio(c["share"]["gather"], goals=goals)]
            + [ratio(c["tflops"]["gather"] / its) if its else "-", *shares]
        )
    header = ["tokens a GPU", "sequences", "pass", "alone, ms", "gather, ms", "gather", "of its tokens"]
    return right([*header, "ring", "heads"], rows)


def ranks_again(document: Document) -> list[str]:
    """The last run of context-parallel, beside the first run's cells of the same work."""
    rows = []
    for c in document["runs"][-1]["cells"]:
        same = ("tokens", "documents", "pass", "peers")
        first = next(f for f in document["runs"][0]["cells"] if all(f[k] == c[k] for k in same))
        row = [c["documents"], pass_of(c)]
        for cell in (c, first):
            row += [milliseconds(cell, "alone"), milliseconds(cell, "gather")]
            row.append(ratio(cell["share"]["gather"], goals=ranks_goals(cell)))
        rows.append(row)
    before = document["runs"][0].get("commit", document["commit"])
    header = [
        "sequences",
        "pass",
        "alone, ms",
        "gather, ms",
        "share",
        f"alone at {before}",
        "gather",
        "share",
    ]
    return right(header, rows)


def ranks_peers(document: Document) -> list[str]:
    """One sequence, beside PyTorch's context_parallel."""
    names = ("cudnn allgather", "flash allgather", "flash alltoall")
    rows = (
        [number(c["tokens"]), pass_of(c), milliseconds(c, "alone"), milliseconds(c, "gather")]
        + [milliseconds(c, f"pytorch {name}") for name in names]
        for c in ranks_cells(document)
        if any(name.startswith("pytorch") for name in c["us"])
        or (c["tokens"] == 131072 and c["pass"] == "both" and "ring" not in c["us"])
    )
    header = ["tokens a GPU", "pass", "alone", "Tandem, gather", "cuDNN, all-gather"]
    return right([*header, "FA2, all-gather", "FA2, all-to-all"], rows)


def chunks(which: str, name: str) -> Callable[[Document], list[str]]:
    """`gather` in one chunk of heads: milliseconds, and the share of one GPU's rate."""

    def table(document: Document) -> list[str]:
        rows = []
        for run in document["runs"]:
            gpus = f"{run['ranks']} {run['device'].split()[1]}"
            for c in run["cells"]:
                if (c["pass"], c["tokens"]) == (which, 8192):
                    share = ratio(c["share"][name], goals=ranks_goals(c))
                    rows.append(
                        [gpus, c["documents"], milliseconds(c, "alone"), milliseconds(c, name), share]
                    )
        return right(["GPUs", "sequences", "alone, ms", "gather, ms", "share"], rows)

    return table


TABLES: dict[str, Callable[[Document], list[str]]] = {
    "ranks": ranks,
    "ranks-again": ranks_again,
    "ranks-peers": ranks_peers,
    "chunks": chunks("forward", "gather in 8"),
    "chunks-both": chunks("both", "gather in 1,7/8"),
}
