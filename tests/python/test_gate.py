"""gate: an output gate, by every way of a call, and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tandem
import torch
from test_forward import qkv


def gated(*, grad: bool = False) -> list[torch.Tensor]:
    """q, k, v and a gate."""
    q, k, v = qkv()
    gate = torch.randn(*q.shape[:-1], v.shape[-1], generator=torch.Generator().manual_seed(5))
    return [t.requires_grad_(grad) for t in (q, k, v, gate)]


def formula(q: Any, k: Any, v: Any, gate: Any, **options: Any) -> torch.Tensor:
    """What the gate means, with gradients by autograd."""
    out: torch.Tensor = tandem.attention(q, k, v, **options) * torch.sigmoid(gate)
    return out


def close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def gradients(found: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    dout = torch.randn(found.shape, generator=torch.Generator().manual_seed(6))
    return torch.autograd.grad(found, inputs, dout.to(found.dtype))


def test_multiplies_the_result() -> None:
    q, k, v, gate = gated()
    out, lse = tandem.attention(q, k, v, gate=gate, causal=True, return_lse=True)
    close(out, formula(q, k, v, gate, causal=True))
    assert torch.equal(lse, tandem.attention(q, k, v, causal=True, return_lse=True)[1])
    given = torch.empty_like(out)
    assert torch.equal(tandem.attention(q, k, v, gate=gate, causal=True, out=given), out)
    found = tandem.attention(*(t.numpy() for t in (q, k, v)), gate=gate.numpy(), causal=True)
    assert isinstance(found, np.ndarray) and torch.equal(torch.from_numpy(found), out)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 10.0}, {"dropout_p": 0.2}])
def test_gradients(options: dict[str, Any]) -> None:
    inputs = gated(grad=True)
    if "dropout_p" in options:
        options = options | {"dropout_seed": 3}
    right = gradients(formula(*inputs, **options), inputs)
    q, k, v, gate = inputs
    for found, expected in zip(
        gradients(tandem.attention(q, k, v, gate=gate, **options), inputs), right, strict=True
    ):
        close(found, expected)


def test_gradients_of_those_that_are_wanted() -> None:
    inputs = gated(grad=True)
    q, k, v, gate = inputs
    right = gradients(formula(*inputs), inputs)
    (dgate,) = gradients(tandem.attention(q.detach(), k.detach(), v.detach(), gate=gate), [gate])
    close(dgate, right[3])
    others = gradients(tandem.attention(q, k, v, gate=gate.detach()), inputs[:3])
    for found, expected in zip(others, right, strict=False):
        close(found, expected)


def test_with_a_sink_functions_and_the_lse() -> None:
    q, k, v, gate = gated(grad=True)
    sink = torch.randn(q.shape[2], requires_grad=True)
    slopes = torch.rand(q.shape[2], requires_grad=True)
    inputs = [q, k, v, gate, sink, slopes]
    options: dict[str, Any] = {"sink": sink, "alibi_slopes": slopes, "return_lse": True}
    out, lse = tandem.attention(q, k, v, gate=gate, **options)
    plain, plain_lse = tandem.attention(q, k, v, **options)
    right = torch.autograd.grad((plain * torch.sigmoid(gate)).sum() + plain_lse.square().sum(), inputs)
    found = torch.autograd.grad(out.sum() + lse.square().sum(), inputs)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_varlen_and_bfloat16() -> None:
    q, k, v, gate = (t.flatten(0, 1).bfloat16().requires_grad_() for t in gated())
    cu_q = torch.tensor([0, q.shape[0] // 3, q.shape[0]], dtype=torch.int32)
    cu_k = torch.tensor([0, k.shape[0] // 2, k.shape[0]], dtype=torch.int32)
    options: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    inputs = [q, k, v, gate]
    right = gradients(formula(*inputs, **options), inputs)
    found = gradients(tandem.attention(q, k, v, gate=gate, **options), inputs)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_compiled_and_under_transforms() -> None:
    inputs = gated(grad=True)
    right = gradients(formula(*inputs, causal=True), inputs)

    def call(q: Any, k: Any, v: Any, gate: Any) -> Any:
        return tandem.attention(q, k, v, gate=gate, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found, expected in zip(gradients(compiled(*inputs), inputs), right, strict=True):
        close(found, expected)
    plain = [t.detach() for t in inputs]
    dgate = torch.func.grad(lambda gate: call(*plain[:3], gate).sum())(plain[3])
    ones = torch.autograd.grad(formula(*inputs, causal=True).sum(), inputs)
    close(dgate, ones[3])
    meta = call(*(t.to("meta") for t in plain))
    assert meta.shape == (*plain[0].shape[:-1], plain[2].shape[-1])


def test_products_in_8_bits() -> None:
    q, k, v, gate = (t.bfloat16() for t in gated())
    for precision in ("fp8", "int8"):
        found = tandem.attention(q, k, v, gate=gate, precision=precision)
        right = tandem.attention(q, k, v, precision=precision).float() * torch.sigmoid(gate.float())
        torch.testing.assert_close(found.float(), right, rtol=0.02, atol=0.01)
    with pytest.raises(NotImplementedError, match="^gate with an 8-bit precision has no GPU kernel; "):
        tandem.explain(q, k, v, gate=gate, precision="int8", device="H100")


def test_autocast() -> None:
    inputs = gated(grad=True)
    q, k, v, gate = inputs
    with torch.autocast("cpu", torch.bfloat16):
        out = tandem.attention(q, k, v, gate=gate)
    assert out.dtype == torch.bfloat16
    assert [g.dtype for g in gradients(out, inputs)] == [torch.float32] * 4


def test_without_autograd() -> None:
    q, k, v, gate = gated()
    sink = torch.randn(q.shape[2])
    out, lse = tandem.attention(q, k, v, gate=gate, sink=sink, return_lse=True)
    dout = torch.randn_like(out)
    followed = [t.clone().requires_grad_() for t in (q, k, v, sink, gate)]
    right = torch.autograd.grad(
        tandem.attention(*followed[:3], sink=followed[3], gate=followed[4]), followed, dout
    )
    found = tandem.attention_backward(dout, q, k, v, out, lse, gate=gate, sink=sink)
    assert len(found) == 5
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    dgate = torch.empty_like(gate)
    tandem.attention_backward(dout, q, k, v, out, lse, gate=gate, sink=sink, dgate=dgate)
    assert torch.equal(dgate, right[4])
    assert "gate" in tandem.explain(q, k, v, gate=gate, backward=True)


def test_errors() -> None:
    q, k, v, gate = gated(grad=True)
    with pytest.raises(ValueError, match=r"^gate has shape .*; it must be \(batch, seqlen_q, heads_q, head_"):
        tandem.attention(q, k, v, gate=gate[:, 1:])
    with pytest.raises(ValueError, match="^gate is bf16 but q is f32; convert it to f32"):
        tandem.attention(q, k, v, gate=gate.detach().bfloat16())
    found = torch.autograd.grad(tandem.attention(q, k, v, gate=gate).sum(), gate, create_graph=True)
    with pytest.raises(NotImplementedError, match="^tandem.attention has no second derivative"):
        torch.autograd.grad(found[0].sum(), gate)


def test_a_query_that_sees_no_key() -> None:
    q, k, v, gate = gated()
    gate[:, 0] = torch.nan
    gate.requires_grad_()
    out = tandem.attention(q, k[:, : q.shape[1] - 1], v[:, : q.shape[1] - 1], gate=gate, causal=True)
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))
    (dgate,) = torch.autograd.grad(out.sum(), gate)
    assert torch.equal(dgate[:, 0], torch.zeros_like(out[:, 0])) and bool(dgate.isfinite().all())
