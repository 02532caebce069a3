"""The operators of torch.ops.tandem: schemas, fake implementations, tracing, autocast, checkpointing.

Transforms of torch.func are in test_transforms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tandem
import torch
from tandem import _call, _core
from tandem.flash_attn import flash_attn_func
from tandem.torch import _direct, _operators
from test_forward import FEATURES, qkv, varlen
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

SINK = torch.tensor([-1.0, 0.5, 2.0, 7.0])


def operator_calls() -> dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]]:
    packed = (torch.randn(33, 4, 32), torch.randn(44, 2, 32), torch.randn(44, 2, 16))
    return {
        "plain": (qkv(), {}),
        "sink, window, softcap": (qkv(), {"sink": SINK, "window": (9, 4), "softcap": 3.0, "causal": True}),
        "packed": (packed, {**varlen(), "causal": True}),
        "seqused": (qkv(), FEATURES["seqused"]),
        "bf16": (qkv(dtype=torch.bfloat16, head_dim_v=16), {"deterministic": True}),
    }


def arguments(inputs: tuple[torch.Tensor, ...], options: dict[str, Any], gradients: bool) -> tuple[Any, ...]:
    options = dict(options)
    sink = options.pop("sink", None)
    metadata = tuple(options.pop(name, None) for name in _call.METADATA)
    tensors = [t if t is None else t.detach().requires_grad_(gradients) for t in (*inputs, sink)]
    return (*tensors, *_operators.flat(_call.Call(**options, metadata=metadata)))


@pytest.mark.parametrize("kind", operator_calls())
def test_opcheck(kind: str) -> None:
    """PyTorch's own checks: the schema tells the truth, fake and real agree, autograd is registered right,
    and a traced forward and backward with dynamic shapes give the eager results."""
    inputs, options = operator_calls()[kind]
    forward = arguments(inputs, options, True)
    torch.library.opcheck(torch.ops.tandem.attention, (*forward, None))
    q, k, v, sink, *flat = arguments(inputs, options, False)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse, _ = torch.ops.tandem.attention_out(q, k, v, sink, *flat, out)
    torch.library.opcheck(torch.ops.tandem.attention_out, (q, k, v, sink, *flat, torch.empty_like(out)))
    backward = (
        torch.randn_like(out),
        torch.randn_like(lse),
        q,
        k,
        v,
        sink,
        out,
        lse,
        None,
        *flat,
        *(True, True, True, sink is not None),
    )
    torch.library.opcheck(torch.ops.tandem.attention_backward, backward)
    written = [None if t is None else torch.empty_like(t) for t in (q, k, v, sink)]
    torch.library.opcheck(torch.ops.tandem.attention_backward_out, (*backward[:-4], *written))


@pytest.mark.parametrize("granularity", ["tensor", "head", "block", "row"])
@pytest.mark.parametrize("dtype", ["e4m3", "s8"])
def test_opcheck_of_quantize(dtype: str, granularity: str) -> None:
    x, *_ = qkv()
    for smooth in (False, True):
        torch.library.opcheck(torch.ops.tandem.quantize, (x, dtype, granularity, True, smooth, 0))
    torch.library.opcheck(torch.ops.tandem.quantize, (x[0], dtype, granularity, False, False, 0))


def test_fake_tensors_of_float8() -> None:
    q, k, v = (torch.empty(1, 8, 2, 16, dtype=torch.float8_e4m3fn, device="meta") for _ in range(3))
    flat = _operators.flat(_call.Call())
    assert torch.ops.tandem.attention(q, k, v, None, *flat, None)[0].dtype == torch.bfloat16
    assert torch.ops.tandem.attention(q, k, v, None, *flat, torch.float16)[0].dtype == torch.float16


@pytest.mark.parametrize("capped", [True, False])
def test_compile_without_graph_breaks(capped: bool) -> None:
    """One graph serves several shapes, forward and backward, with every kind of option."""

    def step(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, used: torch.Tensor
    ) -> Any:
        options: dict[str, Any] = {"causal": True, "window": (k.shape[1] // 2, -1)}
        options |= {"softcap": 4.0} if capped else {}
        out, lse = tandem.attention(q * 2, k, v, sink=sink, seqused_k=used, return_lse=True, **options)
        return out.square().sum() + lse.sigmoid().sum()

    # aot_eager traces as inductor does, and spares the C++ compiler's seconds
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for length in (20, 31, 44):
        inputs = [t.requires_grad_() for t in (*qkv(seqlen_q=length, seqlen_k=length + 9), SINK.clone())]
        used = torch.tensor([length + 9, length])
        expected = torch.autograd.grad(step(*inputs, used), inputs)
        got = torch.autograd.grad(graph(*inputs, used), inputs)
        torch.testing.assert_close(got, expected)
    assert counter.frame_count == 1


def same(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.float(), b.float())


def by_compile(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")


def by_trace(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    return torch.jit.trace(function, inputs, check_trace=False)


def by_export(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    module = torch.nn.Module()
    module.forward = function  # type: ignore[method-assign]
    return torch.export.export(module, inputs).module()


@pytest.mark.parametrize("capture", [by_compile, by_trace, by_export])
@pytest.mark.parametrize("dtype", ["e4m3", "s8"])
def test_quantize_is_captured(dtype: str, capture: Callable[..., Any]) -> None:
    """And its values and scales go on into attention, in the same graph."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        values, scales, mean = tandem.quantize(k, dtype, granularity="block", hadamard=True, smooth=True)
        (k8, k_scale), (v8, v_scale) = tandem.quantize(k, dtype), tandem.quantize(v, dtype)
        out = tandem.attention(q, k8, v8, k_scale=k_scale, v_scale=v_scale, causal=True)
        return values, scales, mean, out

    inputs = qkv()
    same(capture(function, *inputs)(*inputs), function(*inputs))


