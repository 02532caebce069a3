"""Both passes on a GPU against PyTorch's cuDNN and FlashAttention-2, on the grid of the paper.

    python bench/gpu_speed.py [--program build/release/bench/gpu_speed] [--json FILE] [--plot FILE]

One command measures all: every cell runs rounds of about 12 ms of each contender in turn and takes the
median, so that heat and clocks weigh on all alike. --sustained runs two seconds of each without a pause;
--ablation adds the paper's table of what each idea is worth; --varlen packed sequences beside the same work
dense; --long single sequences of 32k and 128k, and a million tokens by Tandem alone, once; --no-grid leaves
the grid out; --precision the 8-bit kernels alone and with the quantiser, beside bf16; --deterministic holds
Tandem's backward to one order of additions; --from FILE prints and draws what an earlier run wrote. Without
PyTorch Tandem runs alone. The grid: 16,384 tokens in all, hidden size 2048, standard normal inputs. TFLOP/s
count causal as half and backward 2.5 times forward; PyTorch's backward is autograd's, with the forward pass
before the clock starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

try:
    import torch
except ImportError:
    torch = None

TOKENS = 16384
HIDDEN = 2048
ROUND_MS = 12.0


class Tandem:
    """The program gpu_speed, which answers each line by a line of JSON."""

    name = "tandem"

    def __init__(self, program: Path) -> None:
        # Path drops a leading "./", and a bare name would be looked for in PATH.
        command = [program.resolve()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.device = self.ask("device")["device"]

    def ask(self, line: str) -> dict:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "the program ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def prepare(self, cell: dict) -> dict:
        return self.ask("problem " + " ".join(f"{key}={value}" for key, value in cell.items()))

    def round(self, milliseconds: float) -> float:
        return self.ask(f"round {milliseconds}")["us"]


class Timed:
    """Calls on the current stream, which have run before, timed by events."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def time(self, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            self.call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def round(self, milliseconds: float) -> float:
        one = self.time(1)
        if one >= milliseconds:
            return one * 1000
        calls = int(milliseconds / one)
        return self.time(calls) * 1000 / calls


class Sdpa(Timed):
    """torch.nn.functional.scaled_dot_product_attention, held to one backend."""

    def __init__(self, name: str, backend: object) -> None:
        super().__init__(self.attend)
        self.name = name
        self.backend = backend

    def prepare(self, cell: dict) -> None:
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[cell["dtype"]]
        shape = (cell["batch"], cell["seqlen"], cell["heads"], cell["head_dim"])
        tensors = [torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(4)]
        *self.tensors, self.dout = tensors
        self.causal = bool(cell["causal"])
        self.out = None
        if cell["pass"] == "backward":
            for tensor in self.tensors:
                tensor.requires_grad_()
            self.out = self.forward()
        self.time(1)

    def forward(self) -> object:
        with torch.nn.attention.sdpa_kernel(self.backend):
            return torch.nn.functional.scaled_dot_product_attention(*self.tensors, is_causal=self.causal)

    def attend(self) -> None:
        if self.out is None:
            self.forward()
        else:
            torch.autograd.grad(self.out, self.tensors, self.dout, retain_graph=True)


def peers() -> list[Sdpa]:
    if torch is None or not torch.cuda.is_available():
        return []
    backends = torch.nn.attention.SDPBackend
    return [Sdpa("cudnn", backends.CUDNN_ATTENTION), Sdpa("fa2", backends.FLASH_ATTENTION)]


class Product(Timed):
    """A product of n x n matrices through cuBLAS, bf16 or FP8: what the tensor cores reach."""

    def __init__(self, fp8: bool, n: int = 8192) -> None:
        self.flops = 2.0 * n**3
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        if fp8:
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
            one = torch.ones((), device="cuda")
            super().__init__(lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16))
        else:
            super().__init__(lambda: a @ b)
        self.call()


def ceilings(fp8: bool) -> dict[str, float]:
    """TFLOP/s of large products, in turn as attention is measured: medians of 9 rounds."""
    if torch is None or not torch.cuda.is_available():
        return {}
    products = {"gemm_tflops": Product(fp8=False)}
    if fp8:
        products["gemm_fp8_tflops"] = Product(fp8=True)
    return speeds(products["gemm_tflops"].flops, in_turn(products, 9, ROUND_MS))


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


def in_turn(contenders: dict, rounds: int, milliseconds: float) -> dict[str, list[float]]:
    """Microseconds of a call by contender: a round of each, then the next of each. A round is the slower the
    more power the one before it drew, so the order differs from round to round, the same in every run."""
    order, last = random.Random(1), None
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        names = order.sample(list(contenders), len(contenders))
        if names[0] == last:  # nobody behind itself
            names.reverse()
        for name in names:
            times[name].append(contenders[name].round(milliseconds))
        last = names[-1]
    return times


def speeds(flops: float, times: dict[str, list[float]]) -> dict[str, float]:
    """TFLOP/s of the medians."""
    return {name: flops / statistics.median(t) / 1e6 for name, t in times.items()}


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
    times = in_turn(able, rounds, milliseconds)
    found = {key: prepared[key] for key in ("config", "memory_bytes")}
    return {**cell, **found, "us": times, "tflops": speeds(prepared["flops"], times)}


