"""What the tests of the `tandem` program share: where it is, and the plain formula."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TANDEM = Path(os.environ.get("TANDEM_PROGRAM", ROOT / "build/release/cli/tandem")).resolve()


def attention(q, k, v, *, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0):
    """out and lse by the plain formula in fp64; (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    s = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    diagonal = np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    keys = np.arange(k.shape[1])[None, :]
    hidden = np.zeros_like(diagonal + keys, dtype=bool)
    if causal:
        window_right = 0 if window_right < 0 else min(window_right, 0)
    if window_left >= 0:
        hidden |= keys < diagonal - window_left
    if window_right >= 0:
        hidden |= keys > diagonal + window_right
    s[..., hidden] = -np.inf
    largest = np.maximum(s.max(-1, keepdims=True), -1e300)
    p = np.exp(s - largest)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]
    out = np.einsum("bhij,bjhd->bihd", p / np.where(total == 0, 1, total), v)
    return out, lse
