"""Whether the emulator's tests notice small faults in the kernels: a mutation run.

    python scripts/mutate.py [--count 240] [--json FILE]      a run; it goes on where an earlier one stopped
    python scripts/mutate.py --list                           what would be tried
    python scripts/mutate.py --only src/kernels/tile/mask.cuh
    python scripts/mutate.py --retry                          tries survivors again, after a test was added
    python scripts/mutate.py --sample                         a few mutants of the parts, as `make test` does

scripts/mutants.py says what a mutant is. build/release has to hold the kernels' tests. Of them, what includes
the changed file is compiled again with the changed one before it on the include path, linked beside what is
in build/release, and run: first the file that killed most mutants of this one, or the quickest to build, then
program by program, until a test fails. A mutant that none notices survives. One that does not compile does
not count. A program that takes far more time than without a mutant hangs, and has noticed. Results are kept
line by line in build/mutation/results.jsonl. docs/results/mutation.md has the last run, and why each survivor
survived.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from mutants import KERNELS, ROOT, Mutant, chosen

WORK = ROOT / "build" / "mutation"
OVERLAY = WORK / "overlay"  # before src/ on the include path
# The quickest first. The contract's tests run every mask and length on a few kernels.
PROGRAMS = {
    "kernels_tile_tests": "kernels",
    "kernels_pack_tests": "kernels",
    "kernels_emulator_tests": "kernels",
    "kernels_quantize_tests": "kernels",
    "kernels_forward_tests": "kernels",
    "kernels_eight_bit_tests": "kernels",
    "kernels_backward_tests": "kernels",
    "contract_emulated_tests": "contract",
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
        """Of each object, the files of src/kernels that it includes."""
        headers: dict[str, set[str]] = {}
        name = ""
        for line in self.ninja("deps").splitlines():
            if line.startswith("    "):
                path = Path(os.path.normpath(self.directory / line.strip()))
                if path.is_relative_to(KERNELS):
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

    def compile(self, target: str, to: Path, before_sources: Path) -> bool:
        command = [word for word in self.commands[target] if not word.endswith("ccache")]
        command[command.index("-o") + 1] = str(to)
        command[1:1] = ["-I", str(before_sources)]
        to.parent.mkdir(parents=True, exist_ok=True)
        return run([*command, *MUTANT_FLAGS], self.directory, 600).status == 0

    def link(self, program: Program, changed: dict[str, Path], to: Path) -> None:
        """A definition in an object that is named comes before the same in an archive."""
        words = [str(changed.get(word, word)) for word in program.link]
        words[words.index("-o") + 1] = str(to)
        words[1:1] = [str(path) for name, path in changed.items() if name not in program.link]
        done = run(words, self.directory, 600)
        if done.status != 0:
            sys.exit(f"mutate: {program.name} does not link\n{done.output[-2000:]}")


@dataclass
class Run:
    status: int
    output: str
    seconds: float
    hangs: bool


def run(command: list[str], cwd: Path, wall: float, cpu: float = 0.0) -> Run:
    """Runs to the end, or until the time is over, by the clock or of the processor."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if cpu > 0:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu), int(cpu) + 5))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=cwd, stdout=log, stderr=log, preexec_fn=limit)  # noqa: PLW1509
        try:
            status, late = process.wait(wall), False
        except subprocess.TimeoutExpired:
            process.kill()
            status, late = process.wait(), True
        log.seek(0)
        output = log.read().decode(errors="replace")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    hangs = late or (cpu > 0 and seconds >= int(cpu))
    return Run(status, output, seconds, hangs)


