"""Tandem and PyTorch's scaled_dot_product_attention side by side on this machine's CPU.

One process, the same number of threads, both sides in turn on the same tensors. Each side has the layout it
was made for, (batch, heads, seqlen, head_dim) in memory for PyTorch; Tandem reads a transposed view of the
same memory, so neither gains from layout. Both allocate their results in the timed call. PyTorch's backward
is autograd's alone, with the forward pass before the clock starts; Tandem's is attention_backward. Before its
times count, a cell's results are checked against fp64 on sampled rows, Tandem's with every output filled with
NaN beforehand.

    python bench cpu             table on the screen, JSON and plot under build/bench
    python bench cpu --record    also records/cpu.json and .png
    python bench cpu --budget 60 --dtype f32 --head-dim 128 --pass forward
    python bench cpu --joules    also 2 seconds of each side without a pause, for the energy of a call
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cpu_page
import harness
import tandem
import torch
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# A round repeats short calls for this long, so that a cell of 1 ms is measured as carefully as one of 1 s.
ROUND_MS = 30.0
SAMPLED_ROWS = 48


@dataclass(frozen=True)
class Cell:
    """One shape to measure."""

    direction: str  # "forward" or "backward"
    dtype: str
    head_dim: int
    causal: bool
    batch: int
    seqlen: int
    heads: int

    @property
    def flops(self) -> float:
        """2 b h sq sk (d_qk + d_v), half of it if causal, 2.5 times that backward."""
        forward = 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return forward * (0.5 if self.causal else 1.0) * (2.5 if self.direction == "backward" else 1.0)

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.direction} {self.dtype} d{self.head_dim} {mask} batch {self.batch} seqlen {self.seqlen}"
        )


class Arena:
    """The tensors of a cell and one callable a side. PyTorch's names are torch_*, Tandem's tandem_*."""

    def __init__(self, cell: Cell, threads: int) -> None:
        self.cell = cell
        self.threads = threads
        generator = torch.Generator().manual_seed(cell.seqlen * 1000 + cell.head_dim)
        shape = (cell.batch, cell.heads, cell.seqlen, cell.head_dim)

        def random() -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DTYPES[cell.dtype])

        backward = cell.direction == "backward"
        self.q, self.k, self.v = (random().requires_grad_(backward) for _ in range(3))
        self.views = tuple(t.detach().transpose(1, 2) for t in (self.q, self.k, self.v))
        if backward:
            self.dout = random()
            self.out = self.torch_forward()
            self.tandem_out, self.lse = tandem.attention(*self.views, return_lse=True, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.cell.causal, "threads": self.threads}

    def torch_forward(self) -> torch.Tensor:
        return scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.cell.causal)

    def torch_call(self) -> tuple[torch.Tensor, ...]:
        if self.cell.direction == "forward":
            return (self.torch_forward(),)
        return torch.autograd.grad(self.out, (self.q, self.k, self.v), self.dout, retain_graph=True)

    def tandem_call(self, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Results in (batch, heads, seqlen, head_dim), written to `outputs` if given."""
        given = [t.transpose(1, 2) for t in outputs]
        if self.cell.direction == "forward":
            made = (tandem.attention(*self.views, out=given[0] if given else None, **self.options),)
        else:
            gradients = dict(zip(("dq", "dk", "dv"), given, strict=False))
            made = tandem.attention_backward(
                self.dout.transpose(1, 2), *self.views, self.tandem_out, self.lse, **gradients, **self.options
            )
        return tuple(t.transpose(1, 2) for t in made)

    def errors(self) -> tuple[float, float, bool]:
        """PyTorch's and Tandem's largest error on the sample; whether Tandem's is within the contract."""
        poisoned = [torch.full(self.q.shape, float("nan"), dtype=self.q.dtype) for _ in self.torch_names()]
        ours, theirs, right = 0.0, 0.0, True
        references = self.reference()
        for reference, rows, a, b in zip(
            *references, self.tandem_call(*poisoned), self.torch_call(), strict=True
        ):
            error_a = (a.detach()[-1, 0, rows].double() - reference).abs().max().item()
            error_b = (b.detach()[-1, 0, rows].double() - reference).abs().max().item()
            # the contract: 1e-5 in f32 (relative where values exceed 1), twice PyTorch's error + 3e-5 in 16
            # bits
            bound = 1e-5 * max(1.0, reference.abs().max().item())
            if self.cell.dtype != "f32":
                bound = 2.0 * error_b + 3e-5
            right = right and error_a <= bound and not bool(a.isnan().any())
            ours, theirs = max(ours, error_a), max(theirs, error_b)
        return theirs, ours, right

    def torch_names(self) -> tuple[str, ...]:
        return ("out",) if self.cell.direction == "forward" else ("dq", "dk", "dv")

    def reference(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """fp64 results by the plain formula, of the last batch entry's first head, and the rows sampled.

        Keys' gradients need every query's LSE and row sum of dout * out: those are Tandem's own, so that the
        sample costs seqlen times rows and not seqlen squared. The sampled queries check them in passing.
        """
        cell = self.cell
        q, k, v = (t.detach()[-1, 0].double() for t in (self.q, self.k, self.v))
        rows = torch.linspace(0, cell.seqlen - 1, SAMPLED_ROWS).round().long().unique()
        scale = cell.head_dim**-0.5
        keys = torch.arange(cell.seqlen)

        def visible(queries: torch.Tensor, of_keys: torch.Tensor) -> torch.Tensor:
            return of_keys[None, :] <= queries[:, None] if cell.causal else torch.ones(1, 1, dtype=torch.bool)

        scores = (scale * q[rows] @ k.T).masked_fill(~visible(rows, keys), float("-inf"))
        p = scores.softmax(-1)
        if cell.direction == "forward":
            return [p @ v], [rows]
        dout = self.dout[-1, 0].double()
        out = p @ v
        ds = p * (dout[rows] @ v.T - (dout[rows] * out).sum(-1, keepdim=True))
        dq = scale * ds @ k
        lse = self.lse[-1, 0].double()
        delta = (dout * self.tandem_out[-1, :, 0].double()).sum(-1, keepdim=True)
        p = (scale * q @ k[rows].T - lse[:, None]).exp().masked_fill(~visible(keys, rows), 0.0)
        dv = p.T @ dout
        ds = p * (dout @ v[rows].T - delta)
        dk = scale * ds.T @ q
        return [dq, dk, dv], [rows] * 3


def measure(cell: Cell, threads: int, seconds: float, rounds: int, joules: bool) -> dict[str, Any]:
    """Checks the cell, then measures both sides in turn for about `seconds` and at least `rounds` rounds."""
    end = time.perf_counter() + seconds
    arena = Arena(cell, threads)
    *errors, right = arena.errors()  # warms both sides up, too
    sides = {"torch": harness.OnHost(arena.torch_call), "tandem": harness.OnHost(arena.tandem_call)}
    times = harness.in_turn(sides, rounds, ROUND_MS, end - time.perf_counter())
    record: dict[str, Any] = {**asdict(cell), "flops": cell.flops, "right": right}
    for (name, us), error in zip(times.items(), errors, strict=True):
        best, median = min(us) / 1e6, statistics.median(us) / 1e6
        record[name] = {"best": best, "median": median, "calls": len(us), "error": error}
        if joules:
            load = harness.sustained(sides[name], 2.0)
            record[name] |= harness.energy_of(load, cell.flops, cell.batch * cell.seqlen)
            record[name] |= {"watts": load["watts"]} if "watts" in load else {}
    return record


def grid(args: argparse.Namespace) -> list[Cell]:
    """The cells: every batch at every seqlen, up to as many tokens as the longest sequence has."""
    cells = []
    for direction, dtype, head_dim, mask, seqlen, batch in itertools.product(
        args.direction, args.dtype, args.head_dim, args.mask, args.seqlen, args.batch
    ):
        if batch * seqlen <= max(args.tokens, min(args.batch) * seqlen):
            heads = max(1, args.hidden // head_dim)
            cells.append(Cell(direction, dtype, head_dim, mask == "causal", batch, seqlen, heads))
    return cells


def arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__, "joules")
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides (default 2)")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for the whole run (default 600)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each cell at least (default 3)")
    both = ["forward", "backward"]
    parser.add_argument("--pass", dest="direction", nargs="+", choices=both, default=both)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--mask", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--seqlen", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument(
        "--tokens", type=int, default=8192, help="batch * seqlen of a cell at most (default 8192)"
    )
    parser.add_argument("--hidden", type=int, default=512, help="heads * head_dim (default 512)")
    parser.add_argument(
        "--output", type=Path, default=harness.ROOT / "build" / "bench", help="folder of JSON and plot"
    )
    parser.add_argument("--record", action="store_true", help="also write records/cpu.*")
    return parser.parse_args()


