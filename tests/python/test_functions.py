"""Functions of scores and mask functions, against PyTorch's flex_attention in eager mode and, for gradients,
which that has on no CPU, against the plain formula in float64."""

import math

import numpy as np
import oracle
import pytest
import tandem
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

B, H, SQ, SK, D = 2, 4, 70, 90, 32
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")

_random = torch.Generator().manual_seed(7)


def randn(*shape, **kwargs):
    return torch.randn(*shape, generator=_random, **kwargs)


SLOPES = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])
BIAS = randn(B, H, SQ, SK)
TABLE = randn(H, SQ + SK)
DOCUMENT = torch.arange(SK) // 23
PREFIX = torch.tensor([13, 41])
HEAD_BIAS = randn(H, dtype=torch.float32).to(torch.bfloat16)
SEEN = torch.rand(SQ, SK, generator=_random) > 0.4
BUCKETS = randn(16, H)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def both(first, second):
    return lambda b, h, q, k: first(b, h, q, k) & second(b, h, q, k)


def natten(b, h, q, k):
    rows, columns = torch.abs(q // 10 - k // 10), (q % 10 - k % 10).abs()
    return (rows <= 2) & (columns <= 3)


MASKS = {
    "causal": causal,
    "block causal": lambda b, h, q, k: q // 16 >= k // 16,
    "sliding window": lambda b, h, q, k: (q >= k) & (q - k <= 20),
    "sliding by logical_and": lambda b, h, q, k: torch.logical_and(q >= k, q - k <= 20),
    "dilated": lambda b, h, q, k: (q - k) % 3 == 0,
    "document": lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k],
    "document, causal": both(causal, lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k]),
    "prefix-LM": lambda b, h, q, k: (k < PREFIX[b]) | (q >= k),
    "chunked": lambda b, h, q, k: (q >= k) & (torch.div(q, 32, rounding_mode="floor") == k // 32),
    "NATTEN": natten,
    "boolean tensor": lambda b, h, q, k: SEEN[q, k],
    "by head": lambda b, h, q, k: torch.where(h < 2, q >= k, k < 40),
    "not": lambda b, h, q, k: ~(q == k),
}


def t5(score, b, h, q, k):
    distance = torch.clamp(q - k, min=0)
    far = 8 + (torch.log(torch.clamp(distance, min=1).float() / 8.0) * 2.885).to(torch.int)
    return score + BUCKETS[torch.where(distance < 8, distance, torch.clamp(far, max=15)), h]


SCORES = {
    "identity": lambda score, b, h, q, k: score,
    "relative": lambda score, b, h, q, k: score + (q - k) * 0.01,
    "ALiBi": lambda score, b, h, q, k: score + SLOPES[h] * (k - q),
    "softcap": lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0),
    "method softcap": lambda score, b, h, q, k: (score / 2.0).tanh() * 2.0,
    "bias": lambda score, b, h, q, k: score + BIAS[b, h, q, k],
    "bias, index by index": lambda score, b, h, q, k: score + BIAS[b][h][q, k],
    "bias, transposed": lambda score, b, h, q, k: score + BIAS.permute(2, 3, 0, 1)[q, k, b, h],
    "16-bit bias": lambda score, b, h, q, k: score + HEAD_BIAS[h],
    "relative table": lambda score, b, h, q, k: score + TABLE[h, q - k + SK - 1],
    "T5": t5,
    "causal by -inf": lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")),
    "sigmoid gate": lambda score, b, h, q, k: score * torch.sigmoid(score),
    "square": lambda score, b, h, q, k: score**2,
    "clamped": lambda score, b, h, q, k: torch.clamp(score, -1.0, 1.5),
    "log1p": lambda score, b, h, q, k: torch.log(1.0 + torch.exp(score)),
    "norm": lambda score, b, h, q, k: torch.sqrt(score * score + 0.25),
    "constant tensor": lambda score, b, h, q, k: score * SLOPES[0],
    "negated maximum": lambda score, b, h, q, k: -torch.maximum(score, -score),
}
#: The same by functions that take all pairs at once.
DENSE = {**SCORES, "bias, index by index": SCORES["bias"]}
ALL = [
    *((None, m) for m in MASKS),
    *((s, None) for s in SCORES),
    ("ALiBi", "causal"),
    ("softcap", "document"),
    ("relative", "prefix-LM"),
    ("T5", "NATTEN"),
]


