"""Shared code of the reproductions: arguments, tables with the paper's figure beside weft's, plots.

A reproduction is one script with one command:

    python benchmarks/reproduce/NAME.py [--out FOLDER] [--quick]

It makes a ``Reproduction``, adds comparisons, tables and curves, and ends with ``finish``, which
writes ``result.json``, ``table.md`` and a PNG for each set of curves into the folder.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reproduce"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
CHATS = SHARED / "lengths" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv"

Points = tuple[Seq[float], Seq[float]]


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of the paper beside weft's.

    Attributes:
        paper: None where the paper gives none.
        where: section, table or figure of the paper.
    """

    what: str
    paper: float | None
    weft: float
    unit: str = ""
    where: str = ""

    @property
    def ratio(self) -> float | None:
        """weft's figure over the paper's."""
        return self.weft / self.paper if self.paper else None

    def row(self) -> list[str]:
        """A line of the table."""
        paper = "" if self.paper is None else f"{self.paper:.4g}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return [self.what, self.where, paper, f"{self.weft:.4g}", self.unit, ratio]


@dataclass
class Reproduction:
    """Collects what a reproduction found.

    Attributes:
        quick: whether a small run is wanted, to see that it works.
        out: folder of the results.
    """

    name: str
    quick: bool
    out: Path
    compared: list[Compared] = field(default_factory=list)
    tables: dict[str, tuple[list[str], list[list[str]]]] = field(default_factory=dict)
    plots: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, description: str) -> Reproduction:
        """From the command line."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument(
            "--out", type=Path, default=RESULTS / name, help="folder for JSON, table and plots"
        )
        parser.add_argument("--quick", action="store_true", help="a small run, for a first look")
        given = parser.parse_args()
        given.out.mkdir(parents=True, exist_ok=True)
        return cls(name, given.quick, given.out)

    def compare(
        self, what: str, paper: float | None, weft: float, unit: str = "", where: str = ""
    ) -> None:
        """Put a figure of the paper beside weft's, and print both."""
        self.compared.append(Compared(what, paper, weft, unit, where))
        print(" | ".join(self.compared[-1].row()), flush=True)

    def table(self, title: str, header: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
        """Add a table; floats are shown with four digits."""
        shown = [
            [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row]
            for row in rows
        ]
        self.tables[title] = (list(header), shown)
        print("\n".join(["", title, *_markdown(*self.tables[title])]), flush=True)

    def curves(
        self,
        name: str,
        title: str,
        x: str,
        y: str,
        weft: Mapping[str, Points],
        paper: Mapping[str, Points] | None = None,
        **axes: Any,
    ) -> None:
        """Plot curves by label; the paper's are dashed.

        Args:
            name: of the PNG, without its ending.
            axes: for matplotlib's ``Axes.set``, such as ``xscale="log"``.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        plot = figure.add_subplot()
        for label, (xs, ys) in weft.items():
            plot.plot(xs, ys, "o-", markersize=4, label=label)
        for label, (xs, ys) in (paper or {}).items():
            plot.plot(xs, ys, "s--", markersize=4, alpha=0.7, label=f"{label} (paper)")
        plot.set(title=title, xlabel=x, ylabel=y, **axes)
        plot.grid(alpha=0.3)
        plot.legend()
        figure.savefig(self.out / f"{name}.png", dpi=120)
        self.plots[name] = {"title": title, "x": x, "y": y, "weft": _lists(weft)}
        if paper:
            self.plots[name]["paper"] = _lists(paper)

    def finish(self, **facts: Any) -> None:
        """Write everything; ``facts`` go into the JSON, such as settings and sources."""
        lines = []
        if self.compared:
            header = ["what", "where", "paper", "weft", "unit", "weft / paper"]
            lines += [*_markdown(header, [each.row() for each in self.compared]), ""]
        for title, (header, rows) in self.tables.items():
            lines += [f"**{title}**", "", *_markdown(header, rows), ""]
        (self.out / "table.md").write_text("\n".join(lines), encoding="utf-8")
        report.save(
            self.out / "result.json",
            quick=self.quick,
            **facts,
            compared=[
                {**{key: getattr(each, key) for key in Compared.__slots__}, "ratio": each.ratio}
                for each in self.compared
            ],
            tables={
                title: [dict(zip(header, row, strict=True)) for row in rows]
                for title, (header, rows) in self.tables.items()
            },
            plots=self.plots,
        )


@cache
def chat_spreads() -> tuple[float, float]:
    """Deviation over mean of the prompts and of the answers of chats."""
    with CHATS.open() as file:
        rows = list(csv.DictReader(file))
    columns = [[int(row[f"num_{part}_tokens"]) for row in rows] for part in ("prefill", "decode")]
    given, asked = (statistics.pstdev(each) / statistics.fmean(each) for each in columns)
    return given, asked


def _markdown(header: Seq[str], rows: Iterable[Seq[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _lists(curves: Mapping[str, Points]) -> dict[str, dict[str, list[float]]]:
    return {
        label: {"x": [float(v) for v in xs], "y": [float(v) for v in ys]}
        for label, (xs, ys) in curves.items()
    }
