"""Tandem as an implementation of PyTorch's scaled_dot_product_attention, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tandem
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@pytest.mark.parametrize(("rows", "keys"), [(20, 20), (12, 20), (20, 12)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 20, 65])
def test_scaled_dot_product_attention(
    in_torch: Any, calls: Any, rows: int, keys: int, causal: bool, head_dim: int
) -> None:
    """PyTorch's function, its causal mask at the top left corner, any head_dim, forward and backward."""
    inputs = [torch.randn(2, 4, n, head_dim, requires_grad=True) for n in (rows, keys, keys)]
    out = scaled_dot_product_attention(*inputs, is_causal=causal)
    dout = torch.randn(out.shape)
    got = (out, *torch.autograd.grad(out, inputs, dout))
    assert calls() == ["forward", "backward"]
    with in_torch.sdpa_kernel(in_torch.SDPBackend.MATH):
        out = scaled_dot_product_attention(*inputs, is_causal=causal)
    torch.testing.assert_close(got, (out, *torch.autograd.grad(out, inputs, dout)))


@pytest.mark.parametrize(("head_dim", "dtype"), [(16, torch.float64), (1032, torch.float32)], ids=str)
def test_scaled_dot_product_attention_of_what_tandem_lacks_stays_pytorchs(
    in_torch: Any, calls: Any, head_dim: int, dtype: torch.dtype
) -> None:
    inputs = [torch.randn(2, 4, 20, head_dim, dtype=dtype, requires_grad=True) for _ in range(3)]
    dout = torch.randn(2, 4, 20, head_dim, dtype=dtype)

    def results() -> tuple[torch.Tensor, ...]:
        with in_torch.sdpa_kernel(in_torch.SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(*inputs, is_causal=True, scale=0.1)
        return out, *torch.autograd.grad(out, inputs, dout)

    with_tandem = results()
    assert calls() == []
    in_torch.restore_flash_attention_impl()
    torch.testing.assert_close(with_tandem, results())


def test_scaled_dot_product_attention_is_given_back(in_torch: Any, calls: Any) -> None:
    in_torch.restore_flash_attention_impl()
    scaled_dot_product_attention(*(torch.randn(1, 2, 8, 16) for _ in range(3)))
    assert calls() == []


def without_and_with_tandem(
    in_torch: Any,
    calls: Any,
    results: Callable[[], tuple[Tensor, ...]],
    exact: Callable[[], tuple[Tensor, ...]] | None = None,
) -> bool:
    """Compares results() under Tandem with those of PyTorch alone; whether Tandem computed any of them. With
    `exact`, results of 16 bits may be as far from it as twice PyTorch's and their last digit."""
    torch.manual_seed(1)
    got = results()
    ran = len(calls())
    in_torch.restore_flash_attention_impl()
    torch.manual_seed(1)
    expected = results()
    assert len(calls()) == ran
    if exact is not None and got[0].dtype.itemsize == 2:
        for a, b, c in zip(got, expected, exact(), strict=True):
            allowed = 2 * (b - c).abs().max() + torch.finfo(a.dtype).eps * c.abs().max()
            assert (a - c).abs().max() <= allowed
        return ran > 0
    for a, b in zip(got, expected, strict=True):
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(a.dtype, 2e-2)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    return ran > 0


def mask_of(kind: str, rows: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """None, or a mask tensor under which every query sees a key."""
    seen = (torch.rand(rows, keys) > 0.4) | (torch.arange(keys) == 0)
    if kind == "bool":
        return seen
    if kind == "float":
        return torch.zeros(rows, keys, dtype=dtype).masked_fill(~seen, -torch.inf)
    if kind == "padding":
        return (torch.arange(keys) < torch.tensor([keys, max(keys - 2, 1)])[:, None])[:, None, None]
    return torch.randn(2, 4, rows, keys, dtype=dtype) if kind == "bias" else None


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("dtype", "dropout_p"), [*((d, 0.0) for d in DTYPES), (torch.float64, 0.3)], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "padding", "bias"])
@pytest.mark.parametrize(("rows", "keys", "heads_kv"), [(7, 7, 4), (5, 9, 4), (9, 5, 2), (1, 9, 4)])
def test_calls_with_masks_or_in_float64_give_what_they_give_without_tandem(
    in_torch: Any, calls: Any, dtype: torch.dtype, kind: str, dropout_p: float,
    rows: int, keys: int, heads_kv: int,
) -> None:  # fmt: skip
    mask = mask_of(kind, rows, keys, dtype)
    inputs = [
        torch.randn(2, heads, n, 16, dtype=dtype, requires_grad=True)
        for heads, n in ((4, rows), (heads_kv, keys), (heads_kv, keys))
    ]
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "is_causal": kind == "causal",
        "enable_gqa": heads_kv != 4,
    }

    def of(inputs: list[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(*inputs, attn_mask=mask, **options)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    def exact() -> tuple[Tensor, ...]:
        whole = mask.double() if mask is not None and mask.is_floating_point() else mask
        return of([t.detach().double().requires_grad_() for t in inputs], whole)

    ours = without_and_with_tandem(in_torch, calls, lambda: of(inputs, mask), exact)
    assert ours == (dropout_p == 0.0 and dtype != torch.float64)


@pytest.mark.parametrize("kind", ["none", "bool"])
@pytest.mark.parametrize(
    ("batch", "rows", "keys", "head_dim"), [(0, 3, 3, 8), (2, 0, 3, 8), (2, 3, 0, 8), (2, 3, 3, 0)]
)
def test_empty_tensors_give_what_they_give_without_tandem(
    in_torch: Any, calls: Any, kind: str, batch: int, rows: int, keys: int, head_dim: int
) -> None:
    inputs = [torch.randn(batch, 4, n, head_dim, requires_grad=True) for n in (rows, keys, keys)]
    mask = mask_of(kind, rows, keys, torch.float32)

    def results() -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(*inputs, attn_mask=mask)
        return out, *torch.autograd.grad(out.sum(), inputs)

    without_and_with_tandem(in_torch, calls, results)


PADDING = torch.arange(9) >= torch.tensor([9, 6])[:, None]  # True: not to be looked at
LATER = torch.ones(9, 9, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    ("padding", "mask", "is_causal"),
    [
        (None, None, False),
        (PADDING, None, False),
        (PADDING.float() * -1e9, None, False),
        (None, LATER, False),
        (None, LATER, True),
        (PADDING, LATER, False),
        (PADDING, LATER, True),
        (PADDING.float() * -1e9, LATER.float() * -1e9, False),
    ],
)
def test_multihead_attention_gives_what_it_gives_without_tandem(
    in_torch: Any, calls: Any, padding: Tensor | None,
    mask: Tensor | None, is_causal: bool,
) -> None:  # fmt: skip
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32, requires_grad=True)

    def results() -> tuple[Tensor, ...]:
        out, _ = module(
            x, x, x, key_padding_mask=padding, attn_mask=mask, is_causal=is_causal, need_weights=False
        )
        return out, *torch.autograd.grad(out.square().sum(), (x, *module.parameters()))

    ours = without_and_with_tandem(in_torch, calls, results)
    assert ours


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["none", "padding"])
@pytest.mark.parametrize("mask", [None, LATER], ids=["none", "mask"])
@pytest.mark.parametrize("decoder", [False, True])
def test_transformer_layers_give_what_they_give_without_tandem(
    in_torch: Any, calls: Any, training: bool, padding: Tensor | None,
    mask: Tensor | None, decoder: bool,
) -> None:  # fmt: skip
    layer: Any = torch.nn.TransformerDecoderLayer if decoder else torch.nn.TransformerEncoderLayer
    module = layer(32, 4, 64, dropout=0.0, batch_first=True).train(training)
    x = torch.randn(2, 9, 32, requires_grad=True)

    def results() -> tuple[Tensor, ...]:
        if decoder:
            out = module(x, x, tgt_mask=mask, tgt_key_padding_mask=padding, memory_key_padding_mask=padding)
        else:
            out = module(x, src_mask=mask, src_key_padding_mask=padding)
        return out, *torch.autograd.grad(out.square().sum(), (x, *module.parameters()))

    without_and_with_tandem(in_torch, calls, results)


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "added"])
def test_dropout_on_the_cpu(in_torch: Any, calls: Any, mask: str) -> None:
    """What is kept is what tandem.attention keeps with the same random numbers, in both passes."""
    q, k, v = (torch.randn(2, 4, 20, 16, requires_grad=True) for _ in range(3))
    seen = torch.rand(2, 1, 20, 20) > 0.3
    added = torch.randn(4, 20, 20)
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": seen},
        "added": {"attn_mask": added},
    }
    ours = {"none": {}, "causal": {"causal": True}, "boolean": {"mask": seen}, "added": {"bias": added}}
    torch.manual_seed(4)
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.3, **options[mask])
    got = (out, *torch.autograd.grad(out.sum(), (q, k, v)))
    assert calls() == ["forward", "backward"]
    torch.manual_seed(4)
    out = tandem.attention(*(t.transpose(1, 2) for t in (q, k, v)), dropout_p=0.3, **ours[mask]).transpose(
        1, 2
    )
    torch.testing.assert_close(got, (out, *torch.autograd.grad(out.sum(), (q, k, v))))
    with torch.no_grad():
        scaled_dot_product_attention(q, k, v, dropout_p=0.3, **options[mask])
    assert len(calls()) == 5


