"""Tests of the `tandem` program, end to end, as a process.

The program is $TANDEM_PROGRAM, or build/release/cli/tandem of this tree. Run them with

    python -m pytest tests/cli
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
from program import TANDEM

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(autouse=True, scope="session")
def _program_is_there() -> None:
    if not TANDEM.is_file():
        pytest.exit(f"{TANDEM} is not there; build it, or say where it is with TANDEM_PROGRAM", returncode=4)


@pytest.fixture
def run() -> Run:
    """Runs the program; `code` is the exit code that the test expects."""

    def runner(*arguments, code: int = 0, **options) -> subprocess.CompletedProcess:
        options.setdefault("timeout", 120)
        done = subprocess.run(
            [TANDEM, *map(str, arguments)],
            capture_output=options.pop("capture_output", True),
            text=True,
            **options,
        )
        assert done.returncode == code, f"exit code {done.returncode}, not {code}: {done.stderr}"
        if code >= 2:
            assert done.stderr.startswith("tandem: "), done.stderr
            assert done.stderr.count("\n") == 1, f"not one line: {done.stderr!r}"
        return done

    return runner


@pytest.fixture
def run_json(run: Run) -> Callable[..., dict]:
    """The same with --json; returns the document."""

    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def runner(*arguments, **options) -> dict:
        return json.loads(run(*arguments, "--json", **options).stdout, parse_constant=reject)

    return runner


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """q, k, v and dout of a small call with two query heads a key head."""
    random = np.random.default_rng(7)
    shapes = {"q": (2, 33, 4, 16), "k": (2, 47, 2, 16), "v": (2, 47, 2, 24), "dout": (2, 33, 4, 24)}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
