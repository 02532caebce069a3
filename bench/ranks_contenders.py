"""The contenders of `context-parallel --measure`: what each rank calls."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import tandem
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tandem.distributed import Layout, _gather, context_parallel_attention
from torch import Tensor

#: PyTorch's context parallel: the SDPA backend, and how keys reach the other ranks.
PEERS = (("CUDNN_ATTENTION", "allgather"), ("FLASH_ATTENTION", "allgather"), ("FLASH_ATTENTION", "alltoall"))
ALONE, OWN, CHECKED, REPEATED = "alone", "alone, a rank's tokens", "auto, checked", ", keys repeated"

Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Cell:
    """One problem: the sequences of all ranks, and the tensors of a rank."""

    tokens: int  #: of a rank
    documents: str
    lengths: tuple[int, ...]
    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def drawn(rows: int, heads: tuple[int, int], head_dim: int, packed: bool, like: Any) -> list[Tensor]:
    """q, k, v and dout, of which the first three want gradients."""
    lead = (rows,) if packed else (1, rows)
    found = [torch.randn(*lead, h, head_dim, **like) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [t.requires_grad_(i < 3) for i, t in enumerate(found)]


def cell_of(tokens: int, documents: str, arguments: argparse.Namespace, like: Any) -> Cell:
    """A sequence of all ranks' tokens, or a mixture of documents; its tensors drawn on this rank."""
    from context_parallel import DENSE, mixture

    ranks = dist.get_world_size()
    lengths = [tokens * ranks] if documents == DENSE else mixture(documents, 0, tokens * ranks)
    packed = documents != DENSE
    layout = Layout.balanced(lengths, ranks) if packed else Layout.zigzag(lengths[0], ranks)
    torch.manual_seed(dist.get_rank())
    rows = layout.rows(dist.get_rank())
    heads = (arguments.heads, arguments.heads_kv)
    tensors = drawn(rows, heads, arguments.head_dim, packed, like)
    return Cell(tokens, documents, tuple(lengths), layout, *tensors)


def passes(call: Callable[[], Tensor], tensors: tuple[Tensor, ...], dout: Tensor) -> dict[str, Call]:
    """A forward pass, and one with a backward pass."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (call(),)

    def both() -> tuple[Tensor, ...]:
        out = call()
        return (out.detach(), *torch.autograd.grad(out, tensors, dout))

    return {"forward": forward, "both": both}


@dataclass(frozen=True)
class Contender:
    """What can be timed, by pass; what it runs in, and how its results become those of the others."""

    passes: dict[str, Call]
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    read: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple


def of_ranks(cell: Cell, strategy: str, check: bool) -> Contender:
    def call() -> Tensor:
        found: Tensor = context_parallel_attention(
            *cell.tensors, layout=cell.layout, causal=True, strategy=strategy, check=check
        )
        return found

    return Contender(passes(call, cell.tensors, cell.dout))


def in_chunks(cell: Cell, chunks: str) -> Contender:
    """`gather` in chunks of so many heads, forward and, after a slash, backward: 1,7/4,4."""
    ways = [tuple(map(int, way.split(","))) for way in chunks.split("/")]
    found = of_ranks(cell, "gather", False)

    def in_these(call: Call) -> Call:
        def called() -> tuple[Tensor, ...]:
            with mock.patch.object(_gather, "chunk_heads", lambda *about: ways[-1 if about[-1] else 0]):
                return call()

        return called

    return Contender({name: in_these(call) for name, call in found.passes.items()})


def of_one(lengths: tuple[int, ...], heads: tuple[int, int], head_dim: int, like: Any) -> Contender:
    """A GPU alone."""
    packed = len(lengths) > 1  # a sequence alone is the same work either way
    q, k, v, dout = drawn(sum(lengths), heads, head_dim, packed, like)
    options: dict[str, Any] = {}
    if packed:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(like["device"])
        options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}

    def call() -> Tensor:
        found: Tensor = tandem.attention(q, k, v, causal=True, **options)
        return found

    return Contender(passes(call, (q, k, v), dout))


def of_torch(cell: Cell, backend: str, rotation: str, grouped: bool) -> Contender:
    """PyTorch's SDPA in its context_parallel, whose shards are those of `Layout.zigzag`. With ``grouped``
    keys keep their heads; otherwise they are repeated for it, as where a backend has no groups."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    times = 1 if grouped else cell.q.shape[2] // cell.k.shape[2]
    q, k, v = (
        t.detach().repeat_interleave(times if i else 1, 2).transpose(1, 2).contiguous().requires_grad_()
        for i, t in enumerate(cell.tensors)
    )
    dout = cell.dout.transpose(1, 2).contiguous()
    mesh = dist.device_mesh.init_device_mesh(q.device.type, (dist.get_world_size(),))

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        # It takes the number of rows from a buffer, which it divides in place.
        rows = torch.empty(1, cell.layout.total, device=q.device)
        set_rotate_method(rotation)
        with sdpa_kernel(getattr(SDPBackend, backend)):
            with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[1], no_restore_buffers={rows}):
                yield

    def read(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tensors = [t.transpose(1, 2) for t in found]
        return tuple(t if i < 2 else t.unflatten(2, (-1, times)).sum(3) for i, t in enumerate(tensors))

    return Contender(passes(call, (q, k, v), dout), inside, read)


def contenders(
    cell: Cell, arguments: argparse.Namespace, like: Any, peers: bool
) -> dict[str, Callable[[], Contender]]:
    """Of each contender what makes it: all strategies, or with ``peers`` the first of them and PyTorch's."""
    ranks = dist.get_world_size()
    heads, heads_kv, head_dim = arguments.heads, arguments.heads_kv, arguments.head_dim
    share = (heads // ranks, max(1, heads_kv // ranks))
    made: dict[str, Callable[[], Contender]] = {
        name: functools.partial(of_ranks, cell, name, False)
        for name in arguments.strategies[: 1 if peers else None]
    }
    if not peers:
        made |= {f"gather in {each}": functools.partial(in_chunks, cell, each) for each in arguments.chunks}
    made[ALONE] = functools.partial(of_one, cell.lengths, share, head_dim, like)
    if not peers:
        if arguments.strategies_alone:
            return made
        made[CHECKED] = functools.partial(of_ranks, cell, "auto", True)
        if not cell.layout.packed:
            made[OWN] = functools.partial(of_one, (cell.tokens,), (heads, heads_kv), head_dim, like)
        return made
    for (backend, rotation), grouped in itertools.product(PEERS, (True, False)):
        name = f"pytorch {backend.split('_')[0].lower()} {rotation}"
        made[name + ("" if grouped else REPEATED)] = functools.partial(
            of_torch, cell, backend, rotation, grouped
        )
    return made
