"""The figures of README.md and docs/performance.md, computed from records/*.json.

`python bench gpu-pages` writes them; tests/test_readme_numbers.py allows no other number there. Shares are
rounded as `harness.ratio` says, and compared with goals before that.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gpu_tables
import harness
from gpu_tables import of, of_best
from harness import geometric_mean, markdown_table, ratio, result

H2H = "gpu-head-to-head-h200"
BEST = "the fastest peer"


@dataclass
class Row:
    """A line of a table: Tandem's rate over another's in several cells of one run."""

    what: str
    page: str  # below docs/
    beside: str
    shares: list[float]
    mean_goal: float | None = None
    goal: float | None = None  # of every cell
    digits: int = 2

    def goals(self) -> list[float]:
        return [1.0, *(g for g in (self.mean_goal, self.goal) if g)]

    def show(self, share: float) -> str:
        return ratio(share, self.digits, self.goals())

    def figures(self) -> list[str]:
        mean = self.show(geometric_mean(self.shares))
        if len(self.shares) == 1:
            return [mean, "", ""]
        return [mean, self.show(min(self.shares)), self.show(max(self.shares))]

    def outcome(self) -> list[str]:
        """The goal, and whether it is reached."""
        wanted, missed = [], []
        if self.mean_goal:
            wanted.append(f"mean {self.mean_goal:.2f}")
            if geometric_mean(self.shares) < self.mean_goal:
                missed.append("mean")
        if self.goal:
            wanted.append(f"each {self.goal:.2f}")
            if below := sum(share < self.goal for share in self.shares):
                missed.append(f"{below} of {len(self.shares)}")
        return [", ".join(wanted), "missed: " + ", ".join(missed) if missed else "reached" if wanted else ""]


def table(rows: Iterable[Row]) -> list[str]:
    return markdown_table(
        ["Tandem's rate", "beside", "cells", "mean", "least", "most", "goal", ""],
        (
            [f"[{row.what}]({row.page})", row.beside, len(row.shares), *row.figures(), *row.outcome()]
            for row in rows
        ),
    )


def grid() -> list[Row]:
    """The paper's grid on an H200, with FlashAttention-3 in the run."""
    d, page = result(H2H), f"results/{H2H}.md"
    longer = {which: [c for c in d[which] if c["seqlen"] >= 2048] for which in ("forward", "backward")}
    short = [of_best(c) for c in d["forward"] if c["seqlen"] < 2048]
    cudnn = [of(c, "cudnn") for c in d["forward"]]

    def fa3(cells: list[Any]) -> list[float]:
        return [of(c, "fa3") for c in cells]

    return [
        Row("forward, bf16", f"{page}#forward", BEST, [of_best(c) for c in d["forward"]], 1.05, 1.0, 3),
        Row("forward of 512 and 1024 tokens", f"{page}#forward", BEST, short, goal=1.1, digits=3),
        Row("forward from 2048 tokens on", f"{page}#forward", "FA3", fa3(longer["forward"]), digits=3),
        Row("forward, the whole grid", f"{page}#forward", "cuDNN", cudnn, digits=3),
        Row("forward with windows, grouped heads", f"{page}#windows", "FA3", fa3(d["windows"]), digits=3),
        Row("under continuous load", f"{page}#continuous-load", "FA3", fa3(d["sustained"]), digits=3),
        Row("backward, bf16", f"{page}#backward", BEST, [of_best(c) for c in d["backward"]], 1.15, 1.0, 3),
        Row("backward from 2048 tokens on", f"{page}#backward", "FA3", fa3(longer["backward"]), digits=3),
        Row("forward, e4m3 tensors", f"{page}#forward-e4m3", "FA3", fa3(d["fp8"]), 1.15, 1.0, 3),
    ]


