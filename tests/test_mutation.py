"""The mutation run (scripts/mutate.py): what it changes, and that its page answers for its results."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
import mutants  # noqa: E402

RESULTS = ROOT / "docs" / "results"


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
    path = mutants.KERNELS / "tile" / "mask.cuh"
    before = mutants.mutants_of(path, 1)
    moved = tmp_path / path.relative_to(ROOT)
    moved.parent.mkdir(parents=True)
    moved.write_text("// One line more.\n" + path.read_text())
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    after = mutants.mutants_of(moved, 1)
    assert [replace(mutant, line=mutant.line + 1) for mutant in before] == after


def test_the_page_has_the_results_and_a_reason_for_each_survivor() -> None:
    results = json.loads((RESULTS / "mutation.json").read_text())["mutants"]
    page = (RESULTS / "mutation.md").read_text()
    outcomes = Counter(result["outcome"] for result in results)
    counted = len(results) - outcomes["does not compile"]
    assert counted > 0 and outcomes["killed"] >= 0.95 * counted
    assert f"{outcomes['killed']} of {counted}" in page
    for result in results:
        if result["outcome"] not in ("killed", "does not compile"):
            place = f"{result['file'].removeprefix('src/kernels/')}:{result['line']}"
            assert place in page, f"{place} survived, and the page does not say why"
