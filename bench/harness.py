"""What the benchmarks share: contenders timed in turn, where and on what a run was, and the JSON it leaves.

It needs neither the package nor PyTorch, so that `gpu-speed` runs where there are neither. They are imported
where they are used, since PyTorch takes seconds.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import random
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "records"
BUILD = ROOT / "build" / "release" / "bench"
#: how long a round of one contender takes on a GPU
ROUND_MS = 12.0


class Contender(Protocol):
    """One of the things that a cell compares. It has run before, so that nothing is compiled in a round."""

    def round(self, milliseconds: float) -> list[float]:
        """Runs for about so long. Returns the times of single calls, or their mean, in any one unit."""
        ...


def in_turn(
    contenders: Mapping[str, Contender], rounds: int, milliseconds: float, seconds: float = 0.0
) -> dict[str, list[float]]:
    """The times by contender: a round of each, then the next of each, for at least `rounds` and `seconds`.

    Heat and clocks then weigh on all alike. A round is the slower the more power the one before it drew, so
    the order differs from round to round, the same in every run.
    """
    order, last, end = random.Random(1), None, time.perf_counter() + seconds
    times: dict[str, list[float]] = {name: [] for name in contenders}
    done = 0
    while done < rounds or time.perf_counter() < end:
        names = order.sample(list(contenders), len(contenders))
        if names[0] == last:  # nobody behind itself
            names.reverse()
        for name in names:
            times[name] += contenders[name].round(milliseconds)
        last = names[-1]
        done += 1
    return times


class OnHost:
    """Microseconds of single calls by the wall clock."""

    #: Workers of an OpenMP runtime spin for some milliseconds after their last region; the next contender
    #: waits that out.
    quiet_seconds = 0.006

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def time(self, calls: int) -> float:
        """Milliseconds of so many calls."""
        start = time.perf_counter()
        for _ in range(calls):
            self.call()
        return (time.perf_counter() - start) * 1e3

    def round(self, milliseconds: float) -> list[float]:
        time.sleep(self.quiet_seconds)
        times: list[float] = []
        spent = 0.0
        while spent < milliseconds * 1000:
            start = time.perf_counter()
            self.call()
            times.append((time.perf_counter() - start) * 1e6)
            spent += times[-1]
        return times


class OnGpu:
    """Microseconds of calls on the current stream, by events: the mean of a round."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def time(self, calls: int) -> float:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            self.call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def round(self, milliseconds: float) -> list[float]:
        one = self.time(1)
        if one >= milliseconds:
            return [one * 1000]
        calls = int(milliseconds / one)
        return [self.time(calls) * 1000 / calls]


