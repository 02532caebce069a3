"""Puts many mutants into one copy of a file, each behind a switch that is set at run time (mutant schemata).

An expression E that a mutant makes E' becomes `(TANDEM_MUTANT(7) ? (E') : (E))`, a statement that is left
out `{ if (TANDEM_MUTANT(7)) ; else S }`. What is rewritten is the whole operand around the change: up to
the bracket, comma, semicolon or assignment that encloses it, so that E' is read as the mutant's line
would be. Where the operands of several mutants overlap, they share one chain. Lines keep their numbers.

A switch is off in constant evaluation (tests/kernels/mutation/switches.hpp). What is decided there, such
as `if constexpr`, an array's size or a template argument, is never reached at run time, and
scripts/mutate.py compiles such mutants one by one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from mutants import Mutant

ASSIGNS = re.compile(r"(?<![<>=!])=(?!=)")  # the last character of `+=` and the like, too
STATEMENT_HEAD = re.compile(r"\b(?:if|if constexpr|for|while|switch)\s*$")


@dataclass
class Change:
    """One mutant's change of the text between begin and end, inside the operand or statement around it."""

    number: int
    begin: int
    end: int
    replacement: str
    first: int
    last: int
    statement: bool


def without_comments(text: str) -> str:
    """The same text and length. Preprocessor lines become semicolons: no expression goes over them."""
    blank = re.sub(r"//[^\n]*", lambda match: " " * len(match[0]), text)
    return re.sub(r"^[ \t]*#[^\n]*", lambda match: ";" + " " * (len(match[0]) - 1), blank, flags=re.MULTILINE)


def difference(mutant: Mutant) -> tuple[int, int, str]:
    """Which columns of the stripped line the mutant replaces by what."""
    before, after = mutant.before, mutant.after
    head = len(os.path.commonprefix([before, after]))
    tail = len(os.path.commonprefix([before[head:][::-1], after[head:][::-1]]))
    return head, len(before) - tail, after[head : len(after) - tail]


def operand_begin(code: str, at: int) -> int:
    """Where the operand that holds `at` begins: after the bracket, comma, semicolon, assignment, or
    `return` before it."""
    i = at
    while i > 0:
        c = code[i - 1]
        if c in "([{,;}":
            break
        if c in ")]":
            i = matching(code, i - 1, -1)
            if STATEMENT_HEAD.search(code, max(0, i - 20), i):  # of a statement that follows without braces
                return matching(code, i, 1) + 1
            continue
        if ASSIGNS.match(code, i - 1):
            break
        if c.isalpha() and re.search(r"\b(?:return|else|do)$", code[max(0, i - 7) : i]):
            break
        i -= 1
    return i


def operand_end(code: str, at: int) -> int:
    i = at
    while code[i] not in ")]},;":
        i = matching(code, i, 1) + 1 if code[i] in "([{" else i + 1
    return i


def matching(code: str, at: int, step: int) -> int:
    """The bracket that belongs to the one at `at`, forward or backward."""
    depth = 0
    for i in range(at, len(code) if step > 0 else -1, step):
        if code[i] in "([{":
            depth += step
        elif code[i] in ")]}":
            depth -= step
        if depth == 0:
            return i
    raise ValueError("unbalanced brackets")


def change_of(code: str, lines: list[int], number: int, mutant: Mutant) -> Change:
    head, tail, replacement = difference(mutant)
    start = code.index(mutant.before[:1], lines[mutant.line - 1])
    begin, end = start + head, start + tail
    if replacement == "" and code[end - 1] == ")" and code[end] == ";":
        return Change(number, begin, end, replacement, begin, end + 1, True)
    first, last = operand_begin(code, begin), operand_end(code, end)
    first += len(code[first:last]) - len(code[first:last].lstrip())
    last -= len(code[first:last]) - len(code[first:last].rstrip())
    return Change(number, begin, end, replacement, first, last, False)


def groups(changes: list[Change]) -> list[list[Change]]:
    """Those whose operands overlap, in the order of the text."""
    found: list[list[Change]] = []
    for change in sorted(changes, key=lambda c: (c.first, -c.last)):
        if found and change.first < max(c.last for c in found[-1]):
            found[-1].append(change)
        else:
            found.append([change])
    return found


def switched(code: str, group: list[Change]) -> str:
    """The chain for one group. What the mutants make of it comes on its first line."""
    first, last = min(c.first for c in group), max(c.last for c in group)
    whole = code[first:last]
    changed = []
    for c in group:
        text = code[first : c.begin] + c.replacement + code[c.end : last]
        changed.append((c.number, " ".join(text.split())))
    if any(c.statement and (c.first, c.last) == (first, last) for c in group):
        chain = "".join(f"if (TANDEM_MUTANT({number})) {text} else " for number, text in changed)
        return f"{{ {chain}{whole} }}"
    none = any(text == "(void)0" for _, text in changed)
    cast = "(void)" if none else ""
    chain = "".join(f"TANDEM_MUTANT({number}) ? {cast}({text}) : " for number, text in changed)
    return f"({chain}{cast}({whole}))"


def with_switches(text: str, numbered: dict[int, Mutant]) -> tuple[str, dict[int, range]]:
    """The file with all of these mutants of it, and the lines of each one's operand."""
    code = without_comments(text)
    lines = [0] + [match.end() for match in re.finditer("\n", text)]
    changes = [change_of(code, lines, number, mutant) for number, mutant in numbered.items()]
    result, at = "", 0
    spans = {}
    for group in groups(changes):
        first, last = min(c.first for c in group), max(c.last for c in group)
        result += text[at:first] + switched(code, group)
        at = last
        here = range(1 + text.count("\n", 0, first), 2 + text.count("\n", 0, last))
        spans.update({c.number: here for c in group})
    return result + text[at:], spans
