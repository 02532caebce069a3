"""Both passes on a GPU against PyTorch's cuDNN and FlashAttention-2, on the grid of the paper.

    python bench gpu-speed [--json FILE] [--plot FILE]

One command measures all: every cell runs rounds of about 12 ms of each contender in turn and takes the
median, so that heat and clocks weigh on all alike. --sustained runs two seconds of each without a pause;
--ablation adds the paper's table of what each idea is worth; --varlen packed sequences beside the same work
dense; --long single sequences of 32k and 128k, and a million tokens by Tandem alone, once; --no-grid leaves
the grid out; --precision the 8-bit kernels alone and with the quantiser, beside bf16; --deterministic holds
Tandem's backward to one order of additions; --from FILE prints and draws what an earlier run wrote. Without
PyTorch Tandem runs alone. Before Tandem is timed, a sample of its results is compared with fp64 (-1 of
share_of_bound: not of windows and softcap). The grid: 16,384 tokens in all, hidden size 2048, standard normal
inputs. TFLOP/s count causal as half and backward 2.5 times forward; PyTorch's backward is autograd's, with
the forward pass before the clock starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

import harness
from gpu_contenders import Tandem, Variants, ceilings, peers

TOKENS = 16384
HIDDEN = 2048


def grid(passes: list[str], dtypes: list[str], head_dims: list[int], seqlens: list[int]) -> list[dict]:
    return [
        {
            "pass": direction,
            "dtype": dtype,
            "batch": max(1, TOKENS // seqlen),
            "heads": HIDDEN // head_dim,
            "seqlen": seqlen,
            "head_dim": head_dim,
            "causal": causal,
        }
        for direction in passes
        for dtype in dtypes
        for head_dim in head_dims
        for causal in (0, 1)
        for seqlen in seqlens
    ]


def measure(cell: dict, contenders: list, rounds: int, milliseconds: float) -> dict:
    """One cell. Tandem comes first; a peer that does not have the shape is left out."""
    tandem, *others = contenders
    prepared = tandem.prepare(cell)
    able = {tandem.name: tandem}
    for peer in others:
        try:
            peer.prepare(cell)
        except RuntimeError:
            continue
        able[peer.name] = peer
    times = harness.in_turn(able, rounds, milliseconds)
    found = {key: prepared[key] for key in ("config", "memory_bytes", "share_of_bound")}
    return {**cell, **found, "us": times, "tflops": harness.tflops(prepared["flops"], times)}


def ablation(program: Path, rounds: int) -> list[dict]:
    """The paper's: batch 4, seqlen 8448, 16 heads, head_dim 128, full, fp16. There 570, 582 and 661."""
    cell = {"dtype": "f16", "batch": 4, "heads": 16, "seqlen": 8448, "head_dim": 128, "causal": 0}
    # The plan may do without ping-pong: each is taken out of a Config that has all three.
    changes = {
        "all": {"pingpong": 1},
        "no warp specialisation": {"pingpong": 1, "specialised": 0},
        "no overlap in a warpgroup": {"pingpong": 1, "overlap": 0},
        "no ping-pong": {"pingpong": 0},
        "as planned": {},
    }
    prepared, times = Variants(program, changes).measure(cell, rounds)
    tflops = harness.tflops(prepared["all"]["flops"], times)
    return [
        {"variant": name, "tflops": tflops[name], "us": times[name], "config": prepared[name]["config"]}
        for name in changes
    ]


def varlen(program: Path, passes: list[str], head_dims: list[int], rounds: int) -> list[dict]:
    """Packed sequences, and the dense call of (nearly) the same work: the ratio is to stay below 1.5."""
    rows = {
        "8192 of 34": ("8192x34", {"batch": 8192, "seqlen": 34}),
        "131072 and 1000 of 16": ("131072,1000x16", {"batch": 1, "seqlen": 131072}),
        "32 of 512": ("32x512", {"batch": 32, "seqlen": 512}),
        "8 of 2048": ("8x2048", {"batch": 8, "seqlen": 2048}),
        "16384": ("16384", {"batch": 1, "seqlen": 16384}),
    }
    results = []
    for name, (lengths, dense) in rows.items():
        pair = Variants(program, {"packed": {"lengths": lengths}, "dense": dense})
        for which, head_dim, causal in itertools.product(passes, head_dims, (0, 1)):
            cell = {
                "pass": which,
                "dtype": "bf16",
                "heads": HIDDEN // head_dim,
                "head_dim": head_dim,
                "causal": causal,
            }
            prepared, times = pair.measure(cell, rounds)
            flops = {kind: answer["flops"] for kind, answer in prepared.items()}
            if not math.isclose(*flops.values(), rel_tol=0.01):
                raise RuntimeError(f"{name}: {flops} operations are not the same work")
            us = {kind: statistics.median(t) for kind, t in times.items()}
            results.append({"sequences": name, **cell, "us": us, "ratio": us["packed"] / us["dense"]})
    return results