def inputs(dtype=torch.float32, heads_kv=H):
    return [randn(B, n, h, D).to(dtype) for n, h in ((SQ, H), (SK, heads_kv), (SK, heads_kv))]


def plain(q, k, v, score, mask):
    """The formula in the tensors' dtype."""
    return oracle.attention(q, k, v, score_mod=DENSE.get(score), mask_mod=MASKS.get(mask))[0]


@pytest.mark.parametrize(("score", "mask"), ALL)
def test_forward_is_flex_attention(score, mask):
    q, k, v = inputs()
    block_mask = mask and create_block_mask(MASKS[mask], B, H, SQ, SK, device="cpu")
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    out, lse = flex_attention(*heads_first, SCORES.get(score), block_mask, return_lse=True)
    ours, our_lse = tandem.flex_attention(*heads_first, SCORES.get(score), block_mask, return_lse=True)
    torch.testing.assert_close(ours, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_lse, lse, rtol=1e-5, atol=1e-5)
    direct = tandem.attention(q, k, v, score_mod=SCORES.get(score), mask_mod=MASKS.get(mask))
    assert torch.equal(direct.transpose(1, 2), ours)


@pytest.mark.parametrize(("score", "mask"), ALL)
def test_gradients_are_those_of_the_formula(score, mask):
    tensors = [t.requires_grad_() for t in inputs()]
    dout = randn(B, SQ, H, D)
    out = tandem.attention(*tensors, score_mod=SCORES.get(score), mask_mod=MASKS.get(mask))
    out.backward(dout)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = plain(*exact, score, mask)
    expected.backward(dout.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for t, e in zip(tensors, exact, strict=True):
        scale = max(1.0, e.grad.abs().max().item())
        torch.testing.assert_close(t.grad.double() / scale, e.grad / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    q, k, v = inputs(dtype)
    out = tandem.attention(q, k, v, score_mod=SCORES["ALiBi"], mask_mod=causal)
    exact = plain(*(t.double() for t in (q, k, v)), "ALiBi", "causal")
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-2 if dtype is torch.bfloat16 else 3e-3)


def test_numpy_arrays_are_indexed_in_closures_globals_and_defaults():
    q, k, v = (t.numpy() for t in inputs())
    bias, documents, default = BIAS.numpy(), DOCUMENT.numpy(), SLOPES.numpy()

    def score(score, b, h, q_idx, kv_idx, slopes=default):
        return score + bias[b, h, q_idx, kv_idx] + slopes[h] * (kv_idx - q_idx)

    out = tandem.attention(q, k, v, score_mod=score, mask_mod=lambda b, h, i, j: documents[i] == documents[j])

    def same(score, b, h, i, j):
        return score + BIAS[b, h, i, j] + SLOPES[h] * (j - i)

    tensors = [torch.from_numpy(a) for a in (q, k, v)]
    assert np.array_equal(out, tandem.attention(*tensors, score_mod=same, mask_mod=MASKS["document"]).numpy())


def test_numpy_gradients():
    q, k, v = (t.numpy() for t in inputs())
    options = {"score_mod": lambda s, b, h, i, j: s * 1.5, "mask_mod": causal}
    out, lse = tandem.attention(q, k, v, return_lse=True, **options)
    dout = np.ones_like(out)
    dq, _, _ = tandem.attention_backward(dout, q, k, v, out, lse, **options)
    t = torch.from_numpy(q).requires_grad_()
    tandem.attention(t, *map(torch.from_numpy, (k, v)), **options).backward(torch.from_numpy(dout))
    assert np.array_equal(dq, t.grad.numpy())


@pytest.mark.parametrize("shape", [(SQ, SK), (1, SK), (H, 1, SK), (B, 1, SQ, SK), (B, H, 1, 1)])
def test_bias_and_mask_broadcast(shape):
    q, k, v = inputs()
    bias, mask = randn(*shape), torch.rand(shape, generator=_random) > 0.3
    sdpa = torch.nn.functional.scaled_dot_product_attention
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    out = sdpa(*heads_first, attn_mask=bias.expand(B, H, SQ, SK)).transpose(1, 2)
    torch.testing.assert_close(tandem.attention(q, k, v, bias=bias), out, rtol=1e-5, atol=1e-5)
    filled = torch.where(mask, bias, -math.inf).expand(B, H, SQ, SK)
    out = torch.nan_to_num(sdpa(*heads_first, attn_mask=filled).transpose(1, 2))
    torch.testing.assert_close(tandem.attention(q, k, v, bias=bias, mask=mask), out, rtol=1e-5, atol=1e-5)


def test_gqa_and_positions_of_packed_sequences():
    lengths = [31, 0, 57]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    q, k, v = randn(sum(lengths), H, D), randn(sum(lengths), 2, D), randn(sum(lengths), 2, D)
    options = {"score_mod": SCORES["ALiBi"], "mask_mod": MASKS["dilated"]}
    out = tandem.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        alone = tandem.attention(*(t[None, a:b] for t in (q, k, v)), **options)[0]
        torch.testing.assert_close(out[a:b], alone, rtol=1e-5, atol=1e-5)


def test_flex_attention_takes_gqa_scale_and_aux():
    q, k, v = (t.transpose(1, 2) for t in inputs(heads_kv=2))
    expected = flex_attention(q, k, v, SCORES["relative"], scale=0.3, enable_gqa=True)
    out, aux = tandem.flex_attention(
        q, k, v, SCORES["relative"], scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert aux.lse.shape == (B, H, SQ)
    with pytest.raises(tandem.InvalidArgumentError, match="enable_gqa"):
        tandem.flex_attention(q, k, v)


def test_block_masks_mean_their_blocks():
    """As compiled: a mask function counts in listed blocks, and in full ones everything is visible. Behind
    the blocks that are listed there may be any numbers, or no more numbers at all."""
    counts = torch.tensor([[[2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 2, 1], [1, 0, 77]]]], dtype=torch.int32)
    full = (torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[[-5], [2]]]], dtype=torch.int32))
    listed, whole = torch.zeros(2, SQ, SK, dtype=torch.bool)
    listed[:40, :32] = listed[:40, 64:] = listed[40:, 32:64] = whole[40:, 64:] = True
    seen = torch.arange(SQ)[:, None] >= torch.arange(SK)
    q, k, v = inputs()
    for mask_mod, more, visible in (
        (None, (), listed),
        (causal, (), listed & seen),
        (None, full, listed | whole),
        (causal, full, (listed & seen) | whole),
    ):
        sizes = {"BLOCK_SIZE": (40, 32), "seq_lengths": (SQ, SK), "compute_q_blocks": False}
        mask = BlockMask.from_kv_blocks(counts, indices, *more, mask_mod=mask_mod, **sizes)
        out = tandem.flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask).transpose(1, 2)
        torch.testing.assert_close(out, tandem.attention(q, k, v, mask=visible), rtol=1e-5, atol=1e-5)


