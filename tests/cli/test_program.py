"""Help, usage errors, verify, bench, explain, info, demo: output, JSON and exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from program import ROOT, TANDEM
from safetensors.numpy import save_file

SUBCOMMANDS = ("run", "verify", "bench", "tune", "explain", "info", "demo")


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_help_has_examples(run, subcommand):
    text = run(subcommand, "--help").stdout
    assert "Example" in text
    assert f"tandem {subcommand}" in text


def examples(text: str) -> list[list[str]]:
    """The command lines under "Examples" of a help text, without redirections and remarks."""
    lines = (line.strip() for line in text.partition("\nExample")[2].splitlines())
    return [
        shlex.split(re.split(r" > |\s\s+\(", line)[0])[1:] for line in lines if line.startswith("tandem ")
    ]


@pytest.mark.parametrize("subcommand", [None, *SUBCOMMANDS])
def test_examples_are_command_lines(run, subcommand):
    """An option too many ends the program once it has parsed the others, and is all that it objects to."""
    found = examples(run(*filter(None, [subcommand]), "--help").stdout)
    assert found
    for arguments in found:
        error = run(*arguments, "--no-such-option", code=2).stderr
        assert "The following argument was not expected: --no-such-option;" in error, arguments
        if arguments[0] == "tune":  # which checks fields and their values before it looks for a GPU
            legal = re.search(r"(\d+) Configs are legal", run(*arguments, "--most", 0, code=2).stderr)
            assert legal and int(legal[1]) > 1, arguments


def test_help_documents_exit_codes_and_subcommands(run):
    text = run("--help").stdout
    assert "Exit codes:" in text
    for subcommand in SUBCOMMANDS:
        assert f"\n  {subcommand} " in text


def test_version(run):
    assert run("--version").stdout == f"tandem {(ROOT / 'VERSION').read_text().strip()}\n"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "subcommand is required"),
        (["frobnicate"], "'frobnicate' is no subcommand"),
        (["--frobnicate"], "tandem --help"),
        (["run"], "tandem run --help"),
        (["run", "x.safetensors"], "--out is required"),
        (["verify", "--dtype"], "tandem verify --help"),
        (["verify", "x.safetensors", "--dtype", "f64"], "must be f32, f16, bf16 or e4m3"),
        (["bench", "--seqlen", "many"], "--seqlen"),
        (["bench", "--seqlen", "0"], "at least 1"),
        (["bench", "--causal", "maybe"], "--causal"),
        (["bench", "--heads", "3", "--heads-kv", "2"], "must divide"),
        (["bench", "--threads", "-2"], "--threads is -2"),
        (["bench", "--seconds", "nan"], "--seconds is nan"),
        (["tune", "--block-n", "112,x"], "x is no value of the Config's field block_n"),
        (["tune", "--pass", "backward", "--pingpong", "2"], "2 is no value of the Config"),
        (["tune", "--pass", "backward", "--stages", "2"], "the Config has no field stages"),
        (["tune", "--pass", "backward", "--causal", "no", "--transform", "1"], "transform follows from"),
        (["tune", "--head-dim", "65"], "--head-dim is 65"),
        (["tune", "--dtype", "f32"], "--dtype is f32"),
        (["tune", "--block-n", "64,80,96,112,128", "--stages", "2,3", "--most", "3"], "--most"),
        (["explain", "--pad"], "--pad"),
        (["explain", "--window-left=-2"], "window_left is -2"),
        (["explain", "--dtype", "e4m3", "--backward"], "e4m3"),
        (["explain", "--scale", "inf"], "scale is inf"),
        (["explain", "--precision", "fp4"], "--precision"),
        (["explain", "--precision", "int8", "--dtype", "f32"], "precision int8 rounds f16 or bf16 inputs"),
        (["explain", "--window-left=-2"], "pass -1"),
        # No value is taken for 0, and no number for an octal one.
        (["explain", "--scale", ""], "--scale: the value is empty"),
        (["explain", "--heads", ""], "--heads: the value is empty"),
        (["bench", "--seqlen", ""], "--seqlen: the value is empty"),
        (["tune", "--block-n", ""], "--block-n: the value is empty"),
        (["tune", "--page-size", "64", "--seqlen", "100"], "--seqlen 100 is no multiple of --page-size 64"),
        (["tune", "--pass", "backward", "--queries", "1"], "--queries, --page-size and --v-in-k are of"),
        (["tune", "--head-dim", "64", "--head-dim-v", "128", "--v-in-k"], "with --v-in-k v has no more"),
        (["run", "", "--out", "o.safetensors"], "FILES: the value is empty"),
        (["run", "x.safetensors", "--out", ""], "--out: the value is empty"),
        (["run", "x.safetensors", "--out", "o/", "--dout-seed", ""], "--dout-seed: the value is empty"),
        (["demo", "x.safetensors", "--data", ""], "--data: the value is empty"),
        (["explain", "--heads", "0x10"], "'0x10' is no whole number; give decimal digits"),
        (["explain", "--heads", " 4"], "' 4' is no whole number"),
        (["explain", "--heads", "4 "], "'4 ' is no whole number"),
        (["explain", "--seqlen", "99999999999999999999"], "'99999999999999999999' is beyond 64 bits"),
        (["bench", "--seed", "-1"], "'-1' is no whole number from 0"),
        (["info", "nowhere.npy"], "No such file"),
    ],
)
def test_wrong_command_lines_exit_2(run, arguments, says):
    assert says in run(*arguments, code=2).stderr


def test_numbers_are_decimal(run_json):
    def lines(*arguments) -> list[str]:
        return run_json("explain", *arguments)["lines"]

    assert lines("--seqlen", "010", "--heads", "+08") == lines("--seqlen", "10", "--heads", "8")
    assert lines("--window-left=-01") == lines("--window-left=-1")


def test_verify_accepts_right_results(run, run_json, tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    for dtype in ("f32", "f16", "bf16"):
        document = run_json("verify", tmp_path / "in.safetensors", "--backward", "--causal", "--dtype", dtype)
        assert document["right"] is True
        assert [o["output"] for o in document["outputs"]] == ["out", "lse", "dq", "dk", "dv"]
        for output in document["outputs"]:
            assert output["wrong"] == 0
            assert 0 <= output["share_of_bound"] <= 1
            # An answer that had not been compared at all would be exact.
            assert output["largest_error"] > 0
    text = run("verify", tmp_path / "in.safetensors").stdout
    assert text.splitlines()[0].split()[:3] == ["output", "max", "error"]
    assert text.count(" ok\n") == 2


def test_verify_exits_1_where_fp32_is_not_enough(run, run_json, tmp_path):
    # Logits near 1e6, whose rounding in fp32 (0.06) is far beyond 1e-5, on keys that nearly tie.
    random = np.random.default_rng(3)
    q = 1000 * random.standard_normal((1, 8, 1, 64), dtype=np.float32)
    k = np.repeat(1000 * random.standard_normal((1, 1, 1, 64), dtype=np.float32), 32, axis=1)
    k += 1e-3 * random.standard_normal(k.shape, dtype=np.float32)
    save_file(
        {"q": q, "k": k, "v": random.standard_normal(k.shape, dtype=np.float32)}, tmp_path / "in.safetensors"
    )
    done = run("verify", tmp_path / "in.safetensors", code=1)
    assert "WRONG" in done.stdout
    assert done.stderr.count("\n") == 1
    document = run_json("verify", tmp_path / "in.safetensors", code=1)
    assert document["right"] is False
    assert document["outputs"][0]["wrong"] > 0


def test_bench_json_and_table(run, run_json):
    shape = [
        "--device",
        "cpu",
        "--dtype",
        "f32,bf16",
        "--head-dim",
        32,
        "--seqlen",
        "16,40",
        "--heads",
        4,
        "--heads-kv",
        2,
        "--seconds",
        0,
    ]
    document = run_json("bench", *shape)
    cells = document["cells"]
    assert len(cells) == 2 * 1 * 2 * 2 * 2  # dtypes, head dims, masks, seqlens, passes
    assert document["peak"]["f32_gflops"] > 1
    for cell in cells:
        flops = 2 * 4 * cell["seqlen"] ** 2 * (32 + 32) * (0.5 if cell["causal"] else 1)
        flops *= 2.5 if cell["pass"] == "backward" else 1
        assert cell["gflops"] == pytest.approx(flops / cell["best_ms"] / 1e6, rel=1e-6)
        assert cell["share_of_peak"] == pytest.approx(
            cell["gflops"] / document["peak"][cell["peak"] + "_gflops"], rel=1e-6
        )
        assert cell["median_ms"] >= cell["best_ms"] > 0
        assert cell["runs"] >= 3
        assert cell["right"] is True and 0 < cell["share_of_bound"] <= 1
    done = run("bench", *shape, "--pass", "forward", "--causal", "no")
    assert len([line for line in done.stdout.splitlines() if line.startswith("forward")]) == 4
    assert done.stderr == ""  # no progress where stderr is no terminal
    header, *rows = done.stdout.splitlines()[2:]
    assert header.endswith("error/bound")
    assert all(0 < float(row.split()[-1]) <= 1 for row in rows)


def test_bench_counts_joules(run, powercap, tmp_path):
    shape = ["--device", "cpu", "--seqlen", 256, "--head-dim", 32, "--dtype", "f32", "--causal", "no"]
    arguments = ["bench", *shape, "--pass", "forward", "--joules"]
    environment = {**os.environ, "TANDEM_POWERCAP": str(powercap)}
    (cell,) = json.loads(run(*arguments, "--json", env=environment).stdout)["cells"]
    assert cell["energy_by"] == "the CPU's packages, by RAPL"
    assert 0.1 < cell["joules"] / (50 * cell["median_ms"] / 1e3) < 10
    assert cell["picojoules_per_flop"] == pytest.approx(cell["joules"] / (4 * 8 * 256**2 * 32) * 1e12)
    assert cell["microjoules_per_token"] == pytest.approx(cell["joules"] / 256 * 1e6)
    none = run(*arguments, env={**environment, "TANDEM_POWERCAP": str(tmp_path / "no")}).stdout
    assert none.endswith(f"\nenergy: {tmp_path}/no has no RAPL counter of a package\n")
    assert "uJ/token" in none


@pytest.mark.parametrize("of_pass", ["forward", "backward"])
def test_bench_does_not_time_wrong_results(run, of_pass, tmp_path):
    """The library is right, so the oracle is made wrong: with another exp, its LSE is off by 0.01."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler to build another exp with")
    source = tmp_path / "exp.c"
    source.write_text(
        "double exp2(double); double exp(double x) { return 1.01 * exp2(x * 1.4426950408889634); }"
    )
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", tmp_path / "exp.so", source, "-lm"]
    subprocess.run(command, check=True)
    shape = ["--device", "cpu", "--seqlen", 80, "--head-dim", 32, "--dtype", "f32", "--causal", "no"]
    environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "exp.so")}
    arguments = ["bench", *shape, "--pass", of_pass]
    done = run(*arguments, code=1, env=environment)
    assert done.stderr.startswith(
        f"tandem: WRONG: {of_pass} f32 head_dim 32 seqlen 80 batch 1 full: lse is off"
    )
    assert done.stderr.count("\n") == 1
    (row,) = [line for line in done.stdout.splitlines() if line.startswith(of_pass)]
    assert row.endswith("WRONG") and " - " in row
    (cell,) = json.loads(run(*arguments, "--json", code=1, env=environment).stdout)["cells"]
    assert cell["right"] is False and "lse is off" in cell["wrong"] and cell["runs"] == 0
    assert "best_ms" not in cell


