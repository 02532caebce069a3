"""Both passes on a GPU against PyTorch's cuDNN and FlashAttention-2, on the grid of the paper.

    python bench/gpu_speed.py [--program build/release/bench/gpu_speed] [--json FILE] [--plot FILE]

One command measures all: every cell runs rounds of about 12 ms of each contender in turn and takes the
median, so that heat and clocks weigh on all alike. --sustained runs two seconds of each without a pause;
--ablation adds the paper's table of what each idea is worth; --varlen packed sequences beside the same work
dense; --long single sequences up to a million tokens; --precision the 8-bit kernels alone and with the
quantiser, beside bf16; --deterministic holds Tandem's backward to one order of
additions; --from FILE prints and draws what an earlier
run wrote. Without PyTorch Tandem runs alone. The grid: 16,384 tokens in all, hidden size 2048, standard
normal inputs. TFLOP/s count causal as half and backward 2.5 times forward; PyTorch's backward is autograd's,
with the forward pass before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
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
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


class Sdpa:
    """torch.nn.functional.scaled_dot_product_attention, held to one backend."""

    def __init__(self, name: str, backend: object) -> None:
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

    def call(self) -> None:
        if self.out is None:
            self.forward()
        else:
            torch.autograd.grad(self.out, self.tensors, self.dout, retain_graph=True)

    def time(self, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            self.call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def round(self, milliseconds: float) -> float:
        calls = max(1, int(milliseconds / self.time(1)))
        return self.time(calls) * 1000 / calls


def peers() -> list[Sdpa]:
    if torch is None or not torch.cuda.is_available():
        return []
    backends = torch.nn.attention.SDPBackend
    return [Sdpa("cudnn", backends.CUDNN_ATTENTION), Sdpa("fa2", backends.FLASH_ATTENTION)]


def gemm_tflops(fp8: bool = False, n: int = 8192) -> float | None:
    """The ceiling: a large bf16 or FP8 product through cuBLAS, best of 10 rounds of about 12 ms."""
    if torch is None or not torch.cuda.is_available():
        return None
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if fp8:
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
        one = torch.ones((), device="cuda")

    def multiply() -> None:
        if fp8:
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
        else:
            a @ b

    best = 0.0
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(8):
            multiply()
        end.record()
        end.synchronize()
        best = max(best, 8 * 2 * n**3 / (start.elapsed_time(end) / 1000) / 1e12)
    return best


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
    """The medians of one cell. Tandem comes first; a peer that does not have the shape is left out."""
    tandem, *others = contenders
    prepared = tandem.prepare(cell)
    able = [tandem]
    for peer in others:
        try:
            peer.prepare(cell)
        except RuntimeError:
            continue
        able.append(peer)
    times: dict[str, list[float]] = {c.name: [] for c in able}
    for _ in range(rounds):
        for contender in able:
            times[contender.name].append(contender.round(milliseconds))
    tflops = {name: prepared["flops"] / statistics.median(t) / 1e6 for name, t in times.items()}
    return {**cell, "config": prepared["config"], "us": times, "tflops": tflops}


def ablation(tandem: Tandem, rounds: int) -> list[dict]:
    """The paper's: batch 4, seqlen 8448, 16 heads, head_dim 128, full, fp16. There 570, 582 and 661."""
    cell = {"dtype": "f16", "batch": 4, "heads": 16, "seqlen": 8448, "head_dim": 128, "causal": 0}
    variants = {
        "all": {},
        "no warp specialisation": {"specialised": 0},
        "no overlap in a warpgroup": {"overlap": 0},
        "no ping-pong": {"pingpong": 0},
    }
    results = []
    for name, change in variants.items():
        try:
            result = measure({**cell, **change}, [tandem], rounds, ROUND_MS)
            results.append(
                {"variant": name, "tflops": result["tflops"]["tandem"], "config": result["config"]}
            )
        except RuntimeError as error:
            results.append({"variant": name, "error": str(error)})
    return results


