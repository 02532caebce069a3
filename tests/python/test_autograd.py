"""Gradients: attention_backward and PyTorch autograd against autograd through the plain formula in fp64."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import hypothesis
import hypothesis.strategies as st
import oracle
import pytest
import tandem
import torch
from tandem import _call, _core
from tandem.flash_attn import flash_attn_func
from tandem.torch import _calls, _operators
from test_forward import DTYPES, FEATURES, check_forward, qkv, varlen


def check_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    """Results; attention_backward with a gradient through the LSE, into poisoned outputs; then autograd."""
    out, lse = check_forward(q, k, v, **options)
    dout, dlse = torch.randn(out.shape).to(q.dtype), torch.randn(lse.shape)
    sink = options.get("sink")
    named = {"dq": q, "dk": k, "dv": v} | ({} if sink is None else {"dsink": sink})
    poisoned = {name: torch.full_like(t, float("nan")) for name, t in named.items()}
    got = tandem.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **poisoned, **options)
    assert len(got) == len(named) and all(a is b for a, b in zip(got, poisoned.values(), strict=True))

    expected = oracle.gradients(oracle.exact, q, k, v, dout, dlse, **options)
    same: list[tuple[torch.Tensor, ...]] = [()] * len(got)
    if q.dtype != torch.float32:
        same = oracle.gradient_yardsticks(q, k, v, dout, dlse, **options)
    for gradient, reference, yardstick in zip(got, expected, same, strict=True):
        oracle.assert_close(gradient, reference, *yardstick)

    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    if sink is not None:
        options["sink"] = sink.detach().requires_grad_()
        inputs.append(options["sink"])
    out, lse = tandem.attention(*inputs[:3], return_lse=True, deterministic=True, **options)
    automatic = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    for gradient, reference, yardstick in zip(automatic, expected, same, strict=True):
        oracle.assert_close(gradient, reference, *yardstick)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str, dtype: torch.dtype) -> None:
    check_gradients(*qkv(dtype=dtype), **FEATURES[feature])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(causal: bool, dtype: torch.dtype) -> None:
    q = torch.randn(33, 4, 32).to(dtype)  # three rows past the end
    for keys in (41, 44):
        k, v = torch.randn(keys, 2, 32).to(dtype), torch.randn(keys, 2, 16).to(dtype)
        check_gradients(q, k, v, **varlen(), causal=causal)


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (1, 1, 1), (1, 9, 3)]
)
def test_sizes_at_the_edge(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    check_gradients(*qkv(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k), causal=True)


@hypothesis.given(data=st.data())
def test_random_problems(data: st.DataObject) -> None:
    """Shapes, masks and features crossed at random."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    heads_kv = draw(st.integers(1, 3))
    heads_q = heads_kv * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    batch, seqlen_q, seqlen_k = draw(st.integers(1, 3)), draw(st.integers(0, 80)), draw(st.integers(0, 80))
    dims = st.integers(1, 12).map(lambda n: 8 * n)
    q, k, v = qkv(batch, seqlen_q, seqlen_k, heads_q, heads_kv, draw(dims), draw(dims), dtype)
    bounds = st.integers(-1, 90)
    options: dict[str, Any] = {"causal": draw(st.booleans()), "window": (draw(bounds), draw(bounds))}
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-0.5, 0.5, width=32))
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(0.5, 30.0, width=32))
    if draw(st.booleans()):
        options["sink"] = torch.randn(heads_q)
    if draw(st.booleans()):
        options["seqused_q"] = torch.tensor([draw(st.integers(0, seqlen_q)) for _ in range(batch)])
    if draw(st.booleans()):
        options["seqused_k"] = torch.tensor([draw(st.integers(0, seqlen_k)) for _ in range(batch)])
    check_gradients(q, k, v, **options)


def trainable() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, seqlen_q=6, seqlen_k=7, head_dim=8))
    return q, k, v


def test_gradient_through_the_lse_alone() -> None:
    q, k, v = trainable()
    _, lse = tandem.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    expected = oracle.gradients(oracle.exact, q, k, v, torch.zeros(q.shape), torch.ones(lse.shape))
    for t, reference in zip((q, k, v), expected, strict=True):
        oracle.assert_close(t.grad, reference)


def test_no_gradient_means_no_saved_state() -> None:
    q, k, v = qkv()
    assert tandem.attention(q, k, v).grad_fn is None
    with torch.no_grad():
        out = tandem.attention(*trainable())
    assert out.grad_fn is None and not out.requires_grad
    watched = weakref.ref(q)
    result = tandem.attention(q, k, v)
    del q
    gc.collect()
    assert watched() is None and result is not None


def test_saved_state_is_linear_in_seqlen() -> None:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        tandem.attention(*trainable())
    assert sorted(t.numel() for t in saved) == sorted([6 * 4 * 8, 7 * 2 * 8, 7 * 2 * 8, 6 * 4 * 8, 4 * 6])


def _with_offsets(cu: torch.Tensor, bias: torch.Tensor) -> dict[str, Any]:
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu}


