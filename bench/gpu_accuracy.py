"""The error of fp16 and bf16 attention on inputs with outliers, as the FlashAttention-3 paper measures it.

    python bench/gpu_accuracy.py [--device cuda] [--seqlen 8192] [--heads 16] [--json FILE]
    python bench/gpu_accuracy.py --precision [--seqlen 4096] [--heads 4]     8 bits instead

Inputs are N(0, 1) + N(0, 100) * Bernoulli(0.001), rounded to the dtype. RMSE against the formula in fp64,
of Tandem and of the standard implementation: scores, probabilities and result in the dtype, each computed in
fp32. Bar: Tandem's error is at most 1/1.7 of the standard implementation's in fp16. Exit code 1 if it is not.

--precision: RMSE of every 8-bit setting on fp16 inputs of five kinds (docs/results/low-precision-accuracy.md
describes them), and how many times smaller it is than with one e4m3 scale a tensor, simulated here in fp32.
Bars on the outliers, full: fp8 2.2, int8 6, int8-accurate 10. The ablation of the recipes is the CPU's
(bench/accuracy.py), which computes the same codes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import tandem
import torch

BAR = 1.7
KINDS = ("paper", "normal", "biased", "sink", "flat")
SETTINGS = [(name, strict) for name in ("fp8", "int8", "int8-accurate") for strict in (False, True)]
PRECISION_BARS = {"fp8": 2.2, "int8": 6.0, "int8-accurate": 10.0}


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(1)

    def draw() -> torch.Tensor:
        normal, outlier = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        chosen = torch.rand(shape, generator=generator, device=device) < 0.001
        return (normal + 10 * outlier * chosen).to(dtype)

    return [draw() for _ in range(3)]


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dtype: torch.dtype
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v of one head, every step's result in `dtype`."""
    scores = q.to(dtype) @ k.to(dtype).T * q.shape[-1] ** -0.5
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
    return torch.softmax(scores, -1) @ v.to(dtype)


def errors(dtype: torch.dtype, causal: bool, args: argparse.Namespace) -> dict[str, float]:
    shape = (1, args.seqlen, args.heads, args.head_dim)
    q, k, v = inputs(shape, dtype, args.device)
    result = tandem.attention(q, k, v, causal=causal)
    squares = {"tandem": 0.0, "standard": 0.0}
    for head in range(args.heads):
        one = [t[0, :, head] for t in (q, k, v)]
        reference = formula(*one, causal, torch.float64)
        for name, found in (("tandem", result[0, :, head]), ("standard", formula(*one, causal, dtype))):
            squares[name] += (found.double() - reference).square().sum().item()
    return {name: (total / result.numel()) ** 0.5 for name, total in squares.items()}


def kind_of_inputs(kind: str, shape: tuple[int, ...], device: str) -> list[torch.Tensor]:
    """q, k and v of one kind in fp16."""
    if kind == "paper":
        return inputs(shape, torch.float16, device)
    generator = torch.Generator(device=device).manual_seed(1)
    heads, head_dim = shape[2:]
    q, k, v = (torch.randn(shape, generator=generator, device=device) for _ in range(3))
    if kind == "biased":
        for tensor, deviation in ((k, 8.0), (v, 2.0)):
            tensor += deviation * torch.randn(heads, head_dim, generator=generator, device=device)
    if kind == "sink":
        q[..., 0] += 10.0
        k[:, 0] = 0.0
        k[:, 0, :, 0] = 10.0
        v[:, 0] *= 0.1
    if kind == "flat":
        q *= 0.1
    return [t.to(torch.float16) for t in (q, k, v)]


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def one_scale_a_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """e4m3 codes times their scale."""
    scales = [t.float().abs().max() / 448 for t in (q, k, v)]
    return [e4m3(t.float() / scale) * scale for t, scale in zip((q, k, v), scales, strict=True)]


def plain_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One head of rounded tensors, P rounded in units of the row's largest."""
    scores = q @ k.T * q.shape[-1] ** -0.5
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e4m3(256 * p) / 256 @ v) / p.sum(-1, keepdim=True)


def precision_errors(kind: str, args: argparse.Namespace) -> dict[str, float]:
    q, k, v = kind_of_inputs(kind, (1, args.seqlen, args.heads, args.head_dim), args.device)
    results = {"16-bit": tandem.attention(q, k, v)}
    for precision, strict in SETTINGS:
        name = precision + (" strict" if strict else "")
        results[name] = tandem.attention(q, k, v, precision=precision, strict=strict)
    rounded = one_scale_a_tensor(q, k, v)
    squares = dict.fromkeys(["plain", *results], 0.0)
    for head in range(args.heads):
        reference = formula(*(t[0, :, head] for t in (q, k, v)), False, torch.float64)
        found = {name: result[0, :, head] for name, result in results.items()}
        found["plain"] = plain_fp8(*(t[0, :, head] for t in rounded))
        for name, one in found.items():
            squares[name] += (one.double() - reference).square().sum().item()
    return {name: (total / v.numel()) ** 0.5 for name, total in squares.items()}


def compare_precisions(args: argparse.Namespace, document: dict) -> bool:
    """Prints the table; whether the bars are met."""
    errors_by_kind = {kind: precision_errors(kind, args) for kind in KINDS}
    document["precision"] = errors_by_kind
    print("| setting | " + " | ".join(KINDS) + " |")
    print("|" + "---|" * (1 + len(KINDS)))
    for name in errors_by_kind["paper"]:
        cells = [f"{e[name]:.2e} ({e['plain'] / e[name]:.1f})" for e in errors_by_kind.values()]
        print(f"| {'fp8, one scale a tensor' if name == 'plain' else name} | " + " | ".join(cells) + " |")
    paper = errors_by_kind["paper"]
    return all(paper["plain"] / paper[name] >= bar for name, bar in PRECISION_BARS.items())


def compare_dtypes(args: argparse.Namespace, document: dict) -> bool:
    """Prints the table; whether the bar is met."""
    print("| dtype | mask | standard RMSE | Tandem RMSE | ratio |")
    print("|---|---|---|---|---|")
    met = True
    for dtype in (torch.float16, torch.bfloat16):
        for causal in (False, True):
            rmse = errors(dtype, causal, args)
            ratio = rmse["standard"] / rmse["tandem"]
            name = str(dtype).removeprefix("torch.")
            mask = "causal" if causal else "full"
            print(f"| {name} | {mask} | {rmse['standard']:.3g} | {rmse['tandem']:.3g} | {ratio:.2f} |")
            document["rows"].append({"dtype": name, "causal": causal, "rmse": rmse, "ratio": ratio})
            met = met and (dtype != torch.float16 or ratio >= BAR)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", action="store_true", help="the 8-bit settings")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    document = {"device": device, "commit": commit, "command": " ".join(sys.argv), "rows": []}
    print(f"{device}, commit {commit}, seqlen {args.seqlen}, {args.heads} heads of {args.head_dim}")
    met = compare_precisions(args, document) if args.precision else compare_dtypes(args, document)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
