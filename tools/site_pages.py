"""Hook of MkDocs: what the site makes of the pages in ``docs`` and ``benchmarks/results``.

The user guide is one file, which reads well in an editor; the site shows it as several pages, each
from a heading of ``GUIDE`` up to the next one. The pages of ``benchmarks/results`` join the site.
Links are written as they hold in the repository; those to files that are no pages, such as sources,
become plain text. A link that leads nowhere stays, and MkDocs warns of it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, ClassVar

from markdown.extensions.toc import slugify
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results/"
SHOWN = {".md", ".png"}  # of results
# Page of the site -> its title, and the heading of the guide that it begins with, in their order.
GUIDE = {
    "start": ("Set up and serve", "Set up"),
    "operate": ("Keys, limits, watching", "Keys, limits, HTTPS"),
    "apis": ("APIs and clients", "Responses"),
    "recovery": ("Recovery", "When processes die"),
    "batches": ("Batches", "Generate from the command line"),
    "measuring": ("Measuring and simulation", "Measuring"),
    "devices": ("Devices", "Settings"),
    "weights": ("Models and weights", "Weights of 8 and 4 bits"),
    "python": ("Python and the engine", "Python"),
    "structured": ("Structured output and tools", "Structured output"),
    "targets": ("Latency targets", "Latency targets beside best effort"),
    "troubles": ("When something goes wrong", "How a request runs"),
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{2,4} (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Replace the guide by its pages, and add those of results."""
    guide = files.get_file_from_path("guide.md")
    assert guide is not None
    files.remove(guide)
    pages = split_guide((ROOT / "docs" / "guide.md").read_text(encoding="utf-8"))
    _Links.anchors = {anchor: page for page, text in pages.items() for anchor in anchors_of(text)}
    for page, text in pages.items():
        files.append(File.generated(config, f"guide/{page}.md", content=text))
    for path in sorted((ROOT / RESULTS).rglob("*.*")):
        if path.suffix in SHOWN:
            place = _Links.of_results(path.relative_to(ROOT).as_posix())
            level = InclusionLevel.UNDEFINED if path.stem == "README" else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place, abs_src_path=str(path), inclusion=level))
    return files


def split_guide(text: str) -> dict[str, str]:
    """The pages of the guide. Raises PluginError if a heading of ``GUIDE`` is not in it."""
    starts = []
    for page, (title, heading) in GUIDE.items():
        at = text.find(f"\n## {heading}\n")
        if at < 0:
            raise PluginError(f"docs/guide.md has no heading '{heading}', with which {page} begins")
        starts.append((at + 1, page, title))
    if starts != sorted(starts):
        raise PluginError("the pages of GUIDE are not in the order of docs/guide.md")
    ends = [start for start, _, _ in starts[1:]] + [len(text)]
    return {
        page: f"# {title}\n\n{text[start:end]}"
        for (start, page, title), end in zip(starts, ends, strict=True)
    }


def anchors_of(text: str) -> list[str]:
    """Anchors of the headings of a page, as MkDocs makes them."""
    plain = _FENCED.sub("", text)
    return [slugify(heading.replace("`", ""), "-") for heading in _HEADING.findall(plain)]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001
    """Lead links to where their targets are in the site."""
    links = _Links(page.file.src_uri, files)
    parts = _FENCED.split(markdown)
    return "".join(
        part if part.startswith("```") else _LINK.sub(links.written, part) for part in parts
    )


class _Links:
    """Writes the links of one page.

    Attributes:
        anchors: of the guide: in which of its pages each is.
    """

    anchors: ClassVar[dict[str, str]] = {}

    def __init__(self, page: str, files: Files) -> None:
        self._page = page
        self._files = files
        self._source = self._in_repository(page)

    @staticmethod
    def of_results(name: str) -> str:
        """The place in the site of a page of results."""
        return f"results/{name.removeprefix(RESULTS)}".replace("README.md", "index.md")

    @staticmethod
    def _in_repository(page: str) -> str:
        if page.startswith("guide/"):
            return "docs/guide.md"
        if page.startswith("results/"):
            return RESULTS + page.removeprefix("results/").replace("index.md", "README.md")
        return f"docs/{page}"

    def written(self, link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path, _, anchor = target.partition("#")
        source = self._source
        if path:
            source = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = self._in_site(source, anchor)
        if place is None:
            return text if (ROOT / source).exists() and not image else link[0]
        if place == self._page:
            return f"{image}[{text}](#{anchor})" if anchor else f"{image}[{text}]({target})"
        shown = posixpath.relpath(place, posixpath.dirname(self._page) or ".")
        return f"{image}[{text}]({shown}{'#' if anchor else ''}{anchor})"

    def _in_site(self, source: str, anchor: str) -> str | None:
        """The file of the site that a file of the repository is shown as."""
        if source == "docs/guide.md":
            return f"guide/{self.anchors.get(anchor, 'start')}.md"
        if source.startswith(RESULTS) and source.endswith(tuple(SHOWN)):
            return self.of_results(source)
        place = source.removeprefix("docs/")
        return place if self._files.get_file_from_path(place) else None
