"""Score and mask functions on this machine's CPU, beside PyTorch's compiled flex_attention and its SDPA.

One process, the same number of threads, all sides in turn on the same tensors, (batch, heads, seqlen,
head_dim) in memory. Block masks, mask tensors and what PyTorch compiles are made before anything is timed.
SDPA has the mask as a boolean tensor, and what a score function adds as a tensor in q's dtype; a softcap it
has not. FlexAttention has no backward on the CPU, so that SDPA stands alone there. Tandem without a function
stands beside it where it says what a function costs: `causal=True` beside `causal`, and no mask beside
`document`. Backward is autograd's, with the forward pass before the clock starts.

Before its times count, a cell's results are checked against fp64 on sampled rows of one head: Tandem's have
to be within the contract's bounds. Times are medians.

    python bench cpu-functions                                   table on the screen
    python bench cpu-functions --functions causal --seqlens 1024 --pass forward
    python bench cpu-functions --record                          also records/cpu-functions.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import function_kinds
import harness
import tandem
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
PASSES = ("forward", "backward")
SAMPLED_ROWS = 32
FLEX, SDPA, TANDEM = "flex_attention", "sdpa", "tandem"
CAUSAL, FULL = "tandem, causal=True", "tandem, no mask"

Tensors = tuple[torch.Tensor, ...]


class Cell:
    """One function, head dimension, length and dtype: the tensors, and a forward call by contender."""

    def __init__(self, name: str, dtype: str, head_dim: int, seqlen: int, hidden: int, threads: int) -> None:
        torch.manual_seed(seqlen + head_dim)
        self.name, self.dtype, self.head_dim, self.seqlen = name, dtype, head_dim, seqlen
        self.heads = max(1, hidden // head_dim)
        self.score_mod, self.mask_mod = function_kinds.functions(seqlen, self.heads, "cpu")[name]
        shape = (1, self.heads, seqlen, head_dim)
        self.q, self.k, self.v, self.dout = (torch.randn(shape).to(DTYPES[dtype]) for _ in range(4))
        self.pairs = function_kinds.visible_pairs(self.mask_mod, seqlen, "cpu")
        self.threads = threads

    @property
    def leaves(self) -> Tensors:
        return self.q, self.k, self.v

    def contenders(self, direction: str) -> dict[str, Callable[[], torch.Tensor]]:
        """Forward calls, all of which give (batch, heads, seqlen, head_dim)."""
        lengths = (self.seqlen, self.seqlen)
        block_mask = create_block_mask(self.mask_mod, None, None, *lengths, device="cpu")
        mods = {"score_mod": self.score_mod, "block_mask": block_mask}
        calls = {TANDEM: lambda: self.tandem(score_mod=self.score_mod, mask_mod=self.mask_mod)}
        if direction == "forward":
            compiled = torch.compile(flex_attention, dynamic=False)
            calls[FLEX] = lambda: compiled(*self.leaves, **mods)
        if self.name != "softcap":
            mask = self.as_tensor()
            calls[SDPA] = lambda: scaled_dot_product_attention(*self.leaves, attn_mask=mask)
        for beside, plain, causal in (("causal", CAUSAL, True), ("document", FULL, False)):
            if self.name == beside:
                calls[plain] = lambda causal=causal: self.tandem(causal=causal)
        return calls

    def tandem(self, **options: Any) -> torch.Tensor:
        views = (t.transpose(1, 2) for t in self.leaves)
        return tandem.attention(*views, threads=self.threads, **options).transpose(1, 2)

    def as_tensor(self) -> torch.Tensor:
        """What SDPA takes as attn_mask: booleans, or what is added to scores."""
        at = torch.arange(self.seqlen)
        visible = self.mask_mod(0, 0, at[:, None], at[None])
        if self.score_mod is None:
            return visible
        made = torch.empty(1, self.heads, self.seqlen, self.seqlen, dtype=self.q.dtype)
        for h in range(self.heads):
            added = self.score_mod(torch.zeros(()), 0, h, at[:, None], at[None])
            made[0, h] = added.masked_fill(~visible, float("-inf"))
        return made


class Check:
    """fp64 results of the last head on sampled rows, and what the same formula gives in the inputs' dtype."""

    def __init__(self, cell: Cell, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.cell = cell
        self.rows = torch.linspace(0, cell.seqlen - 1, SAMPLED_ROWS).round().long().unique()
        self.out, self.lse = out.detach()[0, -1], lse.detach()[0, -1]

    def formula(self, direction: str, exact: bool) -> list[torch.Tensor]:
        """Out, or dq, dk and dv, of the sampled rows. Not `exact`: products are rounded to the inputs' dtype.

        Keys' gradients need every query's LSE and row sum of dout * out: those are Tandem's own, so that the
        sample costs seqlen times rows and not seqlen squared. The sampled queries check them in passing.
        """
        cell, rows = self.cell, self.rows
        kind = torch.float64 if exact else torch.float32
        q, k, v, dout = (t.detach()[0, -1].to(kind) for t in (*cell.leaves, cell.dout))
        every = torch.arange(cell.seqlen)

        def rounded(x: torch.Tensor) -> torch.Tensor:
            return x if exact else x.to(cell.q.dtype).to(kind)

        def logits(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            s = (rounded(q[queries] @ k[keys].T) * cell.head_dim**-0.5).requires_grad_()
            at = cell.heads - 1, queries[:, None], keys[None]
            made = s if cell.score_mod is None else cell.score_mod(s, 0, *at)
            visible = cell.mask_mod(0, *at)
            return s, made.masked_fill(~visible, float("-inf"))

        def score_gradient(s: torch.Tensor, made: torch.Tensor, p: torch.Tensor, dp: torch.Tensor) -> Any:
            (ds,) = torch.autograd.grad(made, s, p * dp)
            return rounded(ds) * cell.head_dim**-0.5

        s, made = logits(rows, every)
        p = rounded(made.detach().softmax(-1))
        out = p @ v
        if direction == "forward":
            return [rounded(out)]
        dp = rounded(dout[rows] @ v.T) - (dout[rows] * out).sum(-1, keepdim=True)
        dq = score_gradient(s, made, p, dp) @ k
        s, made = logits(every, rows)
        p = rounded((made.detach() - self.lse[:, None].to(kind)).exp())
        dp = rounded(dout @ v[rows].T) - (dout * self.out.to(kind)).sum(-1, keepdim=True)
        return [rounded(x) for x in (dq, score_gradient(s, made, p, dp).T @ q, p.T @ dout)]

    def errors(self, direction: str, results: dict[str, Tensors]) -> tuple[dict[str, float], bool]:
        """The largest errors, relative to the largest number of each tensor; whether Tandem's are right."""
        references, yardsticks = (self.formula(direction, exact) for exact in (True, False))
        errors, right = {}, True
        for name, got in results.items():
            errors[name] = 0.0
            for t, reference, yardstick in zip(got, references, yardsticks, strict=True):
                largest = reference.abs().max().item()
                error = (t.detach()[0, -1, self.rows].double() - reference).abs().max().item()
                # the contract: 1e-5 in f32 (relative where values exceed 1), twice the formula's own error in
                # 16 bits + 3e-5
                bound = 1e-5 * max(1.0, largest)
                if self.cell.dtype != "f32":
                    bound = 2.0 * (yardstick.double() - reference).abs().max().item() + 3e-5
                if name == TANDEM:
                    right = right and error <= bound and not bool(t.isnan().any())
                errors[name] = max(errors[name], error / largest)
        return errors, right


def measure(args: argparse.Namespace, cell: Cell, direction: str) -> dict[str, Any]:
    torch._dynamo.reset()
    backward = direction == "backward"
    for leaf in cell.leaves:
        leaf.requires_grad_(backward)
    calls = cell.contenders(direction)
    with torch.set_grad_enabled(backward):
        outs = {name: call() for name, call in calls.items()}
    same = {name: out for name, out in outs.items() if name != FULL}
    detached = (t.detach() for t in cell.leaves)
    _, lse = tandem.flex_attention(*detached, cell.score_mod, cell.mask_mod, return_lse=True)
    results: dict[str, Tensors] = {name: (out,) for name, out in same.items()}
    if backward:
        calls = {
            name: lambda out=out: torch.autograd.grad(out, cell.leaves, cell.dout, retain_graph=True)
            for name, out in outs.items()
        }
        results = {name: calls[name]() for name in same}
    errors, right = Check(cell, outs[TANDEM], lse).errors(direction, results)
    with torch.set_grad_enabled(backward):
        sides = {name: harness.OnHost(call) for name, call in calls.items()}
        times = harness.in_turn(sides, args.rounds, args.round_ms)
    return {
        "pass": direction,
        "function": cell.name,
        "dtype": cell.dtype,
        "head_dim": cell.head_dim,
        "heads": cell.heads,
        "seqlen": cell.seqlen,
        "area": cell.pairs / cell.seqlen**2,
        "ms": {name: statistics.median(t) / 1000 for name, t in times.items()},
        "calls": {name: len(t) for name, t in times.items()},
        "errors": errors,
        "right": right,
    }


def times(cell: dict[str, Any], which: str) -> float | None:
    """How many times Tandem's time another contender takes."""
    ms = cell["ms"]
    return ms[which] / ms[TANDEM] if which in ms else None


def table(cells: list[dict[str, Any]]) -> list[str]:
    def ms(cell: dict[str, Any], which: str) -> str:
        return f"{cell['ms'][which]:.2f}" if which in cell["ms"] else ""

    def ratio(cell: dict[str, Any], which: str) -> str:
        found = times(cell, which)
        return "" if found is None else f"{found:.2f}"

    def beside(cell: dict[str, Any]) -> str:
        if CAUSAL in cell["ms"]:
            return f"{cell['ms'][TANDEM] / cell['ms'][CAUSAL]:.2f} of causal=True"
        if FULL in cell["ms"]:
            of_full = cell["ms"][TANDEM] / cell["ms"][FULL]
            return f"{of_full:.2f} of no mask, area {cell['area']:.2f}"
        return ""

    header = ("function", "dtype", "d", "seqlen", "Tandem ms", "flex ms", "SDPA ms", "flex / Tandem")
    rows = [
        [
            c["function"],
            c["dtype"],
            c["head_dim"],
            c["seqlen"],
            *(ms(c, which) for which in (TANDEM, FLEX, SDPA)),
            *(ratio(c, which) for which in (FLEX, SDPA)),
            beside(c) if c["right"] else "**WRONG**",
        ]
        for c in cells
    ]
    return harness.markdown_table([*header, "SDPA / Tandem", "the function's cost"], rows, rule="--:|")


def summary(cells: list[dict[str, Any]]) -> list[str]:
    rows = []
    for direction in PASSES:
        for which, goal in ((FLEX, 2.0), (SDPA, 1.0)):
            found = [x for c in cells if c["pass"] == direction and (x := times(c, which)) is not None]
            if found:
                mean, below = harness.geometric_mean(found), sum(x < goal for x in found)
                rows.append([direction, which, len(found), f"{mean:.2f}", f"{min(found):.2f}", goal, below])
    header = ("pass", "beside", "cells", "geometric mean", "least", "goal", "cells below it")
    return harness.markdown_table(header, rows, rule="--:|")


def page(document: dict[str, Any]) -> str:
    lines = [
        "# Functions on scores on the CPU",
        "",
        f"- Machine: {document['device']}; {document['threads']} threads on every side",
        f"- Commit: {document['commit']}; PyTorch {document['torch']}; Command: `{document['command']}` "
        f"({document['date']})",
        "",
        "One process, all sides in turn on the same tensors, medians. Block masks, mask tensors and what",
        "PyTorch compiles are made before the clock starts. SDPA has the function as a tensor (a softcap",
        "cannot be one). FlexAttention has no backward on the CPU. Results were checked against fp64 first.",
        "",
        *summary(document["cells"]),
    ]
    for direction in PASSES:
        cells = [c for c in document["cells"] if c["pass"] == direction]
        if cells:
            lines += ["", f"## {direction.capitalize()}", "", *table(cells)]
    return "\n".join([*lines, ""])


def arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__, "json")
    names = list(function_kinds.NAMES)
    parser.add_argument("--functions", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--pass", dest="directions", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--hidden", type=int, default=512, help="heads * head_dim (default 512)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every side (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each contender (default 5)")
    parser.add_argument("--round-ms", type=float, default=40.0, help="of a contender, at least (default 40)")
    parser.add_argument("--record", action="store_true", help="write records/cpu-functions.json")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    gc.disable()  # a collection in a timed call would count
    cells = []
    for direction in args.directions:
        for name in args.functions:
            for dtype in args.dtypes:
                for head_dim in args.head_dims:
                    for seqlen in args.seqlens:
                        cell = Cell(name, dtype, head_dim, seqlen, args.hidden, args.threads)
                        start = time.perf_counter()
                        cells.append(measure(args, cell, direction))
                        seconds = time.perf_counter() - start
                        line = table(cells[-1:])[2]
                        print(f"{direction} {line} {seconds:.0f} s", file=sys.stderr, flush=True)
    document = {**harness.origin(harness.machine()), "threads": args.threads, "cells": cells}
    print(page(document))
    harness.write_json(document, args.json)
    if args.record:
        harness.write_json(document, harness.RECORDS / "cpu-functions.json")
    return 0 if all(c["right"] for c in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
