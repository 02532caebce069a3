"""The accuracy of 8-bit attention: every recipe against fp64, by input and context length, and the gradients.

Runs the program of bench/accuracy.cpp; the gradients come from the installed package.

    python bench accuracy                 table on the screen, JSON and plot under build/bench
    python bench accuracy --record        also records/low-precision-accuracy.json and .png
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import tandem
import torch

STEM = "low-precision-accuracy"
BASE = "fp8 tensor"
PAPER = "fp8 block + Hadamard"
DEFAULTS = ("fp8", "int8")
PRECISIONS = (*DEFAULTS, "exact")

METHOD = """\
Root mean square error of the output against fp64, f32 output, inputs in f16 unless said otherwise. *paper* is
N(0, 1) + N(0, 100) * Bernoulli(0.001); *biased* adds to every channel of K a mean drawn from N(0, 64) and of
V from N(0, 4); *sink* gives the first key logits near 9 above the others and a tenth of their value; *flat*
has queries of N(0, 0.01); *minilm* are the real Q, K, V of `data/minilm.safetensors`, by layer. The CPU
computes what tensor cores would, with their accumulators as [numerics](../numerics.md) (Low precision) takes
them to be; nothing here was measured on a GPU."""


def program(binary: Path, **options: Any) -> dict[str, Any]:
    """One run of the C++ program."""
    command = [str(binary)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    record: dict[str, Any] = json.loads(text)
    record["errors"] = {cell["recipe"]: cell["rmse"] for cell in record.pop("cells")}
    return record


def real_inputs(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """A raw file for each layer of the demo's data, with the options that describe it."""
    header, data = harness.safetensors(harness.ROOT / "data" / "minilm.safetensors")
    layers, tokens, heads, head_dim = header["q"]["shape"]
    size = 2 * tokens * heads * head_dim
    inputs = []
    for layer in range(layers):
        path = folder / f"layer{layer}.raw"
        starts = [header[name]["data_offsets"][0] + layer * size for name in "qkv"]
        path.write_bytes(b"".join(data[start : start + size] for start in starts))
        shape = {"seqlen": tokens, "heads": heads, "head_dim": head_dim}
        inputs.append((f"minilm {layer}", {"input": "file", "file": path, **shape}))
    return inputs


