"""Tables of the documentation, each from the JSON of one benchmark on a GPU (`gpu_pages.py` writes them)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from harness import energy_of, geometric_mean, markdown_table, ratio

Document = dict[str, Any]
PEERS = ("fa3", "cudnn", "fa2")
#: The library's own recipes of 8 bits, and the one that they are compared with.
RECIPES = ("fp8 tensor", "fp8", "fp8 strict", "int8", "int8 strict")


def mask_of(cell: Document) -> str:
    return "causal" if cell["causal"] else "full"


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def right(header: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    return markdown_table(header, rows, rule="--:|")


def by_length(cells: list[Document], show: Callable[[Document], str]) -> list[str]:
    """A row a head dimension and mask, a column a length."""
    seqlens = sorted({c["seqlen"] for c in cells})
    rows: dict[tuple[int, str], dict[int, str]] = {}
    for c in cells:
        rows.setdefault((c["head_dim"], mask_of(c)), {})[c["seqlen"]] = show(c)
    header = ["head_dim", "mask", *(number(s) if s > 9999 else s for s in seqlens)]
    return right(header, ([*key, *(row.get(s, "-") for s in seqlens)] for key, row in rows.items()))


def comes_to(ratios: list[float], digits: int = 2) -> str:
    """A sentence on the shares of a table. What reaches 1 is counted before anything is rounded."""
    return (
        f"Geometric mean of the shares: {geometric_mean(ratios):.3f}; least: "
        f"{ratio(min(ratios), digits)}; at 1.00 or more: {sum(x >= 1 for x in ratios)} of {len(ratios)}."
    )


def of_best(cell: Document) -> float:
    """Tandem's rate over that of the fastest other in the same run."""
    return cell["tflops"]["tandem"] / max(cell["tflops"][name] for name in PEERS if name in cell["tflops"])


def of(cell: Document, peer: str) -> float:
    return cell["tflops"]["tandem"] / cell["tflops"][peer]


def beside_cudnn(document: Document) -> list[str]:
    """What a grid comes to, in a sentence."""
    return [comes_to([of(c, "cudnn") for c in document["cells"] if "cudnn" in c["tflops"]])]


def beside_fa3(which: str) -> Callable[[Document], list[str]]:
    """The grid of one pass, as a share of the fastest peer's rate, and what it comes to."""

    def table(document: Document) -> list[str]:
        cells = document[which]
        lines = by_length(cells, lambda c: f"{c['tflops']['tandem']:.0f}, {ratio(of_best(c), 3)}")
        of_fa3 = [of(c, "fa3") for c in cells]
        longer = [of(c, "fa3") for c in cells if c["seqlen"] >= 2048]
        return [
            *lines,
            "",
            comes_to([of_best(c) for c in cells], 3),
            f"Beside FA3 alone: {geometric_mean(of_fa3):.3f}, from 2048 tokens on "
            f"{geometric_mean(longer):.3f}.",
        ]

    return table


def fp8_sums(document: Document) -> list[str]:
    rows = (
        [c["head_dim"], c["seqlen"], *(f"{100 * c['error'][name]:.2g} %" for name in ("tandem", "fa3"))]
        for c in document["fp8_sums"]
    )
    return right(["head_dim", "keys", "Tandem", "FA3"], rows)


def windows(document: Document) -> list[str]:
    rows = (
        [c["head_dim"], f"{c['heads']} on {c['heads_kv']}", c["seqlen"], c["window"] or "causal"]
        + [number(c["tflops"].get(name), 1) for name in ("tandem", "fa3")]
        + [ratio(of(c, "fa3"))]
        for c in document["windows"]
    )
    return right(["head_dim", "heads", "seqlen", "window", "Tandem", "FA3", "of FA3"], rows)


def sustained(document: Document) -> list[str]:
    rows = (
        [c["pass"], c["head_dim"], mask_of(c)]
        + [f"{c['tflops'][name]:.1f}" for name in ("tandem", "fa3", "cudnn")]
        + [ratio(of(c, "fa3"), 3), ratio(c["joules"]["tandem"] / c["joules"]["fa3"], 3)]
        for c in document["sustained"]
    )
    return right(["pass", "head_dim", "mask", "Tandem", "FA3", "cuDNN", "of FA3", "joules, of FA3's"], rows)


