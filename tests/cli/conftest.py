"""Tests of the `tandem` program, end to end, as a process.

The program is $TANDEM, or build/release/cli/tandem of this tree. Run them with

    python -m pytest tests/cli
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
TANDEM = Path(os.environ.get("TANDEM", ROOT / "build/release/cli/tandem")).resolve()

Run = Callable[..., subprocess.CompletedProcess]


def pytest_configure() -> None:
    if not TANDEM.is_file():
        raise pytest.UsageError(f"{TANDEM} is not there; build it, or say where it is with TANDEM=/path/to/tandem")


@pytest.fixture
def run() -> Run:
    """Runs the program; `code` is the exit code that the test expects."""

    def runner(*arguments, code: int = 0, **options) -> subprocess.CompletedProcess:
        options.setdefault("timeout", 120)
        done = subprocess.run(
            [TANDEM, *map(str, arguments)], capture_output=options.pop("capture_output", True), text=True, **options
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


def attention(q, k, v, *, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0):
    """out and lse by the plain formula in fp64; (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    s = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    diagonal = np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    keys = np.arange(k.shape[1])[None, :]
    hidden = np.zeros_like(diagonal + keys, dtype=bool)
    if causal:
        window_right = 0 if window_right < 0 else min(window_right, 0)
    if window_left >= 0:
        hidden |= keys < diagonal - window_left
    if window_right >= 0:
        hidden |= keys > diagonal + window_right
    s[..., hidden] = -np.inf
    largest = np.maximum(s.max(-1, keepdims=True), -1e300)
    p = np.exp(s - largest)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]
    out = np.einsum("bhij,bjhd->bihd", p / np.where(total == 0, 1, total), v)
    return out, lse