class Session:
    """Tries mutants, and learns which tests to run first."""

    def __init__(self, build: Build, jobs: int) -> None:
        self.build = build
        self.jobs = jobs
        self.kills: dict[str, Counter[tuple[str, str]]] = {}
        self.baseline_file = WORK / "baseline.json"
        self.baseline = json.loads(self.baseline_file.read_text()) if self.baseline_file.exists() else {}

    def usual(self, program: Program) -> dict[str, float]:
        """How long the program runs without a mutant, by the clock and of the processor."""
        stamp = (self.build.directory / program.path).stat().st_mtime
        known = self.baseline.get(program.name)
        if known and known["stamp"] == stamp:
            return known
        started = time.monotonic()
        done = self.run_tests(program, self.build.directory / program.path, 3600, 0)
        if done.status != 0:
            sys.exit(f"mutate: {program.name} fails without a mutant\n{done.output[-2000:]}")
        known = {"stamp": stamp, "wall": time.monotonic() - started, "cpu": done.seconds}
        self.baseline[program.name] = known
        self.baseline_file.write_text(json.dumps(self.baseline, indent=1))
        return known

    def run_tests(self, program: Program, path: Path, wall: float, cpu: float) -> Run:
        return run([str(path), "--gtest_break_on_failure"], self.build.directory, wall, cpu)

    def attempt(self, mutant: Mutant) -> dict[str, str]:
        """What became of a mutant: the outcome, and which test noticed it and how."""
        shutil.rmtree(OVERLAY, ignore_errors=True)
        changed_file = OVERLAY / Path(mutant.file).relative_to("src")
        changed_file.parent.mkdir(parents=True)
        changed_file.write_text(mutant.text())
        concerned = {
            program.name: [o for o in program.objects if mutant.file in self.build.headers.get(o, ())]
            for program in self.build.programs
        }
        if not any(concerned.values()):
            return {"outcome": "in no test"}
        compiled: dict[str, bool] = {}  # objects, and whether the mutant is other code
        tried: dict[str, set[str]] = {}
        for program, objects in self.order(mutant.file, concerned):
            wanted = [o for o in objects if o not in compiled]
            if not self.compile(wanted):
                return {"outcome": "does not compile"}
            compiled.update({o: self.differs(o) for o in wanted})
            different = {o for o in concerned[program.name] if compiled.get(o)}
            if different == tried.get(program.name, set()):
                continue
            tried[program.name] = different
            if noticed := self.noticed(program, {o: self.place(o) for o in sorted(different)}):
                self.kills.setdefault(mutant.file, Counter())[program.name, objects[0]] += 1
                return {"outcome": "killed", **noticed}
        return {"outcome": "survived"} | ({} if tried else {"how": "is the same machine code"})

    def differs(self, name: str) -> bool:
        """Whether the compiler makes other code of the mutant than of the sources as they are."""
        usual = WORK / "unchanged" / name
        stamp = (self.build.directory / name).stat().st_mtime
        if not usual.exists() or usual.stat().st_mtime < stamp:
            if not self.build.compile(name, usual, WORK / "nothing"):
                sys.exit(f"mutate: {name} does not compile without a mutant")
        return usual.read_bytes() != self.place(name).read_bytes()

    def order(self, file: str, concerned: dict[str, list[str]]) -> list[tuple[Program, list[str]]]:
        """One object first, then all of each program. For lack of experience, the smallest of the first
        program that has any."""
        programs = [program for program in self.build.programs if concerned[program.name]]
        kills = self.kills.get(file, Counter())
        pairs = [(program, o) for program in programs for o in concerned[program.name]]
        position = {program.name: i for i, program in enumerate(programs)}
        first = min(
            pairs,
            key=lambda pair: (
                -kills[pair[0].name, pair[1]],
                position[pair[0].name],
                (self.build.directory / pair[1]).stat().st_size,
            ),
        )
        return [(first[0], [first[1]])] + [(program, concerned[program.name]) for program in programs]

    def place(self, name: str) -> Path:
        return WORK / "objects" / name

    def compile(self, objects: list[str]) -> bool:
        with ThreadPoolExecutor(self.jobs) as pool:
            return all(pool.map(lambda o: self.build.compile(o, self.place(o), OVERLAY), objects))

    def noticed(self, program: Program, changed: dict[str, Path]) -> dict[str, str] | None:
        usual = self.usual(program)
        path = WORK / program.name
        self.build.link(program, changed, path)
        done = self.run_tests(program, path, max(120.0, 10 * usual["wall"]), 3 * usual["cpu"] + 20)
        if done.status == 0:
            return None
        tests = re.findall(r"^\[ RUN      \] (\S+)", done.output, re.MULTILINE)
        # Google Test traps at the first failed expectation.
        how = "hangs" if done.hangs else "fails" if done.status == -5 else "crashes"
        return {"program": program.name, "test": tests[-1] if tests else "", "how": how}


