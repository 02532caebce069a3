"""Serves made-up requests from a paged cache, and its counters to Prometheus.

    python examples/serve.py --port 9464
    curl localhost:9464/metrics

It is what examples/serve does in C++, without sharing and eviction: in each step every running request
appends its new tokens, a whole prompt or one, and attends to all it has.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import numpy as np
import prometheus_client
import tandem
import tandem.metrics

HEADS, HEADS_KV, HEAD_DIM, PAGE, PAGES, MOST_RUNNING = 8, 2, 64, 16, 256, 8
random = np.random.default_rng(0)


@dataclass
class Request:
    prompt: int
    wanted: int  # tokens to generate
    length: int = 0  # rows of the cache
    pages: list[int] = field(default_factory=list)

    @property
    def new(self) -> int:
        return self.prompt if self.length == 0 else 1


class Server:
    def __init__(self) -> None:
        self.k, self.v = np.zeros((2, PAGES, PAGE, HEADS_KV, HEAD_DIM), np.float32)
        self.free, self.running, self.finished = [*range(PAGES)], list[Request](), 0

    def step(self) -> None:
        while len(self.running) < MOST_RUNNING:
            self.running.append(Request(int(random.integers(1, 200)), int(random.integers(1, 50))))
        for r in self.running:
            while len(r.pages) * PAGE < r.length + r.new:  # there are pages for the longest requests
                r.pages.append(self.free.pop())
        self.attend([r.new for r in self.running])
        for r in self.running:
            r.length += r.new
        done = [r for r in self.running if r.length >= r.prompt + r.wanted]
        for r in done:
            self.free += r.pages
            self.running.remove(r)
        self.finished += len(done)

    def attend(self, counts: list[int]) -> None:
        """One call of append_kv and one of attention for all requests; numbers stand for the model."""
        table = np.full((len(counts), max(len(r.pages) for r in self.running)), -1, np.int32)
        for row, r in zip(table, self.running, strict=True):
            row[: len(r.pages)] = r.pages
        before = np.array([r.length for r in self.running], np.int32)
        cu = np.cumsum([0, *counts], dtype=np.int32)
        q = random.standard_normal((cu[-1], HEADS, HEAD_DIM), np.float32)
        k, v = random.standard_normal((2, cu[-1], HEADS_KV, HEAD_DIM), np.float32)
        tandem.append_kv(
            k, v, self.k, self.v, cache_seqlens=before, cu_seqlens_new=cu, page_table=table
        )  # fmt: skip
        tandem.attention(
            q, self.k, self.v, cu_seqlens_q=cu, seqused_k=before + np.diff(cu), page_table=table, causal=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=9464, help="where the counters are served; 0: a free one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long")
    arguments = parser.parse_args()
    tandem.metrics.register()
    served, _ = prometheus_client.start_http_server(arguments.port, "127.0.0.1")
    print(f"counters at http://127.0.0.1:{served.server_port}/metrics", flush=True)
    server, end = Server(), time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        server.step()
        time.sleep(0.01)
    print(f"{server.finished} requests finished", flush=True)


if __name__ == "__main__":
    main()
