"""Appending new keys and values to a cache on a GPU, beside a copy of as many bytes.

    python bench gpu-append [--heads-kv 8] [--head-dim 128] [--rounds 9] [--json FILE]

From one token of one sequence, a step of generation, to a prefill of 65,536. Tandem's append_kv to a
contiguous cache, to pages of 64 and of 16 rows in a random order, to slots, with a rotary embedding of the
keys, and from bf16 to e4m3, by a scale of the call or by scales that it finds for each row. Beside it
PyTorch's copy of K and V together, which knows nothing of places, and its index_put_ of K and of V to the
same slots. Each is captured in a CUDA graph of calls that go through many buffers: none of calls of 16 MB and
more is in the L2 when its turn comes, those of shorter calls may be, as new keys are that a product has just
written.

What is written is compared before anything is timed: bf16 value by value, e4m3 and embedded keys with what
PyTorch computes; and no other row of a cache may have changed. GB/s count what is read and what is written.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import harness
import tandem
import torch
from harness import InGraph

#: sequences, and new tokens of each
CELLS = ((1, 1), (32, 1), (256, 1), (1, 512), (1, 4096), (8, 2048), (1, 16384), (1, 65536))
#: rows that each sequence has before
BEFORE = 192
PAGES = (64, 16)
#: read and written of an element, where it is not 2 + 2
BYTES = {"tandem, e4m3": 3, "tandem, e4m3 by row": 3}
MOST_BUFFERS = 32

Write = Callable[[int], object]


class Cell:
    """New rows and caches of one shape, and the calls that are compared."""

    def __init__(self, args: argparse.Namespace, batch: int, tokens: int) -> None:
        self.batch, self.tokens, self.heads, self.head_dim = batch, tokens, args.heads_kv, args.head_dim
        self.rows = -(-(BEFORE + tokens) // max(PAGES)) * max(PAGES)
        self.elements = batch * tokens * args.heads_kv * args.head_dim
        self.buffers = min(InGraph.buffers(8 * self.elements), MOST_BUFFERS)
        shape = (2, batch, tokens, args.heads_kv, args.head_dim)
        self.new = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(self.buffers)]
        self.begin = torch.full((batch,), BEFORE, device="cuda", dtype=torch.int32)
        places = torch.arange(batch, device="cuda")[:, None] * self.rows
        self.slots = (places + torch.arange(BEFORE, BEFORE + tokens, device="cuda")).flatten()

    def caches(self, page: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
        """For each buffer K's and V's rows, all 7: nothing that is written by chance."""
        entries, rows = (self.batch, self.rows) if page is None else (self.batch * self.rows // page, page)
        shape = (2, entries, rows, self.heads, self.head_dim)
        return [torch.full(shape, 7.0, device="cuda").to(dtype) for _ in range(self.buffers)]

    def contiguous(self, **options: torch.Tensor) -> tuple[Write, list[torch.Tensor]]:
        caches = self.caches()
        options["cache_seqlens"] = self.begin
        return lambda i: tandem.append_kv(*self.new[i], *caches[i], **options), caches

    def paged(self, page: int) -> tuple[Write, list[torch.Tensor], torch.Tensor]:
        caches = self.caches(page)
        table = torch.randperm(caches[0].shape[1], device="cuda").view(self.batch, -1).to(torch.int32)
        options = {"cache_seqlens": self.begin, "page_table": table}
        return lambda i: tandem.append_kv(*self.new[i], *caches[i], **options), caches, table

    def to_slots(self) -> tuple[Write, Write, list[torch.Tensor]]:
        """Tandem's and PyTorch's way."""
        caches = self.caches()
        flat = [new.flatten(1, 2) for new in self.new]

        def pytorchs(i: int) -> None:
            for rows, cache in zip(flat[i], caches[i], strict=True):
                cache.flatten(0, 1).index_put_((self.slots,), rows)

        def tandems(i: int) -> object:
            return tandem.append_kv(*flat[i], *caches[i], slot_mapping=self.slots)

        return tandems, pytorchs, caches

    def to_codes(self, by_row: bool) -> tuple[Write, list[torch.Tensor], list[torch.Tensor]]:
        caches = self.caches(dtype=torch.float8_e4m3fn)
        if by_row:
            shape = (2, self.batch, self.heads, self.rows)
            scales = [torch.full(shape, 7.0, device="cuda") for _ in range(self.buffers)]
            names = ("k_scale_cache", "v_scale_cache")
        else:
            scales = [torch.full((2, 1), 2**-6, device="cuda")] * self.buffers  # 6 * 64 is below 448
            names = ("k_scale", "v_scale")

        def call(i: int) -> object:
            given = dict(zip(names, scales[i], strict=True))
            return tandem.append_kv(*self.new[i], *caches[i], cache_seqlens=self.begin, **given)

        return call, caches, scales

    def expected(self, new: torch.Tensor) -> torch.Tensor:
        whole = torch.full((2, self.batch, self.rows, self.heads, self.head_dim), 7.0, device="cuda")
        whole[:, :, BEFORE : BEFORE + self.tokens] = new.float()
        return whole

    def embedded(self, new: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, s = (t[BEFORE : BEFORE + self.tokens, None] for t in (cos, sin))
        a, b = new[0].float().chunk(2, -1)
        return torch.stack([torch.cat([a * c - b * s, b * c + a * s], -1), new[1].float()])


def check(name: str, cell: Cell, got: torch.Tensor, new: torch.Tensor, allowed: float = 0.0) -> None:
    """`allowed` is relative, with a hundredth of it absolute."""
    expected = cell.expected(new)
    wrong = ~((got.float() - expected).abs() <= allowed * (expected.abs() + 0.01))  # a NaN is wrong
    if wrong.any():
        raise SystemExit(f"bench: {name} is wrong in {int(wrong.sum())} places, {cell.batch} x {cell.tokens}")


def measure(args: argparse.Namespace, batch: int, tokens: int) -> dict[str, object]:
    cell = Cell(args, batch, tokens)
    new = cell.new[0]
    calls: dict[str, Write] = {}

    calls["tandem"], caches = cell.contiguous()
    calls["tandem"](0)
    check("tandem", cell, caches[0], new)

    for page in PAGES:
        name = f"tandem, pages of {page}"
        calls[name], paged, table = cell.paged(page)
        calls[name](0)
        check(name, cell, paged[0][:, table.long()].flatten(2, 3), new)

    angles = torch.rand(cell.rows, cell.head_dim // 2, device="cuda") * 6.28
    cos, sin = angles.cos(), angles.sin()
    calls["tandem, rotary"], caches = cell.contiguous(rotary_cos=cos, rotary_sin=sin)
    calls["tandem, rotary"](0)
    check("tandem, rotary", cell, caches[0], cell.embedded(new, cos, sin), 2**-7)

    calls["tandem, slots"], calls["pytorch, index_put_"], caches = cell.to_slots()
    for name in ("tandem, slots", "pytorch, index_put_"):
        caches[0].fill_(7.0)
        calls[name](0)
        check(name, cell, caches[0], new)

    calls["tandem, e4m3"], caches, scales = cell.to_codes(by_row=False)
    calls["tandem, e4m3"](0)
    check("tandem, e4m3", cell, caches[0], (new.float() / scales[0][0]).to(torch.float8_e4m3fn))
    calls["tandem, e4m3 by row"], caches, scales = cell.to_codes(by_row=True)
    calls["tandem, e4m3 by row"](0)
    factors = scales[0].transpose(2, 3)[..., None].where(cell.expected(new) != 7.0, 1.0)
    check("tandem, e4m3 by row", cell, caches[0].float() * factors, new, 0.07)

    targets = [torch.empty_like(new) for new in cell.new]
    calls["copy"] = lambda i: targets[i].copy_(cell.new[i])

    graphs = {name: InGraph(call, cell.buffers) for name, call in calls.items()}
    times = harness.in_turn(graphs, args.rounds, 0.0)
    us = {name: statistics.median(t) for name, t in times.items()}
    size = {name: 2 * BYTES.get(name, 4) * cell.elements for name in us}
    return {
        "batch": batch,
        "tokens": tokens,
        "buffers": cell.buffers,
        "us": us,
        "gb_per_s": {name: size[name] / t / 1e3 for name, t in us.items()},
        "of_copy_rate": {name: size[name] / size["copy"] * us["copy"] / t for name, t in us.items()},
    }


def main() -> int:
    parser = harness.parser(__doc__, "commit", "json")
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    cells = []
    for batch, tokens in CELLS:
        cells.append(measure(args, batch, tokens))
        us, share = cells[-1]["us"], cells[-1]["of_copy_rate"]
        line = "  ".join(f"{name} {us[name]:.1f} us {share[name]:.2f}" for name in us)
        print(f"{batch:3} x {tokens:6}: {line}", flush=True)
    document = harness.origin(harness.device_name("cuda"), args.commit) | {
        "heads_kv": args.heads_kv,
        "head_dim": args.head_dim,
        "dtype": "bf16",
        "rounds": args.rounds,
        "cells": cells,
    }
    harness.write_json(document, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
