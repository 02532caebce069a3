"""The modules of an inference engine: its own where its wheel can be imported, which needs no GPU, and small
copies of what Tandem uses of it elsewhere. Tests are the same for both."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest


def modules(
    monkeypatch: pytest.MonkeyPatch, copies: dict[str, dict[str, Any]]
) -> tuple[dict[str, ModuleType], bool]:
    """The engine's modules by name, and whether they are its own. `copies`: what each has of names."""
    try:
        return {name: importlib.import_module(name) for name in copies}, True
    except ImportError:
        pass
    for name, content in copies.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            path = ".".join(parts[:n])
            if path not in sys.modules or n == len(parts):
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
                if n > 1:
                    monkeypatch.setattr(
                        sys.modules[".".join(parts[: n - 1])], parts[n - 1], sys.modules[path], raising=False
                    )
        vars(sys.modules[name]).update(content)
    return {name: sys.modules[name] for name in copies}, False
