"""Which rank holds which rows of a cache of keys and values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem._errors import InvalidArgumentError


@dataclass(frozen=True)
class CacheLayout:
    """Which rank holds which rows of a cache, in the same way for every sequence.

    Blocks of so many rows go around: row t of a sequence is on rank ``t // block % ranks``. A rank's rows lie
    one behind the other in its own cache, in their order. Make one with `striped` or `pages`; the same on
    every rank.

    Attributes:
      seqlen: rows that a sequence can have, on all ranks together.
      ranks: how many ranks share them.
      block: rows of a block.
    """

    seqlen: int
    ranks: int
    block: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, least = field.name, 0 if field.name == "seqlen" else 1
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer, at least {least}")

    @classmethod
    def striped(cls, seqlen: int, ranks: int, block: int = 1) -> CacheLayout:
        """Rank r holds every ranks-th row from r on, or with ``block`` every ranks-th block of so many rows:
        the rows of a page, say. Ranks have equally much to read, however long a sequence is."""
        return cls(seqlen, ranks, block)

    @classmethod
    def pages(cls, seqlen: int, ranks: int, page_size: int = 1) -> CacheLayout:
        """Rank r holds the r-th part of all pages, in their order: consecutive rows, as a prefill leaves
        them. Pages have ``page_size`` rows; all ranks but the last ones have equally many."""
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise InvalidArgumentError(f"page_size is {page_size!r}; it must be an integer, at least 1")
        made = cls(seqlen, ranks)  # validates the others
        count = -(-seqlen // page_size)
        return dataclasses.replace(made, block=max(1, -(-count // ranks)) * page_size)

    def before(self, rank: int, rows: Any) -> Any:
        """How many of the first ``rows`` rows of a sequence a rank holds: an int, or an integer tensor of
        them. With all rows of a sequence in use that is what its own part of the cache has in use. There are
        no rows past ``seqlen``."""
        if not 0 <= rank < self.ranks:
            raise InvalidArgumentError(f"rank is {rank}, but the cache is for ranks 0 to {self.ranks - 1}")
        around = self.block * self.ranks
        rows = rows.clamp(0, self.seqlen) if isinstance(rows, Tensor) else min(max(rows, 0), self.seqlen)
        rounds, left = rows // around, rows % around - rank * self.block
        if isinstance(left, Tensor):
            return rounds * self.block + left.clamp(0, self.block)
        return rounds * self.block + min(max(left, 0), self.block)

    def rows(self, rank: int) -> int:
        """Rows of a sequence that a rank's cache has room for, at least."""
        found: int = self.before(rank, self.seqlen)
        return found

    def indices(self, rank: int) -> Tensor:
        """The number of each row of a rank in the sequence; int64, on the CPU."""
        local = torch.arange(self.rows(rank))
        return local // self.block * (self.block * self.ranks) + rank * self.block + local % self.block

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The rows of x that a rank holds; x has those of all ranks in dimension ``dim``."""
        if x.shape[dim] != self.seqlen:
            raise InvalidArgumentError(
                f"x has {x.shape[dim]} rows in dimension {dim}, but the layout has {self.seqlen}"
            )
        return x.index_select(dim, self.indices(rank).to(x.device))

    def local(self, rank: int, rows: Tensor) -> Tensor:
        """Where a rank's cache has these rows of a sequence: what tells a rank which new tokens to append,
        and where. -1 for those of other ranks, and for rows that no rank has room for, from ``seqlen`` on.
        Integers of any shape; the result has their dtype."""
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
            raise InvalidArgumentError(f"rows is {rows!r}; pass a tensor of int32 or int64")
        mine = (rows >= 0) & (rows < self.seqlen) & (rows // self.block % self.ranks == rank)
        return torch.where(mine, self.before(rank, rows), -1)