class Variants:
    """Tandem in several ways, a process each, so that rounds of them alternate."""

    def __init__(self, program: Path, changes: dict[str, dict]) -> None:
        self.changes = changes
        self.contenders = {name: Tandem(program) for name in changes}

    def measure(self, cell: dict, rounds: int) -> tuple[dict[str, dict], dict[str, list[float]]]:
        """What each prepared for `cell` with its changes, and its microseconds."""
        prepared = {n: c.prepare({**cell, **self.changes[n]}) for n, c in self.contenders.items()}
        return prepared, in_turn(self.contenders, rounds, ROUND_MS)


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
    tflops = speeds(prepared["all"]["flops"], times)
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
        results.append({**cell, "us": times, "tflops": speeds(prepared["16-bit"]["flops"], times)})
    return results


def print_precision(document: dict) -> None:
    entries = document["precision"]
    names = names_of(entries)
    gemm = document.get("gemm_fp8_tflops")
    print(f"FP8 GEMM ceiling {gemm and round(gemm, 1)} TFLOP/s")
    print("| dtype | head_dim | mask | seqlen | " + " | ".join(names) + " |")
    print("|" + "---|" * (4 + len(names)))
    for entry in entries:
        row = [entry["dtype"], entry["head_dim"], "causal" if entry["causal"] else "full", entry["seqlen"]]
        print("| " + " | ".join(map(str, row + [f"{entry['tflops'][n]:.1f}" for n in names])) + " |")


def print_varlen(entries: list[dict]) -> None:
    print("| pass | head_dim | packed sequences | mask | packed us | dense us | packed/dense |")
    print("|" + "---|" * 7)
    for entry in entries:
        us = entry["us"]
        mask = "causal" if entry["causal"] else "full"
        print(
            f"| {entry['pass']} | {entry['head_dim']} | {entry['sequences']} | {mask} | {us['packed']:.1f} "
            f"| {us['dense']:.1f} | {entry['ratio']:.2f} |"
        )


def names_of(cells: list[dict]) -> list[str]:
    """Who ran in any cell, in order."""
    return list(dict.fromkeys(name for cell in cells for name in cell["tflops"]))


def print_table(document: dict) -> None:
    names = names_of(document["cells"])
    gemm = document.get("gemm_tflops")
    print(
        f"{document['device']}, commit {document['commit']}, GEMM ceiling {gemm and round(gemm, 1)} TFLOP/s"
    )
    print(
        "| pass | dtype | head_dim | mask | seqlen | " + " | ".join(names) + " | tandem/best peer | of GEMM |"
    )
    print("|" + "---|" * (7 + len(names)))
    for cell in document["cells"]:
        tflops = cell["tflops"]
        others = [speed for name, speed in tflops.items() if name != "tandem"]
        ratio = f"{tflops['tandem'] / max(others):.3f}" if others else "-"
        share = f"{tflops['tandem'] / gemm:.3f}" if gemm else "-"
        mask = "causal" if cell["causal"] else "full"
        row = [
            cell.get("pass", "forward"),
            cell["dtype"],
            cell["head_dim"],
            mask,
            cell["seqlen"],
            *(f"{tflops[n]:.1f}" if n in tflops else "-" for n in names),
            ratio,
            share,
        ]
        print("| " + " | ".join(map(str, row)) + " |")
    for entry in document.get("ablation", []):
        print(f"ablation: {entry['variant']}: {entry['tflops']:.1f} TFLOP/s")
    if "varlen" in document:
        print_varlen(document["varlen"])
    if "precision" in document:
        print_precision(document)


def plot(document: dict, path: Path) -> None:
    """One panel a head dimension and mask, of the first pass and dtype; bars by seqlen, as the paper's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
                f"{first.get('pass', 'forward')}, {first['dtype']}, head_dim {head_dim}, "
                f"{'causal' if causal else 'full'}",
                fontsize=9,
            )
            axis.set_ylabel("TFLOP/s")
            axis.set_xlabel("seqlen")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{document['device']}, commit {document['commit']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def commit() -> str:
    """The checkout's."""
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def surroundings() -> dict:
    """When it ran, and on whose software, as far as can be told."""
    found = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    if torch is not None and torch.cuda.is_available():
        found |= {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        run = subprocess.run(query, capture_output=True, text=True, check=False)
        found["driver"] = run.stdout.split("\n")[0].strip()
    return found


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, default=Path("build/release/bench/gpu_speed"))
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
        choices=["fp8", "int8", "int8-accurate"],
        help="the 8-bit forward in place of the grid",
    )
    parser.add_argument("--varlen", action="store_true", help="add packed sequences, beside dense ones")
    parser.add_argument(
        "--long", action="store_true", help="add one sequence of 32k, 128k and, forward at 128, 1M tokens"
    )
    parser.add_argument("--commit", help="what the program was built from, where that is no checkout")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--from", dest="source", type=Path, help="print and plot an earlier run's JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.source:
        document = json.loads(args.source.read_text())
    else:
        tandem = Tandem(args.program)
        contenders = [tandem, *peers()]
        document = {
            "device": tandem.device,
            "commit": args.commit or commit(),
            "command": " ".join(sys.argv),
            **surroundings(),
            "rounds": 1 if args.sustained else args.rounds,
            **ceilings(fp8=bool(args.precision)),
            "cells": [],
        }
        rounds, milliseconds = document["rounds"], 2000.0 if args.sustained else ROUND_MS
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
        if args.json:
            args.json.write_text(json.dumps(document, indent=1) + "\n")
    print_table(document)
    if args.plot and document["cells"]:
        plot(document, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
