"""FlashAttention-3's names: parameters and meaning."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import oracle
import pytest
import tandem
import torch
from tandem import flash_attn
from test_forward import qkv, varlen

SINK = torch.tensor([-1.0, 0.5, 2.0, 7.0])
# flash_attn_interface of FlashAttention-3, its positional parameters in order
COMMON = ["q_descale", "k_descale", "v_descale", "window_size", "attention_chunk", "softcap"]
HINTS = ["num_splits", "pack_gqa", "deterministic", "sm_margin", "return_attn_probs"]
PARAMETERS = {
    "flash_attn_func": ["q", "k", "v", "softmax_scale", "causal", "qv", *COMMON, *HINTS],
    "flash_attn_varlen_func": [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("seqused_q", "seqused_k", "softmax_scale", "causal", "qv", *COMMON, *HINTS),
    ],
    "flash_attn_qkvpacked_func": [
        *("qkv", "softmax_scale", "causal", *COMMON),
        *("deterministic", "num_heads_q", "sm_margin", "return_attn_probs"),
    ],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_flash_attention_3(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == PARAMETERS[name]
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["sink"]
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_func(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    out, lse = flash_attn.flash_attn_func(
        q, k, v, 0.3, True, window_size=[9, 4], softcap=3.0, return_attn_probs=True, sink=SINK
    )
    options: dict[str, Any] = {"scale": 0.3, "causal": True, "window": (9, 4), "softcap": 3.0, "sink": SINK}
    expected, expected_lse = oracle.exact(q, k, v, **options)
    same = () if dtype == torch.float32 else oracle.same_dtype(q, k, v, **options)[:1]
    oracle.assert_close(out, expected, *same)
    oracle.assert_close(lse, expected_lse)
    assert torch.equal(flash_attn.flash_attn_func(q, k.transpose(0, 3).contiguous().transpose(0, 3), v),
                       tandem.attention(q, k, v))  # fmt: skip


@pytest.mark.parametrize("head_dim", [20, 65])
def test_any_head_dim(head_dim: int) -> None:
    """They are padded inside, as FlashAttention does."""
    inputs = [t.requires_grad_() for t in qkv(head_dim=head_dim, head_dim_v=head_dim + 1)]
    out = flash_attn.flash_attn_func(*inputs, causal=True)
    dout = torch.randn(out.shape)
    oracle.assert_close(out, oracle.exact(*inputs, causal=True)[0])
    references = oracle.gradients(oracle.exact, *inputs, dout, causal=True)
    for a, b in zip(torch.autograd.grad(out, inputs, dout), references, strict=True):
        oracle.assert_close(a, b)
    q, k, v = torch.randn(33, 4, head_dim), torch.randn(44, 2, head_dim), torch.randn(44, 2, head_dim)
    lengths = varlen()
    out = flash_attn.flash_attn_varlen_func(q, k, v, lengths["cu_seqlens_q"], lengths["cu_seqlens_k"])
    oracle.assert_close(out, oracle.exact(q, k, v, **lengths)[0])


def test_varlen_func_reads_no_maximum() -> None:
    q, k, v = torch.randn(33, 4, 32), torch.randn(44, 2, 32), torch.randn(44, 2, 32)
    lengths = varlen()
    used = torch.tensor([3, 0, 12])[: len(lengths["cu_seqlens_q"]) - 1]
    out, lse = flash_attn.flash_attn_varlen_func(
        q, k, v, lengths["cu_seqlens_q"], lengths["cu_seqlens_k"], torch.tensor(-1), None,
        seqused_k=used, causal=True, return_attn_probs=True,
    )  # fmt: skip
    expected, expected_lse = oracle.exact(q, k, v, **lengths, seqused_k=used, causal=True)
    oracle.assert_close(out, expected)
    oracle.assert_close(lse, expected_lse)


def test_qkvpacked_func_in_both_layouts_with_gradients() -> None:
    equal = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    out = flash_attn.flash_attn_qkvpacked_func(equal, causal=True)
    assert torch.equal(out, tandem.attention(*equal.unbind(2), causal=True))
    (gradient,) = torch.autograd.grad(out.sum(), equal)
    expected = oracle.gradients(oracle.exact, *equal.unbind(2), torch.ones(out.shape), causal=True)
    oracle.assert_close(gradient, torch.stack(expected, 2))
    grouped = torch.randn(2, 9, 4 + 2 + 2, 16)
    out = flash_attn.flash_attn_qkvpacked_func(grouped, num_heads_q=4)
    assert torch.equal(out, tandem.attention(grouped[:, :, :4], grouped[:, :, 4:6], grouped[:, :, 6:]))
    for shape, heads in (((2, 9, 7, 16), 4), ((2, 9, 8, 16), None), ((2, 9, 2, 4, 16), None)):
        with pytest.raises(tandem.InvalidArgumentError, match="qkv has shape"):
            flash_attn.flash_attn_qkvpacked_func(torch.zeros(shape), num_heads_q=heads)


def test_gradients_flow_through_lse_and_sink() -> None:
    q, k, v = qkv()
    inputs = [t.requires_grad_() for t in (q, k, v, SINK.clone())]
    out, lse = flash_attn.flash_attn_func(*inputs[:3], return_attn_probs=True, sink=inputs[3])
    dout, dlse = torch.randn(out.shape), torch.randn(lse.shape)
    got = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    for a, b in zip(got, oracle.gradients(oracle.exact, q, k, v, dout, dlse, sink=SINK), strict=True):
        oracle.assert_close(a, b)


def test_what_tandem_lacks_is_an_error() -> None:
    q, k, v = qkv()
    with pytest.raises(tandem.UnsupportedError, match="qv is given"):
        flash_attn.flash_attn_func(q, k, v, qv=q)
    with pytest.raises(tandem.UnsupportedError, match="attention_chunk is 4"):
        flash_attn.flash_attn_func(q, k, v, attention_chunk=4)
    with pytest.raises(tandem.InvalidArgumentError, match="q_scale"):
        flash_attn.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2))


def test_arguments_of_another_type() -> None:
    q, k, v = qkv()
    for window in (128, (1, 2, 3), None):
        with pytest.raises(tandem.InvalidArgumentError, match="^window_size is .*; pass \\(left, right\\)"):
            flash_attn.flash_attn_func(q, k, v, window_size=window)
    with pytest.raises(TypeError, match="^k is a numpy.ndarray; pass a torch.Tensor$"):
        flash_attn.flash_attn_func(q, k.numpy(), v)
    with pytest.raises(TypeError, match="^qkv is a builtins.list; pass a torch.Tensor$"):
        flash_attn.flash_attn_qkvpacked_func([q, k, v])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_without_places(place: int) -> None:
    inputs = list(qkv())
    for t, error in ((torch.tensor(1.0), ""), (inputs[place].to_sparse(), "is not a plain strided tensor")):
        inputs[place] = t
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{'qkv'[place]} {error}"):
            flash_attn.flash_attn_func(*inputs)


def test_qkvpacked_arguments_that_do_not_fit() -> None:
    packed = flash_attn.flash_attn_qkvpacked_func
    qkv = torch.zeros(2, 9, 6, 16)
    for heads in (8, 6, 0, -2, 3):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^qkv has shape .* with num_heads_q={heads};"):
            packed(qkv, num_heads_q=heads)
    for heads in ("4", 4.0, [4]):
        with pytest.raises(tandem.InvalidArgumentError) as caught:
            packed(qkv, num_heads_q=heads)
        assert str(caught.value) == (
            f"num_heads_q is {heads!r}; pass an integer, or None for qkv of five dimensions"
        )
    nested = torch.nested.nested_tensor([torch.zeros(n, 3, 2, 8) for n in (3, 5)], layout=torch.jagged)
    for t, message in (
        (torch.tensor(1.0), "^qkv has shape "),
        (qkv.to_sparse(), "^qkv is not a plain strided tensor"),
        (nested, "^qkv is a nested tensor; pass q, k and v of all its sequences to flash_attn_varlen_func$"),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            packed(t, num_heads_q=4)


def test_the_module_name_is_served_on_request_alone() -> None:
    program = """
import importlib.util, sys, types
from tandem import flash_attn
assert importlib.util.find_spec("flash_attn_interface") is None and "flash_attn_interface" not in sys.modules
flash_attn.serve()
from flash_attn_interface import flash_attn_func
assert flash_attn_func is flash_attn.flash_attn_func and flash_attn.serve() is flash_attn
sys.modules["flash_attn_interface"] = types.ModuleType("flash_attn_interface")
try:
    flash_attn.serve()
except ValueError as error:
    assert "imported already" in str(error)
else:
    raise AssertionError("no error")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
