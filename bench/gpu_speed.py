"""Tandem on a GPU beside FlashAttention-3 and 4, cuDNN, FlashAttention-2 and FlexAttention, in one run.

    python bench gpu-speed [--pass forward backward] [--fp8] [--windows] [--peer fa3=PATH] [--json FILE]

The grid of the FlashAttention-3 paper (16,384 tokens, hidden size 2048, standard normal inputs), --fp8 the
same on e4m3 tensors of the caller's, --windows grouped heads with and without windows. Peers are those that
load here: what was found, and what not and why, is printed and is in the JSON. --peer fa3=PATH names the
compiled library (of the public source, or _vllm_fa3_C.abi3.so of vLLM's wheel, which has no backward pass) or
a folder that has it. Before a cell is timed, rows of Tandem's output are compared with fp64, and everybody
else's results with Tandem's. Each cell has bursts (rounds of some 12 ms of each contender in turn, the
median), and --sustained SECONDS of each without a pause, with the joules of a call by the board's counter.
Tandem's kernels are compiled beforehand, by a process a core.

--seconds N stops in time and leaves the cells that are missing to the next call with --resume FILE.
TFLOP/s count causal as half and backward 2.5 times forward; PyTorch's backward is autograd's, with the
forward pass before the clock starts. --deterministic holds Tandem's backward to one order of additions.

By the program gpu_speed, without peers: --ablation adds the paper's table of what each idea is worth;
--varlen packed sequences beside the same work dense; --precision the 8-bit kernels alone and with the
quantiser, beside bf16. --long adds single sequences of 32k and 128k, and a million tokens by Tandem alone,
once; --no-grid leaves the grid out; --from FILE prints and draws what an earlier run wrote.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any

import gpu_peers
import gpu_program
import harness
from gpu_program import HIDDEN, ceilings, names_of
from gpu_tables import mask_of, number

TOKENS = 16384
#: Lists of cells in the JSON.
TABLES = ("cells", "fp8", "windows")


def grid(passes: list[str], dtypes: list[str], args: argparse.Namespace) -> list[dict]:
    return [
        {
            "pass": direction,
            "dtype": dtype,
            "batch": max(1, args.tokens // seqlen),
            "heads": HIDDEN // head_dim,
            "seqlen": seqlen,
            "head_dim": head_dim,
            "causal": causal,
        }
        for direction in passes
        for dtype in dtypes
        for head_dim in args.head_dims
        for causal in (0, 1)
        for seqlen in args.seqlens
    ]


def windows() -> list[dict]:
    """Grouped heads: causal, and windows of as many keys as the last query sees."""
    shapes = [
        (seqlen, window, heads, head_dim)
        for seqlen in (4096, TOKENS)
        for window, heads, head_dim in (
            (None, 32, 128),
            *((w, *shape) for w in (128, 1024, 4096) if w < seqlen for shape in ((32, 128), (64, 64))),
        )
    ]
    return [
        {
            "pass": "forward",
            "dtype": "bf16",
            "batch": TOKENS // seqlen,
            "heads": heads,
            "heads_kv": 8,
            "seqlen": seqlen,
            "head_dim": head_dim,
            "causal": 1,
            "window": window,
        }
        for seqlen, window, heads, head_dim in shapes
    ]


def measure(cell: dict, libraries: list[gpu_peers.Library], args: argparse.Namespace) -> dict:
    """One cell: bursts in turn, then sustained load. A peer that refuses it, or is wrong, is left out."""
    inputs = gpu_peers.Cell(cell, args.device)
    calls, left_out = {}, {}
    for library in libraries:
        try:
            calls[library.name] = library.call(inputs)
            calls[library.name]()
        except Exception as error:  # a peer may refuse a cell in any way
            if library.name == "tandem":
                raise
            calls.pop(library.name, None)
            left_out[library.name] = str(error).split("\n")[0][:160]
    errors, wrong = gpu_peers.checked(inputs, calls)
    left_out |= {name: f"wrong by {errors[name]:.1e}" for name in wrong}
    timer = harness.OnGpu if args.device == "cuda" else harness.OnHost
    contenders = {name: timer(call) for name, call in calls.items() if name not in wrong}
    times = harness.in_turn(contenders, args.rounds, args.round_ms)
    found = {**cell, "us": times, "tflops": harness.tflops(inputs.flops, times), "error": errors}
    if left_out:
        found["left_out"] = left_out
    if args.sustained:
        order = random.Random(str(cell)).sample(list(contenders), len(contenders))
        load = {name: harness.sustained(contenders[name], args.sustained) for name in order}
        tokens = cell["batch"] * cell["seqlen"]
        for one in load.values():
            one |= harness.energy_of(one, inputs.flops, tokens)
        found["sustained"] = {
            "tflops": {name: inputs.flops / load[name]["us"] / 1e6 for name in contenders},
            **{
                what: {name: load[name][what] for name in contenders}
                for what in ("joules", "picojoules_per_flop", "microjoules_per_token", "watts")
                if all(what in one for one in load.values())
            },
        }
    return found


def compile_all(cells: list[dict]) -> None:
    """Compiles Tandem's kernels by a process a core, since one after another takes minutes."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=spawn) as pool:
        list(pool.map(gpu_peers.compile_kernels, cells))


