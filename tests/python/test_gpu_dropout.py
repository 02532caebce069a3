"""Dropout in CUDA graphs."""

from __future__ import annotations

import pytest
import tandem
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use")


def test_a_seed_drawn_on_the_host_is_refused() -> None:
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    with (
        pytest.raises(tandem.UnsupportedError, match="^dropout_seed is missing in a CUDA graph's capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        tandem.attention(q, q, q, dropout_p=0.1)