def measure(binary: Path, quick: bool) -> dict[str, Any]:
    """All records: by input, by seed of the paper's distribution, by context length."""
    size = {"queries": 32, "seqlen": 256} if quick else {"queries": 1024, "seqlen": 4096}
    inputs: list[tuple[str, dict[str, Any]]] = [
        (name, {"input": name, **size}) for name in ("normal", "biased", "sink", "flat")
    ]
    inputs.insert(1, ("paper, causal", {"input": "paper", "causal": True, **size}))
    inputs.insert(2, ("paper, bf16", {"input": "paper", "dtype": "bf16", **size}))
    inputs += [(f"paper, d {d}", {"input": "paper", "head_dim": d, **size}) for d in (64, 256)]
    seeds, contexts = ((1,), (64, 128)) if quick else ((1, 2, 3, 4), (1024, 8192, 131072))
    records: dict[str, Any] = {"inputs": {}, "seeds": [], "contexts": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in inputs + real_inputs(Path(folder)):
            print(name, file=sys.stderr, flush=True)
            records["inputs"][name] = program(binary, **options)
    queries = size["queries"] if quick else size["seqlen"]
    for seed in seeds:
        print(f"paper, seed {seed}", file=sys.stderr, flush=True)
        records["seeds"].append(program(binary, seed=seed, queries=queries, seqlen=size["seqlen"]))
    for seqlen in contexts:
        for name in ("paper", "normal"):
            print(f"{name}, seqlen {seqlen}", file=sys.stderr, flush=True)
            records["contexts"].append(program(binary, input=name, seqlen=seqlen, queries=min(seqlen, 256)))
    return records


def gradients(seqlen: int) -> dict[str, dict[str, float]]:
    """Relative rms error of dq, dk and dv after a forward pass of each precision, against fp64."""
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(1, seqlen, 4, 64).to(torch.bfloat16) for _ in range(4))
    wide = [t.double().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    p = (wide[0] @ wide[1].transpose(2, 3) * 64**-0.5).softmax(-1)
    exact = torch.autograd.grad(p @ wide[2], wide, dout.double().transpose(1, 2))
    errors = {}
    for precision in PRECISIONS:
        out, lse = tandem.attention(q, k, v, return_lse=True, precision=precision)
        got = tandem.attention_backward(dout, q, k, v, out, lse)
        errors[precision] = {
            name: ((a.double().transpose(1, 2) - b).norm() / b.norm()).item()
            for name, a, b in zip(("dq", "dk", "dv"), got, exact, strict=True)
        }
    return errors


def pooled(records: list[dict[str, Any]], recipe: str) -> float:
    """The rms error over all of the records."""
    return math.sqrt(sum(r["errors"][recipe] ** 2 for r in records) / len(records))


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [*harness.markdown_table(header, rows, rule="--:|"), ""]


def markdown(meta: dict[str, Any], records: dict[str, Any]) -> str:
    seeds, inputs, contexts = records["seeds"], records["inputs"], records["contexts"]
    recipes = [name for name in seeds[0]["errors"] if name != "exact"]
    lines = ["# 8-bit attention: accuracy", "", METHOD, ""]
    lines += [f"{meta['machine']}, commit {meta['commit']}, `{meta['command']}`.", ""]

    shape = f"seqlen {seeds[0]['seqlen']}, {seeds[0]['heads']} heads, head_dim {seeds[0]['head_dim']}"
    lines += [
        "## The paper's distribution",
        "",
        f"All queries, {shape}. `fp8` is block + Hadamard + smoothing.",
    ]
    lines += ["*Times* is how many times smaller the error is than with one e4m3 scale a tensor.", ""]
    base = pooled(seeds, BASE)
    header = ["recipe", *(f"seed {r['seed']}" for r in seeds), "all", "times, by seed", "times, all"]
    rows = []
    for name in recipes:
        times = [r["errors"][BASE] / r["errors"][name] for r in seeds]
        cells = [f"{r['errors'][name]:.2e}" for r in seeds]
        spread = f"{min(times):.1f} to {max(times):.1f}"
        rows.append([name, *cells, f"{pooled(seeds, name):.2e}", spread, f"{base / pooled(seeds, name):.2f}"])
    lines += table(header, rows)

    lines += [
        "## By input",
        "",
        "Error, and in brackets how many times smaller than with one e4m3 scale a tensor.",
        "",
    ]

    def cell(record: dict[str, Any], name: str) -> str:
        error = record["errors"][name]
        return f"{error:.1e} ({record['errors'][BASE] / error:.1f})"

    sizes = ["output's rms", *(f"{r['rms']:.1e}" for r in inputs.values())]
    lines += table(
        ["recipe", *inputs], [sizes, *([n, *(cell(r, n) for r in inputs.values())] for n in recipes)]
    )

    lines += ["## By context", "", f"{contexts[0]['queries']} queries, 4 heads, head_dim 128.", ""]
    header = ["recipe", *(f"{r['input']}, {r['seqlen']}" for r in contexts)]
    lines += table(header, [[n, *(f"{r['errors'][n]:.2e}" for r in contexts)] for n in recipes])

    lines += [
        "## Gradients",
        "",
        "The backward of an 8-bit forward is 16-bit: it recomputes P from bf16 q and k and takes",
    ]
    lines += [
        "the forward's out and LSE. Relative rms error against fp64, N(0, 1), 4 heads, head_dim 64, bf16.",
        "",
    ]
    errors = records["gradients"]
    columns = ("dq", "dk", "dv")
    lines += table(
        ["forward", *columns], [[p, *(f"{errors[p][c]:.1e}" for c in columns)] for p in PRECISIONS]
    )
    return "\n".join(lines)


def plot(records: dict[str, Any], path: Path) -> None:
    """How many times smaller the error of each recipe is, by input."""
    plt = harness.pyplot()
    shown = (PAPER, "fp8", "fp8 strict", "int8", "int8 strict")
    inputs = {"paper": records["seeds"][0], **records["inputs"]}
    figure, axis = plt.subplots(figsize=(12, 4.2), layout="constrained")
    for n, name in enumerate(shown):
        ratios = [r["errors"][BASE] / r["errors"][name] for r in inputs.values()]
        axis.bar([i + (n - 2.5) * 0.14 for i in range(len(inputs))], ratios, width=0.13, label=name)
    axis.axhline(1.0, color="#555555", linewidth=1)
    axis.set_yscale("log")
    axis.set_xticks(range(len(inputs)), list(inputs), fontsize=8)
    axis.set_ylabel("error of one e4m3 scale a tensor / error")
    axis.legend(fontsize=8, ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = harness.parser(__doc__)
    default = harness.BUILD / "accuracy"
    parser.add_argument(
        "--program", type=Path, default=default, help="what bench/accuracy.cpp was built into"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--output", type=Path, default=harness.ROOT / "build" / "bench")
    parser.add_argument("--record", action="store_true", help=f"also write records/{STEM}.*")
    args = parser.parse_args()
    meta = {
        "machine": harness.machine(),
        "commit": harness.commit(),
        "command": harness.command(),
    }
    records = measure(args.program, args.quick)
    records["gradients"] = gradients(128 if args.quick else 1024)
    page = markdown(meta, records)
    print(page)
    for folder in [args.output, *([harness.RECORDS] if args.record else [])]:
        harness.write_json({**meta, **records}, folder / f"{STEM}.json")
        plot(records, folder / f"{STEM}.png")
    (args.output / f"{STEM}.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