def test_a_block_mask_of_other_lengths_is_an_error():
    mask = create_block_mask(causal, None, None, SQ, SQ, device="cpu")
    with pytest.raises(tandem.InvalidArgumentError, match=f"{SQ} queries and {SQ} keys"):
        tandem.flex_attention(*(t.transpose(1, 2) for t in inputs()), block_mask=mask)


def test_rows_without_keys_are_zero():
    q, k, v = inputs()
    out, lse = tandem.attention(q, k, v, mask_mod=lambda b, h, i, j: i >= 9, return_lse=True)
    assert not out[:, :9].any()
    assert torch.isneginf(lse[:, :, :9]).all()
    assert torch.isfinite(lse[:, :, 9:]).all()


def branches(score, b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return score
    return score * 2


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (branches, tandem.UnsupportedError, r"test_functions.py:\d+: a condition depends on"),
        (lambda s, b, h, i, j: s * int(i), tandem.UnsupportedError, "a Python number"),
        (lambda s, b, h, i, j: s + BIAS[b, h, i, :], tandem.UnsupportedError, "slice"),
        (lambda s, b, h, i, j: s + BIAS, tandem.UnsupportedError, "used whole"),
        (lambda s, b, h, i, j: torch.special.gammaln(s), tandem.UnsupportedError, "gammaln"),
        (lambda s, b, h, i, j: s + SLOPES[s], tandem.InvalidArgumentError, "indices are integers"),
        (lambda s, b, h, i, j: s & 2, tandem.InvalidArgumentError, "not reals"),
        (lambda s, b, h, i, j: s + SLOPES[i], tandem.InvalidArgumentError, "dimension 0 of t0 has size 4"),
        (lambda s, b, h, i, j: s + BIAS[b, 9, i, j], tandem.InvalidArgumentError, "index 1 of t0 is 9"),
        (lambda s, b, h, i, j: s + SLOPES.double()[h], tandem.InvalidArgumentError, "float64"),
        (lambda s, b, h, i, j: "score", tandem.UnsupportedError, "a str"),
    ],
)
def test_what_cannot_be_traced_is_an_error(function, kind, words):
    with pytest.raises(kind, match=words):
        tandem.attention(*inputs(), score_mod=function)


