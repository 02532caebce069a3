"""Steps of generation on a GPU: one query a sequence against keys and values of many lengths.

    python bench gpu-decode [--heads 32] [--heads-kv 8] [--head-dim 128] [--rounds 9] [--json FILE]

Each contender is captured in a CUDA graph of calls that go through so many buffers that no key is in the L2
again; graphs are replayed in turn. Tandem with and without lengths on the device (`seqused_k`), and with
pages of 64 rows in a random order; cuDNN and FlashAttention-2 through PyTorch, on the same tensors. Results
are compared with fp32 before anything is timed. Memory traffic counts K and V once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import harness
import tandem
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

CELLS = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (16, 32768), (32, 4096), (128, 512))
PAGE = 64
#: bytes of keys and values that lie between two uses of one buffer; more than any L2 holds
APART = 512 << 20

Call = Callable[[int], torch.Tensor]


class Graph:
    """Calls `call(0)`, `call(1)`, ... of a graph, timed by events."""

    def __init__(self, call: Call, buffers: int) -> None:
        self.calls = max(2 * buffers, 8)
        for i in range(buffers):
            call(i)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(self.calls):
                call(i % buffers)

    def round(self, _milliseconds: float) -> list[float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self.calls]


def in_pages(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The rows of (batch, seqlen, heads, head_dim) as pages, page `order[i]` being the i-th."""
    pages = x.reshape(-1, PAGE, *x.shape[2:])
    shuffled = torch.empty_like(pages)
    shuffled[order] = pages
    return shuffled


def cell(args: argparse.Namespace, batch: int, seqlen: int) -> dict[str, object]:
    dtype, device = torch.bfloat16, "cuda"
    size = batch * seqlen * args.heads_kv * args.head_dim * 2 * 2
    buffers = max(1, -(-APART // size))
    q = torch.randn(batch, 1, args.heads, args.head_dim, device=device, dtype=dtype)
    shape = (batch, seqlen, args.heads_kv, args.head_dim)
    keys = [torch.randn(shape, device=device, dtype=dtype) for _ in range(buffers)]
    values = [torch.randn(shape, device=device, dtype=dtype) for _ in range(buffers)]
    used = torch.full((batch,), seqlen, device=device, dtype=torch.int32)

    def sdpa(backend: SDPBackend) -> Call:
        def call(i: int) -> torch.Tensor:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2), keys[i].transpose(1, 2), values[i].transpose(1, 2), enable_gqa=True
                )
            return out.transpose(1, 2)

        return call

    calls: dict[str, Call] = {
        "tandem": lambda i: tandem.attention(q, keys[i], values[i]),
        "tandem, lengths": lambda i: tandem.attention(q, keys[i], values[i], seqused_k=used),
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    if args.pages:
        order = torch.randperm(batch * seqlen // PAGE, device=device)
        table = order.reshape(batch, -1).to(torch.int32)
        paged = [(in_pages(k, order), in_pages(v, order)) for k, v in zip(keys, values, strict=True)]
        calls["tandem, pages"] = lambda i: tandem.attention(q, *paged[i], page_table=table, seqused_k=used)

    with sdpa_kernel(SDPBackend.MATH):
        reference = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(1, 2) for x in (q, keys[0], values[0])), enable_gqa=True
        ).transpose(1, 2)
    errors = {name: (call(0).float() - reference).abs().max().item() for name, call in calls.items()}
    allowed = 2 * max(errors["cudnn"], errors["fa2"]) + 3e-5
    wrong = [name for name, error in errors.items() if not error <= allowed]
    if wrong:
        raise SystemExit(f"bench: {', '.join(wrong)} wrong at batch {batch}, seqlen {seqlen}: {errors}")
    graphs = {name: Graph(call, buffers) for name, call in calls.items()}
    times = harness.in_turn(graphs, args.rounds, 0.0)
    us = {name: statistics.median(t) for name, t in times.items()}
    return {
        "batch": batch,
        "seqlen": seqlen,
        "buffers": buffers,
        "us": us,
        "gb_per_s": {name: size / t / 1e3 for name, t in us.items()},
        "error": errors,
    }


def main() -> int:
    parser = harness.parser(__doc__, "commit", "json")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-pages", dest="pages", action="store_false")
    args = parser.parse_args()
    cells = []
    for batch, seqlen in CELLS:
        cells.append(cell(args, batch, seqlen))
        us, rate = cells[-1]["us"], cells[-1]["gb_per_s"]
        line = "  ".join(f"{name} {us[name]:.1f} us {rate[name]:.0f} GB/s" for name in us)
        print(f"batch {batch:3} seqlen {seqlen:6}: {line}", flush=True)
    document = harness.origin(harness.device_name("cuda"), args.commit) | {
        "heads": [args.heads, args.heads_kv],
        "head_dim": args.head_dim,
        "dtype": "bf16",
        "cells": cells,
    }
    harness.write_json(document, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
