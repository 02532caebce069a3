"""Layouts of context parallel: work and traffic of each, exactly, and a model of the time on H200s.

    python bench context-parallel             writes records/context-parallel.md
    python -m torch.distributed.run --standalone --nproc-per-node 4 bench context-parallel --measure

The page runs nothing: work (visible pairs) and rows sent are counted by tandem.distributed, and the time is
its model's, at the rates of an H200's kernels: a rank computes one chunk of heads while the next is on its
way. With --measure every strategy is timed on the GPUs of this host (or, for a try, on gloo), beside one GPU
and PyTorch's context parallel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import harness
from tandem.distributed import H200, H200_HOSTS, Layout, _chunks
from tandem.distributed._balance import Work, least_rows, least_rows_of_equal_shards
from tandem.distributed._machine import Shape
from tandem.distributed._mask import Mask
from tandem.distributed._routes import received, route, rows_of, sent

PAGE = harness.RECORDS / "context-parallel.md"

RANKS = (2, 4, 8, 64)
ROWS = 8192  # tokens a rank
HEADS_Q, HEADS_KV, HEAD_DIM = 64, 8, 128
HOST = 8  # GPUs of a host
NVLINK = H200.link  # bytes a second that a rank sends, and receives, within a host
NETWORK = H200_HOSTS.link  # likewise between hosts: 400 Gbit/s a GPU
SEEDS = range(10)

CAUSAL = Mask(-1, 0)
DENSE = "one sequence"
PASSES = ("forward", "both")


def pretraining(draw: random.Random) -> int:
    """Web documents: lognormal, half of them below 1100 tokens."""
    return int(draw.lognormvariate(7.0, 1.2)) + 1


def long_documents(draw: random.Random) -> int:
    """Six in seven have 500 to 4000 tokens, the others 16k to 128k."""
    return draw.randint(500, 4000) if draw.randrange(7) else draw.randint(16_000, 128_000)


MIXTURES = {"web documents": pretraining, "long documents": long_documents, "one book": pretraining}


def mixture(name: str, seed: int, total: int) -> list[int]:
    """Lengths of the documents of a batch, the last one cut off."""
    draw = random.Random(seed)
    lengths = [total // 2] if name == "one book" else []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(MIXTURES[name](draw), left))
    return lengths


class Rates:
    """FLOP/s of the kernels on one H200, causal, 8192 keys."""

    def __init__(self) -> None:
        self.forward, self.backward = (self._of(name) for name in ("forward", "backward"))

    @staticmethod
    def _of(name: str) -> float:
        cells = json.loads((harness.RECORDS / f"gpu-{name}-h200.json").read_text())["cells"]
        wanted = {"dtype": "bf16", "seqlen": ROWS, "head_dim": HEAD_DIM, "causal": 1}
        cell = next(c for c in cells if all(c[key] == value for key, value in wanted.items()))
        return float(cell["tflops"]["tandem"]) * 1e12


def link_seconds(layout: Layout) -> float:
    """Of one byte a row of K and V, on the rank that takes longest."""
    longest = 0.0
    for rank in range(layout.ranks):
        near = far = 0
        for source in range(layout.ranks):
            if source == rank:
                continue
            rows = rows_of(route(layout, CAUSAL, source, rank))
            if source // HOST == rank // HOST:
                near += rows
            else:
                far += rows
        longest = max(longest, near / NVLINK, far / NETWORK)
    return longest


def efficiency(layout: Layout, rates: Rates) -> tuple[float, float]:
    """Of one GPU's rate what a rank reaches, forward and backward, with the strategy "gather"."""
    shape = Shape(1, HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM, 2)
    rows = max(max(received(layout, CAUSAL)), max(sent(layout, CAUSAL)))
    link = rows / seconds if (seconds := link_seconds(layout)) else NVLINK
    found = []
    for rate, work, backward in ((rates.forward, 1.0, False), (rates.backward, _chunks.WORK, True)):
        machine = replace(H200 if layout.ranks <= HOST else H200_HOSTS, flops=rate, link=link)
        way = _chunks.chunk_heads(layout, CAUSAL, shape, machine, backward)
        pairs = sum(layout.pairs(causal=True)) / layout.ranks
        ideal = work * shape.flops(pairs) / rate
        found.append(ideal / _chunks.seconds(layout, CAUSAL, shape, machine, backward, way))
    return found[0], found[1]


def dense() -> Iterator[str]:
    rates = Rates()
    yield (
        "| GPUs | layout | busiest / mean | rows received / least | of equal shards | most rows / mean "
        "| forward | backward |"
    )
    yield "|--:|---|--:|--:|--:|--:|--:|--:|"
    for ranks, kind in itertools.product(RANKS, ("zigzag", "balanced")):
        layout = getattr(Layout, kind)(ROWS * ranks, ranks)
        pairs = layout.pairs(causal=True)
        rows = sum(received(layout, CAUSAL))
        ratio = rows / least_rows(Work(layout.lengths, CAUSAL), max(pairs))
        equal = f"{rows / least_rows_of_equal_shards(layout.total, ranks):.3f}" if kind == "zigzag" else "-"
        most = max(layout.rows(r) for r in range(ranks)) / ROWS
        forward, backward = efficiency(layout, rates)
        even = max(pairs) * ranks / sum(pairs)
        yield (
            f"| {ranks} | {kind} | {even:.4f} | {ratio:.3f} | {equal} | {most:.2f} "
            f"| {forward:.2f} | {backward:.2f} |"
        )


