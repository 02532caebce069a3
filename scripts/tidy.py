"""clang-tidy over sources of the release build, each once, but for those that it has found clean as they are.

    python scripts/tidy.py FILE...

A clean file is remembered by a hash of all that clang-tidy was given: version, checks, command, and what the
file includes, as ninja knows it of the object. Where something has changed since the object was built, ninja
may not know it all, and the file is checked again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "release"
WORK = ROOT / "build" / "lint"
CLEAN = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem-lint"
TIDY = Path(sys.executable).with_name("clang-tidy")


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def commands() -> dict[Path, dict[str, str]]:
    """How each source is compiled, once: clang-tidy would check it for each target that it is in."""
    entries: dict[Path, dict[str, str]] = {}
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        entries.setdefault(Path(entry["file"]), entry)
    return entries


def included() -> dict[str, list[Path]]:
    """By object: what it was made of, where none of that has changed since."""
    known: dict[str, list[Path]] = {}
    for block in output_of("ninja", "-C", BUILD, "-t", "deps").split("\n\n"):
        head, *lines = block.splitlines() or [""]
        found = re.fullmatch(r"(.+): #deps \d+, deps mtime (\d+) \(VALID\)", head)
        if not found:
            continue
        paths = [Path(os.path.normpath(BUILD / line.strip())) for line in lines]
        if all(path.exists() and path.stat().st_mtime_ns <= int(found[2]) for path in paths):
            known[found[1]] = paths
    return known


def marks(sources: list[Path], given: list[str]) -> dict[Path, Path]:
    """The file that says that a source is clean as it is, of each that ninja knows enough of."""
    known, compiled, found = included(), commands(), {}
    for source in sources:
        command = compiled[source]["command"]
        paths = known.get(re.findall(r" -o (\S+)", command)[-1])
        if paths is None:
            continue
        text = [*given, command, *(f"{path} {digest(path)}" for path in sorted(paths))]
        key = "\n".join(text).replace(str(ROOT), "")
        found[source] = CLEAN / hashlib.sha256(key.encode()).hexdigest()
    return found


def main(names: list[str]) -> int:
    for folder in (WORK, CLEAN):
        folder.mkdir(parents=True, exist_ok=True)
    (WORK / "compile_commands.json").write_text(json.dumps([*commands().values()]))
    # Its own headers lack omp.h, which the compiler has. The library's, with their deprecated parts, are not
    # judged.
    headers = output_of("c++", "-print-file-name=include").strip()
    options = [f"--extra-arg=-idirafter{headers}", "--extra-arg=-Wno-deprecated-declarations"]
    sources = [ROOT / name for name in names]
    clean = marks(sources, [output_of(TIDY, "--version"), digest(ROOT / ".clang-tidy"), *options])

    def check(source: Path) -> bool:
        mark = clean.get(source)
        if mark is not None and mark.exists():
            return True
        command = [TIDY, "-p", WORK, "--quiet", *options, source]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        print(result.stdout, end="")
        if result.returncode != 0:
            print(result.stderr, end="", file=sys.stderr)
        elif mark is not None:
            mark.touch()
        return result.returncode == 0

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return 0 if all([*pool.map(check, sources)]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
