"""Array libraries: no copies, any layout, every dtype, results of the library that came in."""

from __future__ import annotations

import tracemalloc

import numpy as np
import oracle
import pytest
import tandem
import torch
from tandem import _arrays
from test_forward import qkv

ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy's bfloat16 and float8 come from ml_dtypes")


def numpy_qkv(dtype: object = np.float32) -> list[np.ndarray]:
    return [t.numpy().astype(dtype) for t in qkv()]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numpy_arrays_in_numpy_arrays_out(dtype: type) -> None:
    q, k, v = numpy_qkv(dtype)
    out, lse = tandem.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, np.ndarray) and out.dtype == dtype and isinstance(lse, np.ndarray)
    assert lse.dtype == np.float32
    as_torch = {np.float32: torch.float32, np.float16: torch.float16}.get(dtype, torch.bfloat16)
    same = [torch.from_numpy(a.astype(np.float32)).to(as_torch) for a in (q, k, v)]
    expected_out, expected_lse = tandem.attention(*same, causal=True, return_lse=True)
    assert np.array_equal(out.astype(np.float32), expected_out.float().numpy())
    assert np.array_equal(lse, expected_lse.numpy())


def test_numpy_float8() -> None:
    q, k, v = numpy_qkv(ml_dtypes.float8_e4m3fn)
    assert tandem.attention(q, k, v).dtype == ml_dtypes.bfloat16
    assert tandem.attention(q, k, v, out_dtype=np.float32).dtype == np.float32
    scaled = tandem.attention(q, k, v, out_dtype="f32", v_scale=np.array([2.0], np.float32))
    assert np.array_equal(scaled, 2.0 * tandem.attention(q, k, v, out_dtype="f32"))


def test_numpy_gradients() -> None:
    q, k, v = numpy_qkv()
    out, lse = tandem.attention(q, k, v, return_lse=True)
    sink = np.zeros(4, np.float32)
    assert len(tandem.attention_backward(out, q, k, v, out, lse)) == 3
    out, lse = tandem.attention(q, k, v, sink=sink, return_lse=True)
    gradients = tandem.attention_backward(out, q, k, v, out, lse, sink=sink)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, sink.shape]
    tensors = [torch.from_numpy(a) for a in (q, k, v)]
    expected = oracle.gradients(oracle.exact, *tensors, torch.from_numpy(out), sink=torch.from_numpy(sink))
    for got, reference in zip(gradients, expected, strict=True):
        oracle.assert_close(torch.from_numpy(got), reference)


def test_masked_arrays_are_refused() -> None:
    """Their mask would be lost."""
    q, k, v = numpy_qkv()
    out, lse = tandem.attention(q, k, v, return_lse=True)
    sink = np.zeros(4, np.float32)
    message = "{} is a masked array, and Tandem would not see its mask; pass {}.data"

    def masked(array: np.ndarray) -> np.ndarray:
        return np.ma.masked_array(array, mask=np.zeros(array.shape, bool))

    def refused(name: str, call: object) -> None:
        with pytest.raises(tandem.InvalidArgumentError, match="^" + message.format(name, name)):
            call()  # type: ignore[operator]

    for i, name in enumerate("qkv"):
        arrays = [q, k, v]
        arrays[i] = masked(arrays[i])
        for call in (tandem.attention, tandem.explain, tandem.workspace_bytes):
            refused(name, lambda call=call, arrays=arrays: call(*arrays))
        refused(name, lambda arrays=arrays: tandem.attention_backward(out, *arrays, out, lse))
    refused("sink", lambda: tandem.attention(q, k, v, sink=masked(sink)))
    refused("seqused_k", lambda: tandem.attention(q, k, v, seqused_k=masked(np.array([3, 4]))))
    refused("out", lambda: tandem.attention(q, k, v, out=masked(out)))
    refused("dout", lambda: tandem.attention_backward(masked(out), q, k, v, out, lse))
    refused("x", lambda: tandem.quantize(masked(q)))


