"""An output gate on a GPU, beside the formula in f64 by PyTorch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import tandem
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use")


def inputs(batch: int, rows: int, keys: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and a gate, of eight heads over two."""
    shapes = (rows, 8), (keys, 2), (keys, 2), (rows, 8)
    return [
        torch.randn(batch, *shape, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for shape in shapes
    ]


def formula(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, causal: bool) -> Tensor:
    k, v = (t.repeat_interleave(4, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], device=q.device).tril(k.shape[1] - q.shape[1]) > 0
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v) * torch.sigmoid(gate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_results_and_gradients(head_dim: int, causal: bool, dtype: torch.dtype) -> None:
    tensors = inputs(2, 300, 700, head_dim, dtype)
    q, k, v, gate = tensors
    out = tandem.attention(q, k, v, gate=gate, causal=causal)
    dout = torch.randn_like(out)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    right = formula(*exact, causal=causal)
    expected = (right, *torch.autograd.grad(right, exact, dout.double()))
    for found, of_formula in zip((out, *torch.autograd.grad(out, tensors, dout)), expected, strict=True):
        error = (found.double() - of_formula).norm() / of_formula.norm()
        assert error < (0.01 if dtype == torch.bfloat16 else 0.002)


def test_varlen_and_a_step_of_generation() -> None:
    q, k, v, gate = (t.detach() for t in inputs(3, 100, 100, 128, torch.bfloat16))
    cu = torch.tensor([0, 100, 200, 300], device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    found = tandem.attention(*rows, gate=gate.flatten(0, 1), **options)
    torch.testing.assert_close(found, tandem.attention(q, k, v, gate=gate, causal=True).flatten(0, 1))
    q, k, v, gate = (t.detach() for t in inputs(1, 1, 20000, 128, torch.bfloat16))
    plain = tandem.attention(q, k, v).float() * torch.sigmoid(gate.float())
    torch.testing.assert_close(tandem.attention(q, k, v, gate=gate).float(), plain, rtol=0.02, atol=1e-4)


def test_in_a_graph() -> None:
    q, k, v, gate = (t.detach() for t in inputs(1, 256, 256, 64, torch.bfloat16))
    right = tandem.attention(q, k, v, gate=gate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tandem.attention(q, k, v, gate=gate)
    out.zero_()
    graph.replay()
    assert torch.equal(out, right)
