"""Arrows of src/ and python/ point down; tests are named by their rooms; files and functions are short."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SOURCE = ROOT / "src"

# A room includes itself, the public headers, and the rooms named here. In a folder of ops/, config.hpp is of
# the room config, and device code of the room of its architecture; the rest, for the host, is the room ops.
DEVICE = {"tile", "ptx", "config", "problem"}
MAY_INCLUDE = {
    "api": {"ops", "plan", "cpu", "gpu", "problem"},
    "ops": {"plan", "cpu", "gpu", "config", "problem"},
    "plan": {"gpu", "config", "problem"},
    "cpu": {"problem"},
    "gpu": {"config", "problem"},
    "ops/sm90": DEVICE,
    "ops/sm80": DEVICE,
    "ops/common": DEVICE,
    "tile": {"ptx", "config", "problem"},
    "ptx": {"config", "problem"},
    "config": {"problem"},
    "problem": set(),
}
# The emulator's header stands in for the hardware's instructions.
EMULATOR = "emulator.hpp"


def room_of(path: str) -> str:
    """The room of a file named relative to src/."""
    parts = path.split("/")
    if parts[0] == "ops" and parts[-1] == "config.hpp":
        return "config"
    return f"ops/{parts[2]}" if parts[0] == "ops" and path.endswith(".cuh") else parts[0]


def arrows() -> list[tuple[str, str, str]]:
    """Every include of src/: the file, its room, and what it includes."""
    found = []
    for path in sorted(SOURCE.rglob("*.[ch]*")):
        name = path.relative_to(SOURCE).as_posix()
        for target in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            found.append((name, room_of(name), target))
    return found


def test_no_arrow_of_src_points_up() -> None:
    wrong = [
        f"{name} includes {target}"
        for name, room, target in arrows()
        if room_of(target) not in {room, "tandem"} | MAY_INCLUDE[room] and target != EMULATOR
    ]
    assert wrong == []


def test_every_room_is_named() -> None:
    assert {room for _, room, _ in arrows()} == set(MAY_INCLUDE)
    assert len(arrows()) > 300


PACKAGE = ROOT / "python" / "tandem"
# Folders of the package may import the files beside them, and the folders named here; public files may import
# all, and no folder imports a public file or another file that leads back to it.
FOLDERS = {
    "functions": set(),
    "torch": {"functions"},
    "jax": {"functions"},
    "compat": {"functions", "torch"},
    "distributed": {"functions", "torch"},
    "integrations": {"distributed"},
}


def imports_of_the_package() -> dict[str, set[str]]:
    """What each module of the package imports of it, in functions too; hints for mypy apart."""
    modules = {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
        for path in PACKAGE.rglob("*.py")
    }
    modules = {name.removesuffix("__init__").removesuffix("."): path for name, path in modules.items()}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        found[module] = set()
        tree = ast.parse(path.read_text())
        hints = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if id(node) in hints:
                continue
            named = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in named:
                if name.split(".")[0] != "tandem" or name.startswith("tandem._core"):
                    continue
                inside = name.removeprefix("tandem").removeprefix(".")
                found[module].add(inside if inside in modules else inside.rpartition(".")[0])
    return found


def test_modules_of_the_package_make_no_circle() -> None:
    left = imports_of_the_package()
    assert len(left) > 60
    while True:
        lowest = {module for module, imported in left.items() if not imported & left.keys()}
        if not lowest:
            break
        left = {module: imported for module, imported in left.items() if module not in lowest}
    assert sorted(left) == [], "these import one another, or what does"


def test_no_arrow_of_the_package_points_up() -> None:
    wrong = []
    for module, imported in imports_of_the_package().items():
        folder, inside, _ = module.partition(".")
        if not inside and folder not in FOLDERS:
            continue
        for target in imported:
            other, deeper, _ = target.partition(".")
            if (deeper or other in FOLDERS) and other not in FOLDERS[folder] | {folder}:
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_files_of_tests_are_named_after_their_subject() -> None:
    test = re.compile(r"^(TEST|TEST_F|TEST_P|TYPED_TEST|RC_GTEST_PROP)\(", re.MULTILINE)
    files = [path for path in TESTS.rglob("*.c*") if test.search(path.read_text(errors="replace"))]
    assert len(files) > 50
    assert [path.name for path in files if not path.name.endswith("_test.cpp")] == []


def test_ctest_knows_tests_by_their_room() -> None:
    """GoogleTests come through tandem_tests of tests/CMakeLists.txt, which takes the room's name."""
    rooms = sorted(TESTS.glob("*/CMakeLists.txt"))
    assert len(rooms) >= 9
    for path in rooms:
        text, room = path.read_text(), path.parent.name
        assert "gtest_discover_tests" not in text, path
        for name in re.findall(r"add_test\(NAME (\S+)", text) + re.findall(r"PREFIX (\S+\.)\n", text):
            assert name.startswith(f"{room}."), path


