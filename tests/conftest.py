"""How tests are spread over processes (pytest-xdist, ``-n 2 --dist loadgroup --no-loadscope-reorder``):
those of a file are in one, so that their fixtures are made once, and the longest come first."""

from __future__ import annotations

from pathlib import Path

import pytest

#: Over a minute each; what comes first starts first.
_LONGEST = (
    "ranks",
    "test_transformers_families",
    "test_transformers_rules",
    "test_install",
    "test_torch_ops",
)


def _group(item: pytest.Item) -> str:
    """Tests over ranks are one after another: each has four processes, and waits for them for a minute."""
    name = Path(item.path).stem
    return "ranks" if name.startswith("test_distributed") or name.endswith("_ranks") else name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    order = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(_group(item), len(order)))
