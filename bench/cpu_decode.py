"""Decoding steps out of a cache on this machine's CPU, as a share of what plain reads of its memory reach.

One step of generation reads the whole cache once, so that bytes a second are what counts. A program
(cpu_decode.cpp) holds one cache in bf16 and reads it plainly, attends to it as it is and in pages of 16 in a
random order, and attends to its bytes as 8-bit caches of half the size. PyTorch's attention
runs on a cache of the same size in this process. All take turns, with the same number of threads, and every
cell's paged result is compared with the contiguous one bit for bit first.

Times are CPU time divided by the threads, so that other jobs on the machine weigh less on them; the JSON has
the wall clock's too. Threads wait without spinning.

    python bench cpu-decode             table on the screen
    python bench cpu-decode --record    also records/cpu-decode.json
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import harness

HEADS, HEADS_KV, HEAD_DIM, PAGE = 32, 8, 128, 16
NAMES = ("read", "contiguous", "paged", "e4m3", "s8")
ROUND_MS = 60.0


class Program:
    """cpu_decode, which answers a line with a line."""

    def __init__(self) -> None:
        path = harness.BUILD / "cpu_decode"
        if not path.exists():
            sys.exit(f"{path} is not there; cmake --build build/release --target cpu_decode")
        environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(
            [path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("cpu_decode has ended; perhaps there was not enough memory")
        return json.loads(answer)


class OfProgram:
    """One name of the program: microseconds of CPU time, and the wall clock's beside them."""

    def __init__(self, program: Program, name: str) -> None:
        self.program, self.name = program, name
        self.wall: list[float] = []

    def round(self, milliseconds: float) -> list[float]:
        times = self.program.ask(f"round {self.name} {milliseconds}")
        self.wall += times["wall"]
        return times["cpu"]


class Sdpa:
    """PyTorch's attention on a cache of (batch, heads_kv, seqlen, head_dim)."""

    def __init__(self, batch: int, seqlen: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.threads = threads
        self.q = torch.randn(batch, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
        self.k, self.v = (
            torch.randn(1, HEADS_KV, 1, HEAD_DIM, dtype=torch.bfloat16)
            .expand(batch, HEADS_KV, seqlen, HEAD_DIM)
            .contiguous()
            for _ in range(2)
        )
        self.wall: list[float] = []
        self.attend()

    def attend(self) -> None:
        from torch.nn.functional import scaled_dot_product_attention

        scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True)

    def round(self, milliseconds: float) -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + milliseconds / 1000
        while not times or time.perf_counter() < end:
            wall, cpu = time.perf_counter(), time.process_time()
            self.attend()
            times.append((time.process_time() - cpu) * 1e6 / self.threads)
            self.wall.append((time.perf_counter() - wall) * 1e6)
        return times


def measure(program: Program, batch: int, seqlen: int, threads: int, rounds: int) -> dict[str, Any]:
    made = program.ask(f"cell {batch} {seqlen} 1 {HEADS} {HEADS_KV} {HEAD_DIM} {PAGE} {threads}")
    contenders: dict[str, Any] = {name: OfProgram(program, name) for name in NAMES}
    contenders["torch"] = Sdpa(batch, seqlen, threads)
    times = harness.in_turn(contenders, rounds, ROUND_MS)
    cell: dict[str, Any] = {"batch": batch, "seqlen": seqlen, "threads": threads, **made}
    for name, of_name in times.items():
        size = made["bytes"] / (2 if name in ("e4m3", "s8") else 1)
        cell[name] = {
            "us": statistics.median(of_name),
            "best_us": min(of_name),
            "wall_us": statistics.median(contenders[name].wall),
            "gb_s": size / statistics.median(of_name) / 1e3,
            "runs": len(of_name),
        }
    return cell


def table(cells: list[dict[str, Any]]) -> list[str]:
    rows = []
    for c in cells:
        read, contiguous = c["read"]["gb_s"], c["contiguous"]["gb_s"]
        rows.append(
            [
                c["batch"],
                c["seqlen"],
                f"{c['bytes'] / 2**20:.0f}",
                f"{read:.1f}",
                f"{contiguous:.1f}",
                f"{100 * contiguous / read:.0f} %",
                f"{100 * c['paged']['gb_s'] / contiguous:.0f} %",
                f"{c['contiguous']['us'] / c['e4m3']['us']:.2f}",
                f"{c['contiguous']['us'] / c['s8']['us']:.2f}",
                f"{c['torch']['us'] / c['contiguous']['us']:.1f}",
            ]
        )
    header = ("batch", "keys", "MiB", "plain read, GB/s", "contiguous, GB/s", "of plain", "pages of it")
    return harness.markdown_table(
        [*header, "e4m3 faster by", "s8 faster by", "than PyTorch by"], rows, rule="--:|"
    )


def main() -> int:
    parser = harness.parser(__doc__, "json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--least", type=int, default=64, help="smallest cache, in MiB")
    parser.add_argument("--most", type=int, default=1024, help="largest cache, in MiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="write records/cpu-decode.json")
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # before PyTorch starts its threads
    import torch  # noqa: F401  its version is part of the result

    program, cells = Program(), []
    for batch in args.batch:
        for seqlen in args.seqlen:
            mib = 4 * batch * seqlen * HEADS_KV * HEAD_DIM // 2**20
            if not args.least <= mib <= args.most:
                continue
            cells.append(measure(program, batch, seqlen, args.threads, args.rounds))
            print(*table(cells[-1:])[2:], sep="\n", file=sys.stderr, flush=True)
    document = {**harness.origin(harness.machine()), "threads": args.threads, "cells": cells}
    print(*table(cells), sep="\n")
    harness.write_json(document, args.json)
    if args.record:
        harness.write_json(document, harness.RECORDS / "cpu-decode.json")
    return 0 if all(c["right"] for c in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