@pytest.mark.parametrize("capture", [by_compile, by_trace, by_export])
@pytest.mark.parametrize("given", [(), ("dq",), ("dk", "dv"), ("dq", "dk", "dv", "dsink")])
def test_attention_backward_is_captured(given: tuple[str, ...], capture: Callable[..., Any]) -> None:
    def function(dout: torch.Tensor, *inputs: torch.Tensor) -> Any:
        q, k, v, out, lse, sink = inputs
        made = {"dq": torch.ones_like(q), "dk": torch.ones_like(k), "dv": torch.ones_like(v)}
        made["dsink"] = torch.ones_like(sink)
        written = {name: made[name] for name in given}
        found = tandem.attention_backward(dout, q, k, v, out, lse, sink=sink, causal=True, **written)
        return *found, *made.values()

    q, k, v = qkv()
    out, lse = tandem.attention(q, k, v, sink=SINK, causal=True, return_lse=True)
    inputs = (torch.randn_like(out), q, k, v, out, lse, SINK)
    same(capture(function, *inputs)(*inputs), function(*inputs))


def test_attention_backward_is_not_differentiated_in_silence() -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    out, lse = tandem.attention(q, k, v, return_lse=True)
    dq, *_ = tandem.attention_backward(out.detach(), q, k, v, out.detach(), lse.detach())
    with pytest.raises(tandem.UnsupportedError, match="no second derivative"):
        dq.sum().backward()
    with pytest.raises(tandem.InvalidArgumentError, match="^dk= cannot be combined with inputs that require"):
        tandem.attention_backward(out, q, k, v, out, lse, dk=torch.empty_like(k))
    with torch.no_grad():
        found = tandem.attention_backward(out, q, k, v, out, lse, dq=torch.empty_like(q))
    assert torch.equal(found[0], dq) and not found[0].requires_grad


def test_compile_sees_the_write_to_out() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)
        tandem.attention(q, k, v, out=out)
        return out

    q, k, v = qkv()
    with torch.no_grad():
        graph = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(graph(q, k, v), tandem.attention(q, k, v))


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor) -> Any:
            return tandem.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)

    def inputs(total: int) -> tuple[torch.Tensor, ...]:
        return (*(torch.randn(total, 2, 16) for _ in range(3)), torch.tensor([0, 5, total]))

    rows = torch.export.Dim("rows", min=6, max=4096)
    shapes = ({0: rows}, {0: rows}, {0: rows}, None)
    program = torch.export.export(Module(), inputs(20), dynamic_shapes=shapes)
    for total in (20, 31):
        given = inputs(total)
        torch.testing.assert_close(program.module()(*given), Module()(*given))