def energy(document: Document) -> list[str]:
    said, heads, seqlen, batch, head_dim = [], 16, 8192, 2, 128
    shape, tokens = {"head_dim": head_dim, "causal": 1, "seqlen": seqlen}, batch * seqlen
    for what, factor in (("forward", 1.0), ("backward", 2.5)):
        (cell,) = [c for c in document["sustained"] if {"pass": what, **shape}.items() <= c.items()]
        flops = factor * 2 * heads * batch * seqlen**2 * head_dim
        found = energy_of({"joules": cell["joules"]["tandem"]}, flops, tokens)
        said.append(
            f"{what} {found['joules']:.2f} J, which are {found['picojoules_per_flop']:.2f} pJ a FLOP and "
            f"{found['microjoules_per_token']:.0f} uJ a token (FA3: {cell['joules']['fa3']:.2f} J)"
        )
    layer = f"A causal layer of {heads} heads of {head_dim} on {batch} sequences of {seqlen} tokens"
    return textwrap.wrap(f"{layer} costs on an H200 in bf16 {said[0]}; {said[1]}.", 110)


def decode_beside_fa3(document: Document) -> list[str]:
    """Rows of gpu-decode with lengths on the device, as FlashAttention-3 has them."""
    ours = "tandem, lengths"
    rows = (
        [c["batch"], number(c["seqlen"])]
        + [number(c["us"][name], 1) for name in (ours, *PEERS)]
        + [ratio(c["us"][name] / c["us"][ours]) for name in ("fa3", "cudnn")]
        for c in document["cells"]
    )
    return right(["batch", "keys", "Tandem", "FA3", "cuDNN", "FA2", "of FA3", "of cuDNN"], rows)


def engine(document: Document) -> list[str]:
    rows = (
        [
            e["phase"],
            e["unit"],
            f"{e['tandem']:g}" if "tandem" in e else "-",
            f"{e['fa3']:g}" if "fa3" in e else "-",
            " to ".join(ratio(share) for share in engine_shares(e)),
        ]
        for e in document["engine"]
    )
    return right(["phase", "unit", "Tandem", "vLLM's FA3", "of its rate"], rows)


def engine_shares(entry: Document) -> list[float]:
    return entry["of_fa3"] if "of_fa3" in entry else [entry["fa3"] / entry["tandem"]]


def prompts_on_pages(document: Document) -> list[str]:
    return right(["keys and values", "TFLOP/s"], document["pages"].items())


def host(document: Document) -> list[str]:
    """Rows of host-overhead: microseconds of a call."""
    us = document["us"]
    calls = {
        "forward": ("flash_attn_func", "sdpa"),
        "forward with LSE": ("flash_attn_func, with LSE", ""),
        "forward, packed": ("flash_attn_varlen_func", ""),
        "forward, recorded for a backward pass": ("flash_attn_func, recorded", "sdpa, recorded"),
        "forward and backward": ("flash_attn_func, forward and backward", "sdpa, forward and backward"),
        "forward and backward of eight calls in a compiled graph": (
            "attention, 8 compiled",
            "sdpa, 8 compiled",
        ),
        "a window": ("attention, a window", ""),
        "a window as a function": ("attention, a window as a function", ""),
        "documents as a function, which read an array": ("attention, documents as a function", ""),
    }
    rows = (
        [what, f"{us[ours]:.1f}", f"{us[theirs]:.1f}" if theirs else ""]
        for what, (ours, theirs) in calls.items()
        if ours in us
    )
    return right(["call", "Tandem", "PyTorch's SDPA"], rows)


def steps(document: Document) -> list[str]:
    """Rows of gpu-decode: one query a sequence."""
    columns = {
        "Tandem": "tandem",
        "lengths": "tandem, lengths",
        "pages 64": "tandem, pages",
        "16": "tandem, pages of 16",
        "`split_size`": "tandem, split_size",
        "e4m3": "tandem, e4m3",
        "FA3": "fa3",
        "cuDNN": "cudnn",
        "FA2": "fa2",
    }
    cells = document["cells"]
    columns = {head: name for head, name in columns.items() if any(name in c["us"] for c in cells)}
    rows = (
        [c["batch"], number(c["seqlen"]), *(number(c["us"].get(name), 1) for name in columns.values())]
        + [number(c["gb_per_s"]["tandem, lengths"])]
        for c in cells
    )
    return right(["batch", "keys", *columns, "GB/s, lengths"], rows)


def mixes(document: Document) -> list[str]:
    """Rows of gpu-decode: very unequal lengths, beside a copy's rate."""
    rows = (
        [
            " + ".join(f"{count} x {number(keys)}" for count, keys in m["lengths"]),
            *(f"{m[name]:.1f}" for name in ("us", "us_of_a_copys_rate")),
            ratio(m["us"] / m["us_of_a_copys_rate"]),
        ]
        for m in document["mixes"]
    )
    return right(["lengths", "Tandem", "at a copy's rate", "ratio"], rows)


