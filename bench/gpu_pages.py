"""Writes the tables of the documentation that come out of records/*.json.

    python bench gpu-pages [--check] [PAGE ...]

A page holds blocks from a line `<!-- from NAME.json -->` to a line `<!-- end -->`; what is between them is
made anew from records/NAME.json, the rest of the page is left as it is. `<!-- from NAME.json: TABLE -->`
is one table of `gpu_tables.py`, `model_tables.py`, `ranks_tables.py`, `cpu_tables.py` or
`eight_bit_tables.py` alone, and `<!-- from figures: TABLE -->` one of `figures.py`, which reads several
results. --check changes nothing and exits with 1 if a page is not what its JSON says.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
from pathlib import Path

import cpu_tables
import eight_bit_tables
import figures
import gpu_tables
import harness
import model_tables
import ranks_tables
from gpu_tables import mask_of, number, of
from harness import geometric_mean, markdown_table, ratio

BLOCK = re.compile(r"(<!-- from (\S+?)(?:: ([\w -]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
#: Those that may have blocks.
PAGES = sorted([harness.ROOT / "README.md", *(harness.ROOT / "docs").rglob("*.md")])


def cells(document: dict) -> list[str]:
    """The table of speeds, and what it comes to."""

    def show(cell: dict) -> str:
        rate = number(cell["tflops"]["tandem"])
        return f"{rate}, {ratio(of(cell, 'cudnn'))}" if "cudnn" in cell["tflops"] else rate

    lines = gpu_tables.by_length(document["cells"], show)
    lines += ["", *wrapped(gpu_tables.beside_cudnn(document)[0])]
    for cell in document["cells"]:
        if cell["seqlen"] >= 1 << 20:
            seconds = statistics.median(cell["us"]["tandem"]) / 1e6
            gibibytes = cell["memory_bytes"] / 2**30
            lines += ["", f"{cell['seqlen']} tokens: {seconds:.2f} s, {gibibytes:.1f} GiB of the device."]
    return lines


def precision(document: dict) -> list[str]:
    """8 bits: the fp8 kernel alone, int8's share of it, and a whole fp8 call beside 16 bits."""
    entries = document["precision"]
    of_fp8 = [e["tflops"]["int8 kernel"] / e["tflops"]["fp8 kernel"] for e in entries]

    def show(e: dict) -> str:
        rates = e["tflops"]
        shares = (rates["int8 kernel"] / rates["fp8 kernel"], rates["fp8 whole"] / rates["16-bit"])
        return ", ".join([number(rates["fp8 kernel"]), *map(ratio, shares)])

    lines = gpu_tables.by_length(entries, show)
    summary = (
        f"An FP8 product of 8192^3 in the same run: {document['gemm_fp8_tflops']:.1f} TFLOP/s. Geometric "
        f"mean of int8 / fp8: {geometric_mean(of_fp8):.3f}."
    )
    return [*lines, "", *wrapped(summary)]


def ablation(document: dict) -> list[str]:
    return markdown_table(
        ["variant", "TFLOP/s"], ([e["variant"], number(e["tflops"], 1)] for e in document["ablation"])
    )


def varlen(document: dict) -> list[str]:
    """Times of a dense call of the same work."""
    rows: dict[tuple, dict[str, str]] = {}
    for e in document["varlen"]:
        key = (e.get("pass", "forward"), e["head_dim"], mask_of(e))
        rows.setdefault(key, {})[e["sequences"]] = ratio(e["ratio"])
    names = list(dict.fromkeys(e["sequences"] for e in document["varlen"]))
    header = ["pass", "head_dim", "mask", *names]
    return markdown_table(header, ([*key, *map(row.get, names)] for key, row in rows.items()))


def errors(document: dict) -> list[str]:
    return markdown_table(
        ["dtype", "mask", "standard RMSE", "Tandem RMSE", "ratio"],
        (
            [
                e["dtype"],
                mask_of(e),
                f"{e['rmse']['standard']:.3g}",
                f"{e['rmse']['tandem']:.3g}",
                number(e["ratio"], 2),
            ]
            for e in document["rows"]
        ),
    )


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False)


def command(document: dict) -> str:
    """As it is given in a checkout: without what names files and the commit."""
    words = document["command"].split()
    if words[:2] == ["python", "bench"]:
        kept, words = words[:3], words[3:]
    else:  # before there was one front, the path of a script, from anywhere
        script, *words = words[words[0] == "python" :]
        kept = ["python", "bench/" + Path(script).name]
    while words:
        word = words.pop(0)
        if word in ("--program", "--commit", "--json", "--plot"):
            words.pop(0)
        else:
            kept.append(word)
    return " ".join(kept)


def origin(document: dict) -> list[str]:
    """Where, on what and by which command it was measured."""
    software = []
    if document.get("driver"):
        software.append(f"driver {document['driver']}")
    if document.get("torch"):
        software.append(f"PyTorch {document['torch']}")
    if document.get("cudnn"):
        version = document["cudnn"]
        software.append(f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}")
    text = ", ".join([document["device"], *software]) + f"; commit {document['commit']}"
    text += f", {document['date']}." if "date" in document else "."
    measured = document.get("cells", [])
    if measured:
        text += f" {', '.join(sorted({c['dtype'] for c in measured}))}."
    rounds = len(measured[0]["us"]["tandem"]) if measured else document.get("rounds")
    if "--sustained" in document["command"]:
        text += " Two seconds of each contender without a pause."
    elif rounds:
        text += f" Medians of {rounds} rounds of about 12 ms of each contender in turn."
    if document.get("gemm_tflops"):
        text += f" A bf16 GEMM of 8192^3 in the same run: {document['gemm_tflops']:.1f} TFLOP/s."
    return [*wrapped(text), "", "    " + command(document)]


def block(document: dict) -> str:
    lines = origin(document)
    makers = {
        "cells": cells,
        "precision": precision,
        "ablation": ablation,
        "varlen": varlen,
        "rows": errors,
    }
    for key, make in makers.items():
        if document.get(key):
            lines += ["", *make(document)]
    return "\n".join(lines) + "\n"


def page_from_json(text: str, folder: Path) -> str:
    """The page with every block made anew, from the JSON in its folder or in records/."""

    def made(match: re.Match[str]) -> str:
        begin, source, table, end = match.groups()
        if source == "figures":
            return begin + "\n".join(figures.TABLES[table]()) + "\n" + end
        path = folder / source
        document = json.loads((path if path.exists() else harness.RECORDS / source).read_text())
        tables = gpu_tables.TABLES | ranks_tables.TABLES | cpu_tables.TABLES | eight_bit_tables.TABLES
        tables |= model_tables.TABLES
        lines = tables[table](document) if table else None
        return begin + ("\n".join(lines) + "\n" if lines else block(document)) + end

    return BLOCK.sub(made, text)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for path in args.pages:
        before = path.read_text()
        after = page_from_json(before, path.parent)
        if after != before:
            stale.append(path)
            if not args.check:
                path.write_text(after)
    for path in stale:
        print(f"{path}: {'is not what its JSON says' if args.check else 'written'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
