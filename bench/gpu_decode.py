"""Steps of generation on a GPU: one query a sequence against keys and values of many lengths.

    python bench gpu-decode [--heads 32] [--heads-kv 8] [--head-dim 128] [--rounds 9] [--json FILE]

Each contender is captured in a CUDA graph of calls that go through so many buffers that no key is in the L2
again; graphs are replayed in turn. Tandem with and without lengths on the device (`seqused_k`), with pages of
64 and of 16 rows in a random order, with a `split_size` of 1024, and with keys and values of e4m3; cuDNN and
FlashAttention-2 through PyTorch, and FlashAttention-3 where it can be imported or --peer fa3=PATH has it
(lengths on the device, splits as it likes), on the same tensors. Then batches of very unequal lengths in
pages of 64 (eight query heads over one, those that HPC-Ops publishes), beside the time of as many bytes at a
copy's rate; and latent attention (128 query heads over one of 576 dimensions, of which v is 512).
Results are compared with fp32 before anything is timed. Memory traffic counts K and V once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import gpu_peers
import harness
import tandem
import torch
from harness import InGraph
from torch.nn.attention import SDPBackend, sdpa_kernel

CELLS = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (16, 32768), (32, 4096), (128, 512))
PAGE = 64
SMALL_PAGE = 16
#: lengths of a batch: (how many sequences, of how many keys)
MIXES = (
    ((64, 512),),
    ((64, 4096),),
    ((32, 128), (32, 4096)),
    ((1, 16384), (15, 64)),
    ((1, 65536), (7, 4096)),
    ((1, 65536), (31, 4096)),
    ((1, 131072), (31, 4096)),
    ((2, 32768), (30, 4096)),
)
#: of latent attention: batch, keys, queries a sequence
LATENT = ((1, 8192, 1), (8, 8192, 1), (32, 4096, 1), (64, 8192, 1), (128, 4096, 1), (128, 4096, 2))
LATENT_HEADS, LATENT_QK, LATENT_V = 128, 576, 512

Call = Callable[[int], torch.Tensor]


def in_pages(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The rows of (batch, seqlen, heads, head_dim) as pages, page `order[i]` being the i-th."""
    pages = x.reshape(len(order), -1, *x.shape[2:])
    shuffled = torch.empty_like(pages)
    shuffled[order] = pages
    return shuffled


