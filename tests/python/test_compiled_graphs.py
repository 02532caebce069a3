"""Calls in compiled graphs: what runs there, and what it gives."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import tandem
import torch
from tandem import _call
from tandem.torch import _operators
from test_forward import qkv
from torch.fx.experimental.proxy_tensor import make_fx

#: Without PyTorch's C exchange of tensors (before 2.11) a call reads them in Python.
exchange = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="PyTorch has no C exchange of tensors"
)


def frames_of(run: Any) -> list[str]:
    """The names of Tandem's functions in Python that run() calls."""
    seen: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("tandem"):
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


@exchange
@pytest.mark.parametrize("recorded", [False, True])
def test_a_graph_calls_no_python_of_ours(recorded: bool) -> None:
    q, k, v = (t.requires_grad_(recorded) for t in qkv())
    dout = torch.randn(*q.shape[:-1], v.shape[-1])
    compiled = torch.compile(lambda q, k, v: tandem.attention(q, k, v, causal=True, softcap=30.0))

    def run(function: Any = compiled) -> Any:
        out = function(q, k, v)
        return (out, *torch.autograd.grad(out, (q, k, v), dout)) if recorded else (out,)

    expected = run(lambda q, k, v: tandem.attention(q, k, v, causal=True, softcap=30.0))
    for got, right in zip(run(), expected, strict=True):  # compiles, too
        assert torch.equal(got, right)
    assert frames_of(run) == []


@exchange
@pytest.mark.parametrize("recording", [False, True])
def test_an_operator_by_itself_calls_no_python_of_ours(recording: bool) -> None:
    q, k, v = qkv()
    flat = _operators.flat(_call.Call(causal=True))
    operators = torch.ops.tandem.attention, torch.ops.tandem.attention_backward

    def run() -> Any:
        out, lse, _ = operators[0](q, k, v, None, *flat, None)
        needed = (True, False, True, False)
        return operators[1](torch.ones_like(out), None, q, k, v, None, out, lse, None, *flat, *needed)

    with torch.set_grad_enabled(recording):
        assert frames_of(run) == []
        gradients = run()
    assert [g.shape for g in gradients] == [q.shape, (0,), v.shape, (0,)]


@exchange
def test_an_operator_may_be_called_without_its_last_arguments() -> None:
    """Graphs leave out what has its default, and so may a caller."""
    q, k, v = qkv()
    operators = torch.ops.tandem.attention, torch.ops.tandem.attention_backward
    flat = _operators.flat(_call.Call())
    whole = operators[0](q, k, v, None, *flat, None)
    saved = (torch.ones_like(whole[0]), None, q, k, v, None, *whole[:2], None)
    needed = (True, True, True, False)
    assert frames_of(lambda: operators[0](q, k, v, None)) == []
    for found, expected in (
        (operators[0](q, k, v, None), whole),
        (operators[1](*saved), operators[1](*saved, *flat, *needed)),
    ):
        for got, right in zip(found, expected, strict=True):
            assert torch.equal(got, right)
    graph = make_fx(lambda q, k, v: operators[0](q, k, v, None, *flat, None))(q, k, v)
    (node,) = (node for node in graph.graph.nodes if node.target is operators[0].default)
    assert len(node.args) == 4


@exchange
def test_an_operator_finds_max_logits_without_python_of_ours() -> None:
    q, k, v = qkv()
    flat = _operators.flat(_call.Call(return_max_logits=True))
    assert frames_of(lambda: torch.ops.tandem.attention(q, k, v, None, *flat, None)) == []
    found = torch.ops.tandem.attention(q, k, v, None, *flat, None)[2]
    assert torch.equal(found, tandem.attention(q, k, v, return_max_logits=True)[1])


def test_what_is_unusual_is_as_right() -> None:
    """A dtype of the result's own, and determinism that PyTorch is asked for."""
    q, k, v = qkv()
    flat = _operators.flat(_call.Call())
    expected, lse, _ = torch.ops.tandem.attention(q, k, v, None, *flat, None)
    same = torch.ops.tandem.attention(q, k, v, None, *flat, torch.float32)
    assert torch.equal(same[0], expected) and torch.equal(same[1], lse)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(torch.ops.tandem.attention(q, k, v, None, *flat, None)[0], expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_error_is_that_of_a_plain_call() -> None:
    q, k, v = qkv()
    flat = _operators.flat(_call.Call(window=(-2, 0)))
    with pytest.raises(tandem.InvalidArgumentError) as plain:
        tandem.attention(q, k, v, window=(-2, 0))
    with pytest.raises(tandem.InvalidArgumentError) as found:
        torch.ops.tandem.attention(q, k, v, None, *flat, None)
    assert str(found.value) == str(plain.value)