def outcomes(kept: Path, published: Path | None) -> dict[str, dict]:
    """The last result of each mutant, here or in a file of results from elsewhere."""
    results = []
    if published and published.exists():
        results += json.loads(published.read_text())["mutants"]
    if kept.exists():
        results += map(json.loads, kept.read_text().splitlines())
    return {result["rank"]: result for result in results}


def report(results: list[dict], share: float) -> int:
    counts = Counter(result["outcome"] for result in results)
    counted = counts["killed"] + counts["survived"] + counts["in no test"]
    for result in results:
        if result["outcome"] not in ("killed", "does not compile"):
            place = f"{result['file']}:{result['line']}"
            print(f"{result['outcome']}: {place}: {result['kind']}: {result['before']} -> {result['after']}")
    hung = sum(result.get("how") == "hangs" for result in results)
    print(
        f"{counts['killed']} of {counted} mutants killed ({hung} of them hung), "
        f"{counts['survived']} survived, {counts['in no test']} in no test; "
        f"{counts['does not compile']} more do not compile"
    )
    return 0 if counted and counts["killed"] >= share * counted else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="files of src/kernels")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--retry", action="store_true", help="try survivors again")
    parser.add_argument("--again", action="store_true", help="forget all earlier results")
    parser.add_argument("--report", action="store_true", help="try none: what is known so far")
    parser.add_argument("--json", type=Path, help="write all results there; those that it has count as known")
    parser.add_argument("--share", type=float, default=0.95, help="killed at least, or the exit status is 1")
    parser.add_argument("--sample", action="store_true", help="a few of the parts' mutants, in half a minute")
    return parser.parse_args()


def sample(build: Path) -> int:
    """What `make test` tries: the tests of the parts that kernels are written in, which are quick to build. A
    changed line may bring a mutant that no test can notice, so not all have to be killed."""
    session = Session(Build(build, ["kernels_tile_tests"]), 1)
    files = {file for o in session.build.programs[0].objects for file in session.build.headers.get(o, ())}
    parts = sorted(file for file in files if file.startswith("src/kernels/tile/"))
    return report([asdict(mutant) | session.attempt(mutant) for mutant in chosen(10, 1, parts)], 0.8)


def main() -> int:
    args = arguments()
    mutants = chosen(args.count, args.seed, args.only)
    if args.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}: {mutant.kind}: {mutant.before} -> {mutant.after}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    if args.sample:
        return sample(args.build.resolve())
    kept = WORK / "results.jsonl"
    if args.again:
        kept.unlink(missing_ok=True)
    known = outcomes(kept, None if args.again else args.json)
    if args.retry:
        final = ("killed", "does not compile")
        known = {rank: result for rank, result in known.items() if result["outcome"] in final}
    if not args.report:
        session = Session(Build(args.build.resolve(), list(PROGRAMS)), args.jobs)
        for number, mutant in enumerate(mutants, 1):
            if mutant.rank in known:
                continue
            started = time.monotonic()
            result = known[mutant.rank] = asdict(mutant) | session.attempt(mutant)
            with kept.open("a") as file:
                file.write(json.dumps(result) + "\n")
            what = " ".join(result.get(name, "") for name in ("outcome", "how", "test"))
            seconds = f"{time.monotonic() - started:5.1f} s"
            print(f"[{number}/{len(mutants)}] {seconds} {mutant.file}:{mutant.line} {what}", flush=True)
    results = [known[mutant.rank] | {"line": mutant.line} for mutant in mutants if mutant.rank in known]
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "mutants": results}, indent=1) + "\n")
    return report(results, args.share)


if __name__ == "__main__":
    sys.exit(main())