def eight_bits() -> list[Row]:
    """Whole calls and kernels; gradients at head dimension 128 from 8192 keys on, where goals are."""

    def rates(record: str, name: str, other: str, least: int = 0, **of: int) -> list[float]:
        cells = result(f"gpu-{record}")["precision"]
        taken = (c["tflops"] for c in cells if c["seqlen"] >= least and of.items() <= c.items())
        return [t[name] / t[other] for t in taken]

    def trained(name: str, other: str, **of: int) -> list[float]:
        return rates("gradients-8-bit-h200", name, other, 8192, head_dim=128, **of)

    h200, h100 = ([f"low-precision-{gpu}", "fp8 whole", "16-bit", 4096] for gpu in ("h200", "h100"))
    int8 = rates("low-precision-h200", "int8 whole", "16-bit", 1024)
    alone = rates("low-precision-h200", "int8 kernel", "fp8 kernel")
    full, causal = (trained("int8 whole", "16-bit", causal=causal) for causal in (0, 1))
    both = trained("int8 with forward", "16-bit with forward", seqlen=16384)
    page, gradients = "results/gpu-low-precision.md", "results/gradients-in-8-bits.md#on-hopper"
    return [
        Row("`fp8`, H200, from 4096 keys on", f"{page}#h200", "bf16", rates(*h200), goal=1.0),
        Row("`int8`, from 1024 keys on", f"{page}#h200", "bf16", int8),
        Row("`int8`, the kernel alone", f"{page}#h200", "`fp8`, the kernel alone", alone, mean_goal=0.85),
        Row("`fp8`, H100, from 4096 keys on", f"{page}#h100", "bf16", rates(*h100), goal=1.0),
        Row("`int8` gradients, full", gradients, "bf16", full, goal=1.15),
        Row("`int8` gradients, causal", gradients, "bf16", causal, goal=1.05),
        Row("`int8` gradients", gradients, "cuDNN's FP8", trained("int8 whole", "cudnn fp8"), goal=1.2),
        Row("with forward, 16,384 keys", gradients, "bf16", both, goal=1.15),
    ]


def of_time(cells: list[Any], name: str, other: str) -> list[float]:
    return [c["us"][other] / c["us"][name] for c in cells if other in c["us"]]


def generation() -> list[Row]:
    rows, lengths, device = [], "tandem, lengths", "decoding with lengths on the device"
    for gpu, page in (("H200", "results/gpu-decode.md"), ("H100", "results/gpu-decode.md#h100")):
        cells = result(f"gpu-decode-{gpu.lower()}")["cells"]
        long = [c for c in cells if c["seqlen"] >= 8192]
        mixes = result(f"gpu-decode-{gpu.lower()}")["mixes"]
        copies = [m["us_of_a_copys_rate"] / m["us"] for m in mixes]
        rows += [
            Row(f"decoding, {gpu}", page, "cuDNN", of_time(cells, "tandem", "cudnn"), goal=1.0),
            Row(f"{device}, {gpu}", page, "cuDNN", of_time(cells, lengths, "cudnn"), goal=1.0),
            Row("pages of 64", page, "rows in order", of_time(cells, "tandem, pages", lengths), goal=0.95),
            Row("e4m3 from 8192 keys", page, "bf16", of_time(long, "tandem, e4m3", lengths), goal=1.7),
            Row("very unequal lengths", page, "a copy", copies, goal=0.87),
        ]
    d, fa3 = result(H2H), of_time(result("gpu-decode-h200")["cells"], lengths, "fa3")
    appended = [c["of_copy_rate"] for c in result("gpu-append-h200")["cells"] if c["tokens"] >= 16384]
    rows += [
        Row(f"{device}, H200", f"results/{H2H}.md#decoding", "FA3", fa3),
        Row(
            "in vLLM, 48 prompts of 6000",
            f"results/{H2H}.md#in-an-engine",
            "its FA3",
            gpu_tables.engine_shares(d["engine"][2]),
        ),
        Row(
            "appending 16,384 tokens and more, H200",
            "results/gpu-append-h200.md",
            "a copy",
            [shares["tandem"] for shares in appended],
            goal=1.0,
        ),
    ]
    return rows


def others() -> list[Row]:
    functions = result("gpu-functions-h200")["cells"]
    rows = [
        Row(
            f"score and mask functions, H200, {which}",
            "results/gpu-functions-h200.md",
            "compiled `flex_attention`",
            [c[which]["times_flex_attention"] for c in functions],
            goal=2.0,
        )
        for which in ("forward", "backward")
    ]
    rows += [
        Row(
            f"kernels for other GPUs, on an H200, {which}",
            f"kernels/{page}.md#measured-on-a-hopper-gpu",
            "FlashAttention-2",
            [of(c, "fa2") for c in result(f"gpu-{which}-sm80-h200")["cells"]],
            mean_goal=1.0,
            goal=0.9,
        )
        for which, page in (("forward", "sm80"), ("backward", "sm80-backward"))
    ]
    runs = result("gpu-context-parallel-4-h200")["runs"]
    measured = [c for run in runs for c in run["cells"]]
    page, one = "results/context-parallel.md", "one GPU"
    for tokens, goal in ((8192, 0.9), (32768, 0.95)):
        for which, name in (("forward", "forward"), ("both", "and backward")):
            found = [
                c["share"]["gather"]
                for c in measured
                if (c["tokens"], c["documents"], c["pass"]) == (tokens, "one sequence", which)
            ]
            what = f"a sequence over four H200s, {tokens} tokens each, {name}; each run"
            rows.append(Row(what, page, one, found, goal=goal))
    packed = [c["share"]["gather"] for c in runs[-1]["cells"] if c["documents"] != "one sequence"]
    rows.append(Row("packed sequences over four H200s, 8192 tokens each", page, one, packed, goal=0.8))
    return rows


