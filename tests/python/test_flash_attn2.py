"""FlashAttention-2's names: parameters, defaults and meaning."""

from __future__ import annotations

import inspect
from typing import Any

import oracle
import pytest
import tandem
import torch
from pages import paged, row_of, used
from tandem import flash_attn2
from test_flash_attn import run_python
from test_forward import qkv, varlen

# flash_attn of FlashAttention-2, its parameters in order, and the defaults of those that have one
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
OPTIONS: dict[str, Any] = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
CACHE: dict[str, Any] = {
    "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None,
    "cache_batch_idx": None, "cache_leftpad": None, "block_table": None, "softmax_scale": None,
    "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True,
    "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip
PARAMETERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "flash_attn_func": (["q", "k", "v"], OPTIONS),
    "flash_attn_qkvpacked_func": (["qkv"], OPTIONS),
    "flash_attn_kvpacked_func": (["q", "kv"], OPTIONS),
    "flash_attn_varlen_func": (["q", "k", "v", *LENGTHS], {**OPTIONS, "block_table": None}),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], OPTIONS),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *LENGTHS], OPTIONS),
    "flash_attn_with_kvcache": (["q", "k_cache", "v_cache"], CACHE),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_defaults_are_those_of_flash_attention_2(name: str) -> None:
    tensors, options = PARAMETERS[name]
    parameters = inspect.signature(getattr(flash_attn2, name)).parameters
    assert list(parameters) == [*tensors, *options]
    assert {p.name: p.default for p in parameters.values() if p.default is not p.empty} == options
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_func_by_position() -> None:
    q, k, v = qkv()
    out, lse, pattern = flash_attn2.flash_attn_func(q, k, v, 0.0, 0.3, True, (9, 4), 3.0, None, False, True)
    expected, expected_lse = oracle.exact(q, k, v, scale=0.3, causal=True, window=(9, 4), softcap=3.0)
    oracle.assert_close(out, expected)
    oracle.assert_close(lse, expected_lse)
    assert pattern is None
    assert torch.equal(flash_attn2.flash_attn_func(q, k, v), tandem.attention(q, k, v))


def test_qkv_and_kv_in_one_tensor_with_gradients() -> None:
    qkv = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    q, kv = torch.randn(2, 7, 4, 16, requires_grad=True), torch.randn(2, 9, 2, 2, 16, requires_grad=True)
    for out, inputs, parts in (
        (flash_attn2.flash_attn_qkvpacked_func(qkv, 0.0, 0.3, True), [qkv], qkv.unbind(2)),
        (flash_attn2.flash_attn_kvpacked_func(q, kv, 0.0, 0.3, True), [q, kv], (q, *kv.unbind(2))),
    ):
        options: dict[str, Any] = {"scale": 0.3, "causal": True}
        oracle.assert_close(out, oracle.exact(*parts, **options)[0])
        dq, dk, dv = oracle.gradients(oracle.exact, *parts, torch.ones(out.shape), **options)
        one = [torch.stack([dq, dk, dv], 2)] if len(inputs) == 1 else [dq, torch.stack([dk, dv], 2)]
        oracle.assert_all_close(torch.autograd.grad(out.sum(), inputs), one)


def test_varlen_in_every_packing() -> None:
    lengths = varlen()
    cu_q, cu_k = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
    q, kv = torch.randn(33, 4, 32), torch.randn(44, 2, 2, 32)
    expected, expected_lse = oracle.exact(q, *kv.unbind(1), **lengths, causal=True)
    for name, tensors in (
        ("flash_attn_varlen_func", (q, *kv.unbind(1))),
        ("flash_attn_varlen_kvpacked_func", (q, kv)),
    ):
        function = getattr(flash_attn2, name)
        out, lse, _ = function(*tensors, cu_q, cu_k, 20, 20, 0.0, causal=True, return_attn_probs=True)
        oracle.assert_close(out, expected)
        oracle.assert_close(lse, expected_lse)
    qkv = torch.randn(33, 3, 4, 32)
    out = flash_attn2.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 20, 0.0, None, True)
    same = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q}
    oracle.assert_close(out, oracle.exact(*qkv.unbind(1), **same, causal=True)[0])


