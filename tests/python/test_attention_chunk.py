"""attention_chunk of FlashAttention-3's functions: queries see the keys of their own chunk."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tandem
import torch
from tandem import flash_attn
from test_flash_attn import SINK
from test_forward import qkv, varlen


def in_chunks(chunk: int, *shift: int) -> Any:
    """Queries see the keys of their own chunk; `shift`: of each sequence its keys less its queries."""
    return lambda b, h, i, j: (i + shift[b]) // chunk == j // chunk


CHUNKED: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "window": (2, 0)}, {"window": (2, 1)}]


@pytest.mark.parametrize("options", CHUNKED, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
@pytest.mark.parametrize(("rows", "keys"), [(20, 20), (7, 20), (20, 7), (1, 9), (7, 0)])
def test_equally_long_sequences(rows: int, keys: int, chunk: int, options: dict[str, Any]) -> None:
    q, k, v = qkv(seqlen_q=rows, seqlen_k=keys)
    call = {name if name == "causal" else "window_size": value for name, value in options.items()}
    got = flash_attn.flash_attn_func(q, k, v, attention_chunk=chunk, sink=SINK, return_lse=True, **call)
    mask = in_chunks(chunk, *[keys - rows] * len(q))
    oracle.assert_all_close(got, oracle.exact(q, k, v, sink=SINK, mask_mod=mask, **options))


def test_varlen_sequences_and_their_rows_in_use() -> None:
    q, k, v = torch.randn(33, 4, 32), torch.randn(44, 2, 32), torch.randn(44, 2, 32)
    lengths = varlen()
    whole = {f"seqused_{name}": lengths[f"cu_seqlens_{name}"].diff() for name in "qk"}
    for given in (whole, {"seqused_q": torch.tensor([5, 0, 3]), "seqused_k": torch.tensor([4, 9, 20])}):
        used = {} if given is whole else given
        got = flash_attn.flash_attn_varlen_func(
            q, k, v, **lengths, **used, causal=True, attention_chunk=4, sink=SINK, return_attn_probs=True
        )
        mask = in_chunks(4, *(given["seqused_k"] - given["seqused_q"]).tolist())
        options = {**lengths, **used, "causal": True, "sink": SINK, "mask_mod": mask}
        oracle.assert_all_close(got, oracle.exact(q, k, v, **options))


def test_gradients_and_one_graph() -> None:
    def function(*inputs: torch.Tensor) -> Any:
        *tensors, sink = inputs
        return flash_attn.flash_attn_func(
            *tensors, causal=True, attention_chunk=8, sink=sink, return_attn_probs=True
        )

    q, k, v = qkv(seqlen_q=20, seqlen_k=20)
    inputs = [t.requires_grad_() for t in (q, k, v, SINK.clone())]
    seeds = (torch.randn(q.shape), torch.randn(len(q), 4, 20))
    options = {"causal": True, "sink": SINK, "mask_mod": in_chunks(8, 0, 0)}
    expected = oracle.gradients(oracle.exact, q, k, v, *seeds, **options)
    compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
    for call in (function, compiled):
        oracle.assert_all_close(torch.autograd.grad(call(*inputs), inputs, seeds), expected)


def test_a_cache() -> None:
    q, k, v = torch.randn(2, 1, 4, 32), torch.randn(2, 20, 2, 32), torch.randn(2, 20, 2, 32)
    used = torch.tensor([19, 9])
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, attention_chunk=8)
    for b, keys in enumerate((slice(16, 19), slice(8, 9))):
        oracle.assert_close(out[b], oracle.exact(q[b : b + 1], k[b : b + 1, keys], v[b : b + 1, keys])[0][0])


def test_float8_with_scales() -> None:
    q, k, v = (t.to(torch.float8_e4m3fn) for t in qkv(seqlen_q=20, seqlen_k=20))
    scales = [torch.rand(2, heads) + 0.5 for heads in (2, 2, 2)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    out = flash_attn.flash_attn_func(q, k, v, causal=True, attention_chunk=8, **names)
    for first in (0, 8, 16):
        rows = (slice(None), slice(first, first + 8))
        part = flash_attn.flash_attn_func(q[rows], k[rows], v[rows], causal=True, **names)
        torch.testing.assert_close(out[rows], part)


def test_arguments_that_do_not_fit() -> None:
    q, k, v = qkv()
    for chunk in (-1, 1.5, "8"):
        with pytest.raises(
            tandem.InvalidArgumentError, match=f"^attention_chunk is {chunk!r}; pass how many"
        ):
            flash_attn.flash_attn_func(q, k, v, attention_chunk=chunk)
    with pytest.raises(tandem.InvalidArgumentError, match="^q has 2 sequences, but k has 1; pass as many$"):
        flash_attn.flash_attn_func(q, k[:1], v[:1], attention_chunk=4)
    with pytest.raises(TypeError, match="^k is a numpy.ndarray; pass a torch.Tensor$"):
        flash_attn.flash_attn_func(q, k.numpy(), v, attention_chunk=4)
    with pytest.raises(tandem.InvalidArgumentError, match=r"^q has shape \(\); pass \(batch, seqlen, heads"):
        flash_attn.flash_attn_func(torch.tensor(1.0), k, v, attention_chunk=4)