def cpu() -> list[Row]:
    rows = []
    for which in ("forward", "backward"):
        for dtype in ("f32", "bf16"):
            shares = [
                c["torch"]["best"] / c["tandem"]["best"]
                for c in result("cpu")["cells"]
                if (c["direction"], c["dtype"]) == (which, dtype)
            ]
            rows.append(Row(f"{which}, {dtype}", "results/cpu.md", "PyTorch", shares))
    decode = result("cpu-decode")["cells"]
    page = "results/cpu.md#decoding"
    rows += [
        Row("decoding", page, "PyTorch", [c["torch"]["us"] / c["contiguous"]["us"] for c in decode]),
        Row(
            "decoding",
            page,
            "plain reads",
            [c["contiguous"]["gb_s"] / c["read"]["gb_s"] for c in decode],
            goal=0.8,
        ),
    ]
    for dtype in ("f32", "bf16"):
        shares = [
            c["ms"]["flex_attention"] / c["ms"]["tandem"]
            for c in result("cpu-functions")["cells"]
            if c["pass"] == "forward" and c["dtype"] == dtype and "flex_attention" in c["ms"]
        ]
        what = f"score and mask functions, {dtype}, AVX2"
        rows.append(
            Row(what, "results/cpu.md#functions-on-scores", "compiled `flex_attention`", shares, goal=2.0)
        )
    return rows


def speed() -> str:
    """README's choice."""
    forward, backward, eight = (grid()[i].figures() for i in (0, 6, 8))
    return (
        f"On an H200 the forward pass in bf16 has {forward[0]} of the rate of the fastest peer "
        f"in the mean, {forward[1]} to {forward[2]} by cell; the backward pass {backward[0]} ({backward[1]} "
        f"to {backward[2]}), and forward on e4m3 tensors {eight[0]} of FA3's. Forward in bf16 has "
        f"{cpu()[1].figures()[0]} times PyTorch's rate on an EPYC (AVX-512), "
        f"{harness.ratio(harness.geometric_mean(beside_torch('forward')))} on a Xeon (AMX)."
    )


#: What a program would run in Tandem's place; other rows compare a call with a bound or with another call.
OTHERS = (BEST, "FA3", "its FA3", "cuDNN", "FlashAttention-2", "PyTorch", "compiled `flex_attention`")


def slower() -> list[str]:
    """Every row in which a peer is faster in some cell."""
    rows = [row for row in (*grid(), *generation(), *others(), *cpu()) if row.beside in OTHERS]
    return markdown_table(
        ["what", "beside", "slower in", "mean", "least"],
        (
            [
                f"[{row.what}]({row.page})",
                row.beside,
                f"{below} of {len(row.shares)}",
                row.show(geometric_mean(row.shares)),
                row.show(min(row.shares)),
            ]
            for row in rows
            if (below := sum(share < 1 for share in row.shares))
        ),
    )


def errors() -> str:
    found = result("low-precision-h100")["precision"]
    settings = ("fp8", "int8")
    layers = [name for name in found if name.startswith("minilm")]

    def times(inputs: str, setting: str) -> float:
        return found[inputs]["fp8 tensor"] / found[inputs][setting]

    paper = [f"{times('paper', setting):.1f}" for setting in settings]
    ranges = []
    for setting in settings:
        each = [times(layer, setting) for layer in layers]
        ranges.append(f"{min(each):.1f} to {max(each):.1f}")
    return (
        "One e4m3 scale a tensor errs {} times as much as `fp8` and {} times as much as `int8` on outliers "
        "like the paper's; on the real Q, K, V of a sentence encoder {} and {} times "
        "([errors](results/low-precision-accuracy.md))."
    ).format(*paper, *ranges)


