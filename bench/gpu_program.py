"""Tandem as the program gpu_speed, which can change any field of a Config; and products of matrices."""

from __future__ import annotations

import collections.abc
import itertools
import json
import math
import statistics
import subprocess
from pathlib import Path

import cudnn_fp8
import harness
from gpu_tables import mask_of, number

try:
    import torch
except ImportError:
    torch = None


HIDDEN = 2048


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

    def round(self, milliseconds: float) -> list[float]:
        return [self.ask(f"round {milliseconds}")["us"]]


class Variants:
    """Tandem in several ways, a process each, so that rounds of them alternate."""

    def __init__(self, program: Path, changes: dict[str, dict]) -> None:
        self.changes = changes
        self.contenders = {name: Tandem(program) for name in changes}

    def measure(
        self, cell: dict, rounds: int, beside: dict[str, harness.Contender] | None = None
    ) -> tuple[dict[str, dict], dict[str, list[float]]]:
        """What each prepared for `cell` with its changes, and its microseconds, others' `beside` them."""
        prepared = {n: c.prepare({**cell, **self.changes[n]}) for n, c in self.contenders.items()}
        return prepared, harness.in_turn({**self.contenders, **(beside or {})}, rounds, harness.ROUND_MS)


class Product(harness.OnGpu):
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
    return harness.tflops(products["gemm_tflops"].flops, harness.in_turn(products, 9, harness.ROUND_MS))


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


def million(program: Path) -> dict:
    """A million tokens, causal: a single call, which takes seconds and 16 GiB of tensors."""
    cell = {"pass": "forward", "dtype": "bf16", "batch": 1, "heads": 16, "seqlen": 1 << 20}
    cell |= {"head_dim": 128, "causal": 1}
    tandem = Tandem(program)
    prepared = tandem.prepare(cell)
    times = harness.in_turn({"tandem": tandem}, 1, 1.0)
    found = {key: prepared[key] for key in ("config", "memory_bytes", "share_of_bound")}
    return {**cell, **found, "us": times, "tflops": harness.tflops(prepared["flops"], times)}


def precision_cells(
    program: Path, cells: list[dict], settings: list[str], rounds: int
) -> collections.abc.Iterator[dict]:
    """The 16-bit call; of every setting forward the kernel alone and the whole call, backward (of int8) the
    whole call and that behind its forward, beside cuDNN's in FP8 where that is installed."""
    changes: dict[str, dict[str, dict]] = {
        "forward": {"16-bit": {}},
        "backward": {"16-bit": {}, "16-bit with forward": {"pass": "both"}},
    }
    for setting in settings:
        changes["forward"][f"{setting} kernel"] = {"pass": "quantized", "precision": setting}
        changes["forward"][f"{setting} whole"] = {"precision": setting}
    if "int8" in settings:
        gradients = {"precision": "int8", "backward_precision": "int8"}
        changes["backward"]["int8 whole"] = gradients
        changes["backward"]["int8 with forward"] = {"pass": "both", **gradients}
    for which, of_pass in itertools.groupby(cells, lambda cell: cell["pass"]):
        variants = Variants(program, changes[which])
        for cell in of_pass:
            peer = cudnn_fp8.backward(cell) if which == "backward" else None
            beside = {"cudnn fp8": peer} if peer is not None else {}
            prepared, times = variants.measure(cell, rounds, beside)
            rates = harness.tflops(1.0, times).items()
            flops = {name: of["flops"] for name, of in prepared.items()}
            tflops = {name: flops.get(name, flops["16-bit"]) * rate for name, rate in rates}
            yield {**cell, "us": times, "tflops": tflops}


def print_precision(document: dict) -> None:
    entries = document["precision"]
    names = names_of(entries)
    gemm = document.get("gemm_fp8_tflops")
    print(f"FP8 GEMM ceiling {gemm and round(gemm, 1)} TFLOP/s")
    rows = (
        [entry["pass"], entry["dtype"], entry["head_dim"], mask_of(entry), entry["seqlen"]]
        + [number(entry["tflops"].get(n), 1) for n in names]
        for entry in entries
    )
    print(*harness.markdown_table(["pass", "dtype", "head_dim", "mask", "seqlen", *names], rows), sep="\n")


def print_varlen(entries: list[dict]) -> None:
    header = ["pass", "head_dim", "packed sequences", "mask", "packed us", "dense us", "packed/dense"]
    rows = (
        [entry["pass"], entry["head_dim"], entry["sequences"], mask_of(entry)]
        + [f"{entry['us'][kind]:.1f}" for kind in ("packed", "dense")]
        + [f"{entry['ratio']:.2f}"]
        for entry in entries
    )
    print(*harness.markdown_table(header, rows), sep="\n")


def names_of(cells: list[dict]) -> list[str]:
    """Who ran in any cell, in order."""
    return list(dict.fromkeys(name for cell in cells for name in cell["tflops"]))
