"""Tables of models on a GPU, from the JSON of gpu-models (`gpu_pages.py` writes them)."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable

from gpu_tables import Document, number, right
from harness import ratio, result

#: Beside whom; that PyTorch's default is cuDNN on an H200, JSON says.
PEERS = {"sdpa": "sdpa", "fa2": "FA2", "fa3": "FA3", "flex": "flex"}
UNITS = {"training": "tokens/s", "first token": "ms", "generation": "us a step"}


def medians(row: Document) -> dict[str, float]:
    return {kind: statistics.median(seconds) for kind, seconds in row["seconds"].items()}


def speed(row: Document, seconds: float) -> str:
    """In the task's unit."""
    if row["task"] == "training":
        return number(row["batch"] * row["seqlen"] / seconds)
    return number(seconds * 1e3) if row["task"] == "first token" else number(seconds / row["new"] * 1e6)


def tokens(row: Document) -> str:
    told = number(row["seqlen"])
    told += f" in {row['documents']}" if row["documents"] > 1 else ""
    told += f" by {number(row['chunk'])}" if row["chunk"] else ""
    return told + (" without graphs" if row["task"] == "generation" and not row["graph"] else "")


def by_row(task: str) -> Callable[[Document], list[str]]:
    """Tandem beside each peer. The most that any attention could reach is the rate of no attention, over that
    of PyTorch's, its default or else FlexAttention. Memory and energy are Tandem's and its, once where they
    look alike. A column tells the model where there are several."""

    def line(row: Document, peers: list[str]) -> list[str]:
        times = medians(row)
        base = next((name for name in ("sdpa", "flex") if name in times), "tandem")

        def both(name: str, scale: float) -> str:
            found = row.get(name, {})
            told = (f"{found[kind] * scale:.3g}" for kind in ("tandem", base) if kind in found)
            return ", ".join(dict.fromkeys(told))

        return [
            tokens(row),
            speed(row, times["tandem"]),
            *(ratio(times[peer] / times["tandem"]) if peer in times else "" for peer in peers),
            ratio(times[base] / times["none"]),
            *([both("peak_bytes", 2**-30)] if task != "generation" else []),
            both("joules_per_token", 1e3),
        ]

    def made(document: Document) -> list[str]:
        rows = [row for row in document["rows"] if row["task"] == task]
        models = list(dict.fromkeys(row["model"] for row in rows))
        rows.sort(
            key=lambda r: (models.index(r["model"]), r["documents"], r["chunk"], not r["graph"], r["seqlen"])
        )
        peers = [peer for peer in PEERS if any(peer in row["seconds"] for row in rows)]
        header = ["tokens", UNITS[task], *(f"of {PEERS[peer]}" for peer in peers)]
        header += ["at most", *(["GiB"] if task != "generation" else []), "mJ/token"]
        lines = (line(row, peers) for row in rows)
        if len(models) == 1:
            return right(header, lines)
        named = ([row["model"], *cells] for row, cells in zip(rows, lines, strict=True))
        return right(["model", *header], named)

    return made


def goals(document: Document) -> list[str]:
    """The Llama's rows that have a goal, in sentences."""

    def shares(task: str, peer: str, seqlen: int) -> list[float]:
        wanted = {"task": task, "model": "llama", "seqlen": seqlen, "documents": 1, "chunk": 0}
        wanted |= {"graph": True} if task == "generation" else {}
        found = (medians(row) for row in document["rows"] if wanted.items() <= row.items())
        return [times[peer] / times["tandem"] for times in found if peer in times]

    told = []
    for what, peer, task, seqlen, goal in (
        ("training on 8192 tokens", "sdpa", "training", 8192, 1.05),
        ("on 32,768", "sdpa", "training", 32768, 1.12),
        ("and", "fa2", "training", 32768, 1.5),
        ("the first token of 131,072", "fa2", "first token", 131072, 1 / 0.6),
        ("generation by CUDA graphs behind 1024", "sdpa", "generation", 1024, 1.05),
        ("behind 8192", "sdpa", "generation", 8192, 1.05),
    ):
        for share in shares(task, peer, seqlen):
            outcome = "reached" if share >= goal else "missed"
            shown = ratio(share, goals=(1.0, goal))
            name = {"fa2": "FlashAttention-2"}.get(peer, peer)
            told.append(f"{what}: {shown} of {name}'s (goal {goal:.2f}: {outcome})")
    text = f"A Llama of 4 layers in bf16 on an H200 reaches, {'; '.join(told).replace('; and:', ' and')}."
    return textwrap.wrap(text, 110, break_on_hyphens=False, break_long_words=False)


def allowed(document: Document) -> list[str]:
    """How much faster than with sdpa, which is cuDNN, steps of training may be by attention's share of them
    and by the kernels' rate over cuDNN's, at up to 16,384 tokens of a causal call of heads of 128."""
    kernels = result("gpu-head-to-head-h200")
    told = []
    wanted = {"task": "training", "model": "llama", "documents": 1}
    rows = (r for r in document["rows"] if wanted.items() <= r.items())
    for row in sorted(rows, key=lambda row: row["seqlen"]):
        wanted = {"head_dim": 128, "causal": 1, "seqlen": min(row["seqlen"], 16384)}
        forward, backward = (
            next(c["tflops"] for c in kernels[which] if wanted.items() <= c.items())
            for which in ("forward", "backward")
        )
        cudnn, ours = (1 / forward[name] + 2.5 / backward[name] for name in ("cudnn", "tandem"))
        times = medians(row)
        share = 1 - times["none"] / times["sdpa"]
        most = 1 / (1 - share + share * ours / cudnn)
        told.append((number(row["seqlen"]), f"{100 * share:.0f} %", ratio(cudnn / ours), ratio(most)))
    (first, share, rate, most), *others = told
    text = (
        f"Training misses its goals: at {first} tokens attention has {share} of sdpa's step, so that {rate} "
        f"times cuDNN's rate makes {most} at most"
    )
    text += "".join(f"; at {tokens} {share}, {rate} and {most}" for tokens, share, rate, most in others)
    return textwrap.wrap(f"{text}.", 110)


def origin(document: Document) -> list[str]:
    """Where, on what and when."""
    names = f"PyTorch {document['torch']}, Transformers {document['transformers']}"
    return [f"{document['device']}, commit {document['commit']}, {document['date']}, {names}:"]


TABLES: dict[str, Callable[[Document], list[str]]] = {
    **{task: by_row(task) for task in UNITS},
    "model goals": goals,
    "model allowed": allowed,
    "model origin": origin,
}
