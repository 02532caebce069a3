"""Tests of the Python package.

They import whatever `tandem` this Python finds. `make test` installs the package with `pip install .` first
and so tests what users get; while working on the package, build the module and put its build folder in front
instead:

    cmake -B build/py -DTANDEM_BUILD_PYTHON=ON && ninja -C build/py tandem_python
    PYTHONPATH=build/py/python python -m pytest tests/python
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import tandem
import tandem.flash_attn
import torch

# The same examples in every run, and no deadline: CI machines have busy neighbours.
hypothesis.settings.register_profile("tandem", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("tandem")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Four processes of a gloo group."""
    from distributed_pool import Pool

    started = Pool(4, tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture
def in_torch() -> Iterator[Any]:
    """torch.nn.attention, with Tandem as PyTorch's flash attention."""
    registry = pytest.importorskip("torch.nn.attention")
    if not hasattr(registry, "register_flash_attention_impl"):
        pytest.skip(f"PyTorch {torch.__version__} has no registry of flash attention implementations")
    tandem.flash_attn.register_with_torch()
    registry.activate_flash_attention_impl("tandem")
    yield registry
    registry.restore_flash_attention_impl()


@pytest.fixture
def calls() -> Callable[[], list[str]]:
    """What gives the passes that the library has run since the test began, "forward" before "backward"."""

    def counted() -> Counter[str]:
        counts: Counter[str] = Counter()
        for row in tandem.stats()["calls"]:
            counts[row["operation"]] += row["calls"]
        return counts

    before = counted()
    return lambda: sorted((counted() - before).elements(), reverse=True)


@pytest.fixture(scope="module")
def registered() -> None:
    """Tandem as an attention implementation of Transformers."""
    from hub import integration

    integration.register()


@pytest.fixture(scope="module")
def jax_on_the_cpu() -> Iterator[None]:
    import jax

    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(autouse=True)
def _no_graphs() -> None:
    """None of the tests before: PyTorch counts the graphs of a function, `tandem.attention` for one, and with
    fullgraph=True the ninth is an error."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(20)
    yield
