"""tandem run: results against the plain formula, every file format in and out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from program import attention
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch


def close(got, expected, bound=1e-5):
    np.testing.assert_allclose(
        got.astype(np.float64), expected, rtol=0, atol=bound * max(1, np.abs(expected).max())
    )


@pytest.mark.parametrize(
    "flags, options",
    [
        ([], {}),
        (["--causal"], {"causal": True}),
        (["--window-left", 5, "--window-right", 2], {"window_left": 5, "window_right": 2}),
        (["--window-left=-1", "--causal", "--scale", -0.3], {"causal": True, "scale": -0.3}),
        (["--softcap", 2.5, "--threads", 1, "--device", "cpu"], {"softcap": 2.5}),
        (["--split-size", 128, "--causal"], {"causal": True}),
    ],
)
def test_safetensors_round_trip(run_json, tmp_path, tensors, flags, options):
    save_file(tensors, tmp_path / "in.safetensors")
    document = run_json("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", *flags)
    results = load_file(tmp_path / "out.safetensors")
    out, lse = attention(tensors["q"], tensors["k"], tensors["v"], **options)
    close(results["out"], out)
    close(results["lse"], lse)
    assert set(results) == {"out", "lse"}
    assert document["outputs"]["out"] == {"dtype": "f32", "shape": [2, 33, 4, 24]}
    assert document["files"] == [str(tmp_path / "out.safetensors")]
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        assert file.metadata()["made by"].startswith("tandem ")


@pytest.mark.parametrize("precision, bound", [("fp8", 0.3), ("int8", 0.1)])
def test_eight_bits(run_json, tmp_path, tensors, precision, bound):
    save_file(tensors, tmp_path / "in.safetensors")
    flags = ["--dtype", "f16", "--precision", precision, "--strict", "--causal"]
    run_json("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", *flags)
    results = load_file(tmp_path / "out.safetensors")
    out, _ = attention(tensors["q"], tensors["k"], tensors["v"], causal=True)
    np.testing.assert_allclose(results["out"].astype(np.float64), out, rtol=0, atol=bound)


def test_npy_in_and_out_with_gradients(run, tmp_path, tensors):
    for name, array in tensors.items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "q.npy").rename(tmp_path / "queries.npy")
    files = [f"q={tmp_path}/queries.npy", *(tmp_path / f"{name}.npy" for name in ("k", "v", "dout"))]
    run("run", *files, "--backward", "--causal", "--out", tmp_path / "results/")
    results = {path.stem: np.load(path) for path in (tmp_path / "results").iterdir()}
    assert set(results) == {"out", "lse", "dq", "dk", "dv"}

    q, k, v, dout = (torch.tensor(tensors[name], dtype=torch.float64) for name in ("q", "k", "v", "dout"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    heads = [q.transpose(1, 2), *(x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))]
    visible = torch.ones(33, 47, dtype=torch.bool).tril(47 - 33)
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, dout)
    close(results["out"], out.detach().numpy())
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        close(results[name], gradient.numpy())


def test_bf16_through_npy_is_u2(run, tmp_path, tensors):
    quantized = {n: tensors[n].astype(ml_dtypes.bfloat16) for n in ("q", "k", "v")}
    for name, array in quantized.items():
        np.save(tmp_path / f"{name}.npy", array.view(np.uint16))
    files = [tmp_path / f"{name}.npy" for name in quantized]
    assert "--npy-as bf16" in run("run", *files, "-o", tmp_path / "r/", code=2).stderr
    run("run", *files, "--npy-as", "bf16", "-o", tmp_path / "r/")
    out = np.load(tmp_path / "r/out.npy")
    assert out.dtype == np.uint16
    expected, _ = attention(*(quantized[n].astype(np.float32) for n in ("q", "k", "v")))
    close(out.view(ml_dtypes.bfloat16), expected, 2e-2)
    # What NumPy itself writes for bf16, a void type, is read the same way.
    np.save(tmp_path / "q.npy", quantized["q"])
    run("run", *files, "--npy-as", "bf16", "-o", tmp_path / "again/")
    np.testing.assert_array_equal(np.load(tmp_path / "again/out.npy"), out)


def test_e4m3_with_scales(run, run_json, tmp_path, tensors):
    quantized = {n: torch.tensor(tensors[n]).to(torch.float8_e4m3fn) for n in ("q", "k", "v")}
    scales = {f"{n}_scale": torch.tensor([s]) for n, s in (("q", 0.5), ("k", 2.0), ("v", 0.25))}
    save_torch(quantized | scales, tmp_path / "in.safetensors")
    document = run_json(
        "run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--out-dtype", "f32"
    )
    assert document["outputs"]["out"]["dtype"] == "f32"
    values = [quantized[n].float().numpy() * scales[f"{n}_scale"].item() for n in ("q", "k", "v")]
    close(load_file(tmp_path / "out.safetensors")["out"], attention(*values)[0], 5e-2)
    # Of other inputs the output has their dtype: the error names the option, not an output that nobody gave.
    save_file(tensors, tmp_path / "f32.safetensors")
    wanted = ["run", tmp_path / "f32.safetensors", "-o", tmp_path / "no.safetensors", "--out-dtype"]
    assert (
        "--out-dtype is bf16 but q is f32; it is for the output of 8-bit"
        in run(*wanted, "bf16", code=2).stderr
    )
    default = run_json("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors")
    assert default["outputs"]["out"]["dtype"] == "bf16"


def largest_errors(document):
    """What `tandem verify` says of each output."""
    return {verdict["output"]: verdict["largest_error"] for verdict in document["outputs"]}


def test_s8_with_scales(run, run_json, tmp_path, tensors):
    quantized = {n: np.rint(tensors[n] * 30).clip(-127, 127).astype(np.int8) for n in ("q", "k", "v")}
    scales = {f"{n}_scale": np.array([1 / 30], np.float32) for n in ("q", "k", "v")}
    save_file(quantized | scales, tmp_path / "in.safetensors")
    flags = ["--precision", "int8", "--causal"]
    document = run_json("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", *flags)
    assert document["outputs"]["out"]["dtype"] == "bf16"
    flags += ["--out-dtype", "f32"]
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", *flags)
    out = load_file(tmp_path / "out.safetensors")["out"]
    close(out, attention(*(quantized[n] / 30 for n in ("q", "k", "v")), causal=True)[0], 2e-2)
    for name, array in (quantized | scales).items():
        np.save(tmp_path / f"{name}.npy", array)
    run("run", *tmp_path.glob("*.npy"), "-o", tmp_path / "out/", *flags)
    np.testing.assert_array_equal(np.load(tmp_path / "out/out.npy"), out)
    assert largest_errors(run_json("verify", tmp_path / "in.safetensors", *flags, code=1))["out"] < 2e-2
    # Products in 8 bits are asked for; a backward of 8-bit inputs there is not.
    wanted = ["run", tmp_path / "in.safetensors", "-o", tmp_path / "no.safetensors"]
    assert "q is s8, which has no exact products; pass precision int8" in run(*wanted, code=2).stderr
    gradients = [*wanted, "--precision", "int8", "--backward", "--dout-seed", 1]
    assert "the backward of an 8-bit forward is 16-bit" in run(*gradients, code=2).stderr


def test_s8_keys_beside_16_bit_queries(run, run_json, tmp_path, tensors):
    quantized = {n: np.rint(tensors[n] * 30).clip(-127, 127).astype(np.int8) for n in ("k", "v")}
    scales = {f"{n}_scale": np.array([1 / 30], np.float32) for n in ("k", "v")}
    save_file({"q": tensors["q"].astype(np.float16)} | quantized | scales, tmp_path / "in.safetensors")
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors")
    out = load_file(tmp_path / "out.safetensors")["out"]
    assert out.dtype == np.float16
    # The scales are factors of the logits and of out: the contract's bounds hold for the 8-bit values.
    run_json("verify", tmp_path / "in.safetensors")
    close(out, attention(tensors["q"], quantized["k"] / 30, quantized["v"] / 30)[0], 4e-3)


def test_varlen_and_sink(run, tmp_path, tensors):
    q, k, v = (tensors[n].reshape(-1, *tensors[n].shape[2:]) for n in ("q", "k", "v"))
    packed = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": np.array([0, 33, 66], np.int32),
        "cu_seqlens_k": np.array([0, 47, 94], np.int64),
        "sink": np.array([-1, 0, 1, 2], np.float32),
        "dout": tensors["dout"].reshape(-1, 4, 24),
    }
    save_file(packed, tmp_path / "in.safetensors")
    run("run", tmp_path / "in.safetensors", "--backward", "-o", tmp_path / "out.safetensors")
    results = load_file(tmp_path / "out.safetensors")
    assert results["lse"].shape == (4, 66)
    assert results["dsink"].shape == (4,)
    # A sink is one more key without a value: out shrinks by the share of the weights that is left.
    out, lse = attention(tensors["q"], tensors["k"], tensors["v"])
    with_sink = np.logaddexp(lse, packed["sink"][None, :, None])
    close(results["lse"], with_sink.transpose(1, 0, 2).reshape(4, 66))
    close(results["out"], (out * np.exp(lse - with_sink).transpose(0, 2, 1)[..., None]).reshape(66, 4, 24))

    packed["cu_seqlens_q"][1] = 70
    save_file(packed, tmp_path / "in.safetensors")
    assert (
        "cu_seqlens_q"
        in run("run", tmp_path / "in.safetensors", "-o", tmp_path / "no.safetensors", code=2).stderr
    )
    assert not (tmp_path / "no.safetensors").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_cache_in_pages(run, run_json, tmp_path, tensors, packed):
    q, k, v = (tensors[n] for n in ("q", "k", "v"))
    lengths, page_size = (47, 20), 8
    table = np.full((2, 7), -1, np.int32)
    pools = {n: np.full((12, page_size, *t.shape[2:]), np.nan, np.float32) for n, t in (("k", k), ("v", v))}
    free = list(np.random.default_rng(3).permutation(12))
    for b, length in enumerate(lengths):
        for i, start in enumerate(range(0, length, page_size)):
            table[b, i] = free.pop()
            rows = slice(start, min(start + page_size, length))
            for n, t in (("k", k), ("v", v)):
                pools[n][table[b, i], : rows.stop - rows.start] = t[b, rows]
    stored = {"q": q, **pools, "page_table": table, "seqused_k": np.array(lengths)}
    if packed:
        stored |= {"q": q.reshape(-1, 4, 16), "cu_seqlens_q": np.array([0, 33, 66], np.int32)}
    save_file(stored, tmp_path / "in.safetensors")
    run("run", tmp_path / "in.safetensors", "--causal", "-o", tmp_path / "out.safetensors")
    results = load_file(tmp_path / "out.safetensors")
    for b, length in enumerate(lengths):
        out, lse = attention(q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], causal=True)
        close(results["out"].reshape(2, 33, 4, 24)[b], out[0])
        of_b = results["lse"][:, 33 * b : 33 * b + 33] if packed else results["lse"][b]
        np.testing.assert_allclose(of_b, lse[0], rtol=1e-5, atol=1e-5)
    assert run_json("verify", tmp_path / "in.safetensors", "--causal")["right"]
    backward = ["run", tmp_path / "in.safetensors", "--backward", "--dout-seed", 1, "-o", tmp_path / "no/"]
    assert "page_table is given to backward; a cache has no gradients" in run(*backward, code=2).stderr
    stored["page_table"][1, 2] = 12
    save_file(stored, tmp_path / "in.safetensors")
    wrong = run("run", tmp_path / "in.safetensors", "-o", tmp_path / "no/", code=2).stderr
    assert "page_table[1, 2] is 12; the 20 rows of sequence 1 need a page from 0 to 11 there" in wrong


def test_chosen_entries_behind_padding(run, run_json, tmp_path, tensors):
    q, k, v = (tensors[n] for n in ("q", "k", "v"))
    cache = {"cache_batch_idx": np.array([1, 1]), "leftpad_k": np.array([0, 9], np.int32)}
    save_file({"q": q, "k": k, "v": v} | cache, tmp_path / "in.safetensors")
    run("run", tmp_path / "in.safetensors", "--causal", "-o", tmp_path / "out.safetensors")
    out = load_file(tmp_path / "out.safetensors")["out"]
    for b, first in enumerate((0, 9)):
        close(out[b], attention(q[b : b + 1], k[1:, first:], v[1:, first:], causal=True)[0][0])
    assert run_json("verify", tmp_path / "in.safetensors", "--causal", "--dtype", "f16")["right"]


def test_renamed_and_ignored_tensors(run_json, tmp_path, tensors):
    stored = {"layer.0.query": tensors["q"], "k": tensors["k"], "v": tensors["v"], "other": np.zeros(3)}
    save_file(stored, tmp_path / "in.safetensors")
    document = run_json(
        "run", tmp_path / "in.safetensors", "--tensor", "q=layer.0.query", "-o", tmp_path / "o.safetensors"
    )
    assert document["ignored"] == ["other"]


def test_dtype_conversion(run_json, tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    out, _ = attention(tensors["q"], tensors["k"], tensors["v"])
    for dtype, bound in (("f16", 4e-3), ("bf16", 3e-2), ("e4m3", 2e-1)):
        arguments = ["run", tmp_path / "in.safetensors", "--dtype", dtype, "-o", tmp_path / "o/"]
        document = run_json(*arguments)
        written = np.load(tmp_path / "o/out.npy")
        assert document["outputs"]["out"]["dtype"] == ("bf16" if dtype == "e4m3" else dtype)
        close(written.view(ml_dtypes.bfloat16) if dtype != "f16" else written, out, bound)


def test_dout_from_a_seed_is_reproducible(run, tmp_path, tensors):
    del tensors["dout"]
    save_file(tensors, tmp_path / "in.safetensors")
    assert (
        "--dout-seed"
        in run("run", tmp_path / "in.safetensors", "--backward", "-o", tmp_path / "a/", code=2).stderr
    )
    for where, seed in (("a", 1), ("b", 1), ("c", 2)):
        flags = ["--backward", "--deterministic", "--dout-seed", seed]
        run("run", tmp_path / "in.safetensors", *flags, "-o", tmp_path / f"{where}/")
    a, b, c = (np.load(tmp_path / where / "dk.npy") for where in "abc")
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 0.1


def test_empty_tensors(run, tmp_path):
    empty = {n: np.zeros((0, 5, 2, 8), np.float32) for n in ("q", "k", "v")}
    save_file(empty, tmp_path / "in.safetensors")
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / "o.safetensors")
    assert load_file(tmp_path / "o.safetensors")["out"].shape == (0, 5, 2, 8)
