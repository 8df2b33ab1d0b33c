"""The documentation as a site: it builds strictly, shows every page, and asks nobody outside."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from weft.cli import command_line
from weft.core.flags import actions_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "index.md"]
PAGES += sorted([*(DOCS / "quickstart").glob("*.md"), *(DOCS / "tutorials").glob("*.md")])
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_LOADED = {"canonical", "prev", "next"}


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loaded(HTMLParser):
    """What a browser loads by itself for a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADED and given.get("rel") not in NOT_LOADED:
            self.found.append(given.get(LOADED[tag]) or "")


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert "assets/iframe-worker.js" in page.read_text(encoding="utf-8")
        loaded = Loaded(page.read_text(encoding="utf-8")).found
        assert len(loaded) > 2
        for address in loaded:
            assert not re.match(r"(https?:)?//", address), f"{page.name} loads {address}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"(url\(['\"]?|@import ['\"])(https?:)?//", text), sheet.name


def test_the_search_index_is_a_file_beside_the_pages(site):
    assert (site / "search" / "search_index.js").stat().st_size > 100_000


def test_the_site_shows_the_whole_guide(site):
    guide = (DOCS / "guide.md").read_text(encoding="utf-8")
    shown = "".join(page.read_text(encoding="utf-8") for page in (site / "guide").glob("*.html"))
    headings = re.findall(r"^## (.+)$", guide, flags=re.MULTILINE)
    assert len(headings) > 40
    for heading in headings:
        escaped = heading.replace("&", "&amp;").replace("'", "&#39;")
        found = f">{heading}<" in shown or f">{escaped}<" in shown
        assert found, f"'{heading}' is on no page"


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    """Both kinds: to a page that there is not, and to a heading of the guide."""
    copied = tmp_path / "copy"
    for name in ("mkdocs.yml", "tools/site_pages.py"):
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes((ROOT / name).read_bytes())
    (copied / "benchmarks" / "results").mkdir(parents=True)
    subprocess.run(["cp", "-r", str(DOCS), str(copied / "docs")], check=True)
    page = copied / "docs" / "concepts.md"
    page.write_text("# Concepts\n\n[a](missing.md) [b](guide.md#missing) [c](guide.md#serve)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=copied, capture_output=True, text=True)
    assert "missing.md" in done.stderr
    assert "#missing" in done.stderr
    assert "#serve" not in done.stderr


def lines_of_shells(page: Path) -> list[str]:
    """The commands in a page's blocks of shell lines, each on one line."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines()]


def commands_of(page: Path) -> list[list[str]]:
    words = [shlex.split(line, comments=True) for line in lines_of_shells(page) if "<<" not in line]
    found = [line for line in words if line and Path(line[0]).name == "weft"]
    return [line[1:] for line in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_pages_are_commands_of_weft(page, capsys):
    parser = command_line(None, whole=True)
    for words in commands_of(page):
        try:
            parser.parse_args(words)
        except SystemExit:
            pytest.fail(f"{page.name}: weft {shlex.join(words)}: {capsys.readouterr().err}")


def test_pages_have_commands_to_check():
    assert sum(len(commands_of(page)) for page in PAGES) >= 25


def test_flags_of_the_migration_tables_are_weft_s():
    known = {flag for a in actions_of(command_line(None, whole=True)) for flag in a.option_strings}
    text = (DOCS / "tutorials" / "migration.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    flags = set()
    for row in rows:
        ours = row[1] if row[2].strip() == "the same" else row[2]
        flags |= set(re.findall(r"--[a-z][a-z-]+", ours + row[3]))
    assert len(flags) > 25
    assert flags <= known, flags - known
