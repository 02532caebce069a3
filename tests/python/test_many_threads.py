"""Calls of every kind from many threads at once give what they give one after the other.

What scripts/matrix runs on free-threaded Pythons, where nothing but the package's own care keeps threads
apart. It needs NumPy and pytest alone, with --noconftest.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tandem

_THREADS, _ROUNDS = 8, 6


def _inputs(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, 40 + seed, 2, 32), np.float32) for _ in range(3)]


def _plain(seed: int, make: Callable[[Any], Any]) -> Sequence[Any]:
    q, k, v = map(make, _inputs(seed))
    out, lse = tandem.attention(q, k, v, causal=True, return_lse=True, threads=1)
    return out, lse, *tandem.attention_backward(out, q, k, v, out, lse, causal=True, threads=1)


def _functions(seed: int, make: Callable[[Any], Any]) -> Sequence[Any]:
    """By functions whose traces are kept, looked up, and dropped for others: each has numbers of its own."""
    q, k, v = map(make, _inputs(seed))
    bias = make(np.linspace(-1.0, 1.0, 64, dtype=np.float32))
    outs = []
    for n in range(12):
        factor = seed + n / 16

        def score(s: Any, b: Any, h: Any, i: Any, j: Any, factor: float = factor) -> Any:
            return s * factor + bias[(i + j) % 64]

        def mask(b: Any, h: Any, i: Any, j: Any, n: int = n) -> Any:
            return i + n >= j

        outs.append(tandem.attention(q, k, v, score_mod=score, mask_mod=mask, threads=1))
    return outs


def _others(seed: int, make: Callable[[Any], Any]) -> Sequence[Any]:
    q, k, v = map(make, _inputs(seed))
    values, scales = tandem.quantize(q, dtype="s8", threads=1)[:2]
    dropped = tandem.attention(q, k, v, dropout_p=0.25, dropout_seed=seed, threads=1)
    parts = [tandem.attention(q, k, v, causal=c, return_lse=True, threads=1) for c in (False, True)]
    merged = tandem.merge(*map(list, zip(*parts, strict=True)), threads=1)
    caches = [make(np.zeros((1, 128, 2, 32), np.float32)) for _ in range(2)]
    tandem.append_kv(k, v, *caches, cache_seqlens=make(np.array([seed], np.int32)), threads=1)
    return values, scales, dropped, *merged, *caches


def _texts(seed: int, make: Callable[[Any], Any]) -> Sequence[Any]:
    """Plans, errors, counters, and the log turned on and off while others write to it."""
    q, k, v = map(make, _inputs(seed))
    tandem.set_log_level(("off", "info", "debug")[seed % 3])
    with pytest.raises(tandem.InvalidArgumentError) as error:
        tandem.attention(q, k, v, softcap=-1.0 - seed)
    assert tandem.info()["backends"]["cpu"]["targets"] and tandem.stats()["errors"]
    return tandem.explain(q, k, v), tandem.workspace_bytes(q, k, v), str(error.value)


def _autograd(seed: int, make: Callable[[Any], Any]) -> Sequence[Any]:
    q, k, v = (make(array).requires_grad_() for array in _inputs(seed))
    out = tandem.attention(q, k, v, causal=True, threads=1)
    out.sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


def _as_numpy(results: Sequence[Any]) -> list[Any]:
    return [result if isinstance(result, (str, int)) else np.asarray(result) for result in results]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_many_threads(library: str) -> None:
    kinds, make = [_plain, _functions, _others, _texts], np.asarray
    if library == "torch":
        make = pytest.importorskip("torch").from_numpy
        kinds.append(_autograd)
    jobs = [(kind, seed) for seed in range(6) for kind in kinds]
    expected = [_as_numpy(kind(seed, make)) for kind, seed in jobs]
    start = threading.Barrier(_THREADS)

    def work(thread: int) -> None:
        start.wait()
        for n in range(_ROUNDS * len(jobs)):
            place = (n * 5 + thread * 7) % len(jobs)
            kind, seed = jobs[place]
            for found, right in zip(_as_numpy(kind(seed, make)), expected[place], strict=True):
                assert np.array_equal(found, right, equal_nan=not isinstance(right, str)), (kind, seed)

    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)  # threads that share a lock on Python hand it over this often
        with ThreadPoolExecutor(_THREADS) as pool:
            for done in [pool.submit(work, thread) for thread in range(_THREADS)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
        tandem.set_log_level("off")


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="a Python with the GIL")
def test_the_import_leaves_the_gil_off() -> None:
    program = "import sys, tandem; assert not sys._is_gil_enabled()"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