def latent_and_short() -> str:
    best = {gpu: max(r["tflops"] for r in result(f"gpu-decode-{gpu}")["latent"]) for gpu in ("h200", "h100")}
    short = [result(f"gpu-decode-{gpu}")["cells"][0]["us"]["tandem"] for gpu in ("h200", "h100")]
    return (
        f"One sequence of 1024 keys takes {short[0]:.1f} us on an H200 and {short[1]:.1f} on an H100 "
        f"(goal: 8). "
        f"Latent vectors (MLA) reach {best['h200']:.0f} and {best['h100']:.0f} TFLOP/s (goal: 600)."
    )


def ranks_now() -> str:
    runs = result("gpu-context-parallel-chunks")["runs"]
    cells = [(r, c) for r in runs if r["ranks"] == 4 for c in r["cells"]]

    def share(tokens: int, which: str, name: str) -> str:
        goal = 0.9 if tokens == 8192 else 0.95
        (found,) = (
            c["share"][name]
            for _, c in cells
            if (c["tokens"], c["documents"], c["pass"]) == (tokens, "one sequence", which)
            and name in c["share"]
        )
        return ratio(found, goals=(goal, 1.0))

    return (
        f"Since those runs rows are sent from where they lie. A sequence of 8192 tokens each has so "
        f"{share(8192, 'forward', 'gather in 8')} of one GPU's rate [on four "
        f"H100s](results/context-parallel.md#chunks-of-heads), and "
        f"{share(8192, 'both', 'gather in 1,7/8')} with the backward pass."
    )


def loss() -> str:
    losses = result("loss-curves-h100")["losses"]
    steps = len(losses["math"][0])

    def smooth(curve: list[float]) -> list[float]:
        return [statistics.fmean(curve[i : i + 20]) for i in range(steps - 19)]

    def apart(a: list[float], b: list[float]) -> float:
        return statistics.fmean(abs(x - y) for x, y in zip(smooth(a), smooth(b), strict=True))

    ours, seeds = apart(losses["tandem"][0], losses["math"][0]), apart(*losses["math"])
    return (
        f"Loss curves [on an H100](results/python.md#learns-the-same) are those of PyTorch's math "
        f"attention: "
        f"{ours:.4f} nats apart over {steps} steps, where two seeds are {seeds:.2f} apart."
    )


def host() -> str:
    us = result("python-overhead-h200")["us"]
    ways = ("", ", recorded", ", forward and backward")
    ours, recorded, both = (us["flash_attn_func" + way] for way in ways)
    theirs, their_recorded, their_both = (us["sdpa" + way] for way in ways)
    h100 = result("python-overhead-h100")["us"]["flash_attn_func"]
    return (
        f"A forward call from Python takes {ours:.1f} us of the host's time beside an H200 (goal: 15; "
        f"{h100:.0f} on the H100's host), sdpa's {theirs:.1f}; recorded for a backward pass {recorded:.1f} "
        f"and {their_recorded:.1f}, forward and backward {both:.0f} and {their_both:.0f}."
    )


def beside_torch(direction: str) -> list[float]:
    """PyTorch's times over Tandem's on an Intel CPU with AMX."""
    cells = [c for c in result("cpu-amx")["cells"] if c["direction"] == direction]
    return [c["torch"]["best"] / c["tandem"]["best"] for c in cells]


def xeon() -> str:
    forward, backward = (
        f"{harness.ratio(harness.geometric_mean(shares))} ({harness.ratio(min(shares))} at least)"
        for shares in map(beside_torch, ("forward", "backward"))
    )
    return (
        f"**On an Intel CPU with AMX** bf16 runs on the matrix unit, forward with {forward} of PyTorch's "
        f"rate, backward with {backward} ([by cell](results/cpu.md#with-a-matrix-unit))."
    )


def prose(made: Callable[[], str]) -> Callable[[], list[str]]:
    return lambda: textwrap.wrap(made(), 110, break_on_hyphens=False, break_long_words=False)


#: What a page may name.
TABLES: dict[str, Callable[[], list[str]]] = {
    "speed": prose(speed),
    "slower": slower,
    "8 bits": lambda: table(eight_bits()),
    "grid": lambda: table(grid()),
    "generation": lambda: table(generation()),
    "others": lambda: table(others()),
    "cpu": lambda: table(cpu()),
    "errors": prose(errors),
    "short and latent": prose(latent_and_short),
    "ranks now": prose(ranks_now),
    "loss": prose(loss),
    "host": prose(host),
    "xeon": prose(xeon),
}
