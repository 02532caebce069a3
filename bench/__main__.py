"""Tandem's benchmarks.

    python bench                    what there is
    python bench NAME [ARGUMENTS]   runs one; NAME --help says what it measures and which arguments it takes

The index with what each was run on and where its results are: bench/README.md.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent

#: Of each benchmark: what it measures, and where. NAME is bench/NAME.py with _ for -.
SCRIPTS = {
    "cpu": "speed beside PyTorch's attention on this CPU; checks every cell (make bench)",
    "cpu-decode": "decoding steps out of a cache on this CPU, as a share of what plain reads reach",
    "cpu-functions": "score and mask functions on this CPU beside PyTorch's compiled flex_attention and SDPA",
    "accuracy": "errors of every 8-bit recipe against fp64, on the CPU",
    "gradients-in-8-bits": "gradients by products in 8 bits against fp64, and whether models learn by them",
    "gpu-speed": "speed and joules on a GPU beside FlashAttention-3, cuDNN and others: the grid, 8 bits",
    "gpu-accuracy": "errors of fp16, bf16 and 8 bits on inputs with outliers, on a GPU",
    "gpu-decode": "steps of generation on a GPU beside cuDNN and FlashAttention: time and GB/s of keys",
    "gpu-append": "new keys and values into a cache on a GPU, beside a copy of as many bytes",
    "gpu-functions": "score and mask functions on a GPU beside PyTorch's compiled flex_attention",
    "gpu-models": "models on a GPU by their attention: training, first token, generation",
    "gpu-pages": "no measurement: writes the tables of the documentation from records/*.json",
    "host-overhead": "host time of a call from Python, CPU or GPU",
    "context-parallel": "work and traffic of layouts over ranks, and a model; --measure times the strategies",
    "timeline": "no measurement: a profiler's trace of a call over ranks as numbers and as a drawing",
    "ranks-overhead": "share of attention over ranks that is neither attention nor communication, on the CPU",
    "loss-curves": "whether a small transformer learns on Tandem as on PyTorch's math attention",
}
#: Programs that CMake builds from bench/NAME.cpp with _ for -.
PROGRAMS = {
    "cpu-share": "share of one core's arithmetic peak that the CPU kernels reach",
    "gpu-overhead": "host time of a call from C++ on a GPU",
}


def index() -> str:
    width = max(map(len, SCRIPTS | PROGRAMS))
    lines = [f"  {name:{width}}  {what}" for name, what in (SCRIPTS | PROGRAMS).items()]
    return "\n".join([*__doc__.rstrip().splitlines(), "", *lines])


def run_program(name: str, arguments: list[str]) -> None:
    program = BENCH.parent / "build" / "release" / "bench" / name.replace("-", "_")
    if not program.exists():
        sys.exit(f"bench: {program} is not there; cmake --build build/release --target {program.name}")
    os.execv(program, [str(program), *arguments])


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in PROGRAMS:
        run_program(name, arguments)
    if name in SCRIPTS:
        sys.argv = [f"python bench {name}", *arguments]
        return importlib.import_module(name.replace("-", "_")).main()
    if name in ("-h", "--help"):
        print(index())
        return 0
    print(f"bench: there is no {name!r}\n\n{index()}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
