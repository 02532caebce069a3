"""How tests are spread over processes (pytest-xdist, ``-n 2 --dist loadscope --no-loadscope-reorder``):
those of a file are in one, so that their fixtures are made once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# What has processes of its own: the tests over ranks begin, since they wait for each other and leave time to
# what runs beside them, and the families of models end, which have a process for each core.
_FIRST, _LAST = "ranks", "test_transformers_families"


def _group(path: str) -> str:
    """Tests over ranks are one after another: each has four processes."""
    name = Path(path).stem
    return _FIRST if name.startswith("test_distributed") or name.endswith("_ranks") else name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups = {item: _group(str(item.path)) for item in items}
    items.sort(key=lambda item: (groups[item] != _FIRST) + (groups[item] == _LAST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.split("::")[0])

    return ByGroup(config, log)


@pytest.fixture
def powercap(tmp_path: Path) -> Iterator[Path]:
    """A folder of RAPL's counters, of a CPU that draws 50 W."""
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "energy_uj").write_text("0\n")
    stopped, start = threading.Event(), time.monotonic()

    def draw() -> None:
        while not stopped.wait(0.02):
            (zone / "next").write_text(f"{(time.monotonic() - start) * 50e6:.0f}\n")
            (zone / "next").replace(zone / "energy_uj")

    thread = threading.Thread(target=draw)
    thread.start()
    yield zone.parent
    stopped.set()
    thread.join()
