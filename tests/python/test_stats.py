"""What tandem.stats() counts."""

from __future__ import annotations

import os

import pytest
import tandem
from test_forward import qkv


def total(table: str, what: str, **labels: str) -> int:
    rows: list[dict[str, object]] = tandem.stats()[table]  # type: ignore[literal-required]
    chosen = [row for row in rows if labels.items() <= row.items()]
    return sum(int(row[what]) for row in chosen)  # type: ignore[call-overload]


def test_a_call_is_counted() -> None:
    q, k, v = qkv()
    before = total("calls", "calls", operation="forward", backend="cpu")
    tandem.attention(q, k, v)
    assert total("calls", "calls", operation="forward", backend="cpu") == before + 1
    assert total("calls", "nanoseconds") > 0 and total("calls", "operations") > 0


def test_an_error_is_counted_by_its_rule() -> None:
    q, k, v = qkv()
    broken = {
        "status": "invalid_argument",
        "rule": "softcap is {}; it must be finite and at least 0 (0: off)",
    }
    before = total("errors", "errors", **broken)
    with pytest.raises(tandem.InvalidArgumentError):
        tandem.attention(q, k, v, softcap=-1.0)
    assert total("errors", "errors", **broken) == before + 1


def test_a_forked_process_begins_at_zero() -> None:
    q, k, v = qkv()
    tandem.attention(q, k, v)
    child = os.fork()
    if child == 0:
        os._exit(0 if tandem.stats()["calls"] == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
