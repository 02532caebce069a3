"""MkDocs hooks: what the site has beyond the files of docs/.

- CONTRIBUTING.md, CHANGELOG.md and bench/README.md are pages too.
- Links to files that are no pages (sources, scripts, results as JSON) become their text.
- <!-- header attention.hpp --> becomes the reference of that header.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
from header_reference import reference  # noqa: E402

#: By their place in the repository, relative to docs/.
FROM_ELSEWHERE = {
    "../CONTRIBUTING.md": "contributing.md",
    "../CHANGELOG.md": "changelog.md",
    "../bench/README.md": "benchmarks.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for source, page in FROM_ELSEWHERE.items():
        path = Path(config.docs_dir) / source
        files.append(File.generated(config, page, abs_src_path=str(path.resolve())))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    generated = {page: source for source, page in FROM_ELSEWHERE.items()}
    here = posixpath.dirname(generated.get(page.file.src_uri, page.file.src_uri))

    def relink(link: re.Match[str]) -> str:
        text, target, anchor = link.group(1), link.group(2), link.group(3) or ""
        path = posixpath.normpath(posixpath.join(here, target))
        path = FROM_ELSEWHERE.get(path, path.removeprefix("../docs/"))
        if files.get_file_from_path(path) is None and (Path(config.docs_dir) / path).exists():
            return text
        back = posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{text}]({back}{anchor})"

    def include(header: re.Match[str]) -> str:
        return reference(ROOT / "include" / "tandem" / header.group(1), f"tandem/{header.group(1)}")

    outside = re.split(r"(^```.*?^```|`[^`\n]+`)", markdown, flags=re.MULTILINE | re.DOTALL)
    outside[::2] = [LINK.sub(relink, text) for text in outside[::2]]
    return re.sub(r"^<!-- header (\S+) -->$", include, "".join(outside), flags=re.MULTILINE)