def long_sequences(passes: list[str], head_dims: list[int]) -> list[dict]:
    return [
        {
            "pass": name,
            "dtype": "bf16",
            "batch": 1,
            "heads": HIDDEN // head_dim,
            "seqlen": seqlen,
            "head_dim": head_dim,
            "causal": causal,
        }
        for name in passes
        for head_dim in head_dims
        for causal in (0, 1)
        for seqlen in (32768, 131072)
    ]


def million(tandem: Tandem) -> dict:
    """A million tokens, causal: a single call, which takes seconds and 16 GiB of tensors."""
    (cell,) = long_sequences(["forward"], [128])[-1:]
    return measure({**cell, "seqlen": 1 << 20}, [tandem], 1, 1.0)


def precision_cells(program: Path, cells: list[dict], settings: list[str], rounds: int) -> list[dict]:
    """The 16-bit forward; of every setting the kernel alone and the whole call."""
    changes: dict[str, dict] = {"16-bit": {}}
    for setting in settings:
        changes[f"{setting} kernel"] = {"pass": "quantized", "precision": setting}
        changes[f"{setting} whole"] = {"precision": setting}
    variants = Variants(program, changes)
    results = []
    for cell in cells:
        prepared, times = variants.measure(cell, rounds)
        results.append({**cell, "us": times, "tflops": harness.tflops(prepared["16-bit"]["flops"], times)})
    return results


def print_precision(document: dict) -> None:
    entries = document["precision"]
    names = names_of(entries)
    gemm = document.get("gemm_fp8_tflops")
    print(f"FP8 GEMM ceiling {gemm and round(gemm, 1)} TFLOP/s")
    rows = (
        [entry["dtype"], entry["head_dim"], mask_of(entry), entry["seqlen"]]
        + [f"{entry['tflops'][n]:.1f}" for n in names]
        for entry in entries
    )
    print(*harness.markdown_table(["dtype", "head_dim", "mask", "seqlen", *names], rows), sep="\n")


def print_varlen(entries: list[dict]) -> None:
    header = ["pass", "head_dim", "packed sequences", "mask", "packed us", "dense us", "packed/dense"]
    rows = (
        [entry["pass"], entry["head_dim"], entry["sequences"], mask_of(entry)]
        + [f"{entry['us'][kind]:.1f}" for kind in ("packed", "dense")]
        + [f"{entry['ratio']:.2f}"]
        for entry in entries
    )
    print(*harness.markdown_table(header, rows), sep="\n")


def mask_of(cell: dict) -> str:
    return "causal" if cell["causal"] else "full"


def names_of(cells: list[dict]) -> list[str]:
    """Who ran in any cell, in order."""
    return list(dict.fromkeys(name for cell in cells for name in cell["tflops"]))


def print_table(document: dict) -> None:
    names = names_of(document["cells"])
    gemm = document.get("gemm_tflops")
    print(
        f"{document['device']}, commit {document['commit']}, GEMM ceiling {gemm and round(gemm, 1)} TFLOP/s"
    )
    rows = []
    for cell in document["cells"]:
        tflops = cell["tflops"]
        others = [speed for name, speed in tflops.items() if name != "tandem"]
        rows.append(
            [cell.get("pass", "forward"), cell["dtype"], cell["head_dim"], mask_of(cell), cell["seqlen"]]
            + [f"{tflops[n]:.1f}" if n in tflops else "-" for n in names]
            + [f"{tflops['tandem'] / max(others):.3f}" if others else "-"]
            + [f"{tflops['tandem'] / gemm:.3f}" if gemm else "-"]
        )
    header = ["pass", "dtype", "head_dim", "mask", "seqlen", *names, "tandem/best peer", "of GEMM"]
    print(*harness.markdown_table(header, rows), sep="\n")
    for entry in document.get("ablation", []):
        print(f"ablation: {entry['variant']}: {entry['tflops']:.1f} TFLOP/s")
    if "varlen" in document:
        print_varlen(document["varlen"])
    if "precision" in document:
        print_precision(document)