def latent(document: Document) -> list[str]:
    """Rows of gpu-decode: latent vectors."""
    rows = (
        [row["batch"], number(row["seqlen"]), row["queries"], number(row["us"]["tandem"])]
        + [number(row["us"]["pytorch"]), number(row["tflops"]), number(row["gb_per_s"])]
        + [ratio(row["share_of_copy_rate"])]
        for row in document["latent"]
    )
    return right(["batch", "keys", "queries", "us", "PyTorch", "TFLOP/s", "GB/s", "of a copy"], rows)


APPENDS = {
    "contiguous": "tandem",
    "pages 64": "tandem, pages of 64",
    "16": "tandem, pages of 16",
    "slots": "tandem, slots",
    "rotary": "tandem, rotary",
    "e4m3": "tandem, e4m3",
    "e4m3 by row": "tandem, e4m3 by row",
    "`index_put_`": "pytorch, index_put_",
}


def append_times(document: Document) -> list[str]:
    rows = (
        [f"{c['batch']} x {number(c['tokens'])}", *(f"{c['us'][name]:.1f}" for name in APPENDS.values())]
        + [f"{c['us']['copy']:.1f}"]
        for c in document["cells"]
    )
    return right(["tokens", *APPENDS, "copy"], rows)


def append_shares(document: Document) -> list[str]:
    rows = (
        [f"{c['batch']} x {number(c['tokens'])}", *(ratio(c["of_copy_rate"][n]) for n in APPENDS.values())]
        for c in document["cells"]
    )
    return right(["tokens", *APPENDS], rows)


def functions(document: Document) -> list[str]:
    """Rows of gpu-functions: TFLOP/s, and times the rate of flex_attention."""
    lengths = sorted({c["seqlen"] for c in document["cells"]})
    rows: dict[tuple[int, str], list[str]] = {}
    for which in ("forward", "backward"):
        for c in sorted(document["cells"], key=lambda c: c["seqlen"]):
            times = ratio(c[which]["times_flex_attention"], goals=(1, 2))
            rows.setdefault((c["head_dim"], c["function"]), []).append(
                f"{number(c[which]['tflops']['tandem'])}, {times}"
            )
    header = [f"{which}, {number(n)} keys" for which in ("forward", "backward") for n in lengths]
    return right(["head_dim", "function", *header], ([*key, *row] for key, row in rows.items()))


def sm80(document: Document) -> list[str]:
    """Rows of gpu-speed with the kernels for other GPUs."""

    def show(c: Document) -> str:
        return f"{c['tflops']['tandem']:.0f}, {ratio(of(c, 'fa2'), goals=(0.9, 1))}"

    return by_length(document["cells"], show)


def quantized_inputs(document: Document) -> list[str]:
    """A whole call on e4m3 tensors of the caller's, and what it comes to."""

    def share(e: Document) -> float:
        return float(e["tflops"]["fp8 codes"] / e["tflops"]["16-bit"])

    entries = document["codes"]
    lines = by_length(entries, lambda e: f"{number(e['tflops']['fp8 codes'])}, {ratio(share(e))}")
    return [*lines, "", comes_to([share(e) for e in entries])]


def recipes(document: Document) -> list[str]:
    """Errors of gpu-accuracy --precision, and how much smaller they are than with one scale a tensor."""
    inputs = document["precision"]
    rows = (
        [name, *(f"{e[name]:.2e} ({e['fp8 tensor'] / e[name]:.1f})" for e in inputs.values())]
        for name in ("16-bit", *RECIPES)
    )
    return right(["recipe", *inputs], rows)


def gradients_in_8_bits(document: Document) -> list[str]:
    """A whole backward call's rate over bf16's, with forward in brackets, and over cuDNN's FP8 pass."""

    def show(c: Document) -> str:
        t = c["tflops"]
        alone, both = t["int8 whole"] / t["16-bit"], t["int8 with forward"] / t["16-bit with forward"]
        peer = f"; {ratio(t['int8 whole'] / t['cudnn fp8'])}" if "cudnn fp8" in t else ""
        return f"{ratio(alone)} ({ratio(both)}){peer}"

    return by_length([c for c in document["precision"] if c["seqlen"] >= 8192], show)


TABLES: dict[str, Callable[[Document], list[str]]] = {
    "gradients in 8 bits": gradients_in_8_bits,
    "beside cuDNN": beside_cudnn,
    "forward": beside_fa3("forward"),
    "backward": beside_fa3("backward"),
    "fp8": beside_fa3("fp8"),
    "fp8 sums": fp8_sums,
    "windows": windows,
    "sustained": sustained,
    "energy": energy,
    "decode": decode_beside_fa3,
    "engine": engine,
    "pages": prompts_on_pages,
    "host": host,
    "steps": steps,
    "mixes": mixes,
    "latent": latent,
    "append-times": append_times,
    "append-shares": append_shares,
    "functions": functions,
    "sm80": sm80,
    "quantized-inputs": quantized_inputs,
    "recipes": recipes,
}
