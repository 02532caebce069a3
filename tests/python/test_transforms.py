"""Transforms of torch.func: reverse mode gives torch.autograd's gradients; forward mode is an error."""

from __future__ import annotations

from typing import Any

import pytest
import tandem
import torch
from tandem import _call
from tandem.flash_attn import flash_attn_func
from tandem.torch import _operators
from test_autograd import trainable
from test_forward import qkv
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

SINK = torch.tensor([-1.0, 0.5, 2.0, 7.0])


def by_operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    sink = options.pop("sink", None)
    metadata = tuple(options.pop(name, None) for name in _call.METADATA)
    flat = _operators.flat(_call.Call(**options, metadata=metadata))
    return torch.ops.tandem.attention(q, k, v, sink, *flat, None)[:2]


def by_function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return tandem.attention(q, k, v, return_lse=True, **options)


def by_flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return flash_attn_func(q, k, v, return_attn_probs=True, **options)


CALLS = [by_function, by_operator, by_flash_attn]


def close(got: Any, expected: Any) -> None:
    leaves = torch.utils._pytree.tree_leaves
    torch.testing.assert_close(leaves(got), leaves(expected))


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_grad_and_vjp(call: Any) -> None:
    inputs = (*qkv(), SINK)

    def both(*t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return call(*t[:3], sink=t[3], causal=True, softcap=4.0)

    def loss(*t: torch.Tensor) -> torch.Tensor:
        out, lse = both(*t)
        return out.square().sum() + lse.sigmoid().sum()

    recorded = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(loss(*recorded), recorded)
    close(grad(loss, (0, 1, 2, 3))(*inputs), expected)
    close(grad_and_value(loss)(*inputs), (expected[0], loss(*inputs)))
    results, pull = vjp(both, *inputs)
    seeds = tuple(torch.randn_like(t) for t in results)
    close(pull(seeds), torch.autograd.grad(both(*recorded), recorded, seeds))


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_jacrev(call: Any) -> None:
    q, k, v = (t.detach() for t in trainable())
    function = lambda *t: call(*t, causal=True)  # noqa: E731
    expected = torch.autograd.functional.jacobian(function, (q, k, v))
    close(jacrev(function, (0, 1, 2))(q, k, v), expected)
    close(jacrev(function, (0, 1, 2), chunk_size=1)(q, k, v), expected)


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_vmap_of_grad_and_grad_of_vmap(call: Any) -> None:
    """Gradients for each sample, with k shared by all."""
    q, k, v = qkv(batch=3)
    loss = lambda q, k, v: call(q[None], k[None], v[None])[0].square().sum()  # noqa: E731
    found = vmap(grad(loss, (0, 1, 2)), in_dims=(0, None, 0))(q, k[0], v)
    for i in range(3):
        close([t[i] for t in found], grad(loss, (0, 1, 2))(q[i], k[0], v[i]))
    total = lambda *t: vmap(loss, in_dims=(0, None, 0))(*t).sum()  # noqa: E731
    dq, dk, dv = grad(total, (0, 1, 2))(q, k[0], v)
    close((dq, dk, dv), (found[0], found[1].sum(0), found[2]))


def test_grad_of_a_module_called_by_function() -> None:
    """Autograd follows other tensors of the call at the same time."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.projection(x).unflatten(-1, (3, 2, 8)).unbind(2)
            return tandem.attention(q, k, v, causal=True)

    block, x = Block(), torch.randn(1, 5, 16)
    parameters = dict(block.named_parameters())
    block(x).square().sum().backward()
    found = grad(lambda p: functional_call(block, p, (x,)).square().sum())(parameters)
    close(list(found.values()), [p.grad for p in parameters.values()])
    q, k, v = trainable()
    found_dq = grad(lambda t: tandem.attention(t, k, v).sum())(q.detach())
    close(found_dq, torch.autograd.grad(tandem.attention(q, k, v).sum(), q)[0])


def test_transforms_compile_and_trace() -> None:
    q, k, v = qkv()
    step = grad(lambda *t: tandem.attention(*t, causal=True).square().sum(), (0, 1, 2))
    expected = step(q, k, v)
    close(torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v), expected)
    graph = make_fx(step)(q, k, v)
    called = [str(node.target) for node in graph.graph.nodes if "tandem" in str(node.target)]
    assert called == ["tandem.attention.default", "tandem.attention_backward.default"]
    close(graph(q, k, v), expected)


def test_attention_backward_under_transforms() -> None:
    q, k, v = qkv(batch=2)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    expected = tandem.attention_backward(out, q, k, v, out, lse)
    inputs = [t[:, None] for t in (out, q, k, v, out, lse)]
    close(vmap(tandem.attention_backward)(*inputs), [t[:, None] for t in expected])
    with pytest.raises(tandem.UnsupportedError, match="no second derivative"):
        grad(lambda q: tandem.attention_backward(out, q, k, v, out, lse)[0].sum())(q)


def test_quantize_under_transforms() -> None:
    """It has no derivative, and no gradient flows."""
    x, *_ = qkv()
    values, scales = tandem.quantize(x, "s8")
    close(vmap(lambda t: tandem.quantize(t, "s8"))(x[:, None]), (values[:, None], scales[:, None]))
    assert (grad(lambda t: (tandem.quantize(t, "s8")[1] + t.sum()).sum())(x) == scales.numel()).all()


def test_second_derivatives_are_refused() -> None:
    q, k, v = (t.detach() for t in trainable())
    loss = lambda t: tandem.attention(t, k, v).square().sum()  # noqa: E731
    with pytest.raises(tandem.UnsupportedError, match="no second derivative"):
        grad(lambda t: grad(loss)(t).sum())(q)
    with pytest.raises(tandem.UnsupportedError, match="carries a tangent"):
        hessian(loss)(q)