def varlen(tandem: Tandem, rounds: int) -> list[dict]:
    """Packed sequences, and the dense call of (nearly) the same work: the ratio is to stay below 1.5."""
    rows = {
        "8192 of 34": ("8192x34", {"batch": 8192, "seqlen": 34}),
        "131072 and 1000 of 16": ("131072,1000x16", {"batch": 1, "seqlen": 131072}),
    }
    results = []
    for name, (lengths, dense) in rows.items():
        for causal in (0, 1):
            cell = {"dtype": "bf16", "heads": HIDDEN // 128, "head_dim": 128, "causal": causal}
            times = {}
            for kind, shape in (("packed", {"lengths": lengths}), ("dense", dense)):
                times[kind] = statistics.median(
                    measure({**cell, **shape}, [tandem], rounds, ROUND_MS)["us"]["tandem"]
                )
            results.append(
                {"sequences": name, **cell, "us": times, "ratio": times["packed"] / times["dense"]}
            )
    return results


def long_sequences(passes: list[str]) -> list[dict]:
    cell = {"dtype": "bf16", "batch": 1, "heads": HIDDEN // 128, "head_dim": 128, "causal": 1}
    lengths = {"forward": (32768, 131072, 1048576), "backward": (32768, 131072)}
    return [{"pass": name, **cell, "seqlen": seqlen} for name in passes for seqlen in lengths[name]]


def precision_cells(program: Path, cells: list[dict], settings: list[str], rounds: int) -> list[dict]:
    """The 16-bit forward; of every setting the kernel alone and the whole call. A process each."""
    variants: dict[str, dict] = {"16-bit": {}}
    for setting in settings:
        variants[f"{setting} kernel"] = {"pass": "quantized", "precision": setting}
        variants[f"{setting} whole"] = {"precision": setting}
    contenders = {name: Tandem(program) for name in variants}
    results = []
    for cell in cells:
        prepared = [contenders[name].prepare({**cell, **change}) for name, change in variants.items()]
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, contender in contenders.items():
                times[name].append(contender.round(ROUND_MS))
        tflops = {name: prepared[0]["flops"] / statistics.median(t) / 1e6 for name, t in times.items()}
        results.append({**cell, "us": times, "tflops": tflops})
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
    print("| packed sequences | mask | packed us | dense us | packed/dense |")
    print("|---|---|---|---|---|")
    for entry in entries:
        us = entry["us"]
        print(
            f"| {entry['sequences']} | {'causal' if entry['causal'] else 'full'} | {us['packed']:.1f} "
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
        print(
            f"ablation: {entry['variant']}: "
            + (f"{entry['tflops']:.1f} TFLOP/s" if "tflops" in entry else entry["error"])
        )
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
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


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
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=["fp8", "int8", "int8-accurate"],
        help="the 8-bit forward in place of the grid",
    )
    parser.add_argument("--varlen", action="store_true", help="add packed sequences, beside dense ones")
    parser.add_argument(
        "--long", action="store_true", help="add 32k, 128k and 1M tokens in one causal sequence"
    )
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
            "commit": commit(),
            "command": " ".join(sys.argv),
            "torch": torch.__version__ if torch else None,
            "gemm_tflops": gemm_tflops(),
            "cells": [],
        }
        rounds, milliseconds = (1, 2000.0) if args.sustained else (args.rounds, ROUND_MS)
        cells = grid(args.passes, args.dtypes.split(","), args.head_dims, args.seqlens)
        if args.precision:
            document["gemm_fp8_tflops"] = gemm_tflops(fp8=True)
            document["precision"] = precision_cells(args.program, cells, args.precision, args.rounds)
            cells = []
        for cell in cells + (long_sequences(args.passes) if args.long else []):
            cell["deterministic"] = int(args.deterministic)
            document["cells"].append(measure(cell, contenders, rounds, milliseconds))
        if args.ablation:
            document["ablation"] = ablation(tandem, args.rounds)
        if args.varlen:
            document["varlen"] = varlen(tandem, args.rounds)
        if args.json:
            args.json.write_text(json.dumps(document, indent=1) + "\n")
    print_table(document)
    if args.plot and document["cells"]:
        plot(document, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
