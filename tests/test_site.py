"""The documentation: links lead somewhere, the site builds, and the reference has everything public."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("bench/*.md"), *sorted(ROOT.glob("docs/**/*.md"))]
RECORDS = sorted(ROOT.glob("records/**/*.md"))
HEADERS = sorted((ROOT / "include" / "tandem").glob("*.h*"))

sys.path.append(str(ROOT / "scripts"))
from header_reference import interface, reference  # noqa: E402


def outside_code(page: Path) -> str:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(?: {4}.*\n)+", "\n", text, flags=re.MULTILINE)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub and the site name them."""
    found, seen = set(), Counter[str]()
    for title in re.findall(r"^#+ (.+)$", outside_code(page), re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def dead_links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", outside_code(page))
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            dead.append(f"{link}: there is no {target}")
        elif anchor and anchor not in anchors(path):
            dead.append(f"{link}: {path.name} has no heading {anchor}")
    return dead


@pytest.mark.parametrize("page", PAGES + RECORDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_of_a_page_is_dead(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `title`, of *two*\n\n[a](#a-title-of-two) [b](no.md) [c](page.md#no) `[d](no.md)`\n")
    assert [link.split(":")[0] for link in dead_links(page)] == ["no.md", "page.md#no"]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = Counter(re.findall(r"[\w/-]+\.md", navigation))
    assert set(listed.values()) == {1}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
    assert set(listed) == pages | {"contributing.md", "changelog.md", "benchmarks.md"}


class Loads(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        address = named.get("href") if tag == "link" else named.get("src") if tag != "a" else None
        if address and named.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it; a warning of any kind is a failure."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed; scripts/bootstrap docs installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    environment = {**os.environ, **offline, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.addresses
        assert [a for a in loads.addresses if re.match(r"(https?:)?//", a)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text()), style


def test_the_reference_has_every_public_name_of_the_package(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    engines = ("integrations.sglang", "integrations.transformers", "integrations.vllm")
    for module in ("", "flash_attn", "flash_attn2", "vllm_flash_attn", "jax", "metrics", "tracing", *engines):
        path = (ROOT / "python" / "tandem").joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        exported = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.MULTILINE | re.DOTALL)
        assert exported
        for name in ast.literal_eval(exported.group(1)):
            full = ".".join(filter(None, ("tandem", module, name)))
            assert name == "__version__" or f'id="{full}"' in page, (
                f"{full} is not in docs/reference/python.md"
            )


def test_the_reference_has_every_header() -> None:
    pages = "".join((ROOT / "docs" / "reference" / page).read_text() for page in ("cpp.md", "c.md"))
    assert set(re.findall(r"<!-- header (\S+) -->", pages)) == {h.name for h in HEADERS} - {"export.h"}


@pytest.mark.parametrize("header", [h for h in HEADERS if h.name != "export.h"], ids=lambda h: h.name)
def test_the_reference_has_every_declaration_of_a_header(header: Path) -> None:
    text = reference(header, header.name)
    titles = "".join(re.findall(r"^### .*", text, re.MULTILINE))
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", interface(header.read_text()), flags=re.DOTALL)
    declared = re.findall(r"^(?:TANDEM_API|static inline|constexpr) [\w:* ]*?(\w+)\(", source, re.MULTILINE)
    declared += re.findall(
        r"^(?:typedef )?(?:struct|class|enum class|enum)(?: TANDEM_API)? (\w+)", source, re.MULTILINE
    )
    declared += re.findall(r"^using (\w+)", source, re.MULTILINE)
    assert declared
    assert [name for name in declared if f"`{name}`" not in titles] == []
    # Each declaration has a comment, and no function a body.
    assert not re.search(r"^### .*\n\n```", text, re.MULTILINE)
    assert not re.search(
        r"\breturn\b|\bfor \(", "".join(re.findall(r"^```c(?:pp)?\n.*?^```", text, re.M | re.S))
    )


def test_start_here_names_the_packages_that_building_needs() -> None:
    sections = re.split(r"^#.*\n", (ROOT / "scripts" / "packages.txt").read_text(), flags=re.MULTILINE)
    needed = next(section for section in sections if section).split()
    assert f"apt-get install {' '.join(needed)}\n" in (ROOT / "docs" / "index.md").read_text()


def test_the_plots_are_what_the_tables_say(tmp_path: Path) -> None:
    if find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed; scripts/bootstrap installs it")
    script = ROOT / "scripts" / "performance_plots.py"
    subprocess.run([sys.executable, str(script), "--into", str(tmp_path)], check=True, timeout=120)
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 4
    for path in drawn:
        stands = (ROOT / "docs" / "drawings" / path.name).read_text()
        assert path.read_text() == stands, f"{path.name} is stale; run python scripts/performance_plots.py"


def commands() -> list[tuple[str, str]]:
    """Each line of the blocks of sh, with its page."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            found += [(page.name, line) for line in block.splitlines()]
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_documented_command_exists(page: str, line: str) -> None:
    """Its program, script or target, and the options of CMake. What runs `tandem` is in tests/cli."""
    words = line.removeprefix("sudo ").split()
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "python" and words[1] == "-m":
        assert (ROOT / "python" / f"{words[2].replace('.', '/')}.py").exists()
    elif words[0] == "python" or words[0].startswith("scripts/"):
        assert (ROOT / words[words[0] == "python"]).exists()
    else:
        assert words[0] in (
            ".",
            "apt-get",
            "build/example",
            "build/ring/ring",
            "build/serve/serve",
            "cc",
            "cmake",
            "export",
            "mpirun",
            "pip",
            "python3",
            "tandem",
        )
    for option in re.findall(r"-D (TANDEM_\w+)=", line):
        assert f"option({option} " in (ROOT / "CMakeLists.txt").read_text()
    for extra in re.findall(r"\.\[(\w+)\]", line):
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_citation_has_what_its_format_demands() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["license"] == "Apache-2.0"
    assert cited["message"] and cited["title"] and all(cited["authors"])
    assert "version" not in cited  # which is in VERSION alone