def cost(cell: Cell) -> float:
    """A cell's share of the budget: the time both sides take, in any unit, with a floor for small ones."""
    speed = 2.0 if cell.dtype == "bf16" else 1.0
    return cell.flops / speed + 3e9


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    gc.disable()  # nothing here makes cycles, and a collection in a timed call would count
    report = cpu_page.Report(args.threads, tandem.info()["backends"]["cpu"]["target"])
    cells = grid(args)
    total = sum(map(cost, cells))
    for i, cell in enumerate(cells, 1):
        # what is left of the budget, not a fixed part, so that a slow start does not overrun
        remaining = max(0.0, args.budget - report.elapsed())
        record = measure(cell, args.threads, remaining * cost(cell) / total, args.rounds, args.joules)
        total -= cost(cell)
        report.cells.append(record)
        ratio = record["torch"]["best"] / record["tandem"]["best"]
        state = f"{ratio:5.2f}x" if record["right"] else "WRONG RESULT"
        if "joules" in record["tandem"]:
            state += ", J a call {tandem[joules]:.4g}, PyTorch {torch[joules]:.4g}".format(**record)
            state += ", pJ/FLOP {picojoules_per_flop:.4g}".format(**record["tandem"])
            state += ", uJ/token {microjoules_per_token:.4g}".format(**record["tandem"])
        print(f"[{i:3}/{len(cells)}] {cell}: {state}", file=sys.stderr, flush=True)
    if args.joules:
        print(f"energy: {harness.energy_meter(False)[0]}", file=sys.stderr)
    report.finish()
    print(report.markdown())
    for path in report.save(args.output):
        print(f"wrote {path}", file=sys.stderr)
    if args.record:
        for path in report.record():
            print(f"wrote {path}", file=sys.stderr)
    return 0 if all(c["right"] for c in report.cells) else 1


if __name__ == "__main__":
    sys.exit(main())
