"""What a profiled call spent on computing and on sending, and how much of that at the same time."""

from __future__ import annotations

import math
from typing import Any


def spans(events: list[tuple[float, float]]) -> float:
    """How much of the time some of these (start, end) are under way."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def overlap(trace: dict[str, Any]) -> dict[str, float]:
    """Of a profiler's trace the microseconds of kernels: those that compute, those that send, and those of
    the latter during which none of the former runs; `idle` is when neither does."""
    kernels = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    times = [(e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower()) for e in kernels]
    if not times:
        return {}
    computing, sending, busy = (
        spans([(start, end) for start, end, sends in times if sends in wanted])
        for wanted in ((False,), (True,), (False, True))
    )
    whole = max(end for _, end, _ in times) - min(start for start, _, _ in times)
    return {"compute": computing, "send": sending, "alone": busy - computing, "idle": whole - busy}