def test_a_mask_that_requires_a_gradient(in_torch: Any, calls: Any) -> None:
    q, k, v = (torch.randn(2, 4, 20, 16, requires_grad=True) for _ in range(3))
    mask = torch.randn(4, 1, 20, requires_grad=True)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    dout = torch.randn(out.shape)
    got = (out, *torch.autograd.grad(out, (q, k, v, mask), dout))
    assert calls() == ["forward", "backward"]
    with in_torch.sdpa_kernel(in_torch.SDPBackend.MATH):  # which is PyTorch's where it is asked for by name
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert len(calls()) == 2
    torch.testing.assert_close(
        got, (out, *torch.autograd.grad(out, (q, k, v, mask), dout)), rtol=1e-4, atol=1e-5
    )


def test_dropout_that_stays_pytorchs(in_torch: Any, calls: Any) -> None:
    """All of it, in float64, of other ranks, under a transform, and in a compiled function."""
    q = torch.randn(2, 4, 20, 16)
    assert not scaled_dot_product_attention(q, q, q, dropout_p=1.0).any()
    scaled_dot_product_attention(*(q.double(),) * 3, dropout_p=0.5)
    scaled_dot_product_attention(q[0], q[0], q[0], dropout_p=0.5)
    attend = lambda q: scaled_dot_product_attention(q, q, q, dropout_p=0.5)  # noqa: E731
    torch.vmap(attend, randomness="different")(q[None])
    torch.compile(attend, backend="aot_eager", fullgraph=True)(q)
    assert calls() == []


