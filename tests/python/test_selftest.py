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


def test_a_result_of_16_bits_that_is_a_little_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried on a GPU, tried on the CPU: out's gain and those of the gradients."""
    assert "largest error" in selftest._bf16_on("cpu")
    right: Any = tandem.attention

    def with_gain(of_out: float, of_dq: float) -> Any:
        def attention(q: Any, *arguments: Any, **options: Any) -> Any:
            if q.itemsize > 2:
                return right(q, *arguments, **options)
            out = right(q.detach() + of_dq * (q - q.detach()), *arguments, **options)
            return out.detach() * of_out + (out - out.detach())

        return attention

    for gain in (0.98, 1.02):
        for name, gains in (("out", (gain, 1.0)), ("dq", (1.0, gain))):
            monkeypatch.setattr(tandem, "attention", with_gain(*gains))
            with pytest.raises(ArithmeticError, match=f"wrong: the largest error of {name} is"):
                selftest._bf16_on("cpu")
