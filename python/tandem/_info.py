"""What this installation is, what it runs on, and what it has done."""

from __future__ import annotations

import os
import platform
from typing import Any

from tandem import _core


def stats() -> _core.Stats:
    """What the library has done in this process, over all threads: counters that are always on.

    ``["calls"]`` has a row for each operation, backend, family and kernel: ``calls``, ``nanoseconds``
    in the library (a GPU's work is queued, not waited for), ``bytes`` and ``operations`` as the shapes say,
    and ``workspace_peak``, the most scratch memory of one call. The family "portable" is a slower path than
    the processor could take. ``["kernels"]`` has one for each place that GPU kernels came from ("compiled",
    "disk", "shipped", "portable", "memory"), ``["errors"]`` one for each rule that was broken, by ``status``.
    A forked process begins at zero.
    """
    return _core.stats()


def info(*, measure_peak: bool = False) -> dict[str, Any]:
    """What this installation is and what it runs on, as a dictionary that JSON can hold.

    ``backends["cpu"]`` has the instruction sets and the threads; ``backends["gpu"]`` the driver and the
    compiler (or why there is none), the devices, where kernels are cached, and how many came with the
    package. Looking starts the driver: processes forked afterwards cannot use CUDA.

    ``measure_peak`` adds the machine's arithmetic peak in GFLOP/s (f32 multiply-add, bf16 dot product),
    measured on every core this process may use; it takes half a second.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    threads = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    result: dict[str, Any] = {
        "version": _core.version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "backends": {"cpu": {**_core.cpu_info(), "threads": threads}, "gpu": _core.gpu_info()},
    }
    if measure_peak:
        result["peak"] = _core.measure_peak(threads)
    return result