def test_bench_shows_progress_on_a_terminal():
    terminal, end = pty.openpty()
    command = [
        TANDEM,
        "bench",
        "--head-dim",
        "32",
        "--seqlen",
        "16",
        "--seconds",
        "0",
        "--dtype",
        "f32",
        "--json",
    ]
    with os.fdopen(end, "wb") as stderr:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, timeout=120)
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert done.returncode == 0
    json.loads(done.stdout)
    assert "[1/4] forward f32 d=32 seqlen=16" in shown


def test_explain(run, run_json):
    text = run("explain", "--dtype", "bf16", "--seqlen", 300, "--causal").stdout
    assert "bf16" in text and "causal" in text
    document = run_json(
        "explain", "--backward", "--heads", 6, "--heads-kv", 2, "--seqlen-q", 1, "--seqlen-k", 5000
    )
    assert document["pass"] == "backward"
    assert document["workspace_bytes"] >= 0
    assert any("heads_kv 2" in line for line in document["lines"])


def test_explain_of_a_cache_in_pages(run):
    shape = ["--seqlen-q", 1, "--seqlen-k", 100, "--batch", 3, "--device", "cpu"]
    text = run("explain", *shape, "--page-size", 16).stdout
    assert "seqlen_k 112," in text and "also: seqused_k, page_table (21 pages of 16 rows), lse" in text
    assert "page_table" not in run("explain", *shape).stdout
    refused = run("explain", *shape, "--page-size", 16, "--backward", code=2).stderr
    assert "page_table is given to backward; a cache has no gradients" in refused


