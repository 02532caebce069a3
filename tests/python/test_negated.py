"""Views with PyTorch's negative bit, whose memory holds the numbers with the other sign.

The imaginary part of a conjugate is one. They are read with their sign on every path, and never written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import tandem
import tandem.flash_attn
import torch
from tandem.flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from test_forward import DTYPES, e4m3, qkv

NEGATED = "has the negative bit, .*memory holds the numbers with the other sign"


def negated(t: torch.Tensor) -> torch.Tensor:
    """The numbers of `t` by a view of their negatives."""
    view = torch._neg_view((-t.detach()).contiguous())
    assert view.is_neg() and torch.equal(view, t)
    return view


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    tandem.flash_attn.register_with_torch()
    torch.nn.attention.activate_flash_attention_impl("tandem")
    try:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    cu = torch.tensor([0, 5, q.shape[1]], dtype=torch.int32)
    return flash_attn_varlen_func(q[0], k[0], v[0], cu, cu)


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = tandem.attention(*inputs, causal=True, return_lse=True)
    return torch.autograd.grad(out.float().square().sum() + lse.sum(), inputs)


def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """attention_backward, each of whose tensors is negated if q is."""
    with_bit = negated if q.is_neg() else torch.clone
    out, lse = tandem.attention(q.clone(), k.clone(), v.clone(), return_lse=True)
    tensors = [with_bit(t) for t in (torch.ones_like(out), q, k, v, out, lse)]
    sink, dlse = torch.zeros(q.shape[2]), torch.ones_like(lse)
    return tandem.attention_backward(*tensors, sink=with_bit(sink), dlse=with_bit(dlse))


def by_operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.compile(tandem.attention, backend="aot_eager", fullgraph=True)(q, k, v)


def read_by_functions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """A table that a function reads and a bias, each negated if q is, and their gradients."""
    with_bit = negated if q.is_neg() else torch.clone
    plain = [t.clone() for t in (q, k, v)]
    table, bias = (with_bit(t) for t in (torch.linspace(-1, 1, 13), torch.linspace(-2, 1, 169).view(13, 13)))

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + table[j]

    without = tandem.attention(*plain, score_mod=score_mod, bias=bias)
    out = tandem.attention(*plain, score_mod=score_mod, bias=bias.requires_grad_())
    return (without, out.detach(), *torch.autograd.grad(out.float().sum(), [bias]))


def with_sink(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return tandem.attention(q.clone(), k.clone(), v.clone(), sink=k[0, 0, :, 0].float())


def packed_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    qkv = torch.stack([q, k, v], 2)
    return flash_attn_qkvpacked_func(negated(qkv) if q.is_neg() else qkv)


def transformed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.func.vmap(tandem.attention)(q[None], k[None], v[None])


def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    (k8, k_scale), (v8, v_scale) = tandem.quantize(k.clone(), "s8"), tandem.quantize(v.clone(), "s8")
    with_bit = negated if q.is_neg() else torch.clone
    return tandem.attention(q.clone(), k8, v8, k_scale=with_bit(k_scale), v_scale=with_bit(v_scale))


CALLS: dict[str, Callable[..., Any]] = {
    "shortest way": tandem.attention,
    "with LSE": lambda *t: tandem.attention(*t, return_lse=True),
    "into out": lambda *t: tandem.attention(*t, out=torch.empty(t[0].shape, dtype=t[0].dtype)),
    "autograd": lambda q, k, v: tandem.attention(q.requires_grad_(), k, v).detach(),
    "gradients": gradients,
    "attention_backward": backward,
    "compiled": by_operator,
    "vmap": transformed,
    "sink": with_sink,
    "scales": mixed,
    "functions": read_by_functions,
    "quantize": lambda q, k, v: [t.float() for t in tandem.quantize(q, smooth=True)],
    "flash_attn": flash_attn_func,
    "flash_attn, varlen": varlen,
    "flash_attn, packed": packed_qkv,
    "sdpa": sdpa,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_the_negative_bit_is_read(call: str, dtype: torch.dtype) -> None:
    tensors = qkv(batch=1, seqlen_q=13, seqlen_k=13, heads_kv=4, dtype=dtype)
    expected = CALLS[call](*(t.clone() for t in tensors))
    got = CALLS[call](*(negated(t) for t in tensors))
    oracle.assert_equal(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_with_the_negative_bit_are_read(dtype: torch.dtype) -> None:
    """Of the result and of the LSE, as autograd hands them over."""
    for function in (tandem.attention, torch.compile(tandem.attention, backend="aot_eager")):
        inputs = [t.requires_grad_() for t in qkv(dtype=dtype)]
        out, lse = function(*inputs, return_lse=True)
        seeds = (torch.randn_like(out), torch.randn_like(lse))
        expected = torch.autograd.grad((out, lse), inputs, seeds, retain_graph=True)
        got = torch.autograd.grad((out, lse), inputs, [negated(t) for t in seeds])
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_imaginary_part_of_a_conjugate_is_read() -> None:
    z = torch.randn(1, 9, 2, 16, dtype=torch.complex64)
    q, k = z.conj().imag, z.real.contiguous()
    assert q.is_neg()
    assert torch.equal(tandem.attention(q, k, k), tandem.attention(-z.imag.contiguous(), k, k))
    with pytest.raises(tandem.InvalidArgumentError, match="^q has dtype complex64"):
        tandem.attention(z.conj(), k, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_with_the_negative_bit_are_refused(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    out = negated(torch.full_like(q, 7.0))
    with pytest.raises(tandem.InvalidArgumentError, match=f"^out {NEGATED}; pass a plain tensor"):
        tandem.attention(q, k, v, out=out)
    compiled = torch.compile(tandem.attention, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match=f"out {NEGATED}"):
        compiled(q, k, v, out=out)
    result, lse = tandem.attention(q, k, v, return_lse=True)
    for name, t in (("dq", q), ("dk", k), ("dv", v)):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{name} {NEGATED}"):
            written = negated(torch.full_like(t, 7.0))
            tandem.attention_backward(result, q, k, v, result, lse, **{name: written})
        assert (written == 7.0).all()
    assert (out == 7.0).all()


def test_what_pytorch_cannot_resolve_is_refused() -> None:
    """A float8 with the bit: PyTorch negates none."""
    q, k, v = (e4m3(1, 4, 2, 16) for _ in range(3))
    with pytest.raises((tandem.InvalidArgumentError, NotImplementedError)):
        tandem.attention(q, torch._neg_view(k), v)
