"""PyTorch's scaled_dot_product_attention on CUDA tensors where Tandem is its flash attention."""

from __future__ import annotations

from typing import Any

import pytest
import tandem
import tandem.flash_attn
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that PyTorch can use")

HEADS, QUERIES, KEYS = 4, 130, 200


def inputs(heads_kv: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = ((HEADS, QUERIES), (heads_kv, KEYS), (heads_kv, KEYS))
    return [torch.randn(2, *shape, 64, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


MASKS = {
    "seen": lambda: torch.rand(QUERIES, KEYS, device="cuda") > 0.3,
    "seen, by batch": lambda: torch.rand(2, 1, 1, KEYS, device="cuda") > 0.3,
    "added": lambda: torch.randn(2, HEADS, QUERIES, KEYS, device="cuda", dtype=torch.bfloat16),
    "added, learned": lambda: torch.randn(
        HEADS, QUERIES, KEYS, device="cuda", dtype=torch.bfloat16, requires_grad=True
    ),
}


@pytest.mark.parametrize("heads_kv", [HEADS, 2])
@pytest.mark.parametrize("name", tuple(MASKS))
def test_masks(in_torch: Any, calls: Any, name: str, heads_kv: int) -> None:
    qkv = inputs(heads_kv)
    mask = MASKS[name]()
    leaves = [*qkv, mask] if mask.requires_grad else qkv
    dout = torch.randn(2, HEADS, QUERIES, 64, device="cuda", dtype=torch.bfloat16)
    given = {"attn_mask": mask, "enable_gqa": heads_kv != HEADS}
    out = scaled_dot_product_attention(*qkv, **given)
    own = (out, *torch.autograd.grad(out, leaves, dout))
    assert calls() == ["forward", "backward"]
    with in_torch.sdpa_kernel(in_torch.SDPBackend.MATH):
        out = scaled_dot_product_attention(*qkv, **given)
    assert calls() == ["forward", "backward"]  # flash attention was not allowed
    for ours, theirs in zip(own, (out, *torch.autograd.grad(out, leaves, dout)), strict=True):
        largest = theirs.abs().max().item()
        assert (ours - theirs).abs().max().item() <= 0.03 * largest


def test_masks_in_inference_mode(in_torch: Any, calls: Any) -> None:
    with torch.inference_mode():
        qkv = inputs()
        mask = MASKS["seen"]()
        out = scaled_dot_product_attention(*qkv, attn_mask=mask)
        assert calls() == ["forward"]
        with in_torch.sdpa_kernel(in_torch.SDPBackend.MATH):
            expected = scaled_dot_product_attention(*qkv, attn_mask=mask)
    assert (out - expected).abs().max().item() <= 0.03 * expected.abs().max().item()


def test_dropout(in_torch: Any, calls: Any) -> None:
    """The bits are those of tandem.attention, whose seeds torch.manual_seed begins."""
    qkv = inputs()
    dout = torch.randn(2, HEADS, QUERIES, 64, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(1)
    out = scaled_dot_product_attention(*qkv, dropout_p=0.3)
    own = (out, *torch.autograd.grad(out, qkv, dout))
    assert calls() == ["forward", "backward"]
    torch.manual_seed(1)
    heads_third = [t.transpose(1, 2) for t in qkv]
    out = tandem.attention(*heads_third, dropout_p=0.3).transpose(1, 2)
    assert torch.equal(own[0], out)
    for ours, same in zip(own[1:], torch.autograd.grad(out, qkv, dout), strict=True):
        torch.testing.assert_close(ours, same, rtol=2e-2, atol=2e-2)  # dq is added up in no fixed order


@pytest.mark.parametrize("why", ["float32", "deterministic, with the mask's gradient", "MATH"])
def test_what_stays_pytorchs(in_torch: Any, calls: Any, why: str) -> None:
    qkv = inputs(dtype=torch.float32 if why == "float32" else torch.bfloat16)
    mask = torch.randn(QUERIES, KEYS, device="cuda", dtype=qkv[0].dtype, requires_grad="gradient" in why)
    backends = [in_torch.SDPBackend.MATH]
    if why != "MATH":
        backends += [in_torch.SDPBackend.FLASH_ATTENTION, in_torch.SDPBackend.EFFICIENT_ATTENTION]
    torch.use_deterministic_algorithms("deterministic" in why, warn_only=True)
    try:
        with in_torch.sdpa_kernel(backends):
            scaled_dot_product_attention(*qkv, attn_mask=mask).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls() == []
