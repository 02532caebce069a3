"""What the model of `explain` knows of the machine and of a call."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Machine:
    """Rates of one rank, per second.

    Attributes:
      flops: of the attention kernels, forward and backward alike.
      link: bytes that a rank sends while it receives as many.
      latency: seconds that a collective or a step takes whatever its size, with the small kernels around it.
      memory: bytes that are read or written where results are merged.
      units: tiles that the kernels compute at the same time, 128 rows of one head each; those of the last
        turn take as long as a full one. 1 where that does not count.
      held_up: of the seconds that an exchange takes beside kernels, the share that these take longer, since
        the exchange has SMs that they wait for.
      host: seconds until the host has launched one exchange and what is computed with it.
    """

    flops: float
    link: float
    latency: float
    memory: float
    units: int = 1
    host: float = 0.0
    held_up: float = 0.0


#: An H200 among others behind one NVLink switch: 600 TFLOP/s, and of the link's 450 GB/s what exchanges of
#: tens of megabytes reached between four H100s. There an exchange beside kernels takes as long as one alone.
H200 = Machine(600e12, 230e9, 200e-6, 3.5e12, 132, 0.4e-3, 1.0)
#: An H200 on a network of 400 Gbit/s a GPU, of which collectives reach 0.9, by a tenth of the SMs.
H200_HOSTS = replace(H200, link=45e9, held_up=0.1)
#: A process of a few cores among others of one host.
CPU = Machine(2e11, 2e9, 100e-6, 5e9)


@dataclass(frozen=True)
class Links:
    """Machines by the links that ranks have: to all others, or within their node and across nodes.

    Attributes:
      within: ranks of a node of a group of two levels; 0 of one level.
      near: links within a node.
      far: links across nodes, or of a group of one level.
    """

    within: int
    near: Machine
    far: Machine

    @classmethod
    def of(cls, device: str, hosts: tuple[int, ...], within: int) -> Links:
        """The links of ranks on these hosts, equal on every rank, whatever else a rank knows of its own."""
        if device != "cuda":
            return cls(within, CPU, CPU)
        size = within or 1
        nodes = [hosts[i : i + size] for i in range(0, len(hosts), size)]
        near = H200 if all(len(set(node)) == 1 for node in nodes) else H200_HOSTS
        return cls(within, near, H200 if len(set(hosts)) == 1 else H200_HOSTS)


@dataclass(frozen=True)
class Shape:
    """The sizes of a call, the same on every rank."""

    batch: int
    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    itemsize: int  #: bytes of an element of q, k and v

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Shape:
        """The shape of a call of tensors with a batch."""
        return cls(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size())

    @property
    def kv(self) -> int:
        """Numbers in a row of K and V of all heads."""
        return self.batch * self.heads_kv * (self.head_dim_qk + self.head_dim_v)

    def flops(self, pairs: float) -> float:
        """Operations of a forward pass over so many pairs of each head."""
        return 2.0 * pairs * self.batch * self.heads_q * (self.head_dim_qk + self.head_dim_v)