def cell(args: argparse.Namespace, batch: int, seqlen: int) -> dict[str, object]:
    dtype, device = torch.bfloat16, "cuda"
    size = batch * seqlen * args.heads_kv * args.head_dim * 2 * 2
    buffers = InGraph.buffers(size)
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

    if args.fa3:
        calls["fa3"] = lambda i: args.fa3(q, keys[i], values[i], used)

    def of_pages(rows: int) -> Call:
        order = torch.randperm(batch * seqlen // rows, device=device)
        table = order.reshape(batch, -1).to(torch.int32)
        paged = [(in_pages(k, order), in_pages(v, order)) for k, v in zip(keys, values, strict=True)]
        return lambda i: tandem.attention(q, *paged[i], page_table=table, seqused_k=used)

    calls["tandem, split_size"] = lambda i: tandem.attention(
        q, keys[i], values[i], seqused_k=used, split_size=1024
    )
    if args.pages:
        calls["tandem, pages"] = of_pages(PAGE)
        calls["tandem, pages of 16"] = of_pages(SMALL_PAGE)
    # Twice the buffers of half the bytes.
    bytes_of = {"tandem, e4m3": size // 2}
    eight = [
        (k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for k, v in zip(keys, values, strict=True)
    ]
    eight += [(k.clone(), v.clone()) for k, v in eight]
    calls["tandem, e4m3"] = lambda i: tandem.attention(q, *eight[i], seqused_k=used)

    references = {
        name: exact(q, *eight[0]) if name in bytes_of else exact(q, keys[0], values[0]) for name in calls
    }
    errors = {name: (call(0).float() - references[name]).abs().max().item() for name, call in calls.items()}
    allowed = 2 * max(errors["cudnn"], errors["fa2"]) + 3e-5
    wrong = [name for name, error in errors.items() if not error <= allowed]
    if wrong:
        raise SystemExit(f"bench: {', '.join(wrong)} wrong at batch {batch}, seqlen {seqlen}: {errors}")
    graphs = {
        name: InGraph(call, 2 * buffers if name in bytes_of else buffers) for name, call in calls.items()
    }
    times = harness.in_turn(graphs, args.rounds, 0.0)
    us = {name: statistics.median(t) for name, t in times.items()}
    return {
        "batch": batch,
        "seqlen": seqlen,
        "buffers": buffers,
        "us": us,
        "gb_per_s": {name: bytes_of.get(name, size) / t / 1e3 for name, t in us.items()},
        "error": errors,
    }


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(1, 2) for x in (q, k, v)), enable_gqa=True
        ).transpose(1, 2)


def mix(args: argparse.Namespace, lengths: tuple[tuple[int, int], ...]) -> dict[str, object]:
    """A batch of unequal lengths in pages, eight query heads over one, and a copy of as many bytes."""
    device, heads, head_dim = "cuda", 8, 128
    each = [keys for count, keys in lengths for _ in range(count)]
    used = torch.tensor(each, device=device, dtype=torch.int32)
    pages = [-(-keys // PAGE) for keys in each]
    size = sum(each) * head_dim * 2 * 2
    buffers = InGraph.buffers(size)
    order = torch.randperm(sum(pages), device=device).to(torch.int32)
    table = torch.full((len(each), max(pages)), -1, device=device, dtype=torch.int32)
    begin = 0
    for b, count in enumerate(pages):
        table[b, :count] = order[begin : begin + count]
        begin += count
    q = torch.randn(len(each), 1, heads, head_dim, device=device, dtype=torch.bfloat16)
    caches = [
        torch.randn(2, sum(pages), PAGE, 1, head_dim, device=device, dtype=torch.bfloat16)
        for _ in range(buffers)
    ]

    def call(i: int) -> torch.Tensor:
        return tandem.attention(q, caches[i][0], caches[i][1], page_table=table, seqused_k=used)

    got = call(0)
    for b in {0, len(each) - 1}:
        k, v = (x[table[b, : pages[b]].long()].reshape(1, -1, 1, head_dim)[:, : each[b]] for x in caches[0])
        error = (got[b : b + 1].float() - exact(q[b : b + 1], k, v)).abs().max().item()
        if not error <= 2e-2:
            raise SystemExit(f"bench: sequence {b} of {lengths} is wrong by {error}")
    target = torch.empty_like(caches[0])
    graphs = {
        "tandem": InGraph(call, buffers),
        "copy": InGraph(lambda i: target.copy_(caches[i]), buffers),  # reads and writes: twice the bytes
    }
    us = {name: statistics.median(t) for name, t in harness.in_turn(graphs, args.rounds, 0.0).items()}
    read = us["copy"] / 2 * sum(each) / (sum(pages) * PAGE)
    return {"lengths": lengths, "bytes": size, "us": us["tandem"], "us_of_a_copys_rate": read}


def latent(args: argparse.Namespace, batch: int, seqlen: int, queries: int) -> dict[str, object]:
    """Multi-head latent attention as decoding runs it: all query heads read one key head, and v is the first
    columns of k; from pages of 64. Beside it two products and a softmax of PyTorch's on the same keys in
    their order, and a copy of as many bytes."""
    device, dtype = "cuda", torch.bfloat16
    size = batch * seqlen * LATENT_QK * 2
    buffers = InGraph.buffers(size)
    q = torch.randn(batch, queries, LATENT_HEADS, LATENT_QK, device=device, dtype=dtype)
    keys = [torch.randn(batch, seqlen, 1, LATENT_QK, device=device, dtype=dtype) for _ in range(buffers)]
    order = torch.randperm(batch * seqlen // PAGE, device=device)
    table = order.reshape(batch, -1).to(torch.int32)
    paged = [in_pages(k, order) for k in keys]
    used = torch.full((batch,), seqlen, device=device, dtype=torch.int32)
    scale = LATENT_QK**-0.5

    def tandems(i: int) -> torch.Tensor:
        k = paged[i]
        return tandem.attention(q, k, k[..., :LATENT_V], page_table=table, seqused_k=used, causal=queries > 1)

    def pytorchs(i: int) -> torch.Tensor:
        k = keys[i][:, :, 0]
        scores = torch.bmm(q.flatten(1, 2), k.mT) * scale
        return torch.bmm(scores.softmax(-1), k[..., :LATENT_V]).view(batch, queries, LATENT_HEADS, -1)

    k = keys[0][:1].float()
    scores = torch.einsum("bqhd,bkd->bqhk", q[:1].float(), k[:, :, 0]) * scale
    for row in range(queries - 1):
        scores[:, row, :, seqlen - queries + row + 1 :] = -torch.inf
    expected = torch.einsum("bqhk,bkd->bqhd", scores.softmax(-1), k[:, :, 0, :LATENT_V])
    error = (tandems(0)[:1].float() - expected).abs().max().item()
    if not error <= 2e-2:
        raise SystemExit(f"bench: latent attention is wrong by {error} at batch {batch}, seqlen {seqlen}")
    target = torch.empty_like(keys[0])
    graphs = {
        "tandem": InGraph(tandems, buffers),
        "pytorch": InGraph(pytorchs, buffers),
        "copy": InGraph(lambda i: target.copy_(keys[i]), buffers),
    }
    us = {name: statistics.median(t) for name, t in harness.in_turn(graphs, args.rounds, 0.0).items()}
    operations = 2 * batch * queries * LATENT_HEADS * seqlen * (LATENT_QK + LATENT_V)
    return {
        "batch": batch,
        "seqlen": seqlen,
        "queries": queries,
        "us": us,
        "error": error,
        "tflops": operations / us["tandem"] / 1e6,
        "gb_per_s": size / us["tandem"] / 1e3,
        "share_of_copy_rate": us["copy"] / 2 / us["tandem"],
    }


def main() -> int:
    parser = harness.parser(__doc__, "commit", "json")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-pages", dest="pages", action="store_false")
    parser.add_argument("--peer", type=gpu_peers.named_path, metavar="fa3=PATH", help="as of gpu-speed")
    args = parser.parse_args()
    try:
        args.fa3 = gpu_peers.fa3_step(args.peer and args.peer[1])
    except (ImportError, OSError) as error:
        args.fa3 = None
        print(f"not found fa3: {error}")
    cells = []
    for batch, seqlen in CELLS:
        cells.append(cell(args, batch, seqlen))
        us, rate = cells[-1]["us"], cells[-1]["gb_per_s"]
        line = "  ".join(f"{name} {us[name]:.1f} us {rate[name]:.0f} GB/s" for name in us)
        print(f"batch {batch:3} seqlen {seqlen:6}: {line}", flush=True)
    mixes = []
    for lengths in MIXES:
        mixes.append(mix(args, lengths))
        us, read = mixes[-1]["us"], mixes[-1]["us_of_a_copys_rate"]
        text = " + ".join(f"{count} x {keys}" for count, keys in lengths)
        print(f"{text}: {us:.1f} us, at a copy's rate {read:.1f} us", flush=True)
    latents = []
    for shape in LATENT:
        latents.append(latent(args, *shape))
        row = latents[-1]
        print(
            f"latent, batch {shape[0]} seqlen {shape[1]} queries {shape[2]}: {row['us']} us, "
            f"{row['tflops']:.0f} TFLOP/s, {row['gb_per_s']:.0f} GB/s",
            flush=True,
        )
    document = harness.origin(harness.device_name("cuda"), args.commit) | {
        "heads": [args.heads, args.heads_kv],
        "head_dim": args.head_dim,
        "dtype": "bf16",
        "cells": cells,
        "mixes": mixes,
        "latent": latents,
    }
    harness.write_json(document, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
