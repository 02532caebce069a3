"""Attention dropout, against the formula in float64 with the entries that the library keeps."""

import math

import numpy as np
import oracle
import pytest
import tandem
import torch
from tandem import _call, _dropout

B, H, SQ, SK, D = 2, 4, 70, 90, 32
P = 0.25


def inputs(dtype=torch.float32, heads_kv=H):
    return [torch.randn(B, n, h, D, dtype=dtype) for n, h in ((SQ, H), (SK, heads_kv), (SK, heads_kv))]


def philox(counter, key):
    """Philox4x32-10 of arrays of 32-bit numbers."""
    c, k = [np.asarray(x, dtype=np.uint64) for x in counter], [np.uint64(x) for x in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & low, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def kept(p, seed, offset=0, batch=B, heads=H, rows=SQ, keys=SK):
    """What docs/functions.md says is kept: (batch, heads, rows, keys)."""
    b, h, q, k = np.ogrid[:batch, :heads, :rows, :keys]
    counter = np.broadcast_arrays(k // 4, q, b * heads + h, np.full_like(k, offset % 2**32))
    words = np.stack(philox(counter, (seed % 2**32, (seed ^ offset) >> 32)))
    word = np.take_along_axis(words, np.broadcast_to(k % 4, words.shape[1:])[None], 0)[0]
    return torch.from_numpy(word >= int(p * 2**32))


def formula(q, k, v, keep, p, **options):
    return oracle.attention(q, k, v, kept=keep / (1 - p), **options)[0]


def test_known_answers_of_philox():
    """Those of its authors (Random123's kat_vectors)."""
    zero = philox([0, 0, 0, 0], (0, 0))
    assert [int(x) for x in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF))
    assert [int(x) for x in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_result_and_gradients_are_those_of_the_formula(heads_kv, causal):
    tensors = [t.requires_grad_() for t in inputs(heads_kv=heads_kv)]
    seed, offset = 0x123456789ABCDEF, 0x500000007
    out = tandem.attention(*tensors, causal=causal, dropout_p=P, dropout_seed=seed, dropout_offset=offset)
    dout = torch.randn_like(out)
    out.backward(dout)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = formula(*exact, kept(P, seed, offset), P, causal=causal)
    expected.backward(dout.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    for t, e in zip(tensors, exact, strict=True):
        torch.testing.assert_close(t.grad.double(), e.grad, rtol=0, atol=1e-5 * max(1.0, e.grad.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    q, k, v = inputs(dtype)
    out = tandem.attention(q, k, v, dropout_p=P, dropout_seed=3)
    exact = formula(*(t.double() for t in (q, k, v)), kept(P, 3), P)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-2 if dtype is torch.bfloat16 else 3e-3)


def test_manual_seed_starts_the_seeds():
    q, k, v = inputs()
    torch.manual_seed(5)
    first, second = (tandem.attention(q, k, v, dropout_p=P) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(tandem.attention(q, k, v, dropout_p=P), first)
    assert torch.equal(tandem.attention(q, k, v, dropout_p=P), second)
    assert not torch.equal(first, second)


def test_backward_keeps_what_forward_kept():
    """Also where other random numbers are drawn between them."""
    q, k, v = (t.requires_grad_() for t in inputs())
    torch.manual_seed(5)
    out = tandem.attention(q, k, v, dropout_p=P)
    torch.randn(100)
    (dv,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
    (again,) = torch.autograd.grad(out.sum(), v)
    assert torch.equal(dv, again)
    # Values enter linearly: <out, 1> = <dv, v>.
    torch.testing.assert_close((dv * v).sum(), out.sum(), rtol=1e-4, atol=1e-3)


def test_checkpointing_recomputes_the_same():
    q, k, v = (t.requires_grad_() for t in inputs())

    def attend(q, k, v):
        return tandem.attention(q, k, v, dropout_p=P)

    grads = []
    for run in (attend, lambda *t: torch.utils.checkpoint.checkpoint(attend, *t, use_reentrant=False)):
        torch.manual_seed(11)
        grads.append(torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_numpy():
    q, k, v = (t.numpy() for t in inputs())
    out, lse = tandem.attention(q, k, v, dropout_p=P, dropout_seed=9, return_lse=True)
    exact = formula(*(torch.from_numpy(t).double() for t in (q, k, v)), kept(P, 9), P)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5)
    dout = np.ones_like(out)
    options = {"dropout_p": P, "dropout_seed": 9}
    _, _, dv = tandem.attention_backward(dout, q, k, v, out, lse, **options)
    np.testing.assert_allclose((dv * v).sum(), out.sum(), rtol=1e-4, atol=1e-3)
    np.random.seed(4)  # noqa: NPY002
    first = tandem.attention(q, k, v, dropout_p=P)
    np.random.seed(4)  # noqa: NPY002
    assert np.array_equal(first, tandem.attention(q, k, v, dropout_p=P))


def test_dropout_beside_functions_and_their_gradients():
    q, k, v = (t.requires_grad_() for t in inputs())
    bias = torch.randn(H, SQ, SK, requires_grad=True)
    out = tandem.attention(q, k, v, bias=bias, dropout_p=P, dropout_seed=1)
    dout = torch.randn_like(out)
    out.backward(dout)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    out = formula(*exact[:3], kept(P, 1), P, score_mod=lambda s, b, h, i, j: s + exact[3][h, i, j])
    out.backward(dout.double())
    for t, e in zip((q, k, v, bias), exact, strict=True):
        torch.testing.assert_close(t.grad.double(), e.grad, rtol=0, atol=2e-5)


def test_explain_says_it():
    assert "also: dropout 0.25" in tandem.explain(*inputs(), dropout_p=P)


def test_zero_is_off():
    q, k, v = inputs()
    assert torch.equal(tandem.attention(q, k, v, dropout_p=0), tandem.attention(q, k, v))


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_shares_that_are_none(p):
    with pytest.raises(tandem.InvalidArgumentError, match="dropout_p is .*below 1"):
        tandem.attention(*inputs(), dropout_p=p)


def test_gpus_have_kernels():
    q, k, v = (t.half() for t in inputs())
    assert "dropout" in str(tandem.explain(q, k, v, dropout_p=P, device="H100"))
    with pytest.raises(tandem.UnsupportedError, match="or dropout, with head dimensions above 256"):
        tandem.explain(*(torch.zeros(1, 8, 1, 512).half() for _ in range(3)), dropout_p=P, device="H100")


def test_other_errors():
    q, k, v = inputs()
    with pytest.raises(tandem.InvalidArgumentError, match="dropout_p is 'often'"):
        tandem.attention(q, k, v, dropout_p="often")
    with pytest.raises(tandem.InvalidArgumentError, match="dropout_seed is 1.5"):
        tandem.attention(q, k, v, dropout_p=P, dropout_seed=1.5)
    with pytest.raises(tandem.UnsupportedError, match="precision fp8, which has no dropout"):
        tandem.attention(q.half(), k.half(), v.half(), dropout_p=P, precision="fp8")
    out, lse = tandem.attention(q, k, v, return_lse=True)
    with pytest.raises(tandem.InvalidArgumentError, match="dropout_seed is missing"):
        tandem.attention_backward(out, q, k, v, out, lse, dropout_p=P)
    with pytest.raises(tandem.UnsupportedError, match=r"torch\.func"):
        torch.func.vmap(lambda q: tandem.attention(q, k, v, dropout_p=P))(q[None])


def test_a_captured_graph_draws_places_on_the_device(monkeypatch):
    """Every replay would have the host's seed. Where a call lies among others is drawn anew."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = _call.Call(dropout_p=P)
    q, k, v = inputs()
    _dropout.draw(call, OnGpu(q))
    assert call.dropout_seed is not None
    places = call.dropout_places
    assert places.dtype == torch.int32
    heads, queries = (places[:, i].tolist() for i in (0, 1))
    assert heads[1] % 2**32 == (heads[0] + H) % 2**32 and queries[0] == queries[1]
    assert places[:, 2:].tolist() == [[0, 1]] * B
    out, *_ = _call.forward(call, q, k, v, None, return_lse=False)
    b, h, i, j = np.ogrid[:B, :H, :SQ, :SK]
    counter = np.broadcast_arrays(j // 4, (i + queries[0]) % 2**32, (b * H + h + heads[0]) % 2**32, 0 * b)
    words = np.stack(philox(counter, (call.dropout_seed % 2**32, call.dropout_seed >> 32)))
    word = np.take_along_axis(words, np.broadcast_to(j % 4, words.shape[1:])[None], 0)[0]
    expected = formula(q, k, v, torch.from_numpy(word >= int(P * 2**32)), P)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    again = _call.Call(dropout_p=P)
    _dropout.draw(again, OnGpu(q))
    assert not torch.equal(again.dropout_places, places)
    _dropout.draw(given := _call.Call(dropout_p=P, dropout_seed=3), OnGpu(q))
    assert given.dropout_places is None
    packed = _call.Call(dropout_p=P, metadata=(torch.zeros(6), *(None,) * (len(_call.METADATA) - 1)))
    _dropout.draw(packed, OnGpu(torch.zeros(9, H, D)))
    assert packed.dropout_places.shape == (5, 4)
