"""Where the program is run: control characters in names, streams that are closed or full, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
from program import TANDEM
from safetensors.numpy import load_file, save_file

HIDDEN = "\u202e\u2066\u200b"
ESCAPES = f"\x1b[31mred\x1b]0;title\x07 \x7f \x9b2J {HIDDEN}"


def controls(text: str) -> list[str]:
    """The characters of `text` that a terminal obeys, or that hide how it reads."""
    return [c for c in text if c != "\n" and (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in HIDDEN)]


def test_names_do_not_control_the_terminal(run, run_json, tmp_path, tensors):
    path = tmp_path / "q\x1b[7m.safetensors"
    save_file(tensors | {ESCAPES: np.zeros(3)}, path, metadata={ESCAPES: ESCAPES})
    shown = run("info", path).stdout
    assert controls(shown) == [] and "\\x1b[31mred" in shown
    shown = run("run", path, "-o", tmp_path / "\x1b[1m/").stdout
    assert controls(shown) == [] and "ignored   \\x1b[31mred" in shown
    documents = run("info", path, "--json").stdout
    assert controls(documents) == [] and ESCAPES in json.loads(documents)[0]["tensors"]
    for name, array in tensors.items():
        np.save(tmp_path / f"{name}.npy", array)
    for arguments in (
        ["info", tmp_path / ESCAPES],
        ["run", path, "-o", tmp_path / f"{ESCAPES}.bin"],
        ["run", tmp_path / "q.npy", tmp_path / f"{ESCAPES}.npy", "-o", tmp_path / "o/"],
        [ESCAPES],
        ["run", f"--{ESCAPES}"],
        ["tune", "--dtype", ESCAPES],
    ):
        assert controls(run(*arguments, code=2).stderr) == [], arguments


def test_names_in_any_script_are_shown_as_they_are(run, tmp_path, tensors):
    save_file(tensors | {"größe, 注意, 🙂": np.zeros(3)}, tmp_path / "名.safetensors")
    shown = run("info", tmp_path / "名.safetensors").stdout
    assert "größe, 注意, 🙂" in shown and "名.safetensors" in shown


def started(*arguments, closed: tuple[int, ...] = (), **options) -> subprocess.CompletedProcess:
    """The program with these streams closed, by number."""

    def close() -> None:
        for stream in closed:
            os.close(stream)

    return subprocess.run([TANDEM, *map(str, arguments)], preexec_fn=close, timeout=120, **options)


def test_an_error_keeps_its_exit_code_without_a_stderr(tmp_path):
    with open("/dev/full", "w") as full:
        for where in ({"closed": (2,)}, {"stderr": full}):
            quiet = {"stdout": subprocess.DEVNULL} | where
            assert started("info", tmp_path / "nowhere.npy", **quiet).returncode == 2
            assert started("frobnicate", **quiet).returncode == 2
            assert started("info", **quiet).returncode == 0


def test_a_closed_stdout_is_an_error_and_no_file_takes_its_place(tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    done = started("info", closed=(1,), stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3 and done.stderr.startswith("tandem: writing to stdout failed: ")
    assert done.stderr.count("\n") == 1
    for closed in ((1,), (2,), (1, 2), (0, 1, 2)):
        done = started("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", closed=closed)
        assert done.returncode == (3 if 1 in closed else 0)
        assert set(load_file(tmp_path / "out.safetensors")) == {"out", "lse"}
        (tmp_path / "out.safetensors").unlink()


def test_a_full_stdout_is_one_error(tmp_path):
    # More than a buffer holds: the failure comes while the program prints.
    save_file({f"{i:0100}": np.zeros(1) for i in range(1000)}, tmp_path / "many.safetensors")
    with open("/dev/full", "w") as full:
        for flags in ([], ["--json"]):
            done = started("info", tmp_path / "many.safetensors", *flags, stdout=full, stderr=subprocess.PIPE)
            assert done.returncode == 3
            assert done.stderr.decode().startswith(
                "tandem: writing to stdout failed: No space left on device"
            )
            assert done.stderr.count(b"\n") == 1
        done = started("info", tmp_path / "nowhere.npy", stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 2 and b"No such file" in done.stderr


@pytest.mark.parametrize("flags", [[], ["--backward", "--dout-seed", "1"]], ids=["forward", "backward"])
def test_ctrl_c_ends_the_program_at_once_and_leaves_no_file(tmp_path, flags):
    # Ten seconds of work at the least.
    tensors = {name: np.zeros((1, 100_000, 4, 64), np.float32) for name in ("q", "k", "v")}
    save_file(tensors, tmp_path / "in.safetensors")
    (tmp_path / "out.safetensors").write_bytes(b"older")
    # A shell that starts the tests in the background would have SIGINT ignored.
    command = [TANDEM, "run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", *flags]
    process = subprocess.Popen(
        [*command, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    cpu_seconds = 0.0
    while cpu_seconds < 2 and time.monotonic() < deadline:  # reading takes less
        assert process.poll() is None, process.stderr.read()
        fields = open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()
        cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        time.sleep(0.05)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT
    assert time.monotonic() - sent < 5
    assert process.stdout.read() == b""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]
    assert (tmp_path / "out.safetensors").read_bytes() == b"older"
