"""Dropout in CUDA graphs: each replay keeps other entries, its backward pass those of its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tandem
import tandem.flash_attn
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use")

P = 0.3


def leaves(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of it, and what its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def close(a: Tensor, b: Tensor) -> None:
    """Sums of 66560 numbers near 1 that are equal but for their rounding to bf16, which adds up to 0.3 or so;
    those of two masks differ by 24."""
    torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=3.0)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = tandem.attention(q, k, v, dropout_p=P)
    return out


def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu = torch.arange(0, 2 * q.shape[1] + 1, q.shape[1], device="cuda", dtype=torch.int32)
    rows = (t.flatten(0, 1) for t in (q, k, v))
    out: Tensor = tandem.attention(*rows, cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_p=P)
    return out.unflatten(0, q.shape[:2])


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(*heads_first, dropout_p=P).transpose(1, 2)


@pytest.mark.parametrize("call", [attend, varlen, by_torch])
def test_replays_draw_anew(in_torch: None, call: Callable[..., Tensor]) -> None:
    q, k, v = leaves(2, 130, 4, 64)

    def step() -> tuple[Tensor, Tensor]:
        out = call(q, k, v)
        return out, torch.autograd.grad(out, v, torch.ones_like(out))[0]

    graph, (out, dv) = captured(step)
    seen = []
    for _ in range(4):
        graph.replay()
        # Values enter linearly: <out, 1> = <dv, v>, of one mask alone.
        close(out.float().sum(), (dv.float() * v.float()).sum())
        seen.append(out.clone())
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    torch.manual_seed(5)
    graph.replay()
    first = out.clone()
    torch.manual_seed(5)
    graph.replay()
    assert torch.equal(out, first)  # PyTorch's generator starts the replays, too


def test_the_mean_of_replays_is_the_result_without() -> None:
    q, k, v = (t.detach() for t in leaves(2, 130, 4, 64))
    graph, out = captured(lambda: attend(q, k, v))
    several = []
    for _ in range(300):
        graph.replay()
        several.append(out.float())
    all_of_them = torch.stack(several)
    error = all_of_them.std(0) / 300**0.5
    expected = tandem.attention(q, k, v).float()
    assert ((all_of_them.mean(0) - expected).abs() < 6 * error + 1e-2).all()


def test_a_given_seed_stays() -> None:
    q, k, v = (t.detach() for t in leaves(2, 130, 4, 64))
    graph, out = captured(lambda: tandem.attention(q, k, v, dropout_p=P, dropout_seed=7))
    graph.replay()
    assert torch.equal(out, tandem.attention(q, k, v, dropout_p=P, dropout_seed=7))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return attend(*(self.project(x),) * 3)


def test_graphed_callables() -> None:
    x = torch.randn(2, 130, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(Layer(), (x,))
    results = []
    for _ in range(3):
        out = graphed(x)
        out.float().square().sum().backward()
        results.append((out.detach().clone(), x.grad.clone()))  # the next replay writes there
        x.grad = None
    assert not torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[1][1], results[2][1])


def test_compiled_with_graphs() -> None:
    """A call with dropout is outside of them."""
    compiled = torch.compile(lambda q, k, v: attend(q * 2, k, v) + 1, mode="reduce-overhead")
    q, k, v = (t.detach() for t in leaves(2, 130, 4, 64))
    results = [compiled(q, k, v).clone() for _ in range(5)]
    assert not torch.equal(results[3], results[4])
