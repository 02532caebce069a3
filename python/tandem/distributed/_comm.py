"""The collectives of a process group that attention over ranks needs, on whatever backend the group has."""

from __future__ import annotations

import hashlib
import pickle
import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tandem._errors import ExecutionError, InvalidArgumentError

#: Tags of what is under way between two ranks at the same time.
KEYS, GRADIENTS, OTHERS = 1, 2, 3


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
        self.works, self.sent = (), None
        return self.received


#: The hosts of the ranks by the groups (within, across) that they are of: they are asked once.
_hosts: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, tuple[int, ...]]]
_hosts = weakref.WeakKeyDictionary()

#: By groups that send from GPUs alone: one of the same ranks that sends from the host.
_on_host: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

#: PyTorch 2.13 has another name for it.
_gather_equal: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Groups whose ranks have had an exchange of all of them.
_met: weakref.WeakSet[Any] = weakref.WeakSet()


def host() -> int:
    """A number of this host, the same for all its processes, in containers of their own or not."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else platform.node()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group, and which of them this process is.

    Of a mesh of two dimensions they are counted along the second one first, and ``levels`` has the ranks of
    each: (across nodes, within a node). There ``group`` is None.
    """

    group: Any
    rank: int
    size: int
    levels: tuple[Ranks, Ranks] | None = None

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """The ranks of a ProcessGroup, of a DeviceMesh of one or two dimensions, or of all processes
        (None)."""
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgumentError(
                "torch.distributed has no process group; call torch.distributed.init_process_group first"
            )
        if group is not None and hasattr(group, "get_group"):  # a DeviceMesh
            if group.ndim not in (1, 2):
                raise InvalidArgumentError(
                    f"group is a DeviceMesh of {group.ndim} dimensions; pass those that rows are divided "
                    "over, one or two: mesh['name'] or mesh['across', 'within']"
                )
            return cls.of_groups([group.get_group(i) for i in range(group.ndim)])
        return cls.of_groups([dist.group.WORLD if group is None else group])

    @classmethod
    def of_groups(cls, groups: Sequence[Any]) -> Ranks:
        """The ranks of a group, or of groups across nodes and within one."""
        if len(groups) == 2:
            across, within = (cls.of_groups([group]) for group in groups)
            rank = across.rank * within.size + within.rank
            return cls(None, rank, across.size * within.size, (across, within))
        group = groups[0]
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
        if self.levels is not None:
            return self.levels[0].devices & self.levels[1].devices
        return {device.type for device in self.group._device_types}

    def hosts(self) -> tuple[int, ...]:
        """The host of every rank, the same on all of them: what a choice may depend on. An exchange at the
        first call of a group, in which all ranks take part."""
        across, within = self.levels or (self, self)
        known = _hosts.setdefault(within.group, weakref.WeakKeyDictionary())
        if across.group not in known:
            known[across.group] = tuple(numbers[0] for numbers in self.gather_small([host()]))
        return known[across.group]

    def gather_small(self, numbers: Sequence[int]) -> list[list[int]]:
        """These int64 numbers of every rank. They go between hosts, so that no stream waits."""
        if self.levels is not None:
            across, within = self.levels
            of_node = [number for each in within.gather_small(numbers) for number in each]
            flat = [number for node in across.gather_small(of_node) for number in node]
            return [flat[i : i + len(numbers)] for i in range(0, len(flat), len(numbers))]
        if self.size == 1:
            return [list(numbers)]
        group = self._host_group()
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(own) for _ in range(self.size)]
        _guarded("comparing arguments", lambda: group.allgather([found], [own]).wait())
        return [t.tolist() for t in found]

    def _host_group(self) -> Any:
        """The group, if it sends from the host; or one of gloo beside it, made of its store in the first call
        that asks, in which all of its ranks take part."""
        if sends_from_host(self.devices):
            return self.group
        if self.group not in _on_host:
            of_group: Any = vars(distributed_c10d)["_get_process_group_store"]
            # Some releases give the stores of groups side by side in a mesh one prefix.
            members = "_".join(map(str, dist.get_process_group_ranks(self.group)))
            store = distributed_c10d.PrefixStore(f"tandem/{members}", of_group(self.group))
            make: Any = dist.ProcessGroupGloo
            _on_host[self.group] = _guarded(
                "making a group of gloo between the hosts (GLOO_SOCKET_IFNAME names their network)",
                lambda: make(store, self.rank, self.size, _time_out(self.group)),
            )
        return _on_host[self.group]

    def gather_objects(self, value: Any) -> list[Any]:
        """This value of every rank; on errors alone, since it is slow."""
        data = pickle.dumps(value)
        sizes = [size for (size,) in self.gather_small([len(data)])]
        found = self.gather_small(list(data.ljust(max(sizes), b"\0")))
        return [pickle.loads(bytes(each)) for each in found]

    def exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], tag: int
    ) -> Waiting:
        """Sends the tensors ``sends[r]`` to rank r and receives ``receives[r]`` from it, each a message; all
        of them are contiguous. Both sides have the same sizes in mind. A rank copies what is for itself."""
        what, turns = "an all-to-all", range(1, self.size)
        to = [(r, t) for i in turns for r in [(self.rank + i) % self.size] for t in sends[r]]
        source = [(r, t) for i in turns for r in [(self.rank - i) % self.size] for t in receives[r]]
        works = self._start(to, source, tag, what)
        for place, t in zip(receives[self.rank], sends[self.rank], strict=True):
            place.copy_(t)
        return Waiting(works, receives, sends, what)

    def gather_rows(self, own: Tensor, rows: Sequence[int]) -> Tensor:
        """These rows of every rank, of which each has so many, by rank."""
        if self.levels is not None:
            across, within = self.levels
            nodes = [rows[i : i + within.size] for i in range(0, self.size, within.size)]
            return across.gather_rows(within.gather_rows(own, nodes[across.rank]), [sum(n) for n in nodes])
        whole = own.new_empty((sum(rows), *own.shape[1:]))
        parts = [[part] for part in torch.split(whole, list(rows))]
        self.exchange([[own.contiguous()]] * self.size, parts, OTHERS).wait()
        return whole

    def gather_equal(self, own: Tensor, what: str = "gathering results") -> Tensor:
        """This tensor of every rank, of one shape on all of them: (ranks, ...), in the order of ranks."""
        if self.levels is not None:
            across, within = self.levels
            return across.gather_equal(within.gather_equal(own, what), what).flatten(0, 1)
        found = own.new_empty((self.size, *own.shape))
        if self.size == 1:
            found[0] = own
            return found
        sends = own.contiguous().view(-1).view(torch.uint8)  # as bytes: no backend has all dtypes
        into = found.view(-1).view(torch.uint8)
        _guarded(what, lambda: _gather_equal(into, sends, group=self.group))
        return found

    def shift(self, sends: Tensor, received: Tensor, tag: int) -> Waiting:
        """Sends to the next rank and receives from the one before. Those have the same sizes in mind."""
        after, before = ((self.rank + i) % self.size for i in (1, self.size - 1))
        named = (dist.get_global_rank(self.group, r) for r in (after, before))
        what = f"sending to rank {next(named)} and receiving from rank {next(named)}"
        sends = sends.contiguous()
        return Waiting(self._start([(after, sends)], [(before, received)], tag, what), received, sends, what)

    def _meet(self, device: torch.device) -> None:
        """Before the first message of a group: an exchange of all its ranks. NCCL demands it of the first
        call of a group, and of messages between two ranks some ranks may have none."""
        if self.group not in _met:
            nothing = torch.zeros(1, dtype=torch.int32, device=device)
            _guarded("connecting ranks", lambda: dist.all_reduce(nothing, group=self.group))
            _met.add(self.group)

    def _start(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int, what: str
    ) -> Sequence[Any]:
        """Sends to and receives from these ranks of the group; nothing where tensors are empty. Messages
        between two ranks are received in the order in which they are sent.

        Not by the backend's all-to-all: that of gloo keeps its tensors for a while after it is done, so that
        what a call allocates would depend on when messages arrive, and it has one message for each rank.
        """
        if not sends:
            return ()
        self._meet(sends[0][1].device)
        operations = []
        for call, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for peer, t in messages:
                if t.numel():
                    data = t.view(-1).view(torch.uint8)  # as bytes: no backend has all dtypes
                    other = dist.get_global_rank(self.group, peer)
                    operations.append(dist.P2POp(call, data, other, self.group, tag))
        return _guarded(what, lambda: dist.batch_isend_irecv(operations)) if operations else ()


def sends_from_host(devices: set[str]) -> bool:
    return "cpu" in devices


def _time_out(group: Any) -> timedelta:
    """How long ranks of the group wait for each other."""
    backend = group._get_backend(next(iter(group._device_types)))
    found: timedelta = getattr(getattr(backend, "options", None), "_timeout", timedelta(minutes=30))
    return found


def _guarded(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise ExecutionError(
            f"{what} failed, since a rank has ended, has raised an error or takes longer than the group's "
            f"time-out: {error}"
        ) from error
