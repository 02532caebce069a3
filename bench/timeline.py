"""A profiler's trace of one call over ranks: what it spent on computing and on sending, and a drawing of it.

    python bench timeline TRACE.json --picture step.svg

TRACE.json is one that `python bench context-parallel --measure --trace FOLDER` writes, or any of PyTorch's
profiler on a GPU. Kernels of attention, other kernels and copies, and exchanges (NCCL) have a lane each; what
is shaded are the spans in which nothing but an exchange runs.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import harness

Span = tuple[float, float]
#: The lanes of the drawing, by what they hold, and their colours.
ATTENTION, OTHER, EXCHANGE = "attention", "copies, sums", "exchanges"
COLOURS = {ATTENTION: "#1f5fbf", OTHER: "#6c8a3a", EXCHANGE: "#d1495b"}


def spans(events: list[Span]) -> float:
    """How much of the time some of these (start, end) are under way."""
    return sum(end - start for start, end in union(events))


def union(events: list[Span]) -> list[Span]:
    """The spans in which some of these are under way, by their start."""
    found: list[Span] = []
    for start, end in sorted(events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def kernels(trace: dict[str, Any]) -> dict[str, list[Span]]:
    """The (start, end) of kernels and copies in microseconds, by lane."""
    found: dict[str, list[Span]] = {ATTENTION: [], OTHER: [], EXCHANGE: []}
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = event["name"].lower()
            lane = EXCHANGE if "nccl" in name else ATTENTION if "tandem::" in name else OTHER
            found[lane].append((event["ts"], event["ts"] + event["dur"]))
    return found


def overlap(trace: dict[str, Any]) -> dict[str, float]:
    """Of a profiler's trace the microseconds of kernels: those that compute, those that send, and those of
    the latter during which none of the former runs; `idle` is when neither does."""
    lanes = kernels(trace)
    times = [span for lane in lanes.values() for span in lane]
    if not times:
        return {}
    computing, sending, busy = spans(lanes[ATTENTION] + lanes[OTHER]), spans(lanes[EXCHANGE]), spans(times)
    whole = max(end for _, end in times) - min(start for start, _ in times)
    return {"compute": computing, "send": sending, "alone": busy - computing, "idle": whole - busy}


def uncovered(lanes: dict[str, list[Span]]) -> list[Span]:
    """The spans of exchanges beside which nothing computes."""
    computing = union(lanes[ATTENTION] + lanes[OTHER])
    found = []
    for start, end in union(lanes[EXCHANGE]):
        at = start
        for begin, after in [*computing, (math.inf, math.inf)]:
            if begin > at and (until := min(begin, end)) > at:
                found.append((at, until))
            at = max(at, after)
            if at >= end:
                break
    return found


def draw(trace: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    lanes = kernels(trace)
    first = min(start for lane in lanes.values() for start, _ in lane)
    figure, axes = plt.subplots(figsize=(9, 2.2), layout="constrained")
    for start, end in uncovered(lanes):
        axes.axvspan((start - first) / 1e3, (end - first) / 1e3, color="#f3d9dc", linewidth=0)
    for i, (lane, events) in enumerate(lanes.items()):
        bars = [((start - first) / 1e3, (end - start) / 1e3) for start, end in events]
        axes.broken_barh(bars, (-i - 0.35, 0.7), color=COLOURS[lane], linewidth=0)
    axes.set_yticks([0, -1, -2], list(lanes))
    axes.set_xlabel("milliseconds", fontsize=8)
    axes.tick_params(labelsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = harness.parser(__doc__)
    parser.prog = "python bench timeline"
    parser.add_argument("trace", type=Path, help="a trace of PyTorch's profiler, .json or .json.gz")
    parser.add_argument("--picture", type=Path, help="the drawing to write, .svg")
    arguments = parser.parse_args()
    opened = gzip.open if arguments.trace.suffix == ".gz" else open
    with opened(arguments.trace, "rt") as file:
        trace = json.load(file)
    found = overlap(trace)
    if not found:
        raise SystemExit(f"bench: {arguments.trace} has no kernels; profile a call on a GPU")
    print(", ".join(f"{what} {us / 1e3:.2f} ms" for what, us in found.items()))
    if arguments.picture:
        draw(trace, arguments.picture)
        print(f"wrote {arguments.picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
