"""Small faults for the kernels' device code, and which of them a mutation run tries (scripts/mutate.py).

A mutant is one change to one line: a bound moved by one, a comparison turned, a stage or phase that does not
advance, a count off by one, a mask's condition turned, a scale left out, a wait, arrival or fence left out.
Comments and preprocessor lines stay, as does what decides at compile time that something does not compile.
In src/ptx, functions have one body for the hardware and one for the emulator: both stay, and only
what the two share is changed.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
DEVICE = ("ops", "ptx", "tile")  # Configs are for the host, too: tests/plan tests them

WAITS = (
    r"(?:\w+(?:<[\w ]*>)?(?:\[[^;\]]*\])?(?:\.|->|::))*(?:template )?"
    r"\w*(?:wait|arrive|release|(?<!a)sync|fence|commit|join|acquire|hand_over|claim)\w*(?:<[\w:.() ]*>)?"
)


@dataclass(frozen=True)
class Operator:
    """Replaces group 1 of the pattern."""

    kind: str
    pattern: str
    replacement: str


OPERATORS = [
    # A loop does one step less: one more would leave arrays, of which C++ defines nothing.
    Operator("bound", r"\bfor \([^;]*;[^;]*?( < )[^;]*; (?:\+\+|--)", " + 1 < "),
    Operator("bound", r"^(?!.*\bfor \().*?( < )", " <= "),
    Operator("bound", r"( <= )", " < "),
    Operator("bound", r"( > )", " >= "),
    Operator("bound", r"( >= )", " > "),
    Operator("bound", r"( [+-] 1)(?![\w.'])", ""),
    Operator("bound", r"(?<![\w:.])(min)\(", "max"),
    Operator("bound", r"(?<![\w:.])(max)\(", "min"),
    Operator("comparison", r"( == )", " != "),
    Operator("comparison", r"( != )", " == "),
    Operator("phase", r"( \^ 1)(?!\w)", ""),
    Operator("phase", r"( \^= 1)(?!\w)", " ^= 0"),
    Operator("phase", r"\w(\.phase)\b(?! [\^=])", ".phase ^ 1"),
    Operator("phase", r"\b(?:phase|parity|exchange) = (0);", "1"),
    Operator("stage", r"^ +(?:if \([^;{}]*\) )?((?:\w+\.)*\w*advance\(\);)$", ";"),
    Operator("stage", r"; [^;]*?((?:\w+\.)*advance\(\))\)", "(void)0"),
    Operator("stage", r"\[(\w+(?:\.\w+)*\.stage)\]", r"\1 ^ 1"),
    Operator("stage", r"\bstage = (0);", "1"),
    Operator("count", r"^ +(\+\+)\w", "--"),
    Operator("count", r"\w(\+\+)(?= )", ""),
    Operator("count", r"(?<![<>=] )(?<=[ (<])(4|8|16|32|64|128)(?=[,);]| \+| -)", r"(\1 + 1)"),
    Operator("count", r"\bfor \([^;]*; \w+ < (4|8|16|32|64|128); \+\+", r"(\1 - 1)"),
    Operator("count", r"wgmma_wait<(0)>", "1"),
    Operator("mask", r"( && )", " || "),
    Operator("mask", r"( \|\| )", " && "),
    Operator("mask", r"(?<=[( ])(!)(?=[a-z(])", ""),
    Operator("mask", r"(?<=[=?:(] )(-)ptx::infinity", ""),
    Operator("scale", r"( \* )(?=\w*(?:scale|factor|log2|inverse|weight|unit))", " + "),
    Operator("scale", r"( \*= )", " += "),
    Operator("scale", r"\b(0\.0F)\b", "1.0F"),
    Operator("scale", r"(?<![\w.])(1\.0F)\b", "0.5F"),
    Operator("scale", r"(?<=[=(,?:] )(-)(?=[a-z]\w*[\w.\[\]]*[;,)])", ""),
    Operator("fence", rf"^ +({WAITS}\([^;{{}}]*\);)$", ";"),
    Operator("fence", rf"^ +(?:\}} else )?(?:if|for) .*?\) ({WAITS}\([^;{{}}]*\);)$", ";"),
]
# Comments, declarations, and what only decides whether the file compiles.
LEFT_OUT = re.compile(r"^\s*(?://|\*|#|static_assert|template\b|using |namespace|.*\balignas)")


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    kind: str
    before: str  # the line, stripped
    after: str
    rank: str  # a hash: the place in the order that mutants are tried in

    def text(self) -> str:
        """The file with the change."""
        lines = (ROOT / self.file).read_text().splitlines(keepends=True)
        old = lines[self.line - 1]
        indent = old[: len(old) - len(old.lstrip())]
        lines[self.line - 1] = indent + self.after + "\n"
        return "".join(lines)


def code_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without comments, outside of #if."""
    depth = 0
    for number, whole in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"#\s*if", whole):
            depth += 1
        elif re.match(r"#\s*endif", whole):
            depth -= 1
        line = whole.split(" //")[0].rstrip()
        if depth == 0 and not LEFT_OUT.match(line):
            yield number, line


def mutants_of(path: Path, seed: int) -> list[Mutant]:
    """One for each line and kind of change, in the order of their hashes. A hash is made of the line, so that
    changes elsewhere in the file leave the choice as it is."""
    name = path.relative_to(ROOT).as_posix()
    best: dict[tuple[int, str], Mutant] = {}
    seen: Counter[str] = Counter()
    for number, line in code_lines(path):
        for operator in OPERATORS:
            for match in re.finditer(operator.pattern, line):
                start, end = match.span(1)
                changed = operator.replacement.replace(r"\1", match[1])
                after = (line[:start] + changed + line[end:]).strip()
                text = f"{seed} {name} {line.strip()} {after}"
                seen[text] += 1
                rank = hashlib.sha256(f"{text} {seen[text]}".encode()).hexdigest()[:16]
                mutant = Mutant(name, number, operator.kind, line.strip(), after, rank)
                key = (number, operator.kind)
                if key not in best or rank < best[key].rank:
                    best[key] = mutant
    return sorted(best.values(), key=lambda mutant: mutant.rank)


def sources() -> list[Path]:
    return sorted(path for room in DEVICE for path in (SOURCE / room).rglob("*.cuh"))


def weight(found: list[Mutant]) -> float:
    """How many of one kind and file come first. Phases and stages are few, and rings rest on them."""
    return len(found) ** 0.5 * (2 if found[0].kind in ("phase", "stage") else 1)


def chosen(count: int, seed: int, only: list[str]) -> list[Mutant]:
    """Spread over files and kinds: one of each file first, then of each kind of a file about as many as the
    square root of how many there are."""
    order = []
    for path in sources():
        if only and path.relative_to(ROOT).as_posix() not in only:
            continue
        kinds = defaultdict(list)
        for mutant in mutants_of(path, seed):
            kinds[mutant.kind].append(mutant)
        entries = [
            ((i + 0.5) / weight(found), m.rank, m) for found in kinds.values() for i, m in enumerate(found)
        ]
        entries.sort(key=lambda entry: entry[:2])
        order += [(0.0, *entry[1:]) for entry in entries[:1]] + entries[1:]
    picked = [mutant for _, _, mutant in sorted(order, key=lambda entry: entry[:2])[:count]]
    by_file = defaultdict(list)
    for mutant in picked:
        by_file[mutant.file].append(mutant)
    return [mutant for file in sorted(by_file) for mutant in sorted(by_file[file], key=lambda m: m.line)]
