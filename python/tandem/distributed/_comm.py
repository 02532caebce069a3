"""The collectives of a process group that attention over ranks needs, on whatever backend the group has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem._errors import ExecutionError, InvalidArgumentError


@dataclass
class Waiting:
    """Tensors that are on their way. `wait` gives them; what is sent is kept until then."""

    works: Sequence[Any]
    received: Any
    sent: Any
    what: str

    def wait(self) -> Any:
        """What was received. On a GPU the current stream waits, not the caller."""
        for work in self.works:
            _guarded(self.what, work.wait)
        self.sent = None
        return self.received


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group, and which of them this process is."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """The ranks of a ProcessGroup, of a DeviceMesh of one dimension, or of all processes (None)."""
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgumentError(
                "torch.distributed has no process group; call torch.distributed.init_process_group first"
            )
        if group is not None and hasattr(group, "get_group"):  # a DeviceMesh
            if group.ndim != 1:
                raise InvalidArgumentError(
                    f"group is a DeviceMesh of {group.ndim} dimensions; pass the one that rows are divided "
                    "over, mesh['name']"
                )
            group = group.get_group()
        group = dist.group.WORLD if group is None else group
        rank = -1 if isinstance(group, int) else dist.get_rank(group)
        if rank < 0:
            raise InvalidArgumentError(
                f"group does not hold this process, rank {dist.get_rank()} of all; call on the ranks of the "
                "group alone"
            )
        return cls(group, rank, dist.get_world_size(group))

    @property
    def devices(self) -> set[str]:
        """The types of devices that the group sends from."""
        return {device.type for device in self.group._device_types}

    def gather_small(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """These int64 numbers of every rank. ``device``: that of the tensors, for a group that sends from
        GPUs alone."""
        place = torch.device("cpu")
        if "cpu" not in self.devices:
            place = device if device.type in self.devices else torch.device(torch.cuda.current_device())
        own = torch.tensor(numbers, dtype=torch.int64, device=place)
        found = [torch.empty_like(own) for _ in range(self.size)]
        _guarded("comparing arguments", lambda: dist.all_gather(found, own, group=self.group))
        return [t.tolist() for t in found]

    def gather_objects(self, value: Any) -> list[Any]:
        """This value of every rank; on errors alone, since it is slow."""
        found: list[Any] = [None] * self.size
        _guarded("comparing arguments", lambda: dist.all_gather_object(found, value, group=self.group))
        return found

    def exchange(self, sends: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> Waiting:
        """Sends the first ``send_rows[0]`` rows to rank 0, the next ones to rank 1, and so on. What is
        received is in the order of ranks."""
        sends = sends.contiguous()
        received = sends.new_empty((sum(receive_rows), *sends.shape[1:]))
        if self.size == 1:
            received.copy_(sends)
            return Waiting((), received, None, "")
        what = "an all-to-all"
        width = sends[0].numel() if len(sends) else received[0].numel() if len(received) else 0
        scale = width * sends.element_size()  # as bytes: no backend has all dtypes
        work = _guarded(
            what,
            lambda: dist.all_to_all_single(
                received.view(-1).view(torch.uint8),
                sends.view(-1).view(torch.uint8),
                [rows * scale for rows in receive_rows],
                [rows * scale for rows in send_rows],
                group=self.group,
                async_op=True,
            ),
        )
        return Waiting([work], received, sends, what)

    def shift(self, sends: Tensor, received: Tensor, tag: int) -> Waiting:
        """Sends to the next rank and receives from the one before. Those have the same sizes in mind; empty
        tensors are not sent."""
        after, before = (
            dist.get_global_rank(self.group, (self.rank + i) % self.size) for i in (1, self.size - 1)
        )
        sends = sends.contiguous()
        operations = []
        if sends.numel():
            operations.append(
                dist.P2POp(dist.isend, sends.view(-1).view(torch.uint8), after, self.group, tag)
            )
        if received.numel():
            whole = received.view(-1).view(torch.uint8)
            operations.append(dist.P2POp(dist.irecv, whole, before, self.group, tag))
        what = f"sending to rank {after} and receiving from rank {before}"
        works = _guarded(what, lambda: dist.batch_isend_irecv(operations)) if operations else []
        return Waiting(works, received, sends, what)


def _guarded(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise ExecutionError(
            f"{what} failed, since a rank has ended, has raised an error or takes longer than the group's "
            f"time-out: {error}"
        ) from error
