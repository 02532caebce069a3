"""A public header of Tandem as a page of Markdown: what its comments say, then what it declares.

A declaration is what stands between two blank lines: a struct with its fields, an enum, a function with its
overloads. Its comment (`///`, in C `/* */`) becomes the text above it; comments inside stay in the code,
beside the fields that they are about. Bodies of functions are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

KINDS = r"(?:typedef )?(?:enum class|enum|struct|class)"


def reference(header: Path, include: str) -> str:
    """The section of a header that users include as <include>."""
    chunks = split(interface(header.read_text()))
    introduction, _ = take_comment(chunks[0])
    sections = [f"## `{include}`", prose(introduction)]
    for chunk in chunks[1:]:
        comment, code = take_comment(chunk)
        if code.strip():
            code = declaration(code.strip())
            language = "c" if header.suffix == ".h" else "cpp"
            names = names_of(code)
            heading = (
                f"### {', '.join(f'`{name}`' for name in names)} {{ #{anchor_of(names[0], code, language)} }}"
            )
            sections += [heading, prose(comment), f"```{language}\n{code}\n```"]
    return "\n\n".join(section for section in sections if section) + "\n"


def interface(text: str) -> str:
    """The header without what no reader needs: guards, includes and the namespace's braces."""
    text = re.sub(r"^#ifdef __cplusplus\n.*?^#endif\n", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return "\n".join(line for line in lines if line not in ("namespace tandem {", "}  // namespace tandem"))


def split(text: str) -> list[str]:
    """Cuts at the blank lines outside all braces and comments."""
    chunks, lines, depth, comment = [], [], 0, False
    for line in text.splitlines():
        if not line.strip() and depth == 0 and not comment:
            chunks.append("\n".join(lines))
            lines = []
            continue
        lines.append(line)
        code = re.sub(r"//.*|/\*.*?\*/", "", line)
        comment = "/*" in code or (comment and "*/" not in line)
        depth += 0 if comment else code.count("{") - code.count("}")
    return [chunk for chunk in [*chunks, "\n".join(lines)] if chunk.strip()]


def take_comment(chunk: str) -> tuple[str, str]:
    """The comment that a chunk begins with, without its marks; and the rest."""
    if chunk.startswith("/*"):
        comment, _, code = chunk[2:].partition("*/")
        return re.sub(r"^ \* ?", "", comment, flags=re.MULTILINE).strip(), code
    lines = chunk.splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    return "\n".join(re.sub(r"^///? ?", "", line) for line in lines[:count]), "\n".join(lines[count:])


def prose(comment: str) -> str:
    """As Markdown: lines indented by two spaces are code, and < and > stand for themselves."""
    paragraphs = []
    for paragraph in comment.split("\n\n"):
        if paragraph.startswith("  "):
            paragraphs.append(f"```text\n{paragraph}\n```")
        else:
            outside = re.split(r"(`[^`]*`)", paragraph)
            outside[::2] = [re.sub(r"([<>*])", r"\\\1", text) for text in outside[::2]]
            paragraphs.append("".join(outside))
    return "\n\n".join(paragraphs)


def names_of(code: str) -> list[str]:
    """What a declaration declares: one struct or enum, or functions and aliases."""
    code = re.sub(r"^template <.*>\n", "", code)
    if found := re.match(rf"{KINDS} (\w+)", code):
        return [found.group(1)]
    names = re.findall(r"^using (\w+)|^typedef [^(]*\(\*(\w+)\)|^\w[^(\n]*?(\w+)\(", code, re.MULTILINE)
    if not names:
        raise ValueError(f"what does this declare?\n{code}")
    return list(dict.fromkeys("".join(name) for name in names))


def anchor_of(name: str, code: str, language: str) -> str:
    """Unlike in C and C++, and for the overloads of name_of."""
    argument = re.search(r"name_of\((\w+) \w+\)", code)
    overload = f"-{argument.group(1).lower()}" if argument else ""
    return f"{language}-{name.lower()}{overload}"


def declaration(code: str) -> str:
    """Code without the export mark, private members and bodies of functions."""
    if code.startswith(mark := "TANDEM_API "):
        code = re.sub(rf"^(?:{mark}| {{{len(mark)}}}(?= *\S))", "", code, flags=re.MULTILINE)
    code = re.sub(r"\n\n private:.*?\n\};", "\n};", code, flags=re.DOTALL).replace(mark, "")
    return without_bodies(code)


def without_bodies(code: str) -> str:
    """Functions as declarations: a body, and a constructor's initialisers before it, become a semicolon."""
    kept, i, begin = "", 0, 0  # begin: where the statement that is being read begins in kept
    while i < len(code):
        if comment := re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL).match(code, i):
            kept, i = kept + comment.group(), comment.end()
            continue
        statement = re.sub(r"//.*|/\*.*?\*/", "", kept[begin:])
        if code[i] == "{" and "(" in statement and statement.count("(") == statement.count(")"):
            initialisers = re.search(r"\)\s*(?://[^\n]*\n\s*)?: [\w:]+\(", kept[begin:])
            end = begin + initialisers.start() + 1 if initialisers else len(kept.rstrip())
            kept, i = kept[:end] + ";", closing_brace(code, i) + 1
            begin = len(kept)
            continue
        kept += code[i]
        if code[i] == ";" or (code[i] == "{" and "(" not in statement):
            begin = len(kept)
        i += 1
    return kept


def closing_brace(code: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(code)):
        depth += {"{": 1, "}": -1}.get(code[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"an open brace in\n{code}")