class InGraph:
    """Microseconds of a call, by a CUDA graph of `call(0)`, `call(1)`, ..., each on buffers of its own."""

    @staticmethod
    def buffers(size: int) -> int:
        """How many buffers of `size` bytes no L2 holds together, so that each is read from memory."""
        return max(1, -(-(512 << 20) // size))

    def __init__(self, call: Callable[[int], object], buffers: int) -> None:
        import torch

        self.calls = max(2 * buffers, 8)
        for i in range(buffers):
            call(i)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(self.calls):
                call(i % buffers)

    def round(self, _milliseconds: float) -> list[float]:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self.calls]


def sustained(contender: OnHost | OnGpu, seconds: float) -> dict[str, float]:
    """Microseconds and joules of a call, and watts, under load without a pause, after half as long of it."""
    one = contender.time(3) / 3
    calls = max(1, int(seconds * 1e3 / one))
    contender.time(max(1, calls // 2))
    _, joules = energy_meter(isinstance(contender, OnGpu))
    before = joules() if joules else 0.0
    spent = contender.time(calls)
    found = {"us": spent * 1e3 / calls}
    if joules:
        energy = joules() - before
        found |= {"joules": energy / calls, "watts": energy / spent * 1e3}
    return found


@functools.cache
def energy_meter(gpu: bool) -> tuple[str, Callable[[], float] | None]:
    """What counts the joules of PyTorch's GPU, or of the CPU, and its counter; or why nothing does."""
    from tandem import _core

    device = -1
    if gpu:
        import torch

        device = torch.cuda.current_device()
    return _core.energy_meter(device)


def energy_of(load: Mapping[str, float], flops: float, tokens: int) -> dict[str, float]:
    """What `sustained` found, as joules of a call, a FLOP (pJ) and a token (uJ); empty if nothing counts."""
    if "joules" not in load:
        return {}
    joules = load["joules"]
    return {
        "joules": joules,
        "picojoules_per_flop": joules / flops * 1e12,
        "microjoules_per_token": joules / tokens * 1e6,
    }


def tflops(flops: float, times: Mapping[str, list[float]]) -> dict[str, float]:
    """TFLOP/s of the medians of microseconds."""
    return {name: flops / statistics.median(t) / 1e6 for name, t in times.items()}


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else float("nan")


def ratio(value: float, digits: int = 2, goals: Iterable[float] = (1.0,)) -> str:
    """A share or speedup as pages show it: rounded, but with as many digits as tell it from a goal, or from
    1, that it misses. 0.896 of a goal of 0.90 is 0.896, and 0.9996 is 0.9996."""
    while any(float(f"{value:.{digits}f}") >= goal > value for goal in goals):
        digits += 1
    return f"{value:.{digits}f}"


def machine() -> str:
    """Processor, cores and system in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), model)
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def device_name(device: str) -> str:
    """The GPU's name for "cuda"; other devices are called what they are."""
    if device != "cuda":
        return device
    import torch

    return torch.cuda.get_device_name()


def commit() -> str:
    """The commit that ran, marked if the working tree differs from it."""

    def git(*args: str) -> str:
        run = subprocess.run(("git", *args), cwd=ROOT, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!records")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with local changes" if changed else "")


def command() -> str:
    """What was typed: `python bench NAME ...`, or the script's own path."""
    program, *arguments = sys.argv
    if not program.startswith("python "):
        program = f"python {os.path.relpath(program, ROOT)}"
    return " ".join([program, *map(shlex.quote, arguments)])


def surroundings() -> dict[str, Any]:
    """When it ran, and on whose software, as far as it was used and can be told."""
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    if torch := sys.modules.get("torch"):
        found["torch"] = torch.__version__
        if torch.cuda.is_available():
            found["cudnn"] = torch.backends.cudnn.version()
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        run = subprocess.run(query, capture_output=True, text=True, check=False)
        found["driver"] = run.stdout.split("\n")[0].strip()
    return found


def origin(device: str, named_commit: str | None = None) -> dict[str, Any]:
    """What every result begins with. `named_commit` is what was built, where that is no checkout."""
    return {
        "device": device,
        "commit": named_commit or commit(),
        "command": command(),
        **surroundings(),
    }


def parser(description: str | None, *options: str) -> argparse.ArgumentParser:
    """A parser with those that are named of the options that several benchmarks have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known: dict[str, dict[str, Any]] = {
        "commit": {"help": "what was built, where that is no checkout"},
        "json": {"type": Path, "help": "write the result to this file"},
        "plot": {"type": Path, "help": "draw it into this file"},
        "joules": {"action": "store_true", "help": "energy of a call, too, by the board's counter or RAPL"},
        "from": {"dest": "source", "type": Path, "help": "print and plot an earlier run's JSON"},
    }
    for option in options:
        made.add_argument(f"--{option}", **known[option])
    return made


def has_measurements(value: object) -> bool:
    """Whether it has, at any depth, a list of objects or an object of objects alone."""
    if isinstance(value, Mapping):
        held = list(value.values())
        return any(map(has_measurements, held)) or (bool(held) and all(isinstance(x, Mapping) for x in held))
    return isinstance(value, list) and any(isinstance(x, Mapping) for x in value)


def json_lines(value: object, margin: str = "") -> str:
    """JSON with each measurement on a line, so that a diff shows which of them changed."""
    if margin and not has_measurements(value):
        return json.dumps(value)
    inner = margin + " "
    if isinstance(value, Mapping):
        ends, parts = "{}", [f"{json.dumps(k)}: {json_lines(v, inner)}" for k, v in value.items()]
    else:
        assert isinstance(value, list)
        ends, parts = "[]", [json_lines(v, inner) for v in value]
    return ends[0] + "\n" + ",\n".join(inner + part for part in parts) + f"\n{margin}{ends[1]}"


@functools.cache
def result(name: str) -> Any:
    """What a record says."""
    return json.loads((RECORDS / f"{name}.json").read_text())


def write_json(document: Mapping[str, Any], path: Path | None) -> None:
    """Writes a result, if there is a path to."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_lines(document) + "\n")


def safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a file, and the bytes that its offsets count in."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def pyplot() -> Any:
    """matplotlib, which only plots need, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def markdown_table(
    header: Iterable[object], rows: Iterable[Iterable[object]], rule: str = "---|"
) -> list[str]:
    """The lines of a table. `rule` is what stands under each column but the first; `--:|` aligns right."""
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (list(header), *map(list, rows))]
    columns = lines[0].count(" | ")
    return [lines[0], "|---|" + rule * columns, *lines[1:]]