# Lines at most.
LONGEST_FILE = 400
LONGEST_FUNCTION = 80


def sources(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split()]


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and lines of what has parameters and a body, at most one level inside a class. A signature may
    have several lines, of which those behind the first are indented; one of a macro (TEST) has one."""
    lines = text.splitlines()
    for start, line in enumerate(lines):
        head = re.match(r"( {0,2})(?!namespace|struct|class|enum|union|extern|[}#/])\S.*\(", line)
        if not head:
            continue
        last = start
        if not re.match(r" *[A-Z_]+\(", line):
            indented = re.compile(rf"{head[1]} +\S")
            while lines[last][-1:] not in "{};" and indented.match("".join(lines[last + 1 : last + 2])):
                last += 1
        if lines[last].endswith("{"):
            end = next((i for i in range(last + 1, len(lines)) if lines[i].startswith(head[1] + "}")), last)
            named = re.search(r"([\w:<>~]+)\(", line)
            yield named[1] if named else "", end - start + 1


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and lines of the body, without the docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_files_are_short() -> None:
    files = sources("*.c", "*.h", "*.cpp", "*.hpp", "*.cuh", "*.py")
    assert len(files) > 400
    lengths = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_functions_fit_a_screen() -> None:
    found = []
    for path in sources("*.c", "*.h", "*.cpp", "*.hpp", "*.cuh", "*.py"):
        functions = python_functions if path.suffix == ".py" else cpp_functions
        name = path.relative_to(ROOT).as_posix()
        found += [(name, function, lines) for function, lines in functions(path.read_text())]
    assert len(found) > 3000
    assert [one for one in found if one[2] > LONGEST_FUNCTION] == []


def test_pages_of_kernels_are_short() -> None:
    pages = sorted((ROOT / "docs" / "kernels").glob("*.md"))
    assert len(pages) >= 12
    for page in pages:
        lines = page.read_text().splitlines()
        assert len(lines) <= 120, page.name
        assert [line for line in lines if len(line) > 110] == [], page.name


def test_docs_are_for_readers() -> None:
    """What was measured and tried lies in records/, which has no limit."""
    docs = ROOT / "docs"
    assert {path.suffix for path in docs.rglob("*") if path.is_file()} <= {".md", ".svg", ".css", ".js"}
    assert sum(len(page.read_text().split()) for page in docs.rglob("*.md")) <= 60_000


UNNAMED = re.compile(r'(?://[/!]?<?|"""|#:?) *(?:The same|Those|Of) |///< *of ')


def test_comments_begin_with_what_a_thing_is() -> None:
    wrong, files = [], 0
    for path in sources("src", "include", "python", "cli"):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in {".h", ".hpp", ".cuh", ".cpp", ".py"}:
            continue
        files += 1
        continues = False  # the comment of the line before
        for line in path.read_text().splitlines():
            comment = line.lstrip().startswith(("//", "#"))
            if UNNAMED.search(line) and not (comment and continues):
                wrong.append(f"{name}: {line.strip()}")
            continues = comment
    assert files > 300
    assert wrong == []


def test_the_dockerfile_and_the_workflow_name_what_exists() -> None:
    """Neither can run where the tests do."""
    docker = (ROOT / "Dockerfile").read_text()
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    targets = set(re.findall(r"(?:- run:|RUN) make (\S+)", docker + workflow))
    assert targets == {"check", "test", "wheel"}
    assert targets <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert all((ROOT / path).is_dir() for path in re.findall(r"cmake -S (\S+)", docker))
    assert re.findall(r"- run: (\S+)", workflow) == ["make", "make"]
