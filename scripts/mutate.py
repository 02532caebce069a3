"""Whether the emulator's tests notice small faults in the kernels: a mutation run.

    python scripts/mutate.py [--count 240] [--json FILE]      a run; it goes on where an earlier one stopped
    python scripts/mutate.py --list                           what would be tried
    python scripts/mutate.py --only src/tile/mask.cuh
    python scripts/mutate.py --retry                          tries survivors again, after a test was added
    python scripts/mutate.py --sample                         a few mutants of the parts, as `make test` does

scripts/mutants.py says what a mutant is. build/release has to hold the kernels' tests. All mutants are
compiled into them at once, each behind a switch (scripts/mutant_schemata.py), and each is tried by the
tests that reach its switch.

What the compiler decides, as in `if constexpr`, cannot be switched. Such a mutant is compiled alone: of
the tests, what includes the changed file is compiled again with the changed one before it on the include
path, linked beside what is in build/release, and run: first the file that killed most mutants of this
one, or the quickest to build, then program by program, until a test fails.

A mutant that no test notices survives. One that does not compile does not count. A program that takes far
more time than without a mutant hangs, and has noticed. Results are kept line by line in
build/mutation/results.jsonl. records/mutation.md has the last run, and why each survivor survived.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from threading import Lock

from mutant_build import PROGRAMS, WORK, Build, Program, limits, noticed, run
from mutant_schemata import Schemata
from mutants import ROOT, Mutant, chosen

sys.path.append(str(ROOT / "bench"))
import harness  # noqa: E402

SAMPLE = 30


class Session:
    """Tries mutants that are compiled alone, and learns which tests to run first."""

    def __init__(self, build: Build, seconds: dict[str, float]) -> None:
        self.build = build
        self.seconds = seconds  # that each program takes without a mutant
        self.kills: dict[str, Counter[tuple[str, str]]] = {}
        self.locks: dict[str, Lock] = {}  # of objects without a mutant

    def attempt(self, mutant: Mutant) -> dict[str, str]:
        """What became of a mutant: the outcome, and which test noticed it and how. Its files are its own:
        several are tried at a time."""
        directory = WORK / "alone" / mutant.rank
        try:
            return self.attempt_in(directory, mutant)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def attempt_in(self, directory: Path, mutant: Mutant) -> dict[str, str]:
        overlay = directory / "overlay"  # before src/ on the include path
        changed_file = overlay / Path(mutant.file).relative_to("src")
        changed_file.parent.mkdir(parents=True, exist_ok=True)
        changed_file.write_text(mutant.text())
        concerned = {
            program.name: [o for o in program.objects if mutant.file in self.build.headers.get(o, ())]
            for program in self.build.programs
        }
        if not any(concerned.values()):
            return {"outcome": "in no test"}
        compiled: dict[str, bool] = {}  # objects, and whether the mutant is other code
        linked: dict[str, set[str]] = {}
        for program, objects in self.order(mutant.file, concerned):
            for o in objects:
                if o not in compiled:
                    if self.build.compile(o, directory / o, overlay).status != 0:
                        return {"outcome": "does not compile"}
                    compiled[o] = self.differs(o, directory / o)
                # The first object that differs is tried alone; of later ones, all of a program at once.
                different = {name for name in objects if compiled.get(name)}
                if different == linked.get(program.name, set()) or (
                    any(linked.values()) and o != objects[-1]
                ):
                    continue
                linked[program.name] = different
                changed = {name: directory / name for name in sorted(different)}
                if found := self.tried(program, changed, directory / program.name):
                    self.kills.setdefault(mutant.file, Counter())[program.name, o] += 1
                    return {"outcome": "killed", **found}
        return {"outcome": "survived"} | ({} if linked else {"how": "is the same machine code"})

    def differs(self, name: str, mutated: Path) -> bool:
        """Whether the compiler makes other code of the mutant than of the sources as they are."""
        usual = WORK / "unchanged" / name
        stamp = (self.build.directory / name).stat().st_mtime
        with self.locks.setdefault(name, Lock()):
            if not usual.exists() or usual.stat().st_mtime < stamp:
                if self.build.compile(name, usual, WORK / "nothing").status != 0:
                    sys.exit(f"mutate: {name} does not compile without a mutant")
        return usual.read_bytes() != mutated.read_bytes()

    def order(self, file: str, concerned: dict[str, list[str]]) -> list[tuple[Program, list[str]]]:
        """First what killed most mutants of the file; then the quickest program, the smallest object."""
        kills = self.kills.get(file, Counter())
        most = {
            name: max((kills[name, o] for o in objects), default=0) for name, objects in concerned.items()
        }
        return [
            (
                program,
                sorted(
                    concerned[program.name],
                    key=lambda o: (-kills[program.name, o], (self.build.directory / o).stat().st_size),
                ),
            )
            for program in sorted(self.build.programs, key=lambda program: -most[program.name])
            if concerned[program.name]
        ]

    def tried(self, program: Program, changed: dict[str, Path], path: Path) -> dict[str, str] | None:
        self.build.link(program, changed, path)
        command = [str(path), "--gtest_break_on_failure"]
        done = run(command, self.build.directory, *limits(self.seconds[program.name]))
        return noticed(program.name, done)


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
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="device sources")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--jobs", type=int, default=1, help="compilers, and mutants, at a time")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--retry", action="store_true", help="try survivors again")
    parser.add_argument("--again", action="store_true", help="forget all earlier results")
    parser.add_argument("--report", action="store_true", help="try none: what is known so far")
    parser.add_argument("--json", type=Path, help="write all results there; those that it has count as known")
    parser.add_argument("--share", type=float, default=0.95, help="killed at least, or the exit status is 1")
    parser.add_argument("--sample", action="store_true", help="a few of the parts' mutants, in half a minute")
    return parser.parse_args()


def results_of(
    build: Build, mutants: list[Mutant], wanted: list[Mutant], directory: Path, jobs: int
) -> Iterator[dict]:
    """Compiles all mutants together and tries those that are wanted; at last, those that have to be compiled
    alone."""
    schemata = Schemata(build, mutants, directory, jobs)
    session = Session(build, schemata.seconds)
    alone = [mutant for mutant in wanted if not schemata.reaches(mutant)]
    together = [mutant for mutant in wanted if schemata.reaches(mutant)]

    def tried(mutant: Mutant) -> tuple[dict, float]:
        started = time.monotonic()
        attempt = schemata.attempt if schemata.reaches(mutant) else session.attempt
        return asdict(mutant) | attempt(mutant), time.monotonic() - started

    # Those that compile take longest: first where several are tried at a time, so that the end is not theirs.
    order = alone + together if jobs > 1 else together + alone
    with ThreadPoolExecutor(jobs) as pool:
        attempts = [pool.submit(tried, mutant) for mutant in order]
        for number, attempt in enumerate(as_completed(attempts), 1):
            result, seconds = attempt.result()
            what = " ".join(result.get(name, "") for name in ("outcome", "how", "test"))
            print(
                f"[{number}/{len(wanted)}] {seconds:5.1f} s {result['file']}:{result['line']} {what}",
                flush=True,
            )
            yield result


def sample(directory: Path) -> int:
    """What `make test` tries: mutants of the parts that kernels are written in, by the tests of the parts,
    which are quick to build. Those that these tests do not reach do not count here. A changed line may bring
    a mutant that no test can notice, so not all have to be killed."""
    build = Build(directory, ["kernels_tile_tests"])
    files = {file for o in build.programs[0].objects for file in build.headers.get(o, ())}
    parts = sorted(file for file in files if file.startswith("src/tile/"))
    mutants = chosen(SAMPLE, 1, parts)
    schemata = Schemata(build, mutants, WORK / "sample", 1, checks_first=False)
    reached = [mutant for mutant in mutants if schemata.reaches(mutant)]
    print(f"{len(reached)} of {len(mutants)} mutants are in the tests of the parts")
    return report([asdict(mutant) | schemata.attempt(mutant) for mutant in reached], 0.8)


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
        wanted = [mutant for mutant in mutants if mutant.rank not in known]
        build = Build(args.build.resolve(), list(PROGRAMS))
        for result in results_of(build, mutants, wanted, WORK / "schemata", args.jobs):
            known[result["rank"]] = result
            with kept.open("a") as file:
                file.write(json.dumps(result) + "\n")
    results = [known[mutant.rank] | {"line": mutant.line} for mutant in mutants if mutant.rank in known]
    if args.json:
        harness.write_json({"seed": args.seed, "mutants": results}, args.json)
    return report(results, args.share)


if __name__ == "__main__":
    sys.exit(main())
