"""Plans of calls that are not run: without memory, on the meta device, and for GPUs that are not there."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
import tandem
import torch
from tandem.flash_attn import flash_attn_func
from test_autograd import trainable
from test_forward import qkv
from test_negated import negated
from torch._subclasses.fake_tensor import FakeTensorMode


def meta(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to("meta") for t in tensors]


def vast() -> torch.Tensor:
    """128 GiB, had it memory."""
    return torch.empty(128, 131072, 64, 64, device="meta", dtype=torch.bfloat16)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("device", [None, "cpu", "H100", "H200"])
def test_a_call_beyond_memory_is_planned(device: str | None, backward: bool) -> None:
    q = vast()
    text = tandem.explain(q, q, q, causal=True, backward=backward, device=device)
    assert "batch 128, seqlen_q 131072, seqlen_k 131072, heads_q 64" in text
    assert f"the tensors are on {'the CPU' if device in (None, 'cpu') else device}\n" in text
    size = tandem.workspace_bytes(q, q, q, causal=True, backward=backward, device=device)
    assert f"workspace {size} bytes\n" in text


def test_plans_take_no_memory() -> None:
    """Of NumPy either: the results of this call are of 64 GiB, and its arrays of a few rows."""
    a = np.lib.stride_tricks.as_strided(np.zeros(64, np.float16), (128, 131072, 32, 64), (0, 0, 0, 2))
    tracemalloc.start()
    tandem.workspace_bytes(a, a, a, return_lse=True, device="H200")
    tandem.explain(a, a, a, backward=True, device="H200")
    _, peak = tracemalloc.get_traced_memory()  # NumPy's buffers are traced, too
    tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.parametrize("backward", [False, True])
def test_plans_on_the_meta_device_are_those_of_the_cpu(backward: bool) -> None:
    tensors = qkv()
    options: dict[str, Any] = {"causal": True, "sink": torch.zeros(4), "seqused_k": torch.tensor([3, 4])}
    expected = tandem.explain(*tensors, backward=backward, **options)
    options |= {name: options[name].to("meta") for name in ("sink", "seqused_k")}
    assert tandem.explain(*meta(*tensors), backward=backward, **options) == expected
    arrays = [t.numpy() for t in tensors]
    assert tandem.explain(*arrays, device="cpu") == tandem.explain(*tensors)


def test_plans_of_fake_tensors() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 64, 4, 64, device="cuda", dtype=torch.float16)
        assert "the tensors are on H200" in tandem.explain(q, q, q, device="H200")
        q = torch.empty(1, 64, 4, 64)
        assert "the tensors are on the CPU" in tandem.explain(q, q, q)


def test_names_of_devices() -> None:
    q, k, v = meta(*(t.bfloat16() for t in qkv()))
    for name in ("H100", "h100", "NVIDIA H100", "H100 PCIe", "H200", "GH200", "A100", "rtx 4090"):
        plain = name.removeprefix("NVIDIA ").upper().replace("PCIE", "PCIe")
        assert f"the tensors are on {plain}\n" in tandem.explain(q, k, v, device=name)
    assert "on the CPU" in tandem.explain(q, k, v, device=torch.device("cpu"))
    for wrong in ("V100", "cuda:x", "cuda:-1", "", 3, "meta"):
        message = (
            f"^device is {re.escape(repr(wrong))}; pass 'cpu', 'cuda', 'cuda:1' or a GPU's name: 'H100', "
        )
        for call in (tandem.explain, tandem.workspace_bytes):
            with pytest.raises(tandem.InvalidArgumentError, match=message):
                call(q, k, v, device=wrong)


def test_plans_for_another_device_raise_its_errors() -> None:
    q, k, v = qkv()
    with pytest.raises(tandem.UnsupportedError, match="^f32 has no GPU kernel"):
        tandem.explain(q, k, v, device="H200")
    with pytest.raises(tandem.InvalidArgumentError, match="^softcap is -1"):
        tandem.explain(q, k, v, softcap=-1.0, device="H200")


def test_plans_do_not_ask_for_the_sign() -> None:
    """Of views with the negative bit, which calls read."""
    q, k, v = qkv()
    assert tandem.explain(negated(q), k, v) == tandem.explain(q, k, v)
    assert tandem.workspace_bytes(q, negated(k), v) == tandem.workspace_bytes(q, k, v)


def test_attention_on_the_meta_device() -> None:
    """Shapes and dtypes of a call, and of its gradients, without memory."""
    q = vast()
    assert tandem.attention(q, q, q, causal=True).shape == q.shape
    for function in (tandem.attention, flash_attn_func):
        real, inputs = trainable(), [t.detach().to("meta").requires_grad_() for t in trainable()]
        options = {"return_lse" if function is tandem.attention else "return_attn_probs": True}
        for got, expected in zip(function(*inputs, **options), function(*real, **options), strict=True):
            assert got.is_meta and got.shape == expected.shape and got.dtype == expected.dtype
        function(*inputs).sum().backward()
        for t in inputs:
            assert t.grad is not None and t.grad.is_meta and t.grad.shape == t.shape
    q, k, v = meta(*qkv())
    out = torch.empty_like(q)
    assert tandem.attention(q, k, v, out=out) is out
    lse = torch.empty(2, 4, 37, device="meta")
    gradients = tandem.attention_backward(out, q, k, v, out, lse)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    values, scales, mean = tandem.quantize(q, granularity="block", smooth=True)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (2, 4, 1) and mean.shape == (2, 4, 32)


def test_errors_on_the_meta_device_are_the_calls() -> None:
    q, k, v = qkv()
    cases: list[tuple[list[torch.Tensor], dict[str, Any]]] = [
        ([q, k[:1], v], {}),
        ([q, k, v], {"window": (-2, 0)}),
        ([q, k, v], {"scale": float("nan")}),
        ([q, k, v], {"sink": torch.zeros(3)}),
        ([q, k, v], {"out": torch.empty(2, 37, 4, 31)}),
    ]
    for tensors, options in cases:
        on_meta = {n: o.to("meta") if isinstance(o, torch.Tensor) else o for n, o in options.items()}
        with pytest.raises(tandem.InvalidArgumentError) as expected:
            tandem.attention(*tensors, **options)
        with pytest.raises(tandem.InvalidArgumentError) as caught:
            tandem.attention(*meta(*tensors), **on_meta)
        assert str(caught.value) == str(expected.value)
    for tensors in ([q.to("meta"), k, v], [q, k.to("meta"), v]):
        with pytest.raises(
            tandem.InvalidArgumentError, match="^k is on (device cpu but q is on meta|the meta dev)"
        ):
            tandem.attention(*tensors)
        with pytest.raises(tandem.InvalidArgumentError, match="^k is on device (cpu|meta) but q is on"):
            tandem.explain(*tensors)


def test_v_is_in_the_memory_of_k_where_it_has_k_s_address() -> None:
    k, v = torch.zeros(2, 1, 4096, 1, 512, dtype=torch.bfloat16)
    q = torch.zeros(1, 1, 16, 512, dtype=torch.bfloat16)
    in_k = "v is the first columns of k"
    assert in_k in tandem.explain(q, k, k, device="H200")
    assert in_k not in tandem.explain(q, k, v, device="H200")
    size = max(tandem.workspace_bytes(q, k, other, device="H200") for other in (k, v))
    assert in_k not in tandem.explain(*meta(q, k, v), device="H200")
    assert tandem.workspace_bytes(*meta(q, k, v), device="H200") == size