def test_errors_of_arguments():
    q, k, v = inputs()
    with pytest.raises(tandem.InvalidArgumentError, match="does not broadcast"):
        tandem.attention(q, k, v, bias=randn(SK, SQ))
    with pytest.raises(tandem.InvalidArgumentError, match="must be boolean"):
        tandem.attention(q, k, v, mask=randn(SQ, SK))
    with pytest.raises(tandem.InvalidArgumentError, match="boolean; pass it as mask"):
        tandem.attention(q, k, v, bias=SEEN)
    with pytest.raises(tandem.InvalidArgumentError, match="alibi_slopes has shape"):
        tandem.attention(q, k, v, alibi_slopes=SLOPES[:3])
    with pytest.raises(tandem.UnsupportedError, match="precision exact alone"):
        tandem.attention(q.half(), k.half(), v.half(), mask_mod=causal, precision="fp8")
    with pytest.raises(tandem.UnsupportedError, match="f32 has no GPU kernel"):
        tandem.explain(q, k, v, mask_mod=causal, device="H100")
    with pytest.raises(tandem.UnsupportedError, match=r"torch\.func"):
        torch.func.vmap(lambda q: tandem.attention(q, k, v, mask_mod=causal))(q[None])


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_on_a_gpu_has_the_functions(backward):
    """Arrays that functions read are taken to be there, too."""
    q, k, v = (x.half() for x in inputs())
    text = tandem.explain(
        q, k, v, alibi_slopes=SLOPES, mask_mod=causal, mask=SEEN, backward=backward, device="H100"
    )
    assert "compiled into the kernel at its first call" in text
    assert "every pair's score and mask are evaluated" in text


def test_explain_shows_the_functions():
    text = tandem.explain(*inputs(), mask_mod=causal, score_mod=SCORES["softcap"])
    assert "mask function: le(k, q)" in text
    assert "score function: mul(2.0, tanh(div(s, 2.0)))" in text


def test_bias_and_mask_of_a_cache_in_pages():
    q, k, v = torch.randn(1, 3, 2, 16), torch.randn(1, 64, 2, 16), torch.randn(1, 64, 2, 16)
    table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    order = table[0].argsort()
    pages = [x.reshape(4, 16, 2, 16)[order] for x in (k, v)]
    bias, mask = torch.randn(1, 2, 1, 64), torch.rand(1, 1, 3, 64) < 0.7
    want = tandem.attention(q, k, v, bias=bias, mask=mask)
    got = tandem.attention(q, *pages, page_table=table, bias=bias, mask=mask)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(tandem.InvalidArgumentError, match="does not broadcast"):
        tandem.attention(q, *pages, page_table=table, bias=bias[..., :16])


def test_autocast_reaches_calls_with_functions():
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = tandem.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.1 * j)
    assert out.dtype == torch.bfloat16


def test_pytorchs_masks_join():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))

    def causal(b, h, i, j):
        return i >= j

    def near(b, h, i, j):
        return i - j < 5

    from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

    for join in (and_masks, or_masks):
        mask = join(causal, near)
        block_mask = create_block_mask(mask, 1, 1, 20, 20, device="cpu")
        want = flex_attention(q, k, v, block_mask=block_mask)
        got = tandem.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask_mod=mask)
        torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-5, atol=1e-5)
    x = [t.transpose(1, 2) for t in (q, k, v)]
    torch.testing.assert_close(tandem.attention(*x, mask_mod=noop_mask), tandem.attention(*x))


def test_changing_a_tensor_in_place_is_an_error():
    q = torch.randn(1, 4, 1, 16)

    def score(s, b, h, i, j):
        t = torch.zeros(1)
        t.add_(s)
        return t

    with pytest.raises(tandem.UnsupportedError, match="in place"):
        tandem.attention(q, q, q, score_mod=score)


@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_without_pairs_functions_change_nothing(batch, rows, keys):
    q, k = torch.randn(batch, rows, 1, 16), torch.randn(batch, keys, 1, 16)
    out = tandem.attention(q, k, k, bias=torch.zeros(batch, 1, rows, keys))
    assert torch.equal(out, torch.zeros(batch, rows, 1, 16))