@pytest.mark.parametrize(("keys", "is_causal"), [(20, True), (12, True), (300, False)])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_second_derivatives_where_pytorch_has_them(
    in_torch: Any, calls: Any, keys: int, is_causal: bool, heads_kv: int
) -> None:
    """Of learned masks PyTorch's, and with dropout those of the entries that the call kept."""
    q, k, v = (
        torch.randn(2, h, n, 16, requires_grad=True) for h, n in ((4, 20), (heads_kv, keys), (heads_kv, keys))
    )
    mask = torch.randn(4, 20, keys, requires_grad=True)

    def penalty(**options: Any) -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(q, k, v, enable_gqa=heads_kv != 4, **options)
        inputs = (q, k, v, mask) if "attn_mask" in options else (q, k, v)
        gradients = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return (*gradients, *torch.autograd.grad(sum(g.square().sum() for g in gradients), inputs))

    got = penalty(attn_mask=mask)
    assert calls() == ["forward", "backward"]  # the latter of the penalty by what is squared
    with in_torch.sdpa_kernel(in_torch.SDPBackend.MATH):
        torch.testing.assert_close(got, penalty(attn_mask=mask), rtol=1e-3, atol=1e-3)
    torch.manual_seed(5)
    recorded = penalty(dropout_p=0.3, is_causal=is_causal)[:3]
    torch.manual_seed(5)
    out = scaled_dot_product_attention(q, k, v, enable_gqa=heads_kv != 4, dropout_p=0.3, is_causal=is_causal)
    torch.testing.assert_close(
        recorded, torch.autograd.grad(out.square().sum(), (q, k, v)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.1}, {"attn_mask": torch.ones(20, 20, requires_grad=True)}]
)
def test_keys_that_pytorch_broadcasts_or_refuses(in_torch: Any, options: dict[str, Any]) -> None:
    q = torch.randn(2, 4, 20, 16)
    with pytest.raises(RuntimeError, match="must match"):
        scaled_dot_product_attention(q, q[:, :2], q[:, :2], **options)
    results = []
    for backends in (in_torch.SDPBackend.MATH, [*in_torch.SDPBackend.__members__.values()][1:]):
        torch.manual_seed(1)
        with in_torch.sdpa_kernel(backends):
            results.append(
                [scaled_dot_product_attention(q, k, k, **options) for k in (q[:1], q[:, :1], q[:1, :1])]
            )
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
