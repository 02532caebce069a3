"""Attention by the plain formula in PyTorch, differentiable: what the package is tested against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    kept: Tensor | None = None,
    round_to: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with the meaning of tandem.attention, in the dtype of q.

    Functions are called with the scores (heads, rows, keys) of a sequence, its number, and positions as
    arrays. `kept`: what dropout multiplies probabilities by, (batch, heads, rows, keys). `round_to` rounds
    the probabilities and the result to a 16-bit dtype, as PyTorch's own 16-bit attention does.
    """
    batch = len(_given(cu_seqlens_q)) - 1 if cu_seqlens_q is not None else q.shape[0]
    rows_q = q.shape[0] if cu_seqlens_q is not None else q.shape[1]
    dense_q, dense_k = q.flatten(0, -3), k.flatten(0, -3)
    dense_v = v.flatten(0, -3)
    out = q.new_zeros(dense_q.shape[0], q.shape[-2], v.shape[-1])
    lse = q.new_full((q.shape[-2], dense_q.shape[0]), -math.inf)
    for b in range(batch):
        mine = _rows(b, cu_seqlens_q, seqused_q, rows_q)
        theirs = _rows(b, cu_seqlens_k, seqused_k, k.shape[0] if cu_seqlens_k is not None else k.shape[1])
        if mine.stop == mine.start:
            continue
        own = (dense_q[mine], dense_k[theirs], dense_v[theirs])
        slopes = None if alibi_slopes is None else alibi_slopes.expand(batch, -1)[b]
        functions = (slopes, score_mod, mask_mod, None if kept is None else kept[b])
        o, s = _sequence(b, *own, scale, causal, window, softcap, sink, *functions, round_to)
        # masked writes, not in-place slices of a leaf: autograd sees through index_copy
        index = torch.arange(mine.start, mine.stop, device=q.device)
        out = out.index_copy(0, index, o)
        lse = lse.index_copy(1, index, s)
    if cu_seqlens_q is None:
        return out.unflatten(0, (batch, rows_q)), lse.unflatten(1, (batch, rows_q)).transpose(0, 1)
    return out, lse


def _given(t: Tensor | None) -> Tensor:
    assert t is not None
    return t


def _rows(b: int, cu_seqlens: Tensor | None, seqused: Tensor | None, rows: int) -> slice:
    """The rows of sequence b that take part, in the flattened tensor."""
    begin, end = b * rows, (b + 1) * rows
    if cu_seqlens is not None:
        begin, end = int(cu_seqlens[b]), int(cu_seqlens[b + 1])
    if seqused is not None:
        end = begin + int(seqused[b])
    return slice(begin, end)


def _sequence(
    b: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    sink: Tensor | None,
    slopes: Tensor | None,
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor] | None,
    kept: Tensor | None,
    round_to: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """One sequence: q (rows, heads, d); out like it, lse (heads, rows)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    heads, rows, keys = (torch.arange(n, device=q.device) for n in s.shape)
    at = (heads[:, None, None], rows[:, None], keys)
    if score_mod is not None:
        s = score_mod(s, b, *at).to(s.dtype)
    diagonal = rows[:, None] + len(k) - len(q)
    if slopes is not None:
        s = s - slopes[:, None, None] * (diagonal - keys).abs()
    left, right = window
    right = 0 if causal else right
    visible = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    if left >= 0:
        visible &= keys >= diagonal - left
    if right >= 0:
        visible &= keys <= diagonal + right
    if mask_mod is not None:
        visible = visible & mask_mod(b, *at)
    s = s.masked_fill(~visible, -math.inf)
    # A query that sees no key, or whose scores a function makes -inf, gives 0, and the sink or -inf.
    some = (visible if score_mod is None else s > -math.inf).any(-1, keepdim=True)
    if sink is not None:
        s = torch.cat([s, sink[:, None, None].expand(-1, len(q), 1)], -1)
        some = torch.ones_like(some)
    if s.shape[-1] == 0:
        s = s.new_zeros(*s.shape[:-1], 1)
    s = torch.where(some, s, 0.0)  # keeps rows of -inf out of softmax, whose gradient would be NaN there
    p = s.softmax(-1) * some
    lse = s.logsumexp(-1).masked_fill(~some[..., 0], -math.inf)
    p = p[..., : len(k)]
    p = p if kept is None else p * kept
    if round_to is not None:
        p = p.to(round_to).to(s.dtype)
    out = torch.einsum("hij,jhd->ihd", p, v)
    return (out if round_to is None else out.to(round_to).to(s.dtype)), lse


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The reference in float64."""
    if options.get("sink") is not None:
        options["sink"] = options["sink"].double()
    return attention(q.double(), k.double(), v.double(), **options)


