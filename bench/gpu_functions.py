"""Score and mask functions on a GPU, beside PyTorch's compiled flex_attention on the same functions.

    python bench gpu-functions [--head-dims 64 128] [--lengths 1024 4096 16384] [--functions NAME ...]

16 query heads on 16, bf16, forward and backward, as many sequences as make 16,384 tokens. Block masks are
made before anything is timed, on both sides; so is what both compile; flex_attention with fewer stages where
its own choice does not fit (`flex_attention_options`). `causal=True` of Tandem without a
function stands beside the mask function `causal`, which says what a function costs. Each result is compared
with flex_attention's before it is timed. TFLOP/s count the pairs that are visible.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import function_kinds
import harness
import tandem
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

HEADS, TOKENS = 16, 16_384


def compiled_flex(
    tensors: tuple[torch.Tensor, ...], score_mod: function_kinds.Function | None, block_mask: Any
) -> tuple[Callable[[], torch.Tensor], dict[str, int]]:
    """PyTorch's compiled flex_attention and its kernel options: its own choice, or where that does not fit
    the GPU's shared memory, fewer stages."""
    *qkv, dout = tensors
    failure: Exception | None = None
    for options in ({}, {"num_stages": 2}, {"num_stages": 1}):
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        call = functools.partial(
            compiled, *qkv, score_mod=score_mod, block_mask=block_mask, kernel_options=dict(options) or None
        )
        try:
            torch.autograd.grad(call(), qkv, dout, retain_graph=True)
        except torch._inductor.exc.InductorError as error:
            failure = error
        else:
            return call, options
    raise SystemExit(f"bench: flex_attention compiles with no number of stages: {failure}")


def cell(args: argparse.Namespace, name: str, head_dim: int, seqlen: int) -> dict[str, Any]:
    torch.manual_seed(1)
    batch = max(1, TOKENS // seqlen)
    score_mod, mask_mod = function_kinds.functions(seqlen, HEADS)[name]
    heads_first = (batch, HEADS, seqlen, head_dim)
    q, k, v, dout = (torch.randn(heads_first, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, None, None, seqlen, seqlen, device="cuda")
    peer, options = compiled_flex((q, k, v, dout), score_mod, block_mask)
    forwards: dict[str, Callable[[], torch.Tensor]] = {
        "tandem": lambda: tandem.flex_attention(q, k, v, score_mod, block_mask),
        "flex_attention": peer,
    }
    if name == "causal":
        forwards["tandem, causal=True"] = lambda: tandem.attention(
            *(t.transpose(1, 2) for t in (q, k, v)), causal=True
        ).transpose(1, 2)
    results, backwards = {}, {}
    for which, forward in forwards.items():
        out = forward()
        results[which] = (out.detach(), *torch.autograd.grad(out, leaves, dout, retain_graph=True))
        backwards[which] = lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for which, got in results.items():
        for ours, theirs in zip(got, results["flex_attention"], strict=True):
            error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
            if not error <= 0.02:
                raise SystemExit(f"bench: {which} differs by {error} with {name}, {head_dim}, {seqlen}")

    flops = 4.0 * batch * HEADS * function_kinds.visible_pairs(mask_mod, seqlen) * head_dim
    row: dict[str, Any] = {"function": name, "head_dim": head_dim, "seqlen": seqlen, "batch": batch}
    row["flex_attention_options"] = options
    with torch.no_grad():
        times = harness.in_turn(
            {w: harness.OnGpu(f) for w, f in forwards.items()}, args.rounds, args.round_ms
        )
    row["forward"] = summary(times, flops)
    timed = {w: harness.OnGpu(f) for w, f in backwards.items()}
    times = harness.in_turn(timed, args.rounds, args.round_ms)
    row["backward"] = summary(times, 2.5 * flops)
    return row


def summary(times: dict[str, list[float]], flops: float) -> dict[str, Any]:
    us = {which: statistics.median(t) for which, t in times.items()}
    return {
        "us": us,
        "tflops": {which: flops / t / 1e6 for which, t in us.items()},
        "times_flex_attention": us["flex_attention"] / us["tandem"],
    }


def main() -> int:
    parser = harness.parser(__doc__, "commit", "json")
    names = list(function_kinds.NAMES)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--functions", nargs="+", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=20.0)
    args = parser.parse_args()
    cells = []
    for head_dim in args.head_dims:
        for name in args.functions:
            for seqlen in args.lengths:
                cells.append(cell(args, name, head_dim, seqlen))
                row = cells[-1]
                line = "  ".join(
                    f"{direction} " + ", ".join(f"{w} {t:.0f}" for w, t in row[direction]["tflops"].items())
                    for direction in ("forward", "backward")
                )
                print(f"{name}, {head_dim}, {seqlen}: TFLOP/s {line}", flush=True)
    document = harness.origin(harness.device_name("cuda"), args.commit) | {"heads": HEADS, "cells": cells}
    harness.write_json(document, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