def unmeasured(cells: list[dict], done: list[dict]) -> list[dict]:
    return [cell for cell in cells if not any(cell.items() <= one.items() for one in done)]


def measure_all(document: dict[str, Any], tables: dict[str, list[dict]], args: argparse.Namespace) -> None:
    """Measures the cells of `tables` that `document` has not yet, until the time is over."""
    libraries, missing = gpu_peers.found(args.peer, args.without)
    document["libraries"] = {lib.name: {"version": lib.version, "source": lib.source} for lib in libraries}
    document["not_found"] = missing
    for name, what in document["libraries"].items():
        print(f"found {name} {what['version']}: {what['source']}", flush=True)
    for name, why in missing.items():
        print(f"not found {name}: {why}", flush=True)
    lists = {name: unmeasured(cells, document.get(name, [])) for name, cells in tables.items()}
    left = [(table, cell) for table, cells in lists.items() for cell in cells]
    if args.device == "cuda":
        compile_all([cell for _, cell in left])
        document |= ceilings(fp8="fp8" in tables)
    if "fp8" in tables:
        document["fp8_sums"] = gpu_peers.errors_of_sums(libraries, args.device)
        for row in document["fp8_sums"]:
            print("e4m3, mean of V 1:", row["head_dim"], row["seqlen"], row["error"], flush=True)
    end = time.perf_counter() + (args.seconds or math.inf)
    done, longest = 0, 0.0
    for table, cell in left:
        start = time.perf_counter()
        if start + longest > end:
            break
        found = measure(cell, libraries, args)
        document.setdefault(table, []).append(found)
        print(*line_of(found), flush=True)
        harness.write_json(document, args.json)
        longest, done = max(longest, time.perf_counter() - start), done + 1
    if done < len(left):
        print(f"{len(left) - done} of {len(left)} cells left: run again with --resume", flush=True)


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


def line_of(cell: dict) -> list[object]:
    """A cell in words: what it is, rates in bursts, sustained, and joules of a call."""
    loaded = cell.get("sustained", {})
    line: list[object] = [cell["pass"], cell["dtype"], cell["head_dim"], mask_of(cell), cell["seqlen"]]
    line += [f"window {cell['window']}"] if cell.get("window") else []
    for what, values in (("TFLOP/s", cell["tflops"]), *loaded.items()):
        digits = 3 if what == "joules" else 1
        said = ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())
        line.append(f"| {'sustained ' if values is loaded.get('tflops') else ''}{what}: {said}")
    return line + [f"| without {name}: {why}" for name, why in cell.get("left_out", {}).items()]


def print_cells(name: str, cells: list[dict]) -> None:
    """A table: rates in bursts and under sustained load, joules of a call; and what they come to."""
    names = names_of(cells)
    rows, shares = [], {"bursts": [], "sustained": []}

    def share(tflops: dict) -> float | None:
        peers = [speed for name, speed in tflops.items() if name != "tandem"]
        return tflops["tandem"] / max(peers) if peers else None

    for cell in cells:
        row = [cell.get("pass", "forward"), cell["dtype"], cell.get("heads"), cell["head_dim"]]
        row += [cell.get("window") or mask_of(cell), cell["seqlen"]]
        for kind, measured in (("bursts", cell), ("sustained", cell.get("sustained", {"tflops": {}}))):
            tflops = measured["tflops"]
            row += [number(tflops.get(n), 1) for n in names]
            row.append("-" if not tflops or share(tflops) is None else f"{share(tflops):.3f}")
            if row[-1] != "-":
                shares[kind].append(share(tflops))
        row += [number(cell.get("sustained", {}).get("joules", {}).get(n), 4) for n in names]
        rows.append(row)
    header = ["pass", "dtype", "heads", "head_dim", "mask", "seqlen", *names, "of best"]
    header += [*(f"{n}, sustained" for n in names), "of best", *(f"{n}, J" for n in names)]
    print(f"\n{name}", *harness.markdown_table(header, rows), sep="\n")
    for kind, found in shares.items():
        if found:
            mean = harness.geometric_mean(found)
            below = sum(x < 1 for x in found)
            print(f"{name}, {kind}: mean {mean:.3f}, least {min(found):.3f}, {below} of {len(found)} below 1")


