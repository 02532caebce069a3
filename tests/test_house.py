"""Arrows of src/ point down: which room may include which."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"

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
