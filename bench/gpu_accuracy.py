"""The error of fp16 and bf16 attention on inputs with outliers, as the FlashAttention-3 paper measures it.

    python bench gpu-accuracy [--device cuda] [--seqlen 8192] [--heads 16] [--json FILE]
    python bench gpu-accuracy --precision [--seqlen 4096] [--heads 4]     8 bits instead

Inputs are N(0, 1) + N(0, 100) * Bernoulli(0.001), rounded to the dtype. RMSE against the formula in fp64,
of Tandem and of the standard implementation: scores, probabilities and result in the dtype, each computed in
fp32. Bar: Tandem's error is at most 1/1.7 of the standard implementation's in fp16. Exit code 1 if it is not.

--precision: RMSE of every 8-bit recipe on fp16 inputs of five kinds (docs/results/low-precision-accuracy.md
describes them) and on the real Q, K, V of data/minilm.safetensors, and how many times smaller it is than with
one e4m3 scale a tensor. Recipes that no precision has get their 8-bit inputs from tandem.quantize. Beside
them TFLOP/s at seqlen 16384, 16 heads of 128: of the whole call, and of attention to inputs that are 8-bit
already. Bars on the outliers, full: fp8 2.2, int8 6. The cost of fewer promotions is the
CPU's to tell (`python bench accuracy`): the GPU kernel promotes every tile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import harness
import tandem
import torch

BAR = 1.7
BASE = "fp8 tensor"
KINDS = ("paper", "normal", "biased", "sink", "flat")
SETTINGS = [(name, strict) for name in ("fp8", "int8") for strict in (False, True)]
PRECISION_BARS = {"fp8": 2.2, "int8": 6.0}


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


def real_inputs(layer: int, device: str) -> list[torch.Tensor]:
    """q, k and v of a layer of the demo's model."""
    header, data = harness.safetensors(harness.ROOT / "data" / "minilm.safetensors")
    tensors = []
    for name in "qkv":
        begin, end = header[name]["data_offsets"]
        every = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float16).view(header[name]["shape"])
        tensors.append(every[layer : layer + 1].to(device))
    return tensors


Arguments = dict[str, object]


def quantized(tensors: list[torch.Tensor], granularity: str, hadamard: bool, smooth: bool) -> Arguments:
    """Arguments of attention: q, k and v in e4m3 with their scales."""
    arguments: Arguments = {"precision": "fp8", "out_dtype": "f16"}
    for name, tensor in zip("qkv", tensors, strict=True):
        rotated = hadamard and name != "v"
        found = tandem.quantize(
            tensor, granularity=granularity, hadamard=rotated, smooth=smooth and name == "k"
        )
        arguments[name], arguments[name + "_scale"] = found[:2]
    return arguments


#: granularity, Hadamard and smoothing of the recipes whose inputs are 8-bit already
ABLATION = {
    BASE: ("tensor", False, False),
    "fp8 head": ("head", False, False),
    "fp8 block": ("block", False, False),
    "fp8 tensor + Hadamard": ("tensor", True, False),
    "fp8 block + Hadamard": ("block", True, False),
    "fp8 block + smoothing": ("block", False, True),
}


def recipe_results(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    results = {"16-bit": tandem.attention(*tensors)}
    for name, recipe in ABLATION.items():
        results[name] = tandem.attention(**quantized(tensors, *recipe))
    for precision, strict in SETTINGS:
        name = precision + (" strict" if strict else "")
        results[name] = tandem.attention(*tensors, precision=precision, strict=strict)
    return results


def recipe_errors(tensors: list[torch.Tensor]) -> dict[str, float]:
    """RMSE against fp64 by recipe."""
    results = recipe_results(tensors)
    squares = dict.fromkeys(results, 0.0)
    for head in range(tensors[0].shape[2]):
        reference = formula(*(t[0, :, head] for t in tensors), False, torch.float64)
        for name, result in results.items():
            squares[name] += (result[0, :, head].double() - reference).square().sum().item()
    return {name: (total / tensors[2].numel()) ** 0.5 for name, total in squares.items()}


def tflops(call: Callable[[], object], flops: float) -> float:
    """The best of five rounds."""
    call()
    times = harness.in_turn({"tandem": harness.OnGpu(call)}, 5, harness.ROUND_MS)["tandem"]
    return flops / min(times) / 1e6


def recipe_speeds() -> dict[str, tuple[float, float | None]]:
    """TFLOP/s by recipe: of the whole call, and of attention to inputs that are 8-bit already."""
    shape = (1, 16384, 16, 128)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3)]
    flops = 4.0 * shape[1] ** 2 * shape[2] * shape[3]
    speeds: dict[str, tuple[float, float | None]] = {
        "16-bit": (tflops(lambda: tandem.attention(*tensors), flops), None)
    }
    for name, recipe in ABLATION.items():
        ready = quantized(tensors, *recipe)
        whole = tflops(lambda r=recipe: tandem.attention(**quantized(tensors, *r)), flops)
        speeds[name] = (whole, tflops(lambda r=ready: tandem.attention(**r), flops))
    for precision, strict in SETTINGS:
        options = {"precision": precision, "strict": strict}
        name = precision + (" strict" if strict else "")
        speeds[name] = (tflops(lambda o=options: tandem.attention(*tensors, **o), flops), None)
    return speeds


def compare_precisions(args: argparse.Namespace, document: dict) -> bool:
    """Prints the table; whether the bars are met."""
    shape = (1, args.seqlen, args.heads, args.head_dim)
    found = {kind: recipe_errors(kind_of_inputs(kind, shape, args.device)) for kind in KINDS}
    found |= {f"minilm {layer}": recipe_errors(real_inputs(layer, args.device)) for layer in range(3)}
    document["precision"] = found
    speeds = recipe_speeds() if args.device == "cuda" else {}
    document["tflops"] = speeds
    header = ["recipe", *found, "TFLOP/s, whole call", "8-bit inputs"]
    print("| " + " | ".join(header) + " |")
    print("|---|" + "--:|" * (len(header) - 1))
    for name in found["paper"]:
        cells = [f"{e[name]:.2e} ({e[BASE] / e[name]:.1f})" for e in found.values()]
        cells += ["" if speed is None else f"{speed:.0f}" for speed in speeds.get(name, (None, None))]
        print(f"| {name} | " + " | ".join(cells) + " |")
    paper = found["paper"]
    return all(paper[BASE] / paper[name] >= bar for name, bar in PRECISION_BARS.items())


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
    parser = harness.parser(__doc__, "commit", "json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", action="store_true", help="the 8-bit settings")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    document = {**harness.origin(harness.device_name(args.device), args.commit), "rows": []}
    sizes = f"seqlen {args.seqlen}, {args.heads} heads of {args.head_dim}"
    print(f"{document['device']}, commit {document['commit']}, {sizes}")
    met = compare_precisions(args, document) if args.precision else compare_dtypes(args, document)
    harness.write_json(document, args.json)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
