"""What PyTorch's flop counter and profiler say of calls."""

from __future__ import annotations

import numpy as np
import tandem
import torch
from tandem.flash_attn import flash_attn_func
from test_forward import qkv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode


def math_flops(*tensors: torch.Tensor) -> tuple[int, int]:
    """PyTorch's count of the plain formula, of forward and of both passes."""
    heads_first = [t.transpose(1, 2) for t in tensors]
    counts = []
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first)
        counts.append(counter.get_total_flops())
        out.sum().backward()
    return counts[0], counter.get_total_flops() - counts[0]


def test_flops_are_counted() -> None:
    """As PyTorch counts the plain formula; its backward keeps P, and makes one product less."""
    q, k, v = (t.requires_grad_() for t in qkv(heads_kv=4, head_dim_v=16))
    forward, backward = math_flops(q, k, v)
    scores = 2 * 2 * 4 * 37 * 53 * 32
    ops = torch.ops.tandem
    with FlopCounterMode(display=False) as counter:
        tandem.attention(q, k, v, causal=True).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    assert counted == {ops.attention: forward, ops.attention_backward: backward + scores}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        flash_attn_func(q, k, v)
        tandem.attention(q, k, v, out=torch.empty(2, 37, 4, 16))
    assert counter.get_total_flops() == 2 * forward
    with FlopCounterMode(display=False) as counter:
        tandem.attention(q, k.detach(), v.detach()).sum().backward()
    of_v = forward - scores  # a product with a matrix of V's width
    assert counter.get_flop_counts()["Global"][ops.attention_backward] == scores + of_v + scores


def test_flops_of_packed_sequences_are_counted() -> None:
    """Each for itself; equal shares where the lengths are not known."""
    q, k, v = torch.randn(33, 4, 32), torch.randn(44, 2, 32), torch.randn(44, 2, 16)
    cu_q, cu_k = torch.tensor([0, 5, 33]), torch.tensor([0, 40, 44])
    pairs = {"cpu": 4 * (5 * 40 + 28 * 4), "meta": 4 * 2 * 33 // 2 * 22}
    for device, count in pairs.items():
        arguments = [t.to(device) for t in (q, k, v)]
        with FlopCounterMode(display=False) as counter:
            tandem.attention(*arguments, cu_seqlens_q=cu_q.to(device), cu_seqlens_k=cu_k.to(device))
        assert counter.get_total_flops() == 2 * count * (32 + 16)


def test_profiles_name_the_operators() -> None:
    q, k, v = qkv()
    trained = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(tandem.attention(*trained, causal=np.bool_(True)).sum(), trained)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        found = torch.autograd.grad(tandem.attention(*trained, causal=np.bool_(True)).sum(), trained)
        out, lse = tandem.attention(q, k, v, return_lse=True)
        tandem.attention(q, k, v, causal=np.bool_(True), out=torch.empty_like(q))
        tandem.attention_backward(out, q, k, v, out, lse)
        tandem.attention_backward(out, q, k, v, out, lse, dq=torch.empty_like(q))
        flash_attn_func(q, k, v)
        tandem.quantize(q)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    events = {event.key: event for event in profiler.key_averages(group_by_input_shape=True)}
    counts = {name: event.count for name, event in events.items() if name.startswith("tandem::")}
    assert counts == {
        "tandem::attention": 3,
        "tandem::attention_out": 1,
        "tandem::attention_backward": 2,
        "tandem::attention_backward_out": 1,
        "tandem::quantize": 1,
    }
    assert [2, 37, 4, 32] in events["tandem::attention"].input_shapes
    assert "TandemAttentionBackward" in events


def test_autograd_notices_writes_under_a_profiler() -> None:
    q, k, v = qkv()
    out, lse = tandem.attention(q, k, v, return_lse=True)
    written = [torch.empty_like(t) for t in (q, k, v)]
    with profile(activities=[ProfilerActivity.CPU]):
        tandem.attention_backward(
            out, q, k, v, out, lse, **dict(zip(("dq", "dk", "dv"), written, strict=True))
        )
    assert [t._version for t in written] == [1, 1, 1]
