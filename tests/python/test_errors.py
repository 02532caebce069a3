"""Errors: the C++ library's own messages, classes that fit, and nothing written."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tandem
import torch
from tandem import _errors, distributed, flash_attn
from test_forward import e4m3, qkv


def refused(error: type[Exception], message: str, *arrays: Any, **options: Any) -> None:
    """The call raises exactly this, and writes nothing to `out`."""
    arrays = arrays or qkv()
    out = torch.full((2, 37, 4, 32), 7.0)
    if isinstance(arrays[0], torch.Tensor):
        options.setdefault("out", out)
    with pytest.raises(error) as caught:
        tandem.attention(*arrays, **options)
    assert str(caught.value) == message
    assert (out == 7.0).all()


def test_classes() -> None:
    assert issubclass(tandem.InvalidArgumentError, (tandem.TandemError, ValueError))
    assert issubclass(tandem.InvalidArgumentError, ValueError)
    assert issubclass(tandem.UnsupportedError, NotImplementedError)
    assert issubclass(tandem.OutOfMemoryError, MemoryError)
    assert issubclass(tandem.ExecutionError, RuntimeError)
    assert issubclass(tandem.InternalError, RuntimeError)
    classes = [type(_errors.error(status, "")) for status in range(1, 6)]
    assert len(set(classes)) == 5 and all(issubclass(c, tandem.TandemError) for c in classes)


def test_messages_are_the_librarys() -> None:
    invalid = tandem.InvalidArgumentError
    q, k, v = qkv(heads_q=4, heads_kv=3)
    refused(
        invalid,
        "heads_q 4 is not a multiple of heads_kv 3; each kv head serves the same number of query heads",
        q,
        k,
        v,
    )
    refused(invalid, "softcap is -1; it must be finite and at least 0 (0: off)", softcap=-1.0)
    refused(invalid, "scale is nan; it must be finite", scale=float("nan"))
    refused(
        invalid,
        "window_left is -2; it must be at least 0, or -1 for unbounded: FlashAttention takes any negative "
        "bound for unbounded, pass -1",
        window=(-2, 0),
    )
    refused(
        invalid,
        "cu_seqlens_k[2] is 3, below cu_seqlens_k[1] = 5; offsets must ascend",
        torch.randn(2, 37, 4, 32),
        torch.randn(9, 2, 32),
        torch.randn(9, 2, 32),
        cu_seqlens_k=torch.tensor([0, 5, 3]),
        check=True,
    )


def test_options_of_another_type() -> None:
    """Of NumPy's types those are taken that are Python's by another name."""
    two = "(left, right), two integers; -1 is unbounded"
    kinds = {
        "window": [two, 128, None, (1, 2, 3), (1.5, 0), (None, 0), "ab", (2**70, 0), (np.float32(1.5), 0)],
        "scale": ["a number, or None for head_dim_qk ** -0.5", "small", 1j, 10**400, np.ones(2)],
        "softcap": ["a number; 0 is off", None, "1"],
        "threads": ["an integer; 0 is every core", None, "4", 1.0, 2**40, np.float32(2)],
        **{
            name: ["True or False", None, 1, "yes", np.int64(1), np.array([True, False])]
            for name in ("causal", "deterministic", "check", "strict", "return_lse")
        },
    }
    q, k, v = (t.numpy() for t in qkv())
    for name, (kind, *values) in kinds.items():
        for value in values:
            message = f"{name} is {value!r}; pass {kind}"
            refused(tandem.InvalidArgumentError, message, **{name: value})
            refused(tandem.InvalidArgumentError, message, q, k, v, **{name: value})
    with pytest.raises(tandem.InvalidArgumentError, match="^window is 128; pass"):
        tandem.attention_backward(q, q, k, v, q, q, window=128)  # type: ignore[arg-type]
    for value in (8, None, ["int8"], "int4"):
        message = f"precision is {value!r}; it must be one of exact, fp8, int8"
        refused(tandem.InvalidArgumentError, message, q, k, v, precision=value)
    # Where a transform watches the call, too.
    with pytest.raises(tandem.InvalidArgumentError, match="^causal is None; pass True or False"):
        torch.func.vmap(lambda *t: tandem.attention(*t, causal=None))(*(t[None] for t in qkv()))


def plain(t: torch.Tensor) -> torch.Tensor:
    return t


def recorded(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_()


@pytest.mark.parametrize("make", [plain, recorded, torch.Tensor.numpy], ids=lambda f: f.__name__)
def test_numpys_numbers_are_options(make: Any) -> None:
    q, k, v = (make(t) for t in qkv())
    given = {
        "scale": [np.float32(0.25), np.float64(0.25), np.float16(0.25), np.array(0.25)],
        "softcap": [np.float32(2.0), np.int64(2), np.uint8(2)],
        "window": [(np.int64(3), np.int32(0)), np.array([3, 0])],
        "threads": [np.int64(1)],
        **{name: [np.bool_(True)] for name in ("causal", "deterministic", "check", "return_lse")},
    }
    own = {"scale": 0.25, "softcap": 2.0, "window": (3, 0), "threads": 1}
    for name, values in given.items():
        expected = tandem.attention(q, k, v, **{name: own.get(name, True)})
        for value in values:
            got = tandem.attention(q, k, v, **{name: value})
            pairs = zip(got, expected, strict=True) if name == "return_lse" else [(got, expected)]
            assert all((a == b).all() for a, b in pairs)
            tandem.explain(q, k, v, **{name: value})
            if make is not torch.Tensor.numpy:  # by the operator
                one = torch.func.vmap(lambda *t, o={name: value}: tandem.attention(*t, **o))
                got = one(q[None], k[None], v[None])
                assert torch.equal(
                    (got[0] if name == "return_lse" else got)[0], next(iter(pairs_of(expected)))
                )
    for name in ("hadamard", "smooth"):
        assert len(tandem.quantize(q, **{name: np.bool_(False)})) == 2


def pairs_of(results: Any) -> Any:
    return results if isinstance(results, tuple) else (results,)


def test_quantize_arguments_of_another_type() -> None:
    x, *_ = qkv()
    for name, value, message in (
        ("dtype", ["s8"], "it must be 'e4m3' or 's8'"),
        ("granularity", ["row"], "it must be one of tensor, head, block, row"),
        ("hadamard", 1, "pass True or False"),
        ("smooth", 1, "pass True or False"),
        ("smooth", None, "pass True or False"),
        ("threads", "4", "pass an integer; 0 is every core"),
    ):
        with pytest.raises(tandem.InvalidArgumentError) as caught:
            tandem.quantize(x, **{name: value})
        assert str(caught.value) == f"{name} is {value!r}; {message}"


def test_arrays_of_jax_are_told_where_to_go() -> None:
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.zeros((1, 3, 2, 8))
    with pytest.raises(
        TypeError, match="^q is a jax.*; pass an array of numpy or torch, or call tandem.jax.att"
    ):
        tandem.attention(array, array, array)


def test_dtypes_that_do_not_fit() -> None:
    q, k, v = qkv()
    refused(
        tandem.InvalidArgumentError,
        "q has dtype float64, which is not one of "
        "float32, float16, bfloat16, float8_e4m3fn, int32, int64, int8; convert it first",
        q.double(),
        k,
        v,
    )
    with pytest.raises(tandem.InvalidArgumentError, match="^k "):
        tandem.attention(q, k.half(), v)
    # What was passed is named, not the result that the call would make.
    for arrays in ((q, k, v), tuple(t.numpy() for t in (q, k, v))):
        with pytest.raises(tandem.InvalidArgumentError, match="^out_dtype is bf16 but q is f32; it is for"):
            tandem.attention(*arrays, out_dtype="bf16")
    assert tandem.attention(q, k, v, out_dtype="f32").dtype == torch.float32
    for dtype in ("f99", 5, ["f32"]):
        with pytest.raises(tandem.InvalidArgumentError, match="^out_dtype is .*; pass 'f32', 'f16'"):
            tandem.attention(q, k, v, out_dtype=dtype)
    with pytest.raises(tandem.InvalidArgumentError, match="^q_scale "):
        tandem.attention(q, k, v, q_scale=torch.ones(1))
    with pytest.raises(tandem.InvalidArgumentError, match="^cu_seqlens_q "):
        tandem.attention(q[0], k[:1], v[:1], cu_seqlens_q=torch.tensor([0.0, 37.0]))


def test_bytes_are_told_how_to_become_float8() -> None:
    q, k, v = qkv()
    caches = [torch.zeros(2, 20, 2, 32, dtype=torch.uint8) for _ in range(2)]
    message = r"^%s has dtype uint8; pass %s.view\(torch.float8_e4m3fn\) where its bytes are FP8 values"
    with pytest.raises(tandem.InvalidArgumentError, match=message % ("k", "k")):
        tandem.attention(q, *caches)
    for new in ((), (k[:, :1], v[:, :1])):
        with pytest.raises(tandem.InvalidArgumentError, match=message % ("k_cache", "k_cache")):
            flash_attn.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=3)


def test_last_dimension_must_be_contiguous() -> None:
    q, k, v = qkv()
    with pytest.raises(tandem.InvalidArgumentError, match="^v .*contiguous"):
        tandem.attention(q, k, v.transpose(2, 3).contiguous().transpose(2, 3))


def test_backward_of_float8_is_refused() -> None:
    q, k, v = e4m3(1, 4, 2, 16), e4m3(1, 4, 2, 16), e4m3(1, 4, 2, 16)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    with pytest.raises(tandem.InvalidArgumentError, match="backward of an 8-bit forward is 16-bit"):
        tandem.attention_backward(out, q, k, v, out, lse)


def test_arrays_of_other_kinds() -> None:
    q, k, v = qkv()
    refused(TypeError, "k is an array of numpy but q is one of torch; convert one of them", q, k.numpy(), v)
    refused(TypeError, "q is a builtins.list; pass an array of numpy or torch", [1.0], [1.0], [1.0])
    refused(
        TypeError,
        "seqused_k is a builtins.list; pass an array of numpy or torch",
        q,
        k,
        v,
        seqused_k=[3, 4],
    )
    refused(TypeError, "k is an array of torch but q is one of numpy; convert one of them", q.numpy(), k, v)
    for arrays in (
        (q, None, v),
        (q, k, None),
        (q.numpy(), k.numpy(), None),
        (q.numpy(), None, v.numpy()),
        (q.clone().requires_grad_(), None, v),
    ):
        with pytest.raises(TypeError, match="^[kv] is a builtins.NoneType; pass an array of numpy or torch$"):
            tandem.attention(*arrays)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match="^k is a builtins.list; pass an array of numpy or torch$"):
        tandem.attention_backward(out, q, [k], v, out, lse)
    with pytest.raises(tandem.InvalidArgumentError, match="^q is not a plain strided tensor"):
        tandem.attention(q.to_sparse(), k, v)


def test_numpy_arrays_that_cannot_be_viewed() -> None:
    q, k, v = (t.numpy() for t in qkv())
    with pytest.raises(tandem.InvalidArgumentError, match="^k is byte-swapped"):
        tandem.attention(q, k.astype(">f4"), v)
    rows = np.zeros((2, 37, 4), np.dtype({"names": ["x"], "formats": ["(32,)f4"], "itemsize": 130}))
    with pytest.raises(tandem.InvalidArgumentError, match="^q "):
        tandem.attention(rows["x"], k, v)
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(tandem.InvalidArgumentError, match="^out is read-only"):
        tandem.attention(q, k, v, out=out)


@pytest.mark.parametrize("shape", [(2, 37, 4), (2, 37, 4, 31), (37, 4, 32), (1, 2, 37, 4, 32), ()])
def test_out_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(tandem.TandemError):
        tandem.attention(*qkv(), out=torch.empty(shape))


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 5])
def test_ranks(rank: int) -> None:
    _, k, v = qkv()
    with pytest.raises(tandem.InvalidArgumentError, match="^q "):
        tandem.attention(torch.zeros((8,) * rank), k, v)


def test_explain_raises_what_the_call_would() -> None:
    q, k, v = qkv(heads_q=4, heads_kv=3)
    for call in (tandem.attention, tandem.explain, tandem.workspace_bytes):
        with pytest.raises(tandem.InvalidArgumentError, match="heads_q 4 is not a multiple of heads_kv 3"):
            call(q, k, v)


def test_keywords_that_explain_does_not_take() -> None:
    q, k, v = qkv()
    for name in ("foo", "metadata", "out"):
        for call in (tandem.explain, tandem.workspace_bytes):
            with pytest.raises(TypeError) as caught:
                call(q, k, v, causal=True, **{name: None})
            assert str(caught.value) == f"{call.__name__}() got an unexpected keyword argument {name!r}"


def test_options_that_a_part_of_a_call_does_not_take() -> None:
    q, k, v = qkv()
    backward = functools.partial(tandem.attention_backward, q, q, k, v, q, q[..., 0])
    ranks = functools.partial(distributed.context_parallel_attention, q, k, v, layout=None)
    decode = functools.partial(distributed.context_parallel_decode, q, k, v, cache=None)
    taken = {backward: "split_size", ranks: "precision", decode: "dropout_p"}
    for call, name in taken.items():
        message = f"^{name} is not an option of {call.func.__name__}; leave it out$"
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            call(**{name: None})
        with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'foo'"):
            call(foo=1)


@pytest.mark.parametrize("make", [torch.as_tensor, np.asarray])
def test_an_output_that_shares_memory_is_an_error(make: Any) -> None:
    """Heads 1:5 of a buffer whose heads 0:4 are v; gradients likewise; and in place."""
    q, k, v = (make(t) for t in qkv(2, 37, 37, 4, 4, 32, 32))
    buffer = make(torch.full((2, 37, 8, 32), 7.0))
    buffer[:, :, :4] = v
    with pytest.raises(tandem.InvalidArgumentError, match="^out shares memory with v; an output needs"):
        tandem.attention(q, k, buffer[:, :, :4], out=buffer[:, :, 1:5])
    assert (buffer[:, :, :4] == v).all() and (buffer[:, :, 4:] == 7.0).all()
    with pytest.raises(tandem.InvalidArgumentError, match="^out shares memory with q; an output needs"):
        tandem.attention(q, k, v, out=q)
    out, lse = tandem.attention(q, k, v, return_lse=True)
    with pytest.raises(tandem.InvalidArgumentError, match="^dv shares memory with dk; an output needs"):
        tandem.attention_backward(out, q, k, v, out, lse, dk=buffer[:, :, 2:6], dv=buffer[:, :, 4:])
