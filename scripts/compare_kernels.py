"""What a change makes of the GPU kernels: registers, local memory and size before and after.

    python scripts/compare_kernels.py [COMMIT] [--every N]      COMMIT: HEAD unless given

Compiles the shipped set of COMMIT and of the working tree by NVRTC, or every N-th kernel of it, and compares
them one by one. Kernels whose machine code is the same are counted; names of symbols do not matter, so that a
Config may be renamed. Of the others it prints both sides, and it exits with 1 if one has more local memory
than before. No GPU is needed. Work is kept in build/compare_kernels: a second run compiles what changed. All
of the set takes half an hour of processor time, every 16th kernel two minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "compare_kernels"


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: what it is called, what it is, and what it takes of an SM and of memory."""

    name: str
    digest: str
    instructions: int
    registers: int
    local_bytes: int

    def __str__(self) -> str:
        return f"{self.instructions} instructions, {self.registers} registers, {self.local_bytes} local bytes"


def sections(cubin: bytes) -> list[tuple[str, int, bytes]]:
    """Name, sh_info and contents of every section of a 64-bit ELF file."""
    if cubin[:4] != b"\x7fELF" or cubin[4] != 2:
        raise ValueError("a cubin is a 64-bit ELF file")
    table, entry, count, names_at = struct.unpack_from("<Q10xHHH", cubin, 40)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry) for i in range(count)]
    strings = cubin[headers[names_at][4] :]
    found = []
    for name, kind, _, _, offset, size, _, info, _, _ in headers:
        text = strings[name : strings.index(b"\0", name)].decode()
        nobits = kind == 8
        found.append((text, info, b"" if nobits else cubin[offset : offset + size]))
    return found


def reads_globals(code: bytes) -> bool:
    """Whether an LDC or ULDC reads constant bank 4, through which a kernel reaches global variables."""
    words = (struct.unpack_from("<Q", code, at)[0] for at in range(0, len(code), 16))
    return any(word & 0xFFF in (0xB82, 0xAB9) and word >> 54 & 31 == 4 for word in words)


def attribute(info: bytes, wanted: int) -> int:
    """A number among the attributes of .nv.info: format, attribute, size, symbol, value."""
    for at in range(0, len(info) - 11, 12):
        form, found, _, _, value = struct.unpack_from("<BBHII", info, at)
        if (form, found) == (4, wanted):
            return int(value)
    return 0