def layouts(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in many layouts with a contiguous last dimension."""
    batch, rows, heads, dim = t.shape
    fused = torch.full((batch, rows, 3, heads, dim), float("nan"), dtype=t.dtype)
    fused[:, :, 1] = t
    padded = torch.full((batch, rows + 3, heads, dim + 5), float("nan"), dtype=t.dtype)
    padded[:, 2:-1, :, 3:-2] = t
    shifted = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype)
    shifted[1:] = t.flatten()
    stepped = torch.full((batch, 2 * rows, heads, dim), float("nan"), dtype=t.dtype)
    stepped[:, ::2] = t
    return {
        "heads first": t.transpose(1, 2).contiguous().transpose(1, 2),
        "rows first": t.transpose(0, 1).contiguous().transpose(0, 1),
        "slice of a fused qkv": fused[:, :, 1],
        "slice of every dimension": padded[:, 2:-1, :, 3:-2],
        "base aligned to one element": shifted[1:].view(t.shape),
        "every other row": stepped[:, ::2],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(layouts(torch.zeros(1, 1, 1, 1))))
def test_any_strides_give_the_same_result(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    expected, lse = tandem.attention(q, k, v, causal=True, return_lse=True)
    views = [layouts(t)[name] for t in (q, k, v)]
    target = layouts(torch.full_like(expected, float("nan")))[name]
    got = tandem.attention(*views, causal=True, out=target)
    assert got is target and torch.equal(got, expected)
    dout = torch.randn(expected.shape).to(dtype)
    gradients = tandem.attention_backward(dout, q, k, v, expected, lse, causal=True, deterministic=True)
    again = tandem.attention_backward(layouts(dout)[name], *views, got, lse, causal=True, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


def test_expanded_and_reversed_views() -> None:
    q, k, v = qkv(heads_q=4, heads_kv=4)
    shared = k[:, :, :1].expand(-1, -1, 4, -1)  # stride 0
    expected = tandem.attention(q, shared.contiguous(), v)
    assert torch.equal(tandem.attention(q, shared, v), expected)
    arrays = [t.numpy() for t in (q, k, v)]
    backwards = [a[:, ::-1] for a in arrays]  # negative strides
    expected = tandem.attention(*(a.copy() for a in backwards), causal=True)
    assert np.array_equal(tandem.attention(*backwards, causal=True), expected)


def test_subclasses_of_tensors() -> None:
    """Their attributes may mean something else: PyTorch's dispatcher has the first word."""

    class Marked(torch.Tensor):
        pass

    tensors = qkv()
    marked = [t.as_subclass(Marked) for t in tensors]  # type: ignore[no-untyped-call]
    got = tandem.attention(marked[0], *tensors[1:], causal=True)
    assert type(got) is Marked and torch.equal(got, tandem.attention(*tensors, causal=True))
    assert torch.equal(tandem.attention(*marked, causal=True), got)


def test_dimensions_of_one_may_have_odd_strides() -> None:
    q, k, v = (torch.randn(1, 5, 1, 16) for _ in range(3))
    odd = [t.as_strided((1, 5, 1, 16), (7, 16, 3, 1)) for t in (q, k, v)]
    assert torch.equal(tandem.attention(*odd), tandem.attention(q, k, v))


def test_no_copies_of_the_inputs() -> None:
    """The views' addresses are the arrays', and a call allocates its results and no more."""
    q, k, v = (np.zeros((1, 2048, 8, 64), np.float32) for _ in range(3))
    out = np.empty_like(q)
    tandem.attention(q, k, v, out=out)
    tracemalloc.start()
    tandem.attention(q, k, v, out=out)
    _, peak = tracemalloc.get_traced_memory()  # NumPy's buffers are traced, too
    tracemalloc.stop()
    assert peak < q.nbytes // 100


def test_inputs_are_not_written_and_may_be_read_only() -> None:
    q, k, v = numpy_qkv()
    copies = [a.copy() for a in (q, k, v)]
    for a in (q, k, v):
        a.flags.writeable = False
    out, lse = tandem.attention(q, k, v, return_lse=True)
    tandem.attention_backward(out, q, k, v, out, lse)
    assert all(np.array_equal(a, b) for a, b in zip((q, k, v), copies, strict=True))


@pytest.mark.parametrize("make", [torch.as_tensor, np.asarray])
def test_out_is_written_in_place(make: object) -> None:
    q, k, v = (make(t) for t in qkv())  # type: ignore[operator]
    out = make(torch.full((2, 37, 4, 32), float("nan")))  # type: ignore[operator]
    assert tandem.attention(q, k, v, out=out) is out
    assert (out == tandem.attention(q, k, v)).all()


def test_torch_parameters_and_tensors_that_require_gradients_are_read() -> None:
    q, k, v = (torch.nn.Parameter(t) for t in qkv())
    with torch.no_grad():
        expected = tandem.attention(q.detach(), k.detach(), v.detach())
        assert torch.equal(tandem.attention(q, k, v), expected)
    assert torch.equal(tandem.attention(q, k, v), expected)


def test_names_of_out_dtype() -> None:
    DType = tandem._core.DType
    for value in ("bf16", "bfloat16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert _arrays.dtype_named(value) == DType.bf16
    for value in ("f16", torch.float16, np.float16, np.dtype("f2")):
        assert _arrays.dtype_named(value) == DType.f16