def _with_a_function(cu: torch.Tensor, bias: torch.Tensor) -> dict[str, Any]:
    return _with_offsets(cu, bias) | {"score_mod": lambda s, b, h, i, j: s + bias[h] * j}


@pytest.mark.parametrize("options_of", [_with_offsets, _with_a_function])
@pytest.mark.parametrize("learned", [False, True])
def test_copies_that_hooks_have_saved_count(options_of: Any, learned: bool) -> None:
    """As save_on_cpu makes them: what the caller writes to offsets or to captured tensors is too late."""
    q, k, v = (torch.randn(8, 2, 8, requires_grad=True) for _ in range(3))
    cu, bias = torch.tensor([0, 4, 8], dtype=torch.int32), torch.randn(2, requires_grad=learned)
    leaves = [q, k, v, bias] if learned and options_of is _with_a_function else [q, k, v]
    options = options_of(cu, bias)
    expected = torch.autograd.grad(tandem.attention(q, k, v, **options).square().sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = tandem.attention(q, k, v, **options)
        loss = out.square().sum()
    with torch.no_grad():
        cu[1] = 2
        bias.mul_(3)
    for a, b in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_double_backward_says_why_it_fails() -> None:
    q, k, v = trainable()
    (dq,) = torch.autograd.grad(tandem.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(tandem.UnsupportedError, match="second derivative"):
        dq.sum().backward()


def test_many_gradients_in_one_pass() -> None:
    inputs = trainable()
    out, lse = tandem.attention(*inputs, return_lse=True, causal=True)
    dout, dlse = torch.randn(3, *out.shape), torch.randn(3, *lse.shape)
    for results, seeds in (((out, lse), (dout, dlse)), ((out,), (dout,)), ((lse,), (dlse,))):
        found = torch.autograd.grad(results, inputs, seeds, is_grads_batched=True, retain_graph=True,
                                    allow_unused=True)  # fmt: skip
        for i in range(3):
            one = torch.autograd.grad(results, inputs, [t[i] for t in seeds], retain_graph=True)
            for a, b in zip(found, one, strict=True):
                torch.testing.assert_close(a[i], b)


def test_writes_to_saved_tensors_are_seen() -> None:
    """A backward pass that saved what a call wrote over since is an error."""
    q, k, v = qkv()
    result, lse = tandem.attention(q, k, v, return_lse=True)
    flat = _operators.flat(_call.Call())

    def backward(into: str, t: torch.Tensor) -> Any:
        sink = torch.zeros(q.shape[2])
        call = lambda **options: tandem.attention_backward(result, q, k, v, result, lse, **options)  # noqa: E731
        return call(sink=sink, **{into: t})

    for shape, write in (
        (q.shape, lambda t: tandem.attention(q, k, v, out=t)),
        (q.shape, lambda t: torch.ops.tandem.attention_out(q, k, v, None, *flat, t)),
        (q.shape, lambda t: backward("dq", t)),
        (k.shape, lambda t: backward("dk", t)),
        (v.shape, lambda t: backward("dv", t)),
        (q.shape[2:3], lambda t: backward("dsink", t)),
    ):
        written, x = torch.ones(shape), torch.ones(shape, requires_grad=True)
        y = (x * written).sum()
        before = written._version
        write(written)
        assert written._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        plain = torch.ones(shape)
        with torch.inference_mode():
            inference = torch.ones(shape)
            write(inference)
            write(plain)
        assert torch.equal(inference, written) and torch.equal(plain, written)
        write(inference)


def test_out_with_gradients_is_refused() -> None:
    q, k, v = trainable()
    with pytest.raises(tandem.InvalidArgumentError, match="out="):
        tandem.attention(q, k, v, out=torch.empty_like(q))
    with pytest.raises(tandem.InvalidArgumentError, match="out="):
        torch.ops.tandem.attention_out(q, k, v, None, *_operators.flat(_call.Call()), torch.empty_like(q))


@pytest.mark.parametrize("into", ["out", "dq", "dk", "dv", "dsink"])
def test_results_that_require_a_gradient_are_refused(into: str) -> None:
    """As PyTorch's own out= does: a leaf would be overwritten, and autograd would not know."""
    q, k, v = qkv()
    sink = torch.zeros(q.shape[2])
    result, lse = tandem.attention(q, k, v, sink=sink, return_lse=True)

    def call(t: torch.Tensor) -> Any:
        if into == "out":
            return tandem.attention(q, k, v, sink=sink, out=t)
        return tandem.attention_backward(result, q, k, v, result, lse, sink=sink, **{into: t})

    expected = {"out": q, "dq": q, "dk": k, "dv": v, "dsink": sink}[into]
    leaf = torch.nn.Parameter(torch.full_like(expected, 7.0))
    for written in (leaf, leaf * 1, leaf.view(-1).view(leaf.shape)):
        with pytest.raises(
            tandem.InvalidArgumentError, match=f"^{into} requires a gradient, .*pass {into}.det"
        ):
            call(written)
        assert (written == 7.0).all()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{into} requires a gradient"):
        compiled(leaf)
    with torch.no_grad():
        call(leaf)
    assert not (leaf == 7.0).any()
    again = torch.full_like(expected, 7.0)
    call(again)
    assert torch.equal(leaf, again)
    call(leaf.detach())


def test_operators_refuse_results_that_require_a_gradient() -> None:
    q, k, v = qkv()
    flat = _operators.flat(_call.Call())
    with pytest.raises(tandem.InvalidArgumentError, match="^out requires a gradient"):
        torch.ops.tandem.attention_out(q, k, v, None, *flat, torch.nn.Parameter(torch.empty_like(q)))


ATTENTIONS = [tandem.attention, flash_attn_func]


@pytest.mark.parametrize("function", ATTENTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_that_require_a_gradient_are_refused(name: str, recorded: bool, function: Any) -> None:
    """A learned temperature would stay as it is, without a word."""
    q, k, v = trainable() if recorded else qkv()
    option = "softmax_scale" if function is flash_attn_func and name == "scale" else name
    number = torch.tensor(0.3, requires_grad=True)
    message = f"^{option} is a tensor that requires a gradient, but Tandem has no derivative for it; "
    for value in (number, number * 2, torch.nn.Parameter(torch.tensor([0.3]))):
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            function(q, k, v, **{option: value})
    expected = function(q, k, v, **{option: number.item()})
    with torch.no_grad():
        assert torch.equal(function(q, k, v, **{option: number}), expected)
    assert torch.equal(function(q, k, v, **{option: number.detach()}), expected)
    with pytest.raises(tandem.InvalidArgumentError, match=message):
        torch.func.grad(lambda t: function(q, k, v, **{option: t}).sum())(number.detach())
    with pytest.raises(tandem.InvalidArgumentError, match=f"^{option} is a tensor that carries a tangent"):
        torch.func.jvp(lambda t: function(q, k, v, **{option: t}), (number.detach(),), (torch.tensor(1.0),))
    compiled = torch.compile(lambda t: function(q, k, v, **{option: t}), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{name} is a tensor that requires a gradient"):
        compiled(number)
    if function is tandem.attention:
        out, lse = (t.detach() for t in tandem.attention(q, k, v, return_lse=True))
        for call in (tandem.explain, lambda *t, **o: tandem.attention_backward(out, *t, out, lse, **o)):
            with pytest.raises(tandem.InvalidArgumentError, match=message):
                call(q.detach(), k.detach(), v.detach(), **{option: number})


@pytest.mark.parametrize("function", ATTENTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_scales_that_require_a_gradient_are_refused(name: str, function: Any) -> None:
    tensors = zip("qkv", qkv(heads_kv=4), strict=True)
    values = {f"{letter}_scale": tandem.quantize(t, "e4m3") for letter, t in tensors}
    q, k, v = (c for c, _ in values.values())
    scales = {each: s.requires_grad_(each == name) for each, (_, s) in values.items()}
    if function is flash_attn_func:
        options = {each.replace("scale", "descale"): s for each, s in scales.items()}
    else:
        options = scales

    def message(name: str) -> str:
        return f"{name} requires a gradient, but Tandem has none for it; pass {name}.detach\\(\\)"

    own = name if options is scales else name.replace("scale", "descale")
    with pytest.raises(tandem.InvalidArgumentError, match="^" + message(own)):
        function(q, k, v, **options)
    with pytest.raises(Exception, match=message(name)):  # raised where Dynamo traces, which renames nothing
        torch.compile(function, backend="aot_eager", fullgraph=True)(q, k, v, **options)
    flat = _operators.flat(_call.Call(metadata=tuple(map(scales.get, _call.METADATA))))
    with pytest.raises(tandem.InvalidArgumentError, match="^" + message(name)):
        torch.ops.tandem.attention(q, k, v, None, *flat, None)
    with torch.no_grad():
        assert torch.isfinite(function(q, k, v, **options).float()).all()


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="PyTorch before 2.11 has no quick way"
)
@pytest.mark.parametrize("feature", ["plain", "lse", "mask function", "autocast"])
def test_a_plain_recorded_call_and_its_backward_take_the_quick_way(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither looks at a tensor in Python: the host's time of a step depends on it."""
    q, k, v = (t.requires_grad_() for t in qkv())
    options: dict[str, Any] = {} if feature != "mask function" else {"mask_mod": lambda b, h, i, j: i - j < 4}
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=feature == "autocast")
    with autocast:
        result = tandem.attention(q, k, v, **options)
    expected = torch.autograd.grad(result, (q, k, v), 2 * result.detach())
    monkeypatch.delattr(_calls, "in_full")
    monkeypatch.delattr(_core, "backward")
    with autocast:
        out, lse = tandem.attention(q, k, v, return_lse=True, **options)
    assert out.dtype == (torch.bfloat16 if feature == "autocast" else torch.float32)
    assert out.grad_fn is not None and out.grad_fn is lse.grad_fn
    given = ((out, lse), (2 * out.detach(), torch.zeros_like(lse)))
    results, gradients = given if feature == "lse" else (out, 2 * out.detach())
    found = torch.autograd.grad(results, (q, k, v), gradients)
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, right)
