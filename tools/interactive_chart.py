"""Prints the chart of interactive latency beside a batch: ``python tools/interactive_chart.py >
docs/assets/interactive.svg``.

The figures are those of ``benchmarks/results``; the chart says which, and nothing else is in it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SERVERS = {
    "weft": "weft (slo, the default)",
    "weft, priorities only": "weft (fcfs, priorities)",
    "vllm": "vLLM (priorities)",
    "llama.cpp": "llama.cpp",
}
POLICIES = {
    "one class": "fcfs, one class",
    "priorities": "fcfs, priorities",
    "default": "slo, the default",
}
WIDTH, LEFT, BAR, STEP = 960, 230, 20, 30
LONGEST = 530  # of a bar
STYLE = """
.p{fill:#faf8f4}.t{fill:#3b3a36}.s{fill:#77736a}.o{fill:#d9772b}.n{fill:#b9b3a6}.a{stroke:#3b3a36}
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.h{font-size:15px;font-weight:600}.s{font-size:12px}
@media(prefers-color-scheme:dark){.p{fill:#1b1d22}.t{fill:#e6e3dc}.s{fill:#9c988f}.o{fill:#f0934a}
.n{fill:#5a5e68}.a{stroke:#e6e3dc}}
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a panel.

    Attributes:
        alone: the same without a batch beside it, for a mark; None for no mark.
        ours: weft's default, which has a colour.
    """

    label: str
    value: float
    alone: float | None
    shown: str
    ours: bool


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def of_servers(measured: dict[str, Any], figure: str) -> list[Bar]:
    """P95 of interactive requests beside best effort, of each server that the run measured."""
    rows = {row["engine"]: row for row in measured["rows"]}
    bars = []
    for name, label in SERVERS.items():
        if name in rows:
            beside, alone = (rows[name][key] * 1e3 for key in (figure, f"{figure}_alone"))
            shown = f"{beside:,.0f} ms; alone {alone:,.0f} ms"
            bars.append(Bar(label, beside, alone, shown, name == "weft"))
    return bars


def of_policies(measured: dict[str, Any], figure: str) -> list[Bar]:
    """P95 beside best effort over P95 alone: the median over all loads of the run."""
    bars = []
    for name, label in POLICIES.items():
        ratios = [row[figure] for row in measured["mixed"] if row["load"] == name]
        middle = statistics.median(ratios)
        shown = f"{middle:.1f} times ({min(ratios):.1f} to {max(ratios):.1f})"
        bars.append(Bar(label, middle, None, shown, name == "default"))
    return bars


def panel(title: str, below: str, bars: Sequence[Bar], y: int) -> Iterator[str]:
    """The lines of one panel, whose first line of text is at ``y``."""
    yield f'<text class="t h" x="24" y="{y}">{title}</text>'
    scale = LONGEST / max(bar.value for bar in bars)
    for place, bar in enumerate(bars):
        top = y + 14 + place * STEP
        width, colour = max(2.0, bar.value * scale), "o" if bar.ours else "n"
        yield f'<text class="t" x="24" y="{top + 15}">{bar.label}</text>'
        yield f'<rect class="{colour}" x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}"/>'
        if bar.alone is not None:
            mark = LEFT + max(1.0, bar.alone * scale)
            yield f'<path class="a" stroke-width="2" d="M{mark:.1f} {top - 2}v{BAR + 4}"/>'
        # The text stands behind its bar, or before the end of a long one.
        inside = LEFT + width + 8 + 7 * len(bar.shown) > WIDTH
        at, anchor = (LEFT + width - 8, "end") if inside else (LEFT + width + 8, "start")
        place_of_text = f'x="{at:.1f}" y="{top + 15}" text-anchor="{anchor}"'
        yield f'<text class="t" {place_of_text}>{bar.shown}</text>'
    yield f'<text class="s" x="24" y="{y + 14 + len(bars) * STEP + 12}">{below}</text>'


def chart() -> str:
    """The whole picture."""
    peers, policies = read("peers_coserve"), read("default_policy")
    day, other = peers["date"][:10], policies["date"][:10]
    traffic = (
        f"A chat every {1 / peers['rate']:.0f} s beside {peers['clients']} clients of best effort; "
        f"{peers['seconds']:.0f} s, one round, {day}; the mark is P95 alone. Model of 0.1 billion "
        "parameters, 2 cores."
    )
    panels = (
        ("Time to the first token, P95", traffic, of_servers(peers, "ttft_s")),
        ("Time between tokens, P95", "The same run.", of_servers(peers, "tpot_s")),
        (
            "Policies of weft: time to the first token beside best effort, over that alone (P95)",
            f"Built-in model, median (and range) over six loads, two rounds, {other}.",
            of_policies(policies, "ttft_ratio"),
        ),
    )
    lines, y = [], 36
    for title, below, bars in panels:
        lines += panel(title, below, bars, y)
        y += 14 + len(bars) * STEP + 52
    height = y - 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-labelledby="t">\n<title id="t">Latency of interactive requests beside best effort'
        f"</title>\n<style>{STYLE}</style>\n"
        f'<rect class="p" width="{WIDTH}" height="{height}" rx="14"/>'
    )
    return "\n".join([head, *lines, "</svg>"])


if __name__ == "__main__":
    print(chart())