def test_info(run, run_json):
    document = run_json("info")
    assert document["version"] == (ROOT / "VERSION").read_text().strip()
    assert document["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert "portable" in document["backends"]["cpu"]["targets"]
    assert document["backends"]["gpu"]["driver"]  # its version, or why there is none
    assert document["machine"]["processor"] in run("info").stdout


def test_info_lists_files(run, run_json, tmp_path, tensors):
    save_file(tensors, tmp_path / "x.safetensors", metadata={"key": "value"})
    np.save(tmp_path / "y.npy", np.zeros((3, 4)))
    documents = run_json("info", tmp_path / "x.safetensors", tmp_path / "y.npy")
    assert documents[0]["tensors"]["q"] == {"dtype": "F32", "shape": [2, 33, 4, 16]}
    assert documents[0]["metadata"] == {"key": "value"}
    assert documents[1]["tensors"]["array"] == {"dtype": "<f8", "shape": [3, 4]}
    assert "(2, 33, 4, 16)" in run("info", tmp_path / "x.safetensors").stdout


def test_gpu_wish_is_an_error_without_a_gpu(run, tmp_path, tensors):
    if json.loads(run("info", "--json").stdout)["backends"]["gpu"]["devices"]:
        pytest.skip("this machine has a GPU")
    save_file(tensors, tmp_path / "in.safetensors")
    # 3, the machine's, for what it lacks; 2 for what no GPU has.
    for dtype, says, code in (("bf16", "no NVIDIA driver", 3), ("f32", "f32 has no GPU kernel", 2)):
        flags = ["--device", "gpu", "--dtype", dtype]
        out = ["-o", tmp_path / "o.safetensors"]
        assert says in run("run", tmp_path / "in.safetensors", *flags, *out, code=code).stderr
        assert says in run("explain", *flags, code=code).stderr
        assert says in run("bench", *flags, "--seqlen", 16, code=code).stderr
    assert not (tmp_path / "o.safetensors").exists()
    assert "no NVIDIA driver" in run("tune", "--seqlen", "512", "--block-n", "112", code=3).stderr


def test_demo_and_its_picture(run_json, tmp_path):
    document = run_json("demo", ROOT / "data/minilm.safetensors", "--data", tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text()) == document
    assert document["metadata"]["tokens"] == "512"
    assert [r["dtype"] for r in document["results"]] == ["f32", "bf16"]
    assert all(o["right"] for r in document["results"] for o in r["outputs"])
    entropy = np.array(document["entropy_nats"])
    assert entropy.shape == (3, 12, 5)
    # Between one token and all alike, but for the rounding of an LSE of 60 to fp32.
    assert (entropy >= -1e-4).all() and (entropy <= np.log(512) + 1e-4).all()
    assert (np.diff(entropy, axis=-1) >= 0).all()
    picture = tmp_path / "picture.png"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/demo_plot.py", tmp_path / "figures.json", picture],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert str(picture) in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_entropy_is_the_plain_formula(run_json, tmp_path):
    random = np.random.default_rng(5)
    q, k, v = (random.standard_normal((1, 21, 2, 8), dtype=np.float32) for _ in range(3))
    save_file({"q": q, "k": k, "v": v}, tmp_path / "in.safetensors")
    document = run_json("demo", tmp_path / "in.safetensors")
    s = np.einsum("bihd,bjhd->bhij", q, k).astype(np.float64) / np.sqrt(8)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    median = np.median(-(p * np.log(p)).sum(-1), axis=-1)
    np.testing.assert_allclose(np.array(document["entropy_nats"])[..., 2], median, atol=1e-5)


def test_demo_says_where_dout_is_from(run, tmp_path, tensors):
    tensors = {name: np.ascontiguousarray(tensors[name][:, :9, :2, :8]) for name in tensors}
    save_file(tensors, tmp_path / "all.safetensors")
    assert " q, k, v and dout\n" in run("demo", tmp_path / "all.safetensors").stdout
    del tensors["dout"]
    save_file(tensors, tmp_path / "three.safetensors")
    assert " q, k and v; dout: normal numbers, seed 1\n" in run("demo", tmp_path / "three.safetensors").stdout


def test_only_glibc_is_needed_at_run_time():
    needed = subprocess.run(["ldd", TANDEM], capture_output=True, text=True, check=True).stdout
    names = {Path(line.split()[0]).name for line in needed.splitlines()}
    if any("asan" in name for name in names):
        pytest.skip("a sanitizer build")
    allowed = ("linux-vdso", "libc.", "libm.", "libdl.", "libpthread.", "librt.", "ld-linux")
    assert [name for name in names if not name.startswith(allowed)] == []