def packed() -> Iterator[str]:
    rates = Rates()
    yield (
        "| documents | GPUs | sequences | busiest / mean | rows received / least | without need "
        "| of an all-gather | most rows / mean | forward | backward |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name in MIXTURES:
        for ranks in RANKS:
            found = [_batch(mixture(name, seed, ROWS * ranks), ranks, rates) for seed in SEEDS]
            count, even, ratio, over, share, most, forward, backward = zip(*found, strict=True)
            mean = [sum(each) / len(SEEDS) for each in (count, share, forward, backward)]
            yield (
                f"| {name} | {ranks} | {mean[0]:.0f} | {max(even):.3f} | {_ratio(max(ratio))} "
                f"| {max(over):.3f} | {mean[1]:.2f} | {max(most):.2f} | {mean[2]:.2f} | {mean[3]:.2f} |"
            )


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio else "-"


def _batch(lengths: list[int], ranks: int, rates: Rates) -> tuple[float, ...]:
    """The numbers of a row of the table, of one batch."""
    layout = Layout.balanced(lengths, ranks)
    pairs = layout.pairs(causal=True)
    rows = sum(received(layout, CAUSAL))
    share = rows / (ROWS * ranks * (ranks - 1))
    least = least_rows(Work(lengths, CAUSAL), max(pairs))
    ratio, over = (rows / least, 0.0) if least else (0.0, share)
    most = max(layout.rows(r) for r in range(ranks)) / ROWS
    even = max(pairs) * ranks / sum(pairs)
    return len(lengths), even, ratio, over, share, most, *efficiency(layout, rates)


def whole_layers() -> Iterator[str]:
    yield "| documents | GPUs | busiest / mean | rows received / least | of an all-gather | most rows |"
    yield "|---|--:|--:|--:|--:|--:|"
    row_pairs = 6.0 * HEADS_Q * HEAD_DIM
    for name, ranks in itertools.product(MIXTURES, RANKS):
        even, ratio, share, most = 0.0, 0.0, 0.0, 0.0
        for seed in SEEDS:
            lengths = mixture(name, seed, ROWS * ranks)
            layout = Layout.balanced(lengths, ranks, row_pairs=row_pairs)
            held = [layout.rows(r) for r in range(ranks)]
            cost = [p + row_pairs * n for p, n in zip(layout.pairs(causal=True), held, strict=True)]
            least = least_rows(Work(lengths, CAUSAL, row_pairs), max(cost))
            rows = sum(received(layout, CAUSAL))
            even = max(even, max(cost) * ranks / sum(cost))
            ratio = max(ratio, rows / least if least else 0.0)
            share += rows / (ROWS * ranks * (ranks - 1)) / len(SEEDS)
            most = max(most, max(held) / ROWS)
        yield f"| {name} | {ranks} | {even:.3f} | {_ratio(ratio)} | {share:.2f} | {most:.2f} |"


def page() -> str:
    rates = Rates()
    return f"""# Context parallel: layouts and a model

Written by `python bench context-parallel`, commit {harness.commit()}. Work and
traffic are counted exactly by `tandem.distributed`; times are a model. Measured:
[on four H200s](runs/gpu-context-parallel-4-h200.md), [four H100s](runs/gpu-context-parallel-4-h100.md) and
[two](runs/gpu-context-parallel-h100.md).

{ROWS} tokens a GPU, causal. *Busiest / mean* is of visible pairs. *Rows received / least* compares the rows
of K and V that all ranks receive with a lower bound: the least of any layout whose busiest rank has at most
as much work, whatever its rows. *Most rows / mean* (*most rows*) is the largest shard. *Forward* and
*backward* are the model's share of one GPU's rate, strategy `gather`, {HEADS_Q} query heads on {HEADS_KV},
head dimension {HEAD_DIM}, bf16.

The model is that of `tandem.distributed.explain`: kernels at the rates of one H200 at {ROWS} keys,
{rates.forward / 1e12:.0f} and {rates.backward / 1e12:.0f} TFLOP/s ([forward](runs/gpu-forward-h200.md),
[backward](runs/gpu-backward-h200.md)), slower ones of short sequences left out; tiles of {H200.units} SMs,
of which those of a call's last turn wait for one another; {NVLINK / 1e9:.0f} GB/s each way within a
host of {HOST} GPUs, {NETWORK / 1e9:.0f} GB/s between hosts (0.9 of 400 Gbit/s a GPU);
{H200.latency * 1e6:.0f} us an exchange with the small kernels around it. Link and latency are what
[four H100s](runs/gpu-context-parallel-4-h100.md) showed. The number of chunks of heads is the one that this
makes quickest, or more that are within 2 %; the first chunk of keys and the last one of gradients are waited
for, and exchanges beside kernels hold these up: within a host by all the time that they take, between hosts
by {H200_HOSTS.held_up:.0%} of it, which is not measured.

## One sequence

{chr(10).join(dense())}

`zigzag` has equal shards, `balanced` sends less from shards that are not: the bound, which leaves rows free,
is for the latter. *Of equal shards* compares with the least that ranks can receive which have equal rows and
equal work: the j ranks whose last rows are the latest can then hold no more than the last j / (2 ranks) of
the sequence, which `zigzag` lets them hold. So 1.0 here and up to 9/8 there; less takes shards of unequal
size.

## Packed documents

`Layout.balanced`; of each mixture {len(SEEDS)} batches: the worst of *busiest / mean*, *rows received /
least*, *without need* and *most rows*, the mean of the others. *Of an all-gather*: rows received over those
that an all-gather of K and V would send. *Without need*: the same of batches whose bound is 0; no sequence
has to be cut there, but whole ones may fill the ranks unevenly. -: the bound of all batches is 0.

{chr(10).join(packed())}

Web documents: lognormal with mu 7.0 and sigma 1.2. Long documents: six in seven of 500 to 4000 tokens, the
others of 16,000 to 128,000. One book: one document of half of all tokens, and web documents. The last
document of a batch is cut off where the batch ends.

## Packed documents, whole layers

Even pairs leave shards of very different size: the end of a long document has few rows and many pairs. A
model's other layers cost as much a row wherever it is. `Layout.balanced(..., row_pairs=6 * width)` evens out
both together: a layer of width D has about 24 D^2 operations a row besides attention, and 4 D a pair. The
same batches, D = {HEADS_Q * HEAD_DIM}; *busiest / mean* and *least* are of that sum.

{chr(10).join(whole_layers())}
"""


def measured(arguments: argparse.Namespace) -> int:
    """Times all cells on the ranks of this run; the first one prints, and writes the JSON as it goes."""
    import context_parallel_ranks as on_ranks
    import torch
    from ranks_contenders import cell_of

    # PyTorch's come last: what fails on one rank alone there ends the run.
    cells = list(itertools.product((False,), arguments.tokens, arguments.documents))
    cells += [(True, tokens, DENSE) for tokens in arguments.tokens if arguments.peers]
    wrong = 0
    with on_ranks.group() as device:
        first = torch.distributed.get_rank() == 0
        like = {"dtype": getattr(torch, arguments.dtype), "device": device}
        sizes = ("heads", "heads_kv", "head_dim", "dtype", "rounds", "round_ms")
        document = harness.origin(harness.device_name(device.type), arguments.commit)
        document |= {"ranks": torch.distributed.get_world_size()}
        document |= {**{name: getattr(arguments, name) for name in sizes}, "cells": []}
        for (peers, tokens, documents), which in itertools.product(cells, arguments.passes):
            cell = cell_of(tokens, documents, arguments, like)
            found = on_ranks.measure(cell, which, arguments, like, peers)
            document["cells"].append(found)
            wrong += len(found["wrong"])
            if first:
                print("\n".join(on_ranks.lines(found)), flush=True)
                harness.write_json(document, arguments.json)
    return int(wrong > 0)


def main() -> int:
    parser = harness.parser(__doc__, "commit", "json")
    parser.prog = "python bench context-parallel"
    parser.add_argument("--output", type=Path, default=PAGE, help=f"the page to write (default {PAGE.name})")
    parser.add_argument("--measure", action="store_true", help="time the strategies on the ranks of this run")
    of_ranks = parser.add_argument_group("with --measure")
    of_ranks.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of a rank")
    documents = [DENSE, *MIXTURES]
    of_ranks.add_argument("--documents", nargs="+", default=documents, choices=documents)
    of_ranks.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES)
    of_ranks.add_argument("--strategies", nargs="+", default=["gather", "ring", "heads"])
    of_ranks.add_argument(
        "--chunks",
        nargs="+",
        default=[],
        help="gather in these chunks of heads, too: 4,4 or 1,7/4,4, the backward pass's last",
    )
    of_ranks.add_argument(
        "--strategies-alone", action="store_true", help="without the checked call and a rank's own tokens"
    )
    of_ranks.add_argument("--heads", type=int, default=HEADS_Q)
    of_ranks.add_argument("--heads-kv", type=int, default=HEADS_KV)
    of_ranks.add_argument("--head-dim", type=int, default=HEAD_DIM)
    of_ranks.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    of_ranks.add_argument("--rounds", type=int, default=7, help="of each contender, in turn")
    of_ranks.add_argument("--round-ms", type=float, default=30.0, help="how long a round lasts at least")
    of_ranks.add_argument("--no-peers", dest="peers", action="store_false", help="without PyTorch's")
    of_ranks.add_argument("--trace", type=Path, help="profile one call of each, into this folder")
    arguments = parser.parse_args()
    if arguments.measure:
        return measured(arguments)
    arguments.output.write_text(page())
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
