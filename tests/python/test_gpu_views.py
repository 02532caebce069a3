"""What test_negated, test_torch_ops and test_plans say of the CPU, of CUDA tensors."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from tandem.flash_attn import flash_attn_func
from test_forward import qkv
from test_negated import negated

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use")

DTYPES = [torch.float16, torch.bfloat16]


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    return [t.cuda() for t in qkv(seqlen_q=70, seqlen_k=130, head_dim=64, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [tandem.attention, flash_attn_func], ids=lambda f: f.__name__)
def test_the_negative_bit_is_read(function: Any, dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    expected = function(q, k, v, causal=True)
    assert torch.equal(function(*map(negated, (q, k, v)), causal=True), expected)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    plain = tandem.attention_backward(out, q, k, v, out, lse, deterministic=True)
    signed = map(negated, (out, q, k, v, out, lse))
    oracle.assert_equal(tandem.attention_backward(*signed, deterministic=True), plain)
    oracle.assert_equal(tandem.quantize(negated(k), "s8"), tandem.quantize(k, "s8"))
    trained = [t.requires_grad_() for t in (q, k, v)]
    result = function(*trained, causal=True, deterministic=True)
    seed = torch.randn_like(result)
    expected = torch.autograd.grad(result, trained, seed, retain_graph=True)
    oracle.assert_equal(torch.autograd.grad(result, trained, negated(seed)), expected)


@pytest.mark.parametrize("capture", ["compile", "trace"])
def test_attention_backward_and_quantize_are_captured(capture: str) -> None:
    q, k, v = inputs(torch.bfloat16)
    out, lse = tandem.attention(q, k, v, return_lse=True)

    def function(*t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = tandem.attention_backward(t[3], *t[:3], t[3], t[4], deterministic=True)
        return *gradients, *tandem.quantize(t[1], "s8", granularity="row")

    tensors = (q, k, v, out, lse)
    if capture == "compile":
        captured = torch.compile(function, fullgraph=True, backend="aot_eager")
    else:
        captured = torch.jit.trace(function, tensors, check_trace=False)
    oracle.assert_equal(captured(*tensors), function(*tensors))


@pytest.mark.parametrize("backward", [False, True])
def test_plans_by_name_are_those_of_the_gpu(backward: bool) -> None:
    """Of the GPU that is here, if it is one of those known by name."""
    name = torch.cuda.get_device_name()
    known = [each for each in tandem._core.described_devices() if f" {each}" in name]
    if not known:
        pytest.skip(f"{name} is not known by name")
    short = max(known, key=len)
    for seqlen in (64, 4096):
        q = torch.empty(4, seqlen, 16, 128, device="cuda", dtype=torch.bfloat16)
        here = tandem.explain(q, q, q, causal=True, backward=backward)
        there = tandem.explain(*(q.to("meta"),) * 3, causal=True, backward=backward, device=short)
        assert there == here.replace("cuda:0", short)