def same_dtype(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """What PyTorch makes of it in the inputs' own 16-bit dtype: products in f32, probabilities rounded."""
    return attention(q.float(), k.float(), v.float(), **options, round_to=q.dtype)


def eager(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Eager PyTorch in the inputs' own dtype, rounding after every operator: the contract's yardstick."""
    if options.get("sink") is not None:
        options["sink"] = options["sink"].to(q.dtype)
    return attention(q, k, v, **options)


def gradients(
    formula: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """dq, dk, dv (and dsink, if there is a sink) by autograd through `formula` (exact or same_dtype).

    The gradients have the formula's precision: fp64, or the inputs' own dtype.
    """
    wide = formula is exact
    inputs = [(t.double() if wide else t).detach().requires_grad_() for t in (q, k, v)]
    if options.get("sink") is not None:
        sink = options["sink"].double() if wide else options["sink"]
        options["sink"] = sink.detach().requires_grad_()
        inputs.append(options["sink"])
    out, lse = formula(*inputs[:3], **options)
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        seen = lse > -math.inf
        loss = loss + (torch.where(seen, lse, 0.0) * dlse.to(lse.dtype)).sum()
    if not loss.requires_grad:  # no query at all
        return [torch.zeros_like(t) for t in inputs]
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True)]


def gradient_yardsticks(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, **options: Any
) -> list[tuple[Tensor, ...]]:
    """For each gradient what PyTorch makes of it in the inputs' 16-bit dtype: eagerly, and fused.

    Fused attention takes sum(dout * out) from the out it saved in 16 bits, which eager attention does not
    need; that rounding is what is left where the exact gradient nearly cancels. The sum and dlse enter as a
    difference, so the exact gradients with dlse changed by the rounding's share are those of fused attention.
    """
    out, _ = exact(q, k, v, **options)
    rounding = (dout.double() * (out.to(q.dtype).double() - out)).sum(-1).transpose(-1, -2)
    eager = gradients(same_dtype, q, k, v, dout, dlse, **options)
    fused = gradients(exact, q, k, v, dout, dlse - rounding, **options)
    stored = [q.dtype] * 3 + [torch.float32]  # dq, dk and dv are 16-bit themselves
    return [(a.to(dtype), b.to(dtype)) for a, b, dtype in zip(eager, fused, stored, strict=False)]


def assert_close(got: Tensor, expected: Tensor, *same: Tensor) -> None:
    """The contract: 1e-5 in f32; in 16 bits twice the error of PyTorch's own results, `same`, and 3e-5.

    In f32 relative to the largest element, if that exceeds 1: every element sums terms of that size. Of 4096
    elements and more also the bounds of RMS and gain (docs/numerics.md), the RMS that of the least exact of
    `same`.
    """
    assert got.shape == expected.shape
    got, expected = got.double(), expected.double()
    infinite = expected.isinf()
    assert torch.equal(got.isinf(), infinite)
    if got.numel() == 0:
        return
    errors = (got - expected).masked_fill(infinite, 0.0)
    expected = expected.masked_fill(infinite, 0.0)
    f32_bound = bound = 1e-5 * max(1.0, expected.abs().max().item())
    others = [(s.double() - expected).masked_fill(infinite, 0.0) for s in same]
    if same:
        bound = 2.0 * max(o.abs().max().item() for o in others) + 3e-5
    error = errors.abs().max().item()
    assert error <= bound, f"{error:.3g} > {bound:.3g}"
    if got.numel() < 4096 or not same:
        return
    rms, size = _rms(errors), _rms(expected)
    rms_bound = 1.5 * max(map(_rms, others)) + f32_bound / 4
    assert rms <= rms_bound, f"RMS {rms:.3g} > {rms_bound:.3g}"
    chance = min(1.0, 6.0 / math.sqrt(got.numel() / got.shape[-1])) * rms_bound
    gain_error = abs((errors * expected).mean().item())
    gain_bound = max(0.004 * size**2, chance * size)
    assert gain_error <= gain_bound, f"the gain is off by {gain_error / size**2:.3g}"


def assert_sequences_close(
    got: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Iterable[int], cu: Any = None, **options: Any
) -> None:
    """(out, LSE), or out, of sequences of which each sees so many first rows of its entry of k and v, each of
    them by itself. With `cu`, their queries are those rows of packed ones."""
    out, lse = got if isinstance(got, tuple) else (got, None)
    slopes = options.pop("alibi_slopes", None)
    for b, n in enumerate(lengths):
        packed = slice(0) if cu is None else slice(int(cu[b]), int(cu[b + 1]))
        rows: Any = slice(b, b + 1) if cu is None else (None, packed)
        inputs = q[rows], k[b : b + 1, :n], v[b : b + 1, :n]
        if slopes is not None:
            options["alibi_slopes"] = slopes if slopes.ndim == 1 else slopes[b]
        expected, expected_lse = exact(*inputs, **options)
        same = () if q.dtype == torch.float32 else same_dtype(*inputs, **options)[:1]
        assert_close(out[rows], expected, *same)
        if lse is not None:
            assert_close(lse[rows] if cu is None else lse[None, :, packed], expected_lse)


def assert_all_close(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)


def assert_equal(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """As many tensors, of the same bits."""
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
