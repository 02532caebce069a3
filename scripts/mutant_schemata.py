"""All mutants of a run in one build (scripts/mutant_switches.py), and which tests reach each of them.

The tests are compiled once with every mutant behind its switch, and run once with all switches off, which
says which tests reach which switch. A mutant is then tried by the tests that reach it alone, the quickest
first.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutant_build import Build, Program, Run, limits, noticed, run
from mutant_switches import with_switches
from mutants import ROOT, Mutant

SWITCHES = ROOT / "tests" / "kernels" / "mutation"
FIRST_BATCH = 0.5  # seconds of tests that one program runs before the next; each batch is twice the last
LONGEST_FILTER = 100_000  # characters; Linux takes 128 KiB in one argument


@dataclass(frozen=True)
class Test:
    """A test that reaches a mutant."""

    seconds: float
    program: str
    name: str


class Schemata:
    """Numbered mutants, compiled together below `directory`; those that the compiler refuses are left out."""

    def __init__(
        self, build: Build, mutants: list[Mutant], directory: Path, jobs: int, checks_first: bool = True
    ) -> None:
        self.build = build
        self.numbered = dict(enumerate(mutants, 1))
        self.numbers = {mutant.rank: number for number, mutant in self.numbered.items()}
        self.directory = directory
        self.overlay = directory / "overlay"
        self.jobs = jobs
        self.refused: set[int] = set()  # by the compiler
        self.tests: dict[int, list[Test]] = defaultdict(list)
        self.seconds: dict[str, float] = Counter()  # that each program takes
        self.directory.mkdir(parents=True, exist_ok=True)
        self.read_refused()
        files = {mutant.file for mutant in mutants}
        self.objects = {
            o: sorted(files & build.headers[o])
            for program in build.programs
            for o in program.objects
            if files & build.headers.get(o, set())
        }
        if checks_first and not self.refused:  # an error found late compiles all again
            failing = list(self.objects)
            while failing := self.refuse(self.compile(failing, "-fsyntax-only")):
                pass
        while self.refuse(self.compile(self.stale())):
            pass
        self.own = self.compile_own()
        for program in build.programs:
            if any(o in self.objects for o in program.objects):
                self.link(program)
                self.read_tests(program)

    def place(self, name: str) -> Path:
        return self.directory / "objects" / name

    def read_refused(self) -> None:
        """Those that an earlier build of the same mutants could not have are left out at once."""
        kept = self.directory / "refused.json"
        ranks = json.loads(kept.read_text()) if kept.exists() else []
        self.refused = {self.numbers[rank] for rank in ranks if rank in self.numbers}
        self.write_overlay()

    def write_overlay(self) -> None:
        """A copy of each changed file. One that is as before keeps its time, and its objects are kept."""
        by_file: dict[str, dict[int, Mutant]] = defaultdict(dict)
        for number, mutant in self.numbered.items():
            by_file[mutant.file].update({} if number in self.refused else {number: mutant})
        self.spans: dict[str, dict[int, range]] = {}
        for file, numbered in by_file.items():
            text, self.spans[file] = with_switches((ROOT / file).read_text(), numbered)
            path = self.overlay / Path(file).relative_to("src")
            if not path.exists() or path.read_text() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        for path in self.overlay.rglob("*.cuh"):
            if f"src/{path.relative_to(self.overlay).as_posix()}" not in by_file:
                path.unlink()

    def compile(self, names: list[str], *flags: str) -> dict[str, str]:
        """What the compiler says of each that it refuses."""
        header = ["-include", str(SWITCHES / "switches.hpp"), "-fmax-errors=0", *flags]

        def one(numbered: tuple[int, str]) -> Run:
            print(f"[{numbered[0]}/{len(names)}] compiling {' '.join(flags)} {numbered[1]}", flush=True)
            return self.build.compile(numbered[1], self.place(numbered[1]), self.overlay, *header)

        with ThreadPoolExecutor(self.jobs) as pool:
            results = dict(zip(names, pool.map(one, enumerate(names, 1)), strict=True))
        failed = {name: done.output for name, done in results.items() if done.status != 0}
        if not flags:
            for name in failed:
                self.place(name).unlink(missing_ok=True)
        return failed

    def stale(self) -> list[str]:
        def time(path: Path) -> float:
            return path.stat().st_mtime

        sources = {
            o: [self.overlay / Path(f).relative_to("src") for f in files] for o, files in self.objects.items()
        }
        return [
            o
            for o, paths in sources.items()
            if not self.place(o).exists()
            or time(self.place(o)) < max(time(self.build.directory / o), *map(time, paths))
        ]

    def refuse(self, errors: dict[str, str]) -> list[str]:
        """Leaves out the mutants that the errors point at, and says in which objects there were any."""
        found = {number for output in errors.values() for number in blamed(output, self.overlay, self.spans)}
        if errors and not found:
            first = next(iter(errors.values()))
            sys.exit(f"mutate: the tests do not compile with switches\n{first[:4000]}")
        for number in sorted(found):
            mutant = self.numbered[number]
            print(
                f"compiled alone: {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True
            )
        self.refused |= found
        ranks = sorted(self.numbered[number].rank for number in self.refused)
        (self.directory / "refused.json").write_text(json.dumps(ranks))
        if found:
            self.write_overlay()
        return list(errors)

    def compile_own(self) -> Path:
        """The switches themselves."""
        to = self.directory / "switches.o"
        source = SWITCHES / "switches.cpp"
        if not to.exists() or to.stat().st_mtime < max(path.stat().st_mtime for path in SWITCHES.iterdir()):
            compiler = next(iter(self.build.commands.values()))[0]
            subprocess.run([compiler, "-std=c++20", "-O1", "-c", str(source), "-o", str(to)], check=True)
        return to

    def link(self, program: Program) -> None:
        changed = {o: self.place(o) for o in program.objects if o in self.objects}
        to = self.directory / program.name
        parts = [*changed.values(), self.own, self.build.directory / program.path]
        if not to.exists() or to.stat().st_mtime < max(path.stat().st_mtime for path in parts):
            self.build.link(program, changed, to, self.own)

    def read_tests(self, program: Program) -> None:
        """Runs the program with all switches off, once, and learns which test reaches which."""
        path = self.directory / program.name
        kept = self.directory / f"{program.name}.reached"
        if not kept.exists() or kept.stat().st_mtime < path.stat().st_mtime:
            print(f"which tests of {program.name} reach which mutants", flush=True)
            with ThreadPoolExecutor(self.jobs) as pool:
                shards = list(pool.map(lambda shard: self.reached(path, shard), range(self.jobs)))
            new = kept.with_suffix(".new")
            new.write_text("".join(shards))
            new.rename(kept)
        for line in kept.read_text().splitlines():
            name, seconds, *reached = line.split()
            self.seconds[program.name] += float(seconds)
            for number in map(int, reached):
                self.tests[number].append(Test(float(seconds), program.name, name))

    def reached(self, path: Path, shard: int) -> str:
        """What one of `jobs` equal parts of a program's tests writes, run without a mutant."""
        to = path.with_suffix(f".reached{shard}")
        environment = {
            "TANDEM_MUTANT": "0",
            "TANDEM_MUTANTS_REACHED": str(to),
            "GTEST_TOTAL_SHARDS": str(self.jobs),
            "GTEST_SHARD_INDEX": str(shard),
        }
        done = run([str(path)], self.build.directory, 3600, 0, **environment)
        if done.status != 0:
            sys.exit(f"mutate: {path.name} fails without a mutant\n{done.output[-2000:]}")
        text = to.read_text()
        to.unlink()
        return text

    def reaches(self, mutant: Mutant) -> bool:
        """Not where the tests' compiler decides, nor what is in no test at all."""
        return bool(self.tests[self.numbers[mutant.rank]])

    def attempt(self, mutant: Mutant) -> dict:
        """What became of a mutant that tests reach."""
        number = self.numbers[mutant.rank]
        tests = self.tests[number]
        for batch in batches(tests):
            if found := self.notices(number, batch):
                return {"outcome": "killed", **found}
        return {"outcome": "survived", "reached by": len(tests)}

    def notices(self, number: int, batch: list[Test]) -> dict[str, str] | None:
        program = batch[0].program
        names = ":".join(test.name for test in batch)
        seconds = sum(test.seconds for test in batch)
        command = [str(self.directory / program), "--gtest_break_on_failure", f"--gtest_filter={names}"]
        return noticed(
            program, run(command, self.build.directory, *limits(seconds), TANDEM_MUTANT=str(number))
        )


def blamed(output: str, overlay: Path, spans: dict[str, dict[int, range]]) -> set[int]:
    """The mutants at the lines of errors; where there are none, those at lines that led to one."""
    for kind in (r"error: ", r""):
        places = re.findall(rf"^{re.escape(str(overlay))}/(\S+?):(\d+):\d+: .*{kind}", output, re.MULTILINE)
        found = set()
        for path, line in places:
            lines = spans.get(f"src/{path}", {})
            found |= {number for number, span in lines.items() if int(line) in span}
        if found:
            return found
    return set()


def batches(tests: list[Test]) -> Iterator[list[Test]]:
    """The quickest first; each batch is of one program."""
    budget = FIRST_BATCH
    left = sorted(tests, key=lambda test: (test.seconds, test.name))
    while left:
        spent, length, batch = 0.0, 0, []
        while left and (not batch or (spent < budget and length < LONGEST_FILTER)):
            batch.append(left.pop(0))
            spent += batch[-1].seconds
            length += len(batch[-1].name) + 1
        for program in dict.fromkeys(test.program for test in batch):
            yield [test for test in batch if test.program == program]
        budget *= 2
