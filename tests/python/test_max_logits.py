"""return_max_logits: the largest logit of each query, by every way of a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tandem
import torch
from tandem import _call
from tandem.torch import _operators
from test_forward import qkv

OPTIONS: dict[str, Any] = {"causal": True, "softcap": 20.0, "scale": 0.3}


def expected(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """By the formula, with OPTIONS: (batch, heads_q, seqlen_q)."""
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    logits = 20.0 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q.double(), keys) * 0.3 / 20.0)
    hidden = torch.ones(logits.shape[-2:]).tril(k.shape[1] - q.shape[1]) == 0
    return logits.masked_fill(hidden, -torch.inf).amax(-1)


def assert_right(max_logits: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
    torch.testing.assert_close(max_logits.double(), expected(q.detach(), k.detach()), rtol=1e-5, atol=1e-5)


def test_what_is_returned() -> None:
    q, k, v = qkv()
    out, lse, max_logits = tandem.attention(q, k, v, return_lse=True, return_max_logits=True, **OPTIONS)
    assert max_logits.shape == lse.shape and max_logits.dtype == torch.float32
    assert_right(max_logits, q, k)
    alone = tandem.attention(q, k, v, return_max_logits=True, **OPTIONS)
    assert len(alone) == 2 and torch.equal(alone[0], out) and torch.equal(alone[1], max_logits)
    assert torch.equal(tandem.attention(q, k, v, **OPTIONS), out)
    with pytest.raises(ValueError, match="^return_max_logits is 'yes'; pass True or False"):
        tandem.attention(q, k, v, return_max_logits="yes")  # type: ignore[call-overload]


def test_numpy() -> None:
    q, k, v = qkv()
    arrays = [t.numpy() for t in (q, k, v)]
    _, lse, max_logits = tandem.attention(*arrays, return_lse=True, return_max_logits=True, **OPTIONS)
    assert isinstance(max_logits, np.ndarray) and max_logits.shape == lse.shape
    assert_right(torch.from_numpy(max_logits), q, k)


def test_with_gradients_none_flows_through_it() -> None:
    tensors = [t.requires_grad_() for t in qkv()]
    out, max_logits = tandem.attention(*tensors, return_max_logits=True, **OPTIONS)
    assert out.requires_grad and not max_logits.requires_grad
    assert_right(max_logits, *tensors[:2])
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, dout)
    plain = torch.autograd.grad(tandem.attention(*tensors, **OPTIONS), tensors, dout)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def test_with_functions_and_dropout() -> None:
    q, k, v = qkv(seqlen_q=20, seqlen_k=20)
    bias = torch.randn(20, 20)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
    right = (scores * q.shape[-1] ** -0.5 + bias).amax(-1)
    for options in ({}, {"dropout_p": 0.3, "dropout_seed": 1}):
        _, max_logits = tandem.attention(q, k, v, bias=bias, return_max_logits=True, **options)
        torch.testing.assert_close(max_logits, right, rtol=1e-5, atol=1e-5)


def test_the_operator_says_an_empty_tensor_where_there_is_none() -> None:
    q, k, v = qkv()
    flat = _operators.flat(_call.Call(return_max_logits=True))
    for options, shape in ((_operators.flat(_call.Call()), (0,)), (flat, _call.lse_shape(q))):
        assert torch.ops.tandem.attention(q, k, v, None, *options, None)[2].shape == shape
        torch.library.opcheck(torch.ops.tandem.attention, (q, k, v, None, *options, None))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_compiled(is_recorded: bool) -> None:
    tensors = [t.requires_grad_(is_recorded) for t in qkv()]
    compiled = torch.compile(tandem.attention, fullgraph=True, backend="aot_eager")
    out, max_logits = compiled(*tensors, return_max_logits=True, **OPTIONS)
    assert_right(max_logits, *tensors[:2])
    if is_recorded:
        assert not max_logits.requires_grad
        torch.autograd.grad(out.sum(), tensors)


def test_gradients_in_8_bits_take_it() -> None:
    """By autograd, which saves it, and by hand."""
    tensors = [t.requires_grad_() for t in qkv(seqlen_q=64, seqlen_k=64, dtype=torch.bfloat16)]
    options: dict[str, Any] = {"precision": "int8", "backward_precision": "int8"}
    out, lse, max_logits = tandem.attention(*tensors, return_lse=True, return_max_logits=True, **options)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, dout)
    q, k, v = (t.detach() for t in tensors)
    flat = _operators.flat(_call.Call(**options))
    torch.library.opcheck(torch.ops.tandem.attention, (*tensors, None, *flat, None))
    saved = (dout, q, k, v, out.detach(), lse.detach())
    by_hand = tandem.attention_backward(*saved, max_logits=max_logits, **options)
    assert all(torch.equal(a, b) for a, b in zip(gradients, by_hand, strict=True))
    with pytest.raises(ValueError, match="^max_logits is missing; "):
        tandem.attention_backward(*saved, **options)
    with pytest.raises(ValueError, match="^max_logits is given, but backward_precision is exact"):
        tandem.attention_backward(*saved, max_logits=max_logits)


def test_explain_names_it() -> None:
    q, k, v = qkv()
    assert "max_logits" in tandem.explain(q, k, v, return_max_logits=True)
    assert "max_logits" not in tandem.explain(q, k, v)


def test_on_a_gpu_gradients_in_8_bits_have_a_plan() -> None:
    tensors = qkv(head_dim=128, dtype=torch.bfloat16)
    options: dict[str, Any] = {"precision": "int8", "backward_precision": "int8", "device": "H100"}
    forward = tandem.explain(*tensors, return_max_logits=True, **options)
    assert "eight_bit_forward" in forward and "max_logits" in forward
    assert "eight_bit_backward" in tandem.explain(*tensors, backward=True, **options)
    with pytest.raises(NotImplementedError, match="^max_logits with precision fp8 has no GPU kernel; "):
        tandem.explain(*tensors, return_max_logits=True, precision="fp8", device="H100")


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    attention = pytest.importorskip("tandem.jax").attention
    q, k, v = qkv()
    as_jax = [jax.numpy.asarray(t.numpy()) for t in (q, k, v)]

    def run(*arrays: Any) -> Any:
        return attention(*arrays, return_max_logits=True, **OPTIONS)

    with jax.default_device(jax.devices("cpu")[0]):
        _, max_logits = jax.jit(run)(*as_jax)
        assert_right(torch.from_numpy(np.asarray(max_logits).copy()), q, k)
        pulled = jax.grad(lambda *x: run(*x)[0].sum() + run(*x)[1].sum(), (0, 1, 2))(*as_jax)
        plain = jax.grad(lambda *x: attention(*x, **OPTIONS).sum(), (0, 1, 2))(*as_jax)
    for a, b in zip(pulled, plain, strict=True):
        np.testing.assert_array_equal(a, b)
