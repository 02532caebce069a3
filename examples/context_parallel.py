"""Trains a small language model on sequences whose rows are divided among processes.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/context_parallel.py

Each process has one GPU, or without GPUs a part of the CPU. The losses are those of one process: compare with
``--nproc-per-node 1``. With ``--within 2`` two processes make a node, and the group has two levels. What is
special about context parallel is marked by (1) to (5).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from tandem.distributed import Layout, context_parallel_attention, explain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

WORDS, WIDTH, HEADS, HEADS_KV, HEAD_DIM, LAYERS = 64, 64, 4, 2, 16, 2


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """A rotary embedding of (rows, heads, head_dim)."""
    frequencies = 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=x.device)
    angles = positions[:, None, None] * frequencies
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(
        x.dtype
    )


class Block(nn.Module):
    """Attention and a feed-forward layer over this process's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.join = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, positions: Tensor, layout: Layout, options: dict[str, Any]) -> Tensor:
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, HEADS_KV, HEADS_KV], 1)
        )
        q, k = rotated(q, positions), rotated(k, positions)
        # (4) Queries of this process see keys of all of them.
        out = context_parallel_attention(q, k, v, layout=layout, causal=True, **options)
        x = x + self.join(out.flatten(1))
        return x + self.feed(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, words: Tensor, positions: Tensor, layout: Layout, options: dict[str, Any]) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x, positions, layout, options)
        return self.norm(x) @ self.words.weight.T / 8


def documents(lengths: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words and those that follow them; each document says its first half again."""
    found = []
    for length in lengths:
        half = torch.randint(WORDS, (length // 2 + 1,), generator=generator)
        found.append(torch.cat([half, half])[: length + 1])
    return torch.cat([d[:-1] for d in found]), torch.cat([d[1:] for d in found])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model on sequences divided among processes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 300, 120, 70, 25, 9])
    parser.add_argument(
        "--layout", default="balanced", choices=["contiguous", "zigzag", "striped", "balanced"]
    )
    strategies = ["auto", "gather", "ring", "heads", "heads+gather", "heads+ring"]
    parser.add_argument("--strategy", default="auto", choices=strategies)
    parser.add_argument("--within", type=int, default=0, help="processes of a node; 0: one level")
    arguments = parser.parse_args()

    # (1) A process group: NCCL where there are GPUs.
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options: dict[str, Any] = {"strategy": arguments.strategy}
    if arguments.within:
        shape = (ranks // arguments.within, arguments.within)
        options["group"] = init_device_mesh(device.type, shape, mesh_dim_names=("across", "within"))

    # (2) Who has which rows of the packed documents; the same on every process.
    layout: Layout = getattr(Layout, arguments.layout)(arguments.lengths, ranks)
    if rank == 0:
        sizes = {"heads_q": HEADS, "heads_kv": HEADS_KV, "head_dim_qk": HEAD_DIM, "within": arguments.within}
        print(explain(layout, causal=True, strategy=arguments.strategy, **sizes))

    torch.manual_seed(0)  # the same weights everywhere
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)  # and the same documents
    positions = layout.positions(rank).to(device)
    for step in range(arguments.steps):
        whole = documents(arguments.lengths, generator)
        words, after = (layout.shard(t, rank).to(device) for t in whole)  # (3) this process's rows
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            logits = model(words, positions, layout, options)
        loss = nn.functional.cross_entropy(logits.float(), after, reduction="sum") / layout.total
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # (5) each process has the gradients of its rows: add them up
            if parameter.grad is None:  # it has no rows
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.6f}", flush=True)
    options.clear()  # a mesh keeps its groups' threads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
