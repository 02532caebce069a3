"""Functions that are the same objects as in the call before: what they reach is compared by identity."""

import math

import pytest
import torch
from tandem.functions import _kept_traces
from test_kept_traces import call, expected, same, window, within


def _set_cell(monkeypatch, f):
    monkeypatch.setattr(f.__closure__[0], "cell_contents", 2)


def _set_code(monkeypatch, f):
    def other(b, h, q, k, width=None):
        return (q - k).abs() <= (limit if width is None else width) // 2

    limit = 5
    monkeypatch.setattr(f, "__code__", other.__code__)


#: What is changed of the function below, whose window is 5, so that it is 2.
CHANGES = {
    "cell": _set_cell,
    "code": _set_code,
    "default": lambda patch, f: patch.setattr(f, "__defaults__", (2,)),
    "global": lambda patch, f: patch.setitem(globals(), "SHARED", 2),
    "module": lambda patch, f: patch.setattr(math, "trunc", lambda x: 2),
    "builtin": lambda patch, f: patch.setitem(globals(), "min", lambda x, y: 2),
    "builtin of all": lambda patch, f: patch.setattr("builtins.min", lambda x, y: 2),
    "table's dtype": lambda patch, f: patch.setitem(globals(), "LIMITS", torch.full((24,), 2.5)),
    "table's shape": lambda patch, f: patch.setitem(globals(), "LIMITS", torch.full((30,), 2)),
    "table's values": lambda patch, f: patch.setitem(globals(), "LIMITS", torch.full((24,), 2)),
}
SHARED = 5
LIMITS = torch.full((24,), 5)


def changeable(limit):
    def mask(b, h, q, k, width=None):
        distance = (q - k).abs()
        seen = (distance <= limit) & (distance <= min(SHARED, 5)) & (distance <= math.trunc(5.5))
        if width is not None:
            seen = seen & (distance <= width)
        return seen & (distance <= LIMITS[q])

    return mask


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_function_is_known_until_it_changes(monkeypatch, change):
    mask = changeable(5)
    _kept_traces._same.clear()
    for _ in range(4):
        same(call(mask_mod=mask), expected(window(5)))
    assert _kept_traces.again("torch", None, mask) is not None
    CHANGES[change](monkeypatch, mask)
    same(call(mask_mod=mask), expected(window(2)))
    monkeypatch.undo()


def test_functions_made_anew_are_not_held():
    _kept_traces._same.clear()
    for _ in range(4):
        same(call(mask_mod=changeable(5)), expected(window(5)))
    assert not _kept_traces._same


def test_a_function_with_a_helper_is_known_by_its_key_alone():
    def mask(b, h, q, k):
        return within(q, k)

    _kept_traces._same.clear()
    for _ in range(4):
        same(call(mask_mod=mask), expected(window(5)))
    assert not _kept_traces._same
    found = _kept_traces.reached("torch", None, mask)
    assert _kept_traces._kept[found.key].last is None
