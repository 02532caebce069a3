"""The mutation run (scripts/mutate.py): what it changes, and that its page answers for its results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
import mutant_schemata  # noqa: E402
import mutant_switches  # noqa: E402
import mutants  # noqa: E402

RECORDS = ROOT / "records"


def test_the_same_seed_chooses_the_same_mutants() -> None:
    assert mutants.chosen(40, 1, []) == mutants.chosen(40, 1, [])
    assert mutants.chosen(40, 1, []) != mutants.chosen(40, 2, [])


def test_mutants_are_spread_over_files_and_kinds() -> None:
    chosen = mutants.chosen(240, 1, [])
    changeable = [path for path in mutants.sources() if mutants.mutants_of(path, 1)]
    assert len({mutant.file for mutant in chosen}) > 0.9 * len(changeable)
    kinds = Counter(mutant.kind for mutant in chosen)
    assert set(kinds) == {operator.kind for operator in mutants.OPERATORS}
    assert max(kinds.values()) < len(chosen) / 3


def test_a_mutant_is_one_changed_line_of_code_that_gpu_and_emulator_share() -> None:
    for path in mutants.sources():
        old = path.read_text().splitlines()
        shared = dict(mutants.code_lines(path))
        assert not any("TANDEM_ON_DEVICE" in line or "asm volatile" in line for line in shared.values())
        for mutant in mutants.mutants_of(path, 1):
            new = mutant.text().splitlines()
            changed = [i + 1 for i, line in enumerate(old) if line != new[i]]
            assert len(new) == len(old) and changed == [mutant.line]
            assert shared[mutant.line].strip() == mutant.before and not mutant.before.startswith("//")


def test_lines_above_a_mutant_do_not_change_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mutants.SOURCE / "tile" / "mask.cuh"
    before = mutants.mutants_of(path, 1)
    moved = tmp_path / path.relative_to(ROOT)
    moved.parent.mkdir(parents=True)
    moved.write_text("// One line more.\n" + path.read_text())
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    after = mutants.mutants_of(moved, 1)
    assert [replace(mutant, line=mutant.line + 1) for mutant in before] == after


# One of each form that a change can stand in. Each function's result depends on each of its changes.
FORMS = """
#pragma once
int marks = 0;
void wait() { ++marks; }
struct Position { int stage = 1; int advance() { return ++stage; } };
int in_an_if(int a, int b) {
  if (a < b) wait();  // a comment with ( brackets
  return marks;
}
int in_a_loop(int n) {
  int sum = 0;
  for (int i = 0; i < n; ++i) sum += i == 2 ? 10 : i;
  return sum;
}
int leaves_out(bool really) {
  if (really)
    wait();
  else
    marks += 10;
  for (int i = 0; i < 4; ++i) wait();
  return marks;
}
int over_two_lines(int a, int b) {
  const int table[4] = {5, 6, 7, 8};
  Position at;
  at.advance();
  return table[at.stage] + (a > b && a != 3 ||
         !(a + b > 1)) + (b - 1);
}
constexpr int decided() {
  constexpr int most = 7 - 1;
  return most;
}
"""
CALLS = """
#include <cstdio>
#include "forms.cuh"
int main() {
  std::printf("%d %d %d ", in_an_if(1, 2), in_an_if(2, 2), in_a_loop(4));
  std::printf("%d %d ", leaves_out(true), leaves_out(false));
  for (int a = 0; a < 4; ++a) std::printf("%d %d ", over_two_lines(a, 1), over_two_lines(a, 3));
}
"""
SWITCH = """
#include <cstdlib>
#include "switches.hpp"
namespace tandem::mutation {
unsigned char reached[most_mutants];
int active = std::getenv("TANDEM_MUTANT") ? std::atoi(std::getenv("TANDEM_MUTANT")) : 0;
}
"""


def output_of(directory: Path, text: str, calls: str, **environment: str) -> str:
    """What the program prints that is made of this forms.cuh."""
    directory.mkdir(exist_ok=True)
    (directory / "forms.cuh").write_text(text)
    (directory / "calls.cpp").write_text(calls)
    if not (directory / "calls").exists():
        command = ["c++", "-std=c++20", "-w", "-I", str(mutant_schemata.SWITCHES), "calls.cpp", "-o", "calls"]
        subprocess.run(command, cwd=directory, check=True)
    return subprocess.run(
        [directory / "calls"], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_a_mutant_behind_a_switch_does_what_it_does_when_compiled_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    path = tmp_path / "forms.cuh"
    path.write_text(FORMS)
    numbered = dict(enumerate(mutants.mutants_of(path, 1), 1))
    assert {m.kind for m in numbered.values()} >= {"bound", "comparison", "mask", "stage", "fence", "count"}
    text, spans = mutant_switches.with_switches(FORMS, numbered)
    assert text.count("\n") == FORMS.count("\n")
    assert all(mutant.line in spans[number] for number, mutant in numbered.items())
    usual = output_of(tmp_path / "usual", FORMS, CALLS)
    assert output_of(tmp_path / "all", text, SWITCH + CALLS) == usual
    for number, mutant in numbered.items():
        switched = output_of(tmp_path / "all", text, SWITCH + CALLS, TANDEM_MUTANT=str(number))
        if mutant.before != "constexpr int most = 7 - 1;":
            assert switched == output_of(tmp_path / str(number), mutant.text(), CALLS), mutant
        assert (switched != usual) == (mutant.before != "constexpr int most = 7 - 1;"), mutant


def test_every_mutant_of_the_kernels_gets_a_switch_on_its_line() -> None:
    for path in mutants.sources():
        numbered = dict(enumerate(mutants.mutants_of(path, 1), 1))
        old = path.read_text()
        new, _ = mutant_switches.with_switches(old, numbered)
        assert new.count("\n") == old.count("\n")
        for number in numbered:
            assert new.count(f"TANDEM_MUTANT({number})") == 1


def test_errors_of_the_compiler_are_blamed_on_the_mutants_at_their_lines() -> None:
    spans = {"src/tile/mask.cuh": {3: range(10, 12), 4: range(20, 21)}}
    error = "/o/tile/mask.cuh:11:5: error: no match\n/o/tile/mask.cuh:20:1: note: see\n"
    assert mutant_schemata.blamed(error, Path("/o"), spans) == {3}
    inside = "/o/tile/mask.cuh:20:1:   required from here\n/usr/x.hpp:1:1: error: no\n"
    assert mutant_schemata.blamed(inside, Path("/o"), spans) == {4}
    assert mutant_schemata.blamed("/usr/x.hpp:1:1: error: no\n", Path("/o"), spans) == set()


def test_tests_run_the_quickest_first_and_each_once() -> None:
    tests = [mutant_schemata.Test(0.1 * (i % 7), f"program {i % 3}", f"Test.{i}") for i in range(100)]
    batches = list(mutant_schemata.batches(tests))
    assert sorted((test for batch in batches for test in batch), key=tests.index) == tests
    assert all(len({test.program for test in batch}) == 1 for batch in batches)
    assert max(test.seconds for test in batches[0]) < 0.2 < min(test.seconds for test in batches[-1])


def test_the_page_has_the_results_and_a_reason_for_each_survivor() -> None:
    results = json.loads((RECORDS / "mutation.json").read_text())["mutants"]
    page = (RECORDS / "mutation.md").read_text()
    outcomes = Counter(result["outcome"] for result in results)
    counted = len(results) - outcomes["does not compile"]
    assert counted > 0 and outcomes["killed"] >= 0.95 * counted
    assert f"{outcomes['killed']} of {counted}" in page
    for result in results:
        if result["outcome"] not in ("killed", "does not compile"):
            place = f"{result['file'].removeprefix('src/kernels/')}:{result['line']}"
            assert place in page, f"{place} survived, and the page does not say why"
