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
    "flash_attn_with_kvcache": [
        *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens"),
        *("cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new"),
        *("max_seqlen_q", "rotary_seqlens", "q_descale", "k_descale", "v_descale", "softmax_scale", "causal"),
        *("window_size", "attention_chunk", "softcap", "rotary_interleaved", "scheduler_metadata"),
        *("num_splits", "pack_gqa", "sm_margin", "return_softmax_lse"),
    ],
}


# Beyond it, what its forks have, and Tandem's own split_size.
MORE = {
    "flash_attn_func": ["split_size"],
    "flash_attn_varlen_func": [
        *("s_aux", "block_table", "out", "split_size", "causal_by_sequence", "alibi_slopes"),
        *("page_table", "return_softmax_lse", "sinks", "ver"),
    ],
    "flash_attn_with_kvcache": ["s_aux", "block_table", "split_size", "sinks", "out", "ver"],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_flash_attention_3(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == PARAMETERS[name]
    extras = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert extras == ["sink", "learnable_sink", "return_lse", *MORE.get(name, [])]
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
    oracle.assert_all_close(got, oracle.gradients(oracle.exact, q, k, v, dout, dlse, sink=SINK))


def test_what_tandem_lacks_is_an_error() -> None:
    q, k, v = qkv()
    with pytest.raises(tandem.InvalidArgumentError, match="^q_descale is given but q is f32; scales are for"):
        flash_attn.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2))


@pytest.mark.parametrize("zero", [0.0, 0])
def test_flash_attention_2s_dropout_is_no_scale(zero: float) -> None:
    """It has dropout_p where FlashAttention-3 has the scale, and 0 as a scale gives the mean of v."""
    q, k, v = qkv()
    lengths = varlen()
    packed = torch.randn(33, 4, 32), torch.randn(44, 2, 32), torch.randn(44, 2, 32)
    message = (
        f"^argument %d is {zero}: that is FlashAttention-2's dropout_p, and %s here; import from tandem.fl"
    )
    with pytest.raises(tandem.InvalidArgumentError, match=message % (4, "softmax_scale")):
        flash_attn.flash_attn_func(q, k, v, zero, None, True)
    with pytest.raises(tandem.InvalidArgumentError, match=message % (2, "softmax_scale")):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(2, 9, 3, 4, 16), zero)
    with pytest.raises(tandem.InvalidArgumentError, match=message % (8, "seqused_q")):
        flash_attn.flash_attn_varlen_func(*packed, *lengths.values(), 20, 20, zero)
    mean = flash_attn.flash_attn_func(q, k, v, softmax_scale=zero)
    torch.testing.assert_close(mean, tandem.attention(q, k, v, scale=0.0))


def test_flash_attention_4s_spellings() -> None:
    q, k, v = qkv()
    expected, expected_lse = tandem.attention(
        q, k, v, causal=True, window=(5, -1), sink=SINK, return_lse=True
    )
    for options in (
        {"sink": SINK, "window_size": (5, -1), "return_attn_probs": True},
        {"learnable_sink": SINK, "window_size": (5, None), "return_lse": True},
    ):
        out, lse = flash_attn.flash_attn_func(q, k, v, causal=True, **options)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    unbounded = flash_attn.flash_attn_func(q, k, v, window_size=(None, None))
    assert torch.equal(unbounded, tandem.attention(q, k, v))
    with pytest.raises(tandem.InvalidArgumentError, match="sink and learnable_sink are both given"):
        flash_attn.flash_attn_func(q, k, v, sink=SINK, learnable_sink=SINK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_sinks_and_their_gradient(dtype: torch.dtype) -> None:
    q, k, v = qkv()
    sink, wide = SINK.to(dtype).requires_grad_(), SINK.clone().requires_grad_()
    out = flash_attn.flash_attn_func(q, k, v, learnable_sink=sink)
    expected = tandem.attention(q, k, v, sink=wide)
    assert torch.equal(out, expected)
    (got,) = torch.autograd.grad(out.sum(), sink)
    (gradient,) = torch.autograd.grad(expected.sum(), wide)
    assert torch.equal(got, gradient.to(dtype))


def test_compiled_in_one_graph() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> Any:
        return flash_attn.flash_attn_func(q, k, v, 0.3, True, learnable_sink=sink, return_lse=True)

    inputs = (*qkv(), SINK.bfloat16())
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    oracle.assert_equal(compiled(*inputs), function(*inputs))


def test_with_kvcache() -> None:
    """Only so many first rows of each sequence take part, and masks are aligned to them."""
    q, k, v = torch.randn(3, 2, 4, 32), torch.randn(3, 20, 2, 32), torch.randn(3, 20, 2, 32)
    used = torch.tensor([20, 7, 0])
    k[1, 7:], v[1, 7:] = torch.nan, torch.nan
    options: dict[str, Any] = {"causal": True, "window_size": (5, 0), "softcap": 3.0}
    got = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, return_softmax_lse=True, **options)
    oracle.assert_sequences_close(got, q, k, v, used.tolist(), causal=True, window=(5, 0), softcap=3.0)
    for given, n in ((7, 7), (None, 20), (0, 0)):
        out = flash_attn.flash_attn_with_kvcache(q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1),
                                                 cache_seqlens=given)  # fmt: skip
        oracle.assert_close(out, oracle.exact(q, *(t[:1, :n].expand(3, -1, -1, -1) for t in (k, v)))[0])


