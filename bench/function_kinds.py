"""What `cpu-functions` and `gpu-functions` time: the usual masks and scores of FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WINDOW, PREFIX, DOCUMENTS = 256, 256, 8
Function = Callable[..., Any]
NAMES = ("causal", "sliding window", "document", "prefix LM", "ALiBi", "relative", "softcap")


def functions(
    seqlen: int, heads: int, device: str = "cuda"
) -> dict[str, tuple[Function | None, Function | None]]:
    """Score and mask functions by name, in the order of NAMES."""
    slopes = torch.exp2(-torch.arange(1, heads + 1, device=device) * 8.0 / heads)
    document = torch.arange(seqlen, device=device) * DOCUMENTS // seqlen
    table = torch.randn(heads, 2 * seqlen, device=device)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return {
        "causal": (None, causal),
        "sliding window": (None, lambda b, h, q, k: (q >= k) & (q - k <= WINDOW)),
        "document": (None, lambda b, h, q, k: (document[q] == document[k]) & (q >= k)),
        "prefix LM": (None, lambda b, h, q, k: (k < PREFIX) | (q >= k)),
        "ALiBi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), causal),
        "relative": (lambda s, b, h, q, k: s + table[h, q - k + seqlen], causal),
        "softcap": (lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0), causal),
    }


def visible_pairs(mask_mod: Function | None, seqlen: int, device: str = "cuda") -> int:
    """Pairs of query and key that a mask function, which is one for all heads, leaves."""
    if mask_mod is None:
        return seqlen * seqlen
    at = torch.arange(seqlen, device=device)
    rows = 1024
    return sum(
        int(mask_mod(0, 0, at[i : i + rows, None], at[None]).expand(-1, seqlen).sum())
        for i in range(0, seqlen, rows)
    )
