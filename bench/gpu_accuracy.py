"""The error of fp16 and bf16 attention on inputs with outliers, as the FlashAttention-3 paper measures it.

    python bench/gpu_accuracy.py [--device cuda] [--seqlen 8192] [--heads 16] [--json FILE]

Inputs are N(0, 1) + N(0, 100) * Bernoulli(0.001), rounded to the dtype. RMSE against the formula in fp64,
of Tandem and of the standard implementation: scores, probabilities and result in the dtype, each computed in
fp32. Bar: Tandem's error is at most 1/1.7 of the standard implementation's in fp16. Exit code 1 if it is not.
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
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
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
