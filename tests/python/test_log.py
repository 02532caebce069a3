"""What the library does, through logging.getLogger("tandem")."""

from __future__ import annotations

import logging

import pytest
import tandem
from test_forward import qkv


def test_a_call_is_a_line_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv()
    with caplog.at_level(logging.DEBUG, logger="tandem"):
        tandem.attention(q, k, v)
        assert not caplog.records
        tandem.set_log_level("debug")
        try:
            tandem.attention(q, k, v, causal=True)
        finally:
            tandem.set_log_level("off")
        tandem.attention(q, k, v)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG and record.getMessage().startswith("forward f32 b")
    assert record.getMessage().endswith("causal")


def test_levels_have_names() -> None:
    for level in ("loud", 1, None, ["info"]):
        with pytest.raises(tandem.InvalidArgumentError, match="it must be one of off, info, debug") as caught:
            tandem.set_log_level(level)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"level is {level!r};")