def print_table(document: dict) -> None:
    gemm = document.get("gemm_tflops")
    print(
        f"{document['device']}, commit {document['commit']}, GEMM ceiling {gemm and round(gemm, 1)} TFLOP/s"
    )
    for table in TABLES:
        if document.get(table):
            print_cells(table, document[table])
    for entry in document.get("ablation", []):
        print(f"ablation: {entry['variant']}: {entry['tflops']:.1f} TFLOP/s")
    if "varlen" in document:
        gpu_program.print_varlen(document["varlen"])
    if "precision" in document:
        gpu_program.print_precision(document)


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
    add = parser.add_argument
    add("--program", type=Path, default=harness.BUILD / "gpu_speed")
    add("--pass", dest="passes", nargs="+", choices=["forward", "backward"], default=["forward"])
    add("--deterministic", action="store_true")
    add("--dtypes", default="bf16", help="bf16, f16 or both with a comma")
    add("--head-dims", type=numbers, default=[64, 128, 256])
    add("--seqlens", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])
    add("--tokens", type=int, default=TOKENS, help="batch * seqlen of the grid's cells")
    add("--rounds", type=int, default=7)
    add("--round-ms", type=float, default=harness.ROUND_MS)
    seconds = "of load a contender, which gives joules; 0: none"
    add(
        "--sustained",
        "--joules",
        type=float,
        nargs="?",
        const=1.0,
        default=1.0,
        metavar="SECONDS",
        help=seconds,
    )
    add("--grid", action=argparse.BooleanOptionalAction, default=True)
    add("--fp8", action="store_true", help="add the grid on e4m3 tensors of the caller's, forward")
    add("--windows", action="store_true", help="add grouped heads with and without windows")
    add("--peer", type=gpu_peers.named_path, action="append", default=[], metavar="NAME=PATH")
    add("--without", nargs="+", default=[], metavar="NAME", help="leave these libraries out")
    add("--seconds", type=float, help="stop before so many seconds of measuring are over")
    add("--resume", type=Path, metavar="FILE", help="carry on with the JSON of a run that stopped")
    add("--device", default="cuda", help="cpu tries it")
    add("--ablation", action="store_true")
    add("--precision", nargs="+", choices=["fp8", "int8"], help="the 8-bit kernels in place of the grid")
    add("--varlen", action="store_true", help="add packed sequences, beside dense ones")
    add("--long", action="store_true", help="add one sequence of 32k, 128k and, forward at 128, 1M tokens")
    args = parser.parse_args()
    args.peer = dict(args.peer)
    return args


def tables_of(args: argparse.Namespace) -> dict[str, list[dict]]:
    """The cells that the arguments ask for, by the list of the JSON that they go to."""
    tables: dict[str, list[dict]] = {"cells": [], "fp8": [], "windows": []}
    if args.grid:
        tables["cells"] = grid(args.passes, args.dtypes.split(","), args)
    if args.fp8:
        tables["fp8"] = grid(["forward"], ["e4m3"], args)
    if args.windows:
        tables["windows"] = [
            cell
            for cell in windows()
            if cell["head_dim"] in args.head_dims and cell["seqlen"] in args.seqlens
        ]
    if args.long:
        tables["cells"] += long_sequences(args.passes, args.head_dims)
    for cell in tables["cells"]:
        cell["deterministic"] = int(args.deterministic)
    return {name: cells for name, cells in tables.items() if cells}


def measure_precision(document: dict[str, Any], cells: list[dict], args: argparse.Namespace) -> None:
    """Measures the cells that `document` has not yet, until the time is over."""
    done = document.setdefault("precision", [])
    left = unmeasured(cells, done)
    end = time.perf_counter() + (args.seconds or math.inf)
    for one in gpu_program.precision_cells(args.program, left, args.precision, args.rounds):
        done.append(one)
        rates = {name: round(rate, 1) for name, rate in one["tflops"].items()}
        print(one["pass"], one["head_dim"], mask_of(one), one["seqlen"], rates, flush=True)
        if time.perf_counter() > end:
            break


def run(args: argparse.Namespace) -> dict[str, Any]:
    document = {**harness.origin(harness.device_name(args.device), args.commit), "rounds": args.rounds}
    document |= {"sustained_seconds": args.sustained}
    if args.resume:
        earlier = json.loads(args.resume.read_text())
        if (earlier["device"], earlier["commit"]) != (document["device"], document["commit"]):
            raise SystemExit("bench: --resume wants a run of this device and commit")
        document = earlier
    tables = tables_of(args)
    if args.precision:
        document |= {**ceilings(fp8=True)}
        cells = tables.pop("cells", [])
        for cell in cells:
            del cell["deterministic"]
        measure_precision(document, cells, args)
    if tables:
        measure_all(document, tables, args)
    if args.long and "forward" in args.passes:
        document.setdefault("cells", []).append(gpu_program.million(args.program))
    if args.ablation:
        document["ablation"] = gpu_program.ablation(args.program, args.rounds)
    if args.varlen:
        document["varlen"] = gpu_program.varlen(args.program, args.passes, args.head_dims, args.rounds)
    harness.write_json(document, args.json)
    return document


def main() -> int:
    args = arguments()
    document = json.loads(args.source.read_text()) if args.source else run(args)
    print_table(document)
    if args.plot and document.get("cells"):
        plot(document, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
