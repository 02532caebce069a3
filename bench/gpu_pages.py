"""Writes the tables of docs/results/gpu-*.md from the JSON of gpu-speed and gpu-accuracy beside them.

    python bench gpu-pages [--check] [PAGE ...]

A page holds blocks from a line `<!-- from NAME.json -->` to a line `<!-- end -->`; what is between them is
made anew from docs/results/NAME.json, the rest of the page is left as it is. --check changes nothing and
exits with 1 if a page is not what its JSON says. FlashAttention-3 enters by fa3_ratios.json: its ratio to
cuDNN (in 8 bits to an FP8 product) in another run, on the same kind of device where there is one, times cuDNN
(the product) in this one. Beside it stands what FA3 reached in that run, if that was on the same kind of
device.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
from pathlib import Path

import harness
from harness import geometric_mean, markdown_table

NAMES = {"tandem": "Tandem", "cudnn": "cuDNN", "fa2": "FA2", "fa3": "FA3 (by ratio)"}
FA3_THERE = "FA3 (its own run)"
BLOCK = re.compile(r"(<!-- from (\S+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def mask_of(cell: dict) -> str:
    return "causal" if cell["causal"] else "full"


def fa3_tables(device: str) -> list[dict]:
    """What was measured of FlashAttention-3, on the same kind of device first."""
    tables = json.loads((harness.ROOT / "bench" / "fa3_ratios.json").read_text())["tables"]
    return sorted(tables, key=lambda table: table["device"] != device)


def entry(table: dict, kind: str, cell: dict) -> float | None:
    """What `table` has under `kind` for this shape."""
    values = table.get(kind, {}).get(f"{cell['head_dim']} {mask_of(cell)}")
    known = values and cell["seqlen"] in table["seqlens"]
    return values[table["seqlens"].index(cell["seqlen"])] if known else None


def fa3_ratio(cell: dict, device: str, sustained: bool = False) -> float | None:
    """FlashAttention-3's speed over cuDNN's at this shape; None where it was not measured."""
    for table in fa3_tables(device):
        if table.get("sustained", False) == sustained and (ratio := entry(table, cell["pass"], cell)):
            return ratio
    return None


def fa3_there(cell: dict, device: str, kind: str, sustained: bool = False) -> float | None:
    """TFLOP/s of FlashAttention-3 at this shape in another run on the same kind of device."""
    for table in fa3_tables(device):
        if table["device"] != device or table.get("sustained", False) != sustained:
            continue
        if reached := entry({**table.get("fa3_tflops", {}), "seqlens": table["seqlens"]}, kind, cell):
            return reached
    return None


def beside_there(speeds: list[float], there: list[float | None]) -> str:
    """A sentence on Tandem's speeds over FlashAttention-3's in its own run."""
    ratios = [speed / other for speed, other in zip(speeds, there, strict=True) if other]
    if not ratios:
        return ""
    return (
        f" Against what FA3 reached in its own run: geometric mean {geometric_mean(ratios):.3f}, "
        f"least {min(ratios):.2f}."
    )


def fa3_in_8_bits(device: str) -> dict:
    return next(table for table in fa3_tables(device) if "fp8_of_gemm" in table)


def fa3_fp8(cell: dict, gemm: float, device: str) -> float:
    """FlashAttention-3's FP8 speed by its share of an FP8 product's."""
    return gemm * entry(fa3_in_8_bits(device), "fp8_of_gemm", cell)


def with_fa3(cell: dict, device: str, sustained: bool) -> dict[str, float]:
    tflops = dict(cell["tflops"])
    ratio = fa3_ratio(cell, device, sustained)
    if ratio and "cudnn" in tflops and not cell.get("deterministic"):
        tflops["fa3"] = ratio * tflops["cudnn"]
    return tflops


def of_best(tflops: dict[str, float]) -> float | None:
    """Tandem against the best of the others."""
    others = [speed for name, speed in tflops.items() if name != "tandem"]
    return tflops["tandem"] / max(others) if others else None


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def cells(document: dict) -> list[str]:
    """The table of speeds, and what it comes to."""
    sustained = "--sustained" in document["command"]
    device, measured = document["device"], document["cells"]
    speeds = [with_fa3(cell, device, sustained) for cell in measured]
    names = [name for name in NAMES if any(name in tflops for tflops in speeds)]
    ratios = [of_best(tflops) for tflops in speeds]
    there = [
        fa3_there(cell, device, cell["pass"], sustained)
        if "fa3" in tflops and cell["dtype"] == "bf16"
        else None
        for cell, tflops in zip(measured, speeds, strict=True)
    ]
    header = ["head_dim", "mask", "seqlen", *(NAMES[name] for name in names), "Tandem / best"]
    lines = markdown_table(
        header + [FA3_THERE] * any(there),
        (
            [cell["head_dim"], mask_of(cell), cell["seqlen"]]
            + [number(tflops.get(name)) for name in names]
            + [number(ratio, 2)]
            + [number(other)] * any(there)
            for cell, tflops, ratio, other in zip(measured, speeds, ratios, there, strict=True)
        ),
    )
    known = [ratio for ratio in ratios if ratio]
    if known:
        cudnn = [tflops["tandem"] / tflops["cudnn"] for tflops in speeds if "cudnn" in tflops]
        beside = f"; against cuDNN alone, {geometric_mean(cudnn):.2f}" if cudnn else ""
        lines += [
            "",
            *wrapped(
                f"Geometric mean of the last column: {geometric_mean(known):.3f}{beside}. At 1.00 or more: "
                f"{sum(round(r, 2) >= 1 for r in known)} of {len(known)}; least: {min(known):.2f}."
                + beside_there([tflops["tandem"] for tflops in speeds], there)
            ),
        ]
    for cell in document["cells"]:
        if cell["seqlen"] >= 1 << 20:
            seconds = statistics.median(cell["us"]["tandem"]) / 1e6
            gibibytes = cell["memory_bytes"] / 2**30
            lines += ["", f"{cell['seqlen']} tokens: {seconds:.2f} s, {gibibytes:.1f} GiB of the device."]
    return lines


def precision(document: dict) -> list[str]:
    """8 bits: the kernels alone beside FlashAttention-3's, and whole calls beside 16 bits."""
    entries, gemm = document["precision"], document["gemm_fp8_tflops"]
    device = document["device"]
    peers = [fa3_fp8(e, gemm, device) for e in entries]
    of_fa3 = [e["tflops"]["fp8 kernel"] / peer for e, peer in zip(entries, peers, strict=True)]
    of_fp8 = [e["tflops"]["int8 kernel"] / e["tflops"]["fp8 kernel"] for e in entries]
    there = [fa3_there(e, device, "fp8") for e in entries]
    settings = ("fp8", "int8", "int8-accurate")
    lines = markdown_table(
        ["head_dim", "mask", "seqlen", "bf16", "fp8", "FA3 (by ratio)", "fp8 / FA3", "int8", "int8 / fp8"]
        + ["int8-accurate", *(f"whole {s} / bf16" for s in settings)]
        + [FA3_THERE] * any(there),
        (
            [e["head_dim"], mask_of(e), e["seqlen"]]
            + [number(e["tflops"]["16-bit"]), number(e["tflops"]["fp8 kernel"]), number(peer)]
            + [number(x, 2), number(e["tflops"]["int8 kernel"]), number(y, 2)]
            + [number(e["tflops"]["int8-accurate kernel"])]
            + [number(e["tflops"][f"{s} whole"] / e["tflops"]["16-bit"], 2) for s in settings]
            + [number(other)] * any(there)
            for e, peer, x, y, other in zip(entries, peers, of_fa3, of_fp8, there, strict=True)
        ),
    )
    summary = (
        f"An FP8 product of 8192^3 in the same run: {gemm:.1f} TFLOP/s. Geometric means: fp8 / FA3 "
        f"{geometric_mean(of_fa3):.3f} (least {min(of_fa3):.2f}), int8 / fp8 {geometric_mean(of_fp8):.3f}."
    )
    if document.get("gemm_tflops"):
        theirs = fa3_in_8_bits(device)["fp8_gemm_of_bf16"]
        by_bf16 = gemm / (document["gemm_tflops"] * theirs)
        summary += (
            f" The FP8 product was {gemm / document['gemm_tflops']:.2f} of the bf16 one here, and "
            f"{theirs:.2f} where FA3 ran: by the bf16 product fp8 / FA3 is "
            f"{geometric_mean(of_fa3) * by_bf16:.3f} (least {min(of_fa3) * by_bf16:.2f})."
        )
    summary += beside_there([e["tflops"]["fp8 kernel"] for e in entries], there)
    return [*lines, "", *wrapped(summary)]


def ablation(document: dict) -> list[str]:
    return markdown_table(
        ["variant", "TFLOP/s"], ([e["variant"], number(e["tflops"], 1)] for e in document["ablation"])
    )


def varlen(document: dict) -> list[str]:
    return markdown_table(
        ["pass", "head_dim", "packed sequences", "mask", "packed us", "dense us", "packed / dense"],
        (
            [e.get("pass", "forward"), e["head_dim"], e["sequences"], mask_of(e)]
            + [number(e["us"][k], 1) for k in ("packed", "dense")]
            + [number(e["ratio"], 2)]
            for e in document["varlen"]
        ),
    )


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
    """The page with every block made anew."""
    return BLOCK.sub(
        lambda match: match[1] + block(json.loads((folder / match[2]).read_text())) + match[3], text
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("pages", type=Path, nargs="*", default=sorted(harness.RESULTS.glob("gpu-*.md")))
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
