"""Bad files in, trouble on the way out: one clear line, the right exit code, nothing half written."""

from __future__ import annotations

import os
import resource
import signal
import stat
import struct
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from program import TANDEM
from safetensors.numpy import load_file, save_file


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


Q = b'{"q":{"dtype":"F32","shape":[1,2,1,8],"data_offsets":[0,64]}}'
#: What the readers refuse is in files_test.cpp; here it is one of the program's errors.
BAD_SAFETENSORS = {
    "truncated data": (safetensors(Q, bytes(63)), "claims bytes [0, 64) of 63"),
    "control characters": (safetensors(b'{"a\\n\\u001b[31m":1}'), "'a\\x0a\\x1b[31m'"),
    "no k": (safetensors(Q, bytes(64)), "no tensor k"),
}


@pytest.mark.parametrize("name", BAD_SAFETENSORS)
def test_malformed_safetensors(run, tmp_path, name):
    content, says = BAD_SAFETENSORS[name]
    (tmp_path / "bad.safetensors").write_bytes(content)
    error = run("run", tmp_path / "bad.safetensors", "-o", tmp_path / "out.safetensors", code=2).stderr
    assert says in error
    assert "bad.safetensors" in error
    assert [p.name for p in tmp_path.iterdir()] == ["bad.safetensors"]


