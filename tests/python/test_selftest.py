"""python -m tandem.selftest tells what works, and fails where something does not."""

from __future__ import annotations

from typing import Any

import pytest
import tandem
from tandem import selftest


def test_it_tells_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"tandem {tandem.__version__}" and len(lines) == 6
    assert "works: " in lines[1] and "largest error" in lines[1]
    assert all("works: " in line or "not tried: " in line for line in lines[1:])


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right: Any = tandem.attention
    monkeypatch.setattr(tandem, "attention", lambda *a, **o: right(*a, **o) * 1.01)
    monkeypatch.setattr(selftest, "_TRIALS", selftest._TRIALS[:2])
    assert selftest.main() == 1
    assert capsys.readouterr().out.count("FAILS: wrong: the largest error") == 2
