"""Processes that stay: importing PyTorch in each takes longer than most of what they are to do."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing


class Pool:
    """``size`` processes with a gloo group of all of them."""

    def __init__(self, size: int, directory: Path) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            arguments = (rank, size, f"file://{directory}/store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(300), f"rank {rank} has not started within 300 seconds"
            pipe.recv()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> list[Any]:
        """What ``function(rank, *arguments)`` returns on every rank; an AssertionError with the traceback of
        the first that raises."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results: list[Any] = []
        failures: list[str] = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):  # it waits for one that has failed, most likely
                failures.append(f"rank {rank} has not answered within {timeout} seconds")
                break
            result, failure = pipe.recv()
            results.append(result)
            if failure:
                failures.append(f"rank {rank}:\n{failure}")
        assert not failures, "\n".join(failures)
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def on_every_rank(work: Callable[[int], None]) -> Callable[[Any], None]:
    """The test that every rank of the pool does this work: they get the test, by its name."""

    @functools.wraps(work)
    def test(pool: Pool | int) -> None:
        if isinstance(pool, Pool):
            pool.run(test)
        else:
            work(pool)

    del test.__wrapped__  # type: ignore[attr-defined]  # pytest is to see the parameter `pool`
    return test


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    pipe.send("started")
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send((function(rank, *arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()