def test_object_arrays_are_not_unpickled(run, tmp_path):
    np.save(tmp_path / "q.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "dtype '|O'" in run("run", tmp_path / "q.npy", "-o", tmp_path / "out/", code=2).stderr


@pytest.mark.parametrize("kind", ["wrong name", "unreadable"])
def test_what_cannot_be_opened(run, tmp_path, kind):
    tmp_path.chmod(0o755)
    path = tmp_path / ("x.bin" if kind == "wrong name" else "x.safetensors")
    path.write_bytes(b"")
    options = {}
    if kind == "unreadable":
        path.chmod(0)
        # Root reads everything: run as nobody, whose directory this must be reachable for.
        if os.geteuid() == 0:
            options["user"] = 65534
            for parent in (*tmp_path.parents, TANDEM.parent):
                closed = not parent.stat().st_mode & stat.S_IXOTH and parent.owner() == "root"
                if closed and "pytest" in str(parent):
                    parent.chmod(0o755)
    says = {"wrong name": "neither .safetensors nor .npy", "unreadable": "Permission denied"}[kind]
    assert says in run("info" if kind == "unreadable" else "verify", path, code=2, **options).stderr


def test_a_file_twice_or_an_unknown_role(run, tmp_path, tensors):
    for name in ("q", "k", "v"):
        np.save(tmp_path / f"{name}.npy", tensors[name])
    files = [tmp_path / f"{name}.npy" for name in ("q", "k", "v")]
    assert "a second time" in run("run", *files, files[0], "-o", tmp_path / "o/", code=2).stderr
    np.save(tmp_path / "mask.npy", tensors["q"])
    assert (
        "not named after a tensor"
        in run("run", *files, tmp_path / "mask.npy", "-o", tmp_path / "o/", code=2).stderr
    )
    assert "ROLE=NAME" in run("run", *files, "--tensor", "nonsense", "-o", tmp_path / "o/", code=2).stderr


def test_wrong_tensors_leave_no_output(run, tmp_path, tensors):
    tensors["v"] = tensors["v"][:, :-1].copy()
    save_file(tensors, tmp_path / "in.safetensors")
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", code=2)
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--head-dim", 3, code=2)
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_a_full_disk_leaves_nothing(run, tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # noqa: E731
    for out in ("out.safetensors", "results/"):
        done = run("run", tmp_path / "in.safetensors", "-o", tmp_path / out, code=3, preexec_fn=limit)
        assert "writing failed" in done.stderr
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["in.safetensors", "results"]


def test_stdout_full(run):
    with open("/dev/full", "w") as full:
        run("info", code=3, capture_output=False, stdout=full, stderr=subprocess.PIPE)


def test_where_nothing_can_be_written(run, tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    assert (
        "create the directory"
        in run("run", tmp_path / "in.safetensors", "-o", tmp_path / "no/x.safetensors", code=3).stderr
    )
    assert "by its name" in run("run", tmp_path / "in.safetensors", "-o", tmp_path / "x.bin", code=2).stderr
    os.symlink("/dev/null", tmp_path / "null.safetensors")
    assert (
        "not a regular file"
        in run("run", tmp_path / "in.safetensors", "-o", tmp_path / "null.safetensors", code=2).stderr
    )


def test_an_older_result_stays_until_the_new_one_is_complete(run, tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    (tmp_path / "out.safetensors").write_bytes(b"older")
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--head-dim", 3, code=2)
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--window-left", -7, code=2)
    assert (tmp_path / "out.safetensors").read_bytes() == b"older"
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors")
    assert set(load_file(tmp_path / "out.safetensors")) == {"out", "lse"}
    assert (tmp_path / "out.safetensors").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def test_an_output_that_names_an_input_is_an_error(run, tmp_path, tensors):
    directory = tmp_path / "results"
    directory.mkdir()
    save_file(tensors, tmp_path / "in.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "in.safetensors")
    for name, file in (("q", "q"), ("k", "lse"), ("v", "v"), ("dout", "dq")):
        np.save(directory / f"{file}.npy", tensors[name])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    for out in ("in.safetensors", "results/../in.safetensors", "link.safetensors"):
        error = run("run", tmp_path / "in.safetensors", "-o", tmp_path / out, code=2).stderr
        assert f"would replace the input {tmp_path / 'in.safetensors'}; give another path" in error
    error = run("run", tmp_path / "link.safetensors", "-o", tmp_path / "in.safetensors", code=2).stderr
    assert "would replace the input" in error
    assert (
        "would replace"
        in run("demo", tmp_path / "in.safetensors", "--data", tmp_path / "in.safetensors", code=2).stderr
    )
    arrays = [directory / "q.npy", f"k={directory}/lse.npy", directory / "v.npy", f"dout={directory}/dq.npy"]
    error = run("run", *arrays, "-o", directory, code=2).stderr
    assert "lse.npy: would replace the input" in error
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    # dq is written by a backward alone.
    arrays[1] = f"k={directory}/k.npy"
    (directory / "lse.npy").rename(directory / "k.npy")
    run("run", *arrays, "-o", directory)
    error = run("run", *arrays, "--backward", "-o", directory, code=2).stderr
    assert "dq.npy: would replace the input" in error


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_a_result_has_the_permissions_of_the_file_that_it_replaces(run, tmp_path, tensors, mode):
    save_file(tensors, tmp_path / "in.safetensors")
    (tmp_path / "results").mkdir()
    replaced = [tmp_path / "out.safetensors", tmp_path / "results/out.npy"]
    for path in replaced:
        path.write_bytes(b"older")
        path.chmod(mode)
        out = path if path.suffix == ".safetensors" else path.parent
        run("run", tmp_path / "in.safetensors", "-o", out)
        assert path.stat().st_mode & 0o7777 == mode and path.stat().st_size > 5
    assert (tmp_path / "results/lse.npy").stat().st_mode & 0o777 == 0o666 & ~current_umask()


@pytest.mark.skipif(os.geteuid() != 0, reason="files of others are root's to make")
def test_a_result_keeps_group_and_owner(run, tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    (tmp_path / "out.safetensors").write_bytes(b"older")
    os.chown(tmp_path / "out.safetensors", 1234, 2345)
    (tmp_path / "out.safetensors").chmod(0o640)
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors")
    info = (tmp_path / "out.safetensors").stat()
    assert (info.st_uid, info.st_gid, info.st_mode & 0o777) == (1234, 2345, 0o640)


def test_paths_that_cannot_be_written_say_why_before_anything_is_computed(run, tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    (tmp_path / "loop").symlink_to("loop")
    long = "x" * 300
    for out, says in (
        (
            f"{long}.safetensors",
            "cannot be written: File name too long; no file was left, choose a shorter name",
        ),
        (f"{long}/", "the directory cannot be made: File name too long; choose another"),
        ("loop/", "the directory cannot be made: Too many levels of symbolic links; choose another"),
        (
            "in.safetensors/x.safetensors",
            "cannot be written: Not a directory; no file was left, check the path",
        ),
        ("in.safetensors/x/", "Not a directory"),
    ):
        error = run("run", tmp_path / "in.safetensors", "-o", f"{tmp_path}/{out}", code=3).stderr
        assert says in error and "filesystem error" not in error
    # The hidden name that a file has meanwhile is longer than its own.
    name = "y" * (255 - len(".safetensors")) + ".safetensors"
    run("run", tmp_path / "in.safetensors", "-o", tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.safetensors", "loop", name])


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def being_written(pid: int) -> int:
    """Bytes of the unnamed or hidden file that the process is writing; 0 before it starts."""
    sizes = [0]
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            info = link.stat()
            if stat.S_ISREG(info.st_mode) and (info.st_nlink == 0 or ".tmp" in os.readlink(link)):
                sizes.append(info.st_size)
        except OSError:  # closed meanwhile
            pass
    return max(sizes)


def test_killed_while_writing_leaves_no_partial_file(tmp_path):
    # 96 MB of output from hardly any arithmetic: one key a query.
    shape = {"q": (1, 200_000, 8, 8), "k": (1, 1, 8, 8), "v": (1, 1, 8, 8)}
    save_file({name: np.ones(s, np.float32) for name, s in shape.items()}, tmp_path / "in.safetensors")
    caught = 0
    for _ in range(20):
        command = [TANDEM, "run", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        size = 0
        while process.poll() is None and size == 0 and time.monotonic() < deadline:
            try:
                size = being_written(process.pid)
            except OSError:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        names = {p.name for p in tmp_path.iterdir()} - {"in.safetensors"}
        if size > 0 and process.returncode == -signal.SIGKILL and not names:
            caught += 1
        # Whatever has a name is whole.
        for name in names:
            assert set(load_file(tmp_path / name)) == {"out", "lse"}, name
            (tmp_path / name).unlink()
        if caught == 3:
            break
    assert caught > 0, "never caught it in the act"