def test_what_with_kvcache_lacks_is_an_error_with_a_remedy() -> None:
    q, cache = torch.randn(2, 1, 4, 32), torch.randn(2, 20, 2, 32)
    for name, other in (
        ("k", "v"),
        ("v", "k"),
        ("rotary_cos", "k"),
    ):
        with pytest.raises(
            tandem.InvalidArgumentError, match=f"^{name} is given without {other}; pass what is app"
        ):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, **{name: torch.zeros(2)})
    for value, message in (
        (21, "cache_seqlens is 21, but k_cache has 20 rows; pass 0 to 20"),
        (-1, "cache_seqlens is -1, but k_cache has 20 rows; pass 0 to 20"),
        (torch.tensor([20, 21]), r"cache_seqlens\[1\] is 21, but k_cache has 20 rows; pass 0 to 20"),
        (torch.tensor([-1, 21]), r"cache_seqlens\[0\] is -1, but k_cache has 20 rows; pass 0 to 20"),
        (
            torch.tensor([2.0, 3.0]),
            r"cache_seqlens is float32 of shape \(2,\); it must be int32 or int64 of shape \(2,\)",
        ),
        (1.5, r"cache_seqlens is 1.5; pass an integer, a tensor of shape \(2,\), or None"),
        (
            torch.tensor([3]),
            r"cache_seqlens is int64 of shape \(1,\); it must be int.* of shape \(2,\)",
        ),
    ):
        with pytest.raises(tandem.InvalidArgumentError, match=f"^{message}"):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=value)
    with pytest.raises(tandem.InvalidArgumentError, match="^k_cache has shape"):
        flash_attn.flash_attn_with_kvcache(q, cache[0], cache)


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


def run_python(program: str) -> None:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_module_name_is_served_on_request_alone() -> None:
    run_python("""
import importlib.util, sys, types
from tandem import flash_attn
assert importlib.util.find_spec("flash_attn_interface") is None and "flash_attn_interface" not in sys.modules
flash_attn.serve()
from flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
assert flash_attn_func is flash_attn.flash_attn_func and flash_attn.serve() is flash_attn
sys.modules["flash_attn_interface"] = types.ModuleType("flash_attn_interface")
try:
    flash_attn.serve()
except ValueError as error:
    assert "imported already" in str(error)
else:
    raise AssertionError("no error")
""")


def test_served_to_transformers_it_poses_as_no_other_distribution() -> None:
    """Transformers looks for the distribution flash-attn-3, which is not there, before it imports the module;
    whoever asks for the functions gets them."""
    pytest.importorskip("transformers")
    run_python("""
import torch
from tandem import flash_attn
flash_attn.serve()
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.utils import is_flash_attn_3_available
assert not is_flash_attn_3_available()
q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
sink = torch.randn(4).bfloat16()
mask = torch.arange(9) < torch.tensor([9, 5])[:, None]
out = _flash_attention_forward(q, k, v, mask, 9, True, s_aux=sink, attn_implementation="flash_attention_3")
for b, n in enumerate((9, 5)):
    mine = (slice(b, b + 1), slice(n))
    expected = flash_attn.flash_attn_func(q[mine], k[mine], v[mine], causal=True, sink=sink)
    torch.testing.assert_close(out[mine], expected)
""")