def test_caches_in_blocks() -> None:
    """Varlen calls count their rows by cu_seqlens_k, steps of generation by cache_seqlens."""
    lengths = [53, 20, 0]
    q, k, v = torch.randn(3, 2, 4, 32), torch.randn(3, 53, 2, 32), torch.randn(3, 53, 2, 32)
    expected, expected_lse = tandem.attention(q, k, v, seqused_k=used(lengths), causal=True, return_lse=True)
    k_blocks, v_blocks, table = paged(k, v, lengths, 16)
    options = {"causal": True, "block_table": table}
    out, lse = flash_attn2.flash_attn_with_kvcache(
        q, k_blocks, v_blocks, cache_seqlens=used(lengths), return_softmax_lse=True, **options
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    cu_q, cu_k = torch.arange(0, 7, 2, dtype=torch.int32), torch.tensor([0, 53, 73, 73], dtype=torch.int32)
    out, lse, _ = flash_attn2.flash_attn_varlen_func(
        q.flatten(0, 1), k_blocks, v_blocks, cu_q, cu_k, 2, 53, return_attn_probs=True, **options
    )
    torch.testing.assert_close(out, expected.flatten(0, 1))
    torch.testing.assert_close(lse, expected_lse.transpose(0, 1).flatten(1))
    # a step that appends its own row
    new = torch.randn(3, 1, 2, 32)
    flash_attn2.flash_attn_with_kvcache(
        q[:, :1], k_blocks, v_blocks, new, new, cache_seqlens=torch.tensor([40, 15, 0]), causal=True,
        block_table=table.clamp_min(0),
    )  # fmt: skip
    assert torch.equal(row_of(k_blocks, table, 1, 15), new[1, 0])
    with pytest.raises(tandem.InvalidArgumentError, match="^k is given without v; pass what is appended"):
        flash_attn2.flash_attn_with_kvcache(q, k, v, new)


def test_a_dropout_of_one_is_an_error() -> None:
    with pytest.raises(tandem.InvalidArgumentError, match="dropout_p is 1; it must be .* below 1"):
        flash_attn2.flash_attn_func(*[torch.zeros(2, 3, 4, 16)] * 3, dropout_p=1.0)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.4}, {"causal": True, "alibi_slopes": SLOPES}], ids=["dropout", "slopes"]
)
def test_what_every_function_takes(options: dict[str, Any]) -> None:
    """Dropout and slopes are those of tandem.attention, of the same random numbers."""
    qkv = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    q, kv, cu = qkv[:, :, 0], qkv[:, :, 1:], torch.tensor([0, 9, 18])
    packed = [t.flatten(0, 1) for t in (q, *kv.unbind(2))]
    torch.manual_seed(8)
    expected = tandem.attention(*qkv.unbind(2), **options)
    (gradient,) = torch.autograd.grad(expected.square().sum(), qkv)
    calls: dict[str, tuple[Any, ...]] = {
        "flash_attn_func": (q, *kv.unbind(2)),
        "flash_attn_qkvpacked_func": (qkv,),
        "flash_attn_kvpacked_func": (q, kv),
        "flash_attn_varlen_func": (*packed, cu, cu, 9, 9),
        "flash_attn_varlen_qkvpacked_func": (qkv.flatten(0, 1), cu, 9),
        "flash_attn_varlen_kvpacked_func": (packed[0], kv.flatten(0, 1), cu, cu, 9, 9),
    }
    for name, arguments in calls.items():
        torch.manual_seed(8)
        out = getattr(flash_attn2, name)(*arguments, **options)
        torch.testing.assert_close(out.view_as(expected), expected, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(out.square().sum(), qkv)[0]
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


def test_alibi_slopes_on_a_cache() -> None:
    """By the distance from the last row, of rows that the call writes, too; and in varlen calls."""
    lengths = [50, 18, 0]
    q, k, v = torch.randn(3, 2, 4, 32), torch.randn(3, 53, 2, 32), torch.randn(3, 53, 2, 32)
    k_blocks, v_blocks, table = paged(k, v, [n + 2 for n in lengths], 16)
    options = {"causal": True, "alibi_slopes": SLOPES, "block_table": table}
    new = [torch.stack([t[b, n : n + 2] for b, n in enumerate(lengths)]) for t in (k, v)]
    for b, n in enumerate(lengths):  # what the call writes
        for row in (n, n + 1):
            row_of(k_blocks, table, b, row).fill_(torch.nan)
            row_of(v_blocks, table, b, row).fill_(torch.nan)
    written = flash_attn2.flash_attn_with_kvcache(
        q, k_blocks, v_blocks, *new, cache_seqlens=used(lengths), **options
    )
    lengths = [n + 2 for n in lengths]
    read = flash_attn2.flash_attn_with_kvcache(q, k_blocks, v_blocks, cache_seqlens=used(lengths), **options)
    cu_q, cu_k = torch.arange(0, 7, 2), torch.tensor([0, *lengths]).cumsum(0)
    packed = flash_attn2.flash_attn_varlen_func(
        q.flatten(0, 1), k_blocks, v_blocks, cu_q, cu_k, 2, 53, **options
    )
    meant: dict[str, Any] = {"causal": True, "alibi_slopes": SLOPES}
    for out in (written, read, packed.view_as(q)):
        oracle.assert_sequences_close(out, q, k, v, lengths, **meant)


def test_tensors_that_cannot_be_taken_apart() -> None:
    q, cu = torch.zeros(2, 9, 4, 16), torch.tensor([0, 2])
    nested = torch.nested.nested_tensor([torch.zeros(n, 3, 2, 8) for n in (3, 5)], layout=torch.jagged)
    for call, message in (
        (
            lambda: flash_attn2.flash_attn_qkvpacked_func(q),
            r"^qkv has shape \(2, 9, 4, 16\); pass \(batch, s",
        ),
        (
            lambda: flash_attn2.flash_attn_kvpacked_func(q, q),
            r"^kv has shape \(2, 9, 4, 16\); pass \(batch, s",
        ),
        (
            lambda: flash_attn2.flash_attn_varlen_qkvpacked_func(q, cu, 2),
            "^qkv has shape .*; pass \\(total, 3",
        ),
        (
            lambda: flash_attn2.flash_attn_varlen_kvpacked_func(q, q, cu, cu, 2, 2),
            "^kv has shape .*; pass \\(total_k, 2",
        ),
        (
            lambda: flash_attn2.flash_attn_qkvpacked_func(nested),
            "^qkv is a nested tensor; pass the tensors of",
        ),
        (
            lambda: flash_attn2.flash_attn_kvpacked_func(q, q.to_sparse()),
            "^kv is not a plain strided tensor",
        ),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            call()
    with pytest.raises(TypeError, match=r"^kv is a builtins.list; pass a torch.Tensor$"):
        flash_attn2.flash_attn_kvpacked_func(q, [q, q])


def test_the_package_name_is_served_on_request_alone() -> None:
    run_python("""
import importlib.util, sys, types
from tandem import flash_attn2
assert importlib.util.find_spec("flash_attn") is None and "flash_attn" not in sys.modules
flash_attn2.serve()
from flash_attn import flash_attn_func, flash_attn_kvpacked_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func
import flash_attn, flash_attn.flash_attn_interface
assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn2.flash_attn_func
assert flash_attn2.serve() is flash_attn2
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
try:
    flash_attn2.serve()
except ValueError as error:
    assert "flash_attn is imported already" in str(error)
else:
    raise AssertionError("no error")
""")