def test_autocast_converts_q_k_and_v() -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tandem.attention(q, k, v.half(), sink=SINK)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, tandem.attention(q.bfloat16(), k.bfloat16(), v.half().bfloat16(), sink=SINK))
    out.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


def test_checkpointing_gives_the_same_gradients() -> None:
    inputs = [t.requires_grad_() for t in qkv()]

    def block(*tensors: torch.Tensor) -> torch.Tensor:
        return tandem.attention(*tensors, causal=True).square()

    expected = torch.autograd.grad(block(*inputs).sum(), inputs)
    for reentrant in (False, True):
        loss = checkpoint(block, *inputs, use_reentrant=reentrant).sum()
        for t in inputs:
            t.grad = None
        loss.backward()
        for t, gradient in zip(inputs, expected, strict=True):
            torch.testing.assert_close(t.grad, gradient)


@pytest.mark.parametrize("wish", [False, True])
def test_use_deterministic_algorithms_is_obeyed(wish: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = _direct.backward

    def spy(call: _call.Call, *args: Any) -> Any:
        seen.append(call.deterministic)
        return real(call, *args)

    monkeypatch.setattr(_direct, "backward", spy)
    q, k, v = (t.requires_grad_() for t in qkv())
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wish)
    try:
        tandem.attention(q, k, v).sum().backward()  # of an expanded gradient, which is copied first
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen == [wish]


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("way", ["record", "python", "operator"])
def test_only_needed_gradients_are_computed(
    wanted: tuple[bool, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of inputs that require none are not even made; the others are as if all were. A record makes
    them without Python, but of an expanded gradient."""

    seen: list[tuple[bool, ...]] = []
    real, quick, operator = _core.backward, _core.backward_tensors, torch.ops.tandem.attention_backward

    def spy(arrays: tuple[Any, ...], *rest: Any) -> None:
        seen.append(tuple(t is not None for t in arrays[-5:-1]))
        real(arrays, *rest)

    def quick_spy(*arguments: Any) -> Any:
        made = quick(*arguments)
        if made is not None:
            seen.append(tuple(t is not None for t in made))
        return made

    def operator_spy(*arguments: Any) -> Any:
        made = operator(*arguments)
        seen.append(tuple(t.numel() > 0 for t in made))
        return made

    monkeypatch.setattr(_core, "backward", spy)
    monkeypatch.setattr(_core, "backward_tensors", quick_spy)
    monkeypatch.setattr(torch.ops.tandem, "attention_backward", operator_spy)
    run = by_operator if way == "operator" else tandem.attention
    tensors = qkv()

    def differentiate(needed: tuple[bool, ...]) -> list[torch.Tensor]:
        some = [t.clone().requires_grad_(n) for t, n in zip((*tensors, SINK), needed, strict=True)]
        out = run(*some[:3], sink=some[3])
        ones = torch.ones_like(out)
        if way == "record":
            with torch.no_grad():
                seen.append(tuple(t is not None for t in out.grad_fn.apply(ones, None)[2:]))
        out.backward(torch.ones(1).expand_as(out) if way == "python" else ones)
        return some

    expected = differentiate((True, True, True, True))
    assert seen.pop() == (True, True, True, True)
    for need_dsink in (False, True):
        needed = (*wanted, need_dsink)
        some = differentiate(needed)
        assert seen.pop() == needed and not seen
        for t, right, need in zip(some, expected, needed, strict=True):
            assert (t.grad is not None) == need
            if need:
                assert torch.equal(t.grad, right.grad)


def by_operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: Any = None) -> Any:
    return torch.ops.tandem.attention(q, k, v, sink, *_operators.flat(_call.Call()), None)[0]


def into_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: Any = None) -> Any:
    return tandem.attention(q, k, v, sink=sink, out=torch.zeros(*q.shape[:-1], v.shape[-1]))


def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: Any = None) -> Any:
    return tandem.attention(q, k, TRAINED, sink=sink)


TRAINED = torch.zeros(1, 4, 2, 8, requires_grad=True)


def transforms() -> dict[str, Callable[..., Any]]:
    def dual_level(function: Any, *inputs: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            return function(*(forward_ad.make_dual(t, torch.ones_like(t)) for t in inputs))

    return {
        "jvp": lambda function, t: torch.func.jvp(function, (t,), (t,)),
        "jvp of vmap": lambda function, t: torch.func.jvp(torch.func.vmap(function), (t[None],), (t[None],)),
        "jacfwd": lambda function, t: torch.func.jacfwd(function)(t),
        "linearize": lambda function, t: torch.func.linearize(function, t)[1](t),
        "dual_level": dual_level,
        "jacobian": lambda function, t: torch.autograd.functional.jacobian(
            function, t, strategy="forward-mode", vectorize=True
        ),
    }


@pytest.mark.parametrize("transform", transforms())
@pytest.mark.parametrize(
    "call", [tandem.attention, flash_attn_func, by_operator, into_out, recorded], ids=lambda f: f.__name__
)
def test_forward_mode_is_refused(transform: str, call: Callable[..., Any]) -> None:
    """PyTorch would take the derivative for zero."""
    tensors = (*qkv(1, 3, 4, head_dim=8), SINK)
    for i, name in enumerate(("q", "k", "v", "sink")):
        if (call is recorded and name == "v") or (call is into_out and transform == "jvp of vmap"):
            continue  # nothing of the kind is called

        def function(t: torch.Tensor, i: int = i) -> Any:
            inputs = [*tensors[:i], t, *tensors[i + 1 :]]
            return call(*inputs[:3], sink=inputs[3])

        message = f"^{name} carries a tangent, but tandem.attention(_out)? has no forward.*; use reverse mode"
        with pytest.raises(tandem.UnsupportedError, match=message):
            transforms()[transform](function, tensors[i])


def test_a_tangent_of_something_else_is_let_be() -> None:
    q, k, v = qkv()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        assert torch.equal(tandem.attention(q, k, v), tandem.attention(dual.detach(), k, v))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("function", [tandem.attention, flash_attn_func], ids=lambda f: f.__name__)
def test_jit_trace(function: Callable[..., Any], gradients: bool) -> None:
    inputs = [t.requires_grad_(gradients) for t in qkv()]
    traced = torch.jit.trace(lambda *t: function(*t, causal=True, softcap=3.0), inputs)
    others = [(t * 0.5).detach().requires_grad_(gradients) for t in inputs]
    out, expected = traced(*others), function(*others, causal=True, softcap=3.0)
    assert torch.equal(out, expected)
    if gradients:
        found = torch.autograd.grad(out.sum(), others)
        torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), others))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    sequences = [torch.randn(n, 2, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(sequences, layout=layout)
    packed = torch.cat(sequences)
    cu = torch.tensor([0, 3, 8])
    for function in (tandem.attention, flash_attn_func):
        for i, (name, queries) in enumerate((("q", "q"), ("k", "k"), ("v", "k"))):
            inputs = [packed[None], packed[None], packed[None]]
            inputs[i] = nested
            remedy = f"{name}.values() with cu_seqlens_{queries}={name}.offsets()"
            if layout is torch.strided:
                remedy = (
                    f"torch.cat({name}.unbind()) with the offsets of its sequences as cu_seqlens_{queries}"
                )
            with pytest.raises(tandem.InvalidArgumentError) as caught:
                function(*inputs)
            assert str(caught.value) == f"{name} is a nested tensor; pass {remedy}"
    if layout is torch.jagged:  # the remedy is one
        values, offsets = nested.values(), nested.offsets()
        out = tandem.attention(values, values, values, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        expected = tandem.attention(packed, packed, packed, cu_seqlens_q=cu, cu_seqlens_k=cu)
        assert torch.equal(out, expected)
