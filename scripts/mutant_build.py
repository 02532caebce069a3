"""A release build's test programs: what they are made of, how a changed copy is compiled and linked, and
runs with a limit of time. For scripts/mutate.py."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mutants import ROOT, SOURCE

WORK = ROOT / "build" / "mutation"
# The quickest first. The contract's tests run every mask and length on a few kernels.
PROGRAMS = {
    "kernels_tile_tests": "kernels",
    "kernels_pack_tests": "kernels",
    "kernels_emulator_tests": "kernels",
    "kernels_quantize_tests": "kernels",
    "kernels_cache_tests": "kernels",
    "kernels_functions_tests": "kernels",
    "kernels_forward_tests": "kernels",
    "kernels_eight_bit_tests": "kernels",
    "kernels_backward_tests": "kernels",
    "contract_emulated_tests": "contract",
    "contract_emulated_sm80_tests": "contract",
}
# -O1 compiles in half the time of -O3. A mutant may leave a name unused, which is no reason not to try it.
MUTANT_FLAGS = ["-O1", "-w"]


@dataclass
class Program:
    name: str
    path: str  # in the build
    link: list[str]
    objects: list[str]  # that go into it, from archives too


class Build:
    """A release build: what its test programs are made of, and by which commands."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self.directory = directory
        entries = json.loads((directory / "compile_commands.json").read_text())
        self.commands = {}
        for entry in entries:
            command = shlex.split(entry["command"])
            self.commands[command[command.index("-o") + 1]] = command
        self.headers = self.read_headers()
        self.programs = [self.read_program(name) for name in names]

    def ninja(self, *arguments: str) -> str:
        command = ["ninja", "-C", str(self.directory), "-t", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def read_headers(self) -> dict[str, set[str]]:
        """Of each object, the device sources that it includes."""
        headers: dict[str, set[str]] = {}
        name = ""
        for line in self.ninja("deps").splitlines():
            if line.startswith("    "):
                path = Path(os.path.normpath(self.directory / line.strip()))
                if path.suffix == ".cuh" and path.is_relative_to(SOURCE):
                    headers[name].add(path.relative_to(ROOT).as_posix())
            elif line:
                name = line.split(":")[0]
                headers[name] = set()
        return headers

    def read_program(self, name: str) -> Program:
        path = f"tests/{PROGRAMS[name]}/{name}"
        if not (self.directory / path).exists():
            sys.exit(f"mutate: {self.directory / path} is not built; build the targets {' '.join(PROGRAMS)}")
        text = next(part for part in self.ninja("commands", "-s", path).split("&&") if f"-o {path}" in part)
        # Of an archive, only what is needed goes in: the linker says what.
        link = shlex.split(text)
        trace = [*link, "-Wl,--trace", "-Wl,--trace"]
        trace[trace.index("-o") + 1] = str(WORK / "traced")
        done = subprocess.run(trace, cwd=self.directory, capture_output=True, text=True, check=True)
        objects = []
        for line in (done.stdout + done.stderr).splitlines():
            if member := re.fullmatch(r"\((.*\.a)\)(.*\.o)", line):
                archive = Path(member[1])
                prefix = f"{archive.parent}/CMakeFiles/{archive.stem.removeprefix('lib')}.dir/"
                objects += [o for o in self.commands if o.startswith(prefix) and o.endswith("/" + member[2])]
            elif line in self.commands:
                objects.append(line)
        return Program(name, path, link, objects)

    def compile(self, target: str, to: Path, before_sources: Path, *flags: str) -> Run:
        command = [word for word in self.commands[target] if not word.endswith("ccache")]
        command[command.index("-o") + 1] = str(to)
        command[1:1] = ["-I", str(before_sources)]
        to.parent.mkdir(parents=True, exist_ok=True)
        return run([*command, *MUTANT_FLAGS, *flags], self.directory, 900)

    def link(self, program: Program, changed: dict[str, Path], to: Path, *more: Path) -> None:
        """A definition in an object that is named comes before the same in an archive."""
        words = [str(changed.get(word, word)) for word in program.link]
        words[words.index("-o") + 1] = str(to)
        words[1:1] = [str(path) for name, path in changed.items() if name not in program.link]
        words[1:1] = [str(path) for path in more]
        done = run(words, self.directory, 600)
        if done.status != 0:
            sys.exit(f"mutate: {program.name} does not link\n{done.output[-2000:]}")


@dataclass
class Run:
    status: int
    output: str
    hangs: bool


def run(command: list[str], cwd: Path, wall: float, cpu: float = 0.0, **environment: str) -> Run:
    """Runs to the end, or until the time is over, by the clock or of the processor."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if cpu > 0:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu), int(cpu) + 5))

    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=log,
            stderr=log,
            env=os.environ | {"TANDEM_TEST_EFFORT": "1"} | environment,
            preexec_fn=limit,  # noqa: PLW1509
        )
        try:
            status, late = process.wait(wall), False
        except subprocess.TimeoutExpired:
            process.kill()
            status, late = process.wait(), True
        except BaseException:
            process.kill()
            raise
        log.seek(0)
        output = log.read().decode(errors="replace")
    return Run(status, output, late or status == -signal.SIGXCPU)


def limits(seconds: float) -> tuple[float, float]:
    """Of time by the clock and of the processor, for tests that take so long without a mutant. On a busy
    machine the clock runs ahead: what hangs uses the processor, whose time tells."""
    return max(900.0, 60 * seconds), 3 * seconds + 20


def noticed(program: str, done: Run) -> dict[str, str] | None:
    """Which test noticed a mutant, and how. The program ran with --gtest_break_on_failure, which traps at the
    first failed expectation."""
    if done.status == 0:
        return None
    tests = re.findall(r"^\[ RUN      \] (\S+)", done.output, re.MULTILINE)
    how = "hangs" if done.hangs else "fails" if done.status == -5 else "crashes"
    return {"program": program, "test": tests[-1] if tests else "", "how": how}