def plot(document: dict, path: Path) -> None:
    """One panel a head dimension and mask, of the first pass and dtype; bars by seqlen, as the paper's."""
    plt = harness.pyplot()
    first = document["cells"][0]
    cells = [
        c for c in document["cells"] if (c["dtype"], c.get("pass")) == (first["dtype"], first.get("pass"))
    ]
    head_dims = sorted({c["head_dim"] for c in cells})
    names = names_of(cells)
    figure, axes = plt.subplots(len(head_dims), 2, figsize=(12, 3.6 * len(head_dims)), squeeze=False)
    for row, head_dim in enumerate(head_dims):
        for causal in (0, 1):
            axis = axes[row][causal]
            panel = [c for c in cells if c["head_dim"] == head_dim and c["causal"] == causal]
            for i, name in enumerate(names):
                x = [j + (i - (len(names) - 1) / 2) * 0.27 for j in range(len(panel))]
                bars = axis.bar(x, [c["tflops"].get(name, 0.0) for c in panel], 0.25, label=name)
                axis.bar_label(bars, fmt="%.0f", fontsize=6)
            axis.set_xticks(range(len(panel)), [str(c["seqlen"]) for c in panel])
            axis.set_title(
                f"{first.get('pass', 'forward')}, {first['dtype']}, head_dim {head_dim}, {mask_of(panel[0])}",
                fontsize=9,
            )
            axis.set_ylabel("TFLOP/s")
            axis.set_xlabel("seqlen")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{document['device']}, commit {document['commit']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__, "commit", "json", "plot", "from")
    parser.add_argument("--program", type=Path, default=harness.BUILD / "gpu_speed")
    parser.add_argument(
        "--pass", dest="passes", nargs="+", choices=["forward", "backward"], default=["forward"]
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--dtypes", default="bf16", help="bf16, f16 or both with a comma")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128, 256])
    parser.add_argument("--seqlens", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--sustained", action="store_true", help="two seconds without a pause instead of 12 ms"
    )
    parser.add_argument("--grid", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=["fp8", "int8"],
        help="the 8-bit forward in place of the grid",
    )
    parser.add_argument("--varlen", action="store_true", help="add packed sequences, beside dense ones")
    parser.add_argument(
        "--long", action="store_true", help="add one sequence of 32k, 128k and, forward at 128, 1M tokens"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.source:
        document = json.loads(args.source.read_text())
    else:
        tandem = Tandem(args.program)
        contenders = [tandem, *peers()]
        document = {
            **harness.origin(tandem.device, args.commit),
            "rounds": 1 if args.sustained else args.rounds,
            **ceilings(fp8=bool(args.precision)),
            "cells": [],
        }
        rounds, milliseconds = document["rounds"], 2000.0 if args.sustained else harness.ROUND_MS
        cells = grid(args.passes, args.dtypes.split(","), args.head_dims, args.seqlens) if args.grid else []
        if args.precision:
            document["precision"] = precision_cells(args.program, cells, args.precision, args.rounds)
            cells = []
        for cell in cells + (long_sequences(args.passes, args.head_dims) if args.long else []):
            cell["deterministic"] = int(args.deterministic)
            document["cells"].append(measure(cell, contenders, rounds, milliseconds))
        if args.long and "forward" in args.passes:
            document["cells"].append(million(tandem))
        if args.ablation:
            document["ablation"] = ablation(args.program, args.rounds)
        if args.varlen:
            document["varlen"] = varlen(args.program, args.passes, args.head_dims, args.rounds)
        harness.write_json(document, args.json)
    print_table(document)
    if args.plot and document["cells"]:
        plot(document, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
