"""Pages that derive from the code are up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def printed_by(tool: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_settings_page_is_generated_from_the_declarations():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == printed_by("settings_page.py")


def test_the_page_of_parameters_is_generated_from_the_declarations():
    page = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    assert page == printed_by("parameters_page.py")


@pytest.mark.parametrize("name", ["http-api", "commands", "metrics", "errors"])
def test_the_reference_is_generated_from_the_declarations(name):
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page == printed_by("reference_pages.py", name), "run: make pages"


def test_the_chart_shows_what_was_measured():
    picture = (ROOT / "docs" / "assets" / "interactive.svg").read_text(encoding="utf-8")
    assert picture == printed_by("interactive_chart.py"), "run: make pages"


def test_the_map_has_one_line_for_each_file():
    page = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert page == printed_by("map_page.py"), "run: python tools/map_page.py > docs/map.md"
    silent = re.findall(r"^- `([^`]+)`: *$", page, flags=re.MULTILINE)
    assert not silent, f"files that do not say what they are: {silent}"


def test_the_table_of_mutants_is_the_tools():
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    assert printed_by("mutants.py", "--list") in page


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_decisions_are_short_and_stand_in_the_order_of_the_map():
    page = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    long = [entry for entry in page.split("\n\n") if entry.count("\n") >= 5]
    assert not long, "an entry has five lines at most; tables go to benchmarks/results"
    packages = re.findall(r"^## (.+)$", page, flags=re.MULTILINE)
    groups = re.findall(r"^## (?:src/weft/)?(.+)$", printed_by("map_page.py"), flags=re.MULTILINE)
    assert packages == [group for group in groups if group in packages]


def test_the_readme_starts_with_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first_block = text.split("```")[1]
    assert re.findall(r"^make (\w+)", first_block, flags=re.MULTILINE) == ["serve", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^serve:", makefile, flags=re.MULTILINE)
    assert re.search(r"^test:", makefile, flags=re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
