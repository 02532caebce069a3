"""Arrows of src/ point down, and tests are named by their rooms."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"

# A room includes itself, the public headers, and the rooms named here.
MAY_INCLUDE = {
    "api": {"plan", "cpu", "gpu", "problem"},
    "plan": {"cpu", "gpu", "kernels/config", "problem"},
    "cpu": {"problem"},
    "gpu": {"kernels/config", "problem"},
    "kernels/sm90": {"kernels/tile", "kernels/ptx", "kernels/config", "problem"},
    "kernels/common": {"kernels/tile", "kernels/ptx", "kernels/config", "problem"},
    "kernels/tile": {"kernels/ptx", "kernels/config", "problem"},
    "kernels/ptx": {"kernels/config", "problem"},
    "kernels/config": {"problem"},
    "problem": set(),
}
# The emulator's header stands in for the hardware's instructions.
EMULATOR = "emulator.hpp"


def room_of(path: str) -> str:
    """The room of a file named relative to src/."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "kernels" else parts[0]


def arrows() -> list[tuple[str, str, str]]:
    """Every include of src/: the file, its room, and what it includes."""
    found = []
    for path in sorted(SOURCE.rglob("*.[ch]*")):
        name = path.relative_to(SOURCE).as_posix()
        for target in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            found.append((name, room_of(name), target))
    return found


def test_no_arrow_of_src_points_up() -> None:
    wrong = [
        f"{name} includes {target}"
        for name, room, target in arrows()
        if room_of(target) not in {room, "tandem"} | MAY_INCLUDE[room] and target != EMULATOR
    ]
    assert wrong == []


def test_every_room_is_named() -> None:
    assert {room for _, room, _ in arrows()} == set(MAY_INCLUDE)
    assert len(arrows()) > 300


def test_files_of_tests_are_named_after_their_subject() -> None:
    test = re.compile(r"^(TEST|TEST_F|TEST_P|TYPED_TEST|RC_GTEST_PROP)\(", re.MULTILINE)
    files = [path for path in TESTS.rglob("*.c*") if test.search(path.read_text(errors="replace"))]
    assert len(files) > 50
    assert [path.name for path in files if not path.name.endswith("_test.cpp")] == []


def test_ctest_knows_tests_by_their_room() -> None:
    """GoogleTests come through tandem_tests of tests/CMakeLists.txt, which takes the room's name."""
    rooms = sorted(TESTS.glob("*/CMakeLists.txt"))
    assert len(rooms) >= 9
    for path in rooms:
        text, room = path.read_text(), path.parent.name
        assert "gtest_discover_tests" not in text, path
        for name in re.findall(r"add_test\(NAME (\S+)", text) + re.findall(r"PREFIX (\S+\.)\n", text):
            assert name.startswith(f"{room}."), path