def kernel(name: str, cubin: bytes) -> Kernel:
    """The part of a cubin that runs: instructions, registers, relocations (without their symbols) and the
    room for parameters. NVRTC emits every constant of the source as a global variable, in any order; those
    count where a kernel reads one."""
    digest = hashlib.sha256()
    registers = local_bytes = 0
    found = sections(cubin)
    code = b"".join(contents for section, _, contents in found if section.startswith(".text"))
    globals_ = (".nv.global", ".nv.constant4") if reads_globals(code) else ()
    for section, _, contents in found:
        if section == ".nv.info":
            registers, local_bytes = attribute(contents, 0x2F), attribute(contents, 0x11)
            digest.update(struct.pack("<I", registers))
        elif section.startswith(".rela.text"):
            for at in range(0, len(contents) - 23, 24):
                offset, relocation = struct.unpack_from("<QQ", contents, at)
                digest.update(struct.pack("<QI", offset, relocation & 0xFFFFFFFF))
        elif section.startswith((".text", ".nv.constant0", ".nv.constant2", ".nv.constant3", *globals_)):
            digest.update(section.split(".")[1].encode() + struct.pack("<Q", len(contents)) + contents)
    return Kernel(name, digest.hexdigest(), len(code) // 16, registers, local_bytes)


def portable_kernel(name: str, ptx: bytes) -> Kernel:
    """A kernel in PTX, which counts as its text but for the name. The driver chooses registers."""
    entry = re.search(rb"\.entry (\w+)", ptx)
    text = ptx.replace(entry[1], b"kernel") if entry else ptx
    return Kernel(f"{name}, portable", hashlib.sha256(text).hexdigest(), text.count(b";\n"), 0, 0)


def read(folder: Path) -> list[Kernel]:
    """What ship_kernels wrote to `folder`."""
    found = []
    for i, name in enumerate((folder / "names.txt").read_text().splitlines()):
        ptx = folder / f"{i}.ptx"
        if ptx.exists():
            found.append(portable_kernel(name, ptx.read_bytes()))
        else:
            found.append(kernel(name, (folder / f"{i}.cubin").read_bytes()))
    return found


def differences(before: list[Kernel], after: list[Kernel]) -> list[tuple[Kernel | None, Kernel]]:
    """Kernels whose code has changed, and what each was: the one of its name, or in sets of one size the one
    at its place."""
    of_name = {one.name: one for one in before}
    by_place = before if len(before) == len(after) else [None] * len(after)
    pairs = [(of_name.get(now.name, was), now) for was, now in zip(by_place, after, strict=True)]
    return [(was, now) for was, now in pairs if was is None or was.digest != now.digest]


def call(command: list[str | Path], environment: dict[str, str] | None = None) -> str:
    """What a command prints; where it fails, that is all that is left to say."""
    run = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if run.returncode:
        sys.exit(f"{run.stdout}\ncompare_kernels: {' '.join(map(str, command))} failed")
    return run.stdout.strip()


def compile_set(source: Path, name: str, every: str) -> list[Kernel]:
    """Builds `source`'s ship_kernels in build/compare_kernels/NAME and compiles its set there."""
    build, folder = WORK / name / "build", WORK / name / "cubins"
    off = [f"-DTANDEM_BUILD_{part}=OFF" for part in ("CLI", "TESTS", "BENCH")]
    options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DTANDEM_NVRTC={nvrtc()}", *off]
    call(["cmake", "-S", source, "-B", build, *options])
    call(["cmake", "--build", build, "--target", "ship_kernels"])
    shutil.rmtree(folder, ignore_errors=True)
    environment = os.environ | {"TANDEM_CACHE_DIR": str(WORK / "cache"), "TANDEM_NVRTC": nvrtc()}
    jobs = str(os.cpu_count() or 2)
    sample = [] if every == "1" else [every]
    call([build / "src" / "ship_kernels", WORK / name / "archive", jobs, folder, *sample], environment)
    return read(folder)


def nvrtc() -> str:
    """The compiler of build/venv: the same for both sides."""
    if "TANDEM_NVRTC" in os.environ:
        return os.environ["TANDEM_NVRTC"]
    found = sorted((ROOT / "build" / "venv").glob("lib/python*/site-packages/nvidia/**/libnvrtc.so.1[23]"))
    if not found:
        sys.exit("compare_kernels: no NVRTC in build/venv; run scripts/bootstrap, or set TANDEM_NVRTC")
    return str(found[0])


def checkout(commit: str) -> Path:
    """A work tree of `commit` in build/compare_kernels/before/source."""
    source = WORK / "before" / "source"
    if not source.exists():
        call(["git", "-C", ROOT, "worktree", "prune"])
        call(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", source, commit])
    call(["git", "-C", source, "checkout", "-q", "--detach", commit])
    return source


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--every", default="1", metavar="N", help="compile every N-th kernel")
    given = parser.parse_args()
    sha = call(["git", "-C", ROOT, "rev-parse", "--short", given.commit])
    before = compile_set(checkout(sha), "before", given.every)
    after = compile_set(ROOT, "after", given.every)
    changed = differences(before, after)
    worse = [now for was, now in changed if now.local_bytes > (was.local_bytes if was else 0)]
    for was, now in changed:
        print(f"{now.name}\n  - {was}\n  + {now}{'  MORE LOCAL MEMORY' if now in worse else ''}")
    identical = len(after) - len(changed)
    print(f"shipped set: {identical} of {len(after)} kernels identical to {sha}'s {len(before)}", end="; ")
    print(f"{len(worse)} with more local memory")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
