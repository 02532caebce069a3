"""What engines do with caches and `merge`: trees of drafts and prefixes that requests share, read once."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from pages import paged, used
from test_forward import DTYPES

HEADS, HEADS_KV, HEAD_DIM, PAGE = 4, 2, 32, 16
SINK = torch.tensor([-1.0, 0.5, 2.0, 7.0])


def rows(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, *shape, HEADS_KV, HEAD_DIM).to(dtype)
    return k, v


def path(parents: list[int], node: int) -> list[int]:
    """From the root to the node."""
    return ([] if parents[node] < 0 else path(parents, parents[node])) + [node]


def expect(out: torch.Tensor, lse: torch.Tensor, alone: list[Any], **options: Any) -> None:
    """That packed rows (total, heads, head_dim) are what q, k and v of each request alone give."""
    exact = [oracle.exact(*inputs, **options) for inputs in alone]
    same = [oracle.same_dtype(*inputs, **options)[0] for inputs in alone]
    bound = () if out.dtype == torch.float32 else (torch.cat(same, 1),)
    oracle.assert_close(out[None], torch.cat([e for e, _ in exact], 1), *bound)
    oracle.assert_close(lse[None], torch.cat([e for _, e in exact], 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 15, 16, 53])
def test_a_tree_of_drafts(dtype: torch.dtype, length: int) -> None:
    """Verified by two calls: every draft sees the cache, whose unused rows are NaN, and its own ancestors,
    which are pages of one row. Two roots; the sink is in the first part.
    """
    parents = [-1, 0, 0, 1, 1, 3, -1, 6]
    count = len(parents)
    k, v = rows(1, max(length, 1), dtype=dtype)
    drafts = torch.randn(count, HEADS, HEAD_DIM).to(dtype)
    new_k, new_v = rows(count, dtype=dtype)
    k_pages, v_pages, table = paged(k, v, [length], PAGE)
    paths = [path(parents, i) for i in range(count)]
    ancestors = torch.full((count, max(map(len, paths)) + 2), -7, dtype=torch.int32)
    for i, nodes in enumerate(paths):
        ancestors[i, : len(nodes)] = torch.tensor(nodes)
    seen, seen_lse = tandem.attention(
        drafts[None], k_pages, v_pages, page_table=table, seqused_k=used([length]), sink=SINK, return_lse=True
    )
    own, own_lse = tandem.attention(
        drafts[:, None], new_k[:, None], new_v[:, None], page_table=ancestors,
        seqused_k=used([len(nodes) for nodes in paths]), return_lse=True, check=True,
    )  # fmt: skip
    out, lse = tandem.merge((seen[0], own[:, 0]), (seen_lse[0], own_lse[:, :, 0].T))
    alone = []
    for i, nodes in enumerate(paths):
        keys, values = (
            torch.cat([t[:, :length], new[None, nodes]], 1) for t, new in ((k, new_k), (v, new_v))
        )
        alone.append((drafts[None, i : i + 1], keys, values))
    expect(out, lse, alone, sink=SINK)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prefix_that_requests_share(dtype: torch.dtype) -> None:
    """Two pages of every request are the same. They are read once, as one sequence with the queries of all,
    and the rest of each request follows: a chunk of a prompt, a step, and one with nothing behind the prefix.
    """
    shared, behind, new = 2 * PAGE, [30, 1, 0], [20, 1, 0]
    k, v = rows(3, shared + 30, dtype=dtype)
    k[1:, :shared], v[1:, :shared] = k[:1, :shared], v[:1, :shared]
    lengths = [shared + n for n in behind]
    k_pages, v_pages, table = paged(k, v, lengths, PAGE)
    table[1:, :2] = table[:1, :2]
    cu = torch.tensor([0, *new]).cumsum(0)
    q = torch.randn(sum(new), HEADS, HEAD_DIM).to(dtype)
    prefix = tandem.attention(
        q[None], k_pages, v_pages, page_table=table[:1, :2], seqused_k=used([shared]), return_lse=True
    )
    rest = tandem.attention(
        q, k_pages, v_pages, cu_seqlens_q=cu, page_table=table[:, 2:], seqused_k=used(behind), causal=True,
        return_lse=True,
    )  # fmt: skip
    out, lse = tandem.merge((prefix[0][0], rest[0]), (prefix[1][0], rest[1]))
    alone = []
    for b, length in enumerate(lengths):
        at = slice(int(cu[b]), int(cu[b + 1]))
        alone.append((q[None, at], k[b : b + 1, :length], v[b : b + 1, :length]))
    expect(out, lse, alone, causal=True)
