"""Keeps what a run of the parts finds, so that no end of it loses a figure.

``figures.jsonl`` gets a line for each figure, remark, beginning and end of a part, at once.
``summary.json`` is replaced as a whole at each of them. A later run with ``--skip-done`` reads the
lines and goes on.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from running import Outcome

import report

LINES, SUMMARY = "figures.jsonl", "summary.json"
MOST_FIGURES = 1000  # of a part: more are garbage
LONGEST_NAME = 200
STAND_IN = "stand-in"  # in place of figures that were not measured on a GPU


def read_line(line: str) -> dict[str, Any] | None:
    """The figure or remark that a line of output states, or None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if isinstance(found.get("note"), str):
        return {"note": found["note"][:500]}
    name, value = found.get("name"), found.get("value")
    if not isinstance(name, str) or isinstance(value, bool) or len(name) > LONGEST_NAME:
        return None
    if not isinstance(value, int | float | str):
        return None
    goal = found.get("goal")
    if goal is not None and (isinstance(goal, bool) or not isinstance(goal, int | float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        found["value"] = str(value)  # which JSON has not
    keys = ("name", "value", "unit", "goal", "better", "gpu")
    return {key: found[key] for key in keys if key in found}


class Journal:
    """The lines and the summary of a folder.

    Args:
        dry: figures are replaced, as what a stand-in measures says nothing.
        earlier: the lines of another folder; what passed there counts as done.
    """

    def __init__(self, folder: Path, *, dry: bool, earlier: Path | None = None) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._folder, self._dry = folder, dry
        self._started = time.monotonic()
        self.done: dict[str, Outcome] = {}  # parts that passed in an earlier run here
        path = folder / LINES
        text = path.read_text(errors="replace") if path.exists() else ""
        self._read((earlier.read_text(errors="replace") + "\n" if earlier else "") + text)
        self._lines = path.open("a")
        if text and not text.endswith("\n"):  # a run that was killed while it wrote
            self._lines.write("\n")

    def take(self, outcome: Outcome, line: str) -> bool:
        """Keep the figure or remark of a line; return whether it is one."""
        found = read_line(line)
        if found is None or len(outcome.figures) + len(outcome.notes) >= MOST_FIGURES:
            return False
        if "note" in found:
            outcome.notes.append(found["note"])
        else:
            if self._dry:
                found["value"] = STAND_IN
            outcome.figures.append(found)
        self._write(outcome, found)
        return True

    def begin(self, outcome: Outcome, limit_s: float) -> None:
        self.outcomes[outcome.name] = outcome
        begun = {"begins": True, "limit_s": round(limit_s, 1)}
        self._write(outcome, begun | ({"dry": True} if self._dry else {}))

    def end(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        ended = {"status": outcome.status, "seconds": round(outcome.seconds, 1)}
        self._write(outcome, ended | ({"why": outcome.why} if outcome.why else {}))

    def figures(self) -> list[dict[str, Any]]:
        """All figures of all parts."""
        return [figure for outcome in self.outcomes.values() for figure in outcome.figures]

    def _write(self, outcome: Outcome, found: Mapping[str, Any]) -> None:
        at = round(time.monotonic() - self._started, 2)
        self._lines.write(json.dumps({"at_s": at, "part": outcome.name, **found}) + "\n")
        self._lines.flush()
        self.save()

    def save(self) -> None:
        """Replace the summary, so that a reader finds an old one or a new one."""
        unfinished = self._folder / f"{SUMMARY}.{os.getpid()}"
        parts = [vars(outcome) for outcome in self.outcomes.values()]
        report.save(unfinished, stand_in=self._dry, parts=parts)
        unfinished.replace(self._folder / SUMMARY)

    def _read(self, text: str) -> None:
        """Find what passed before; lines that are cut off or not of this journal do not count."""
        found: dict[str, Outcome] = {}
        alike: dict[str, bool] = {}  # a dry run says nothing to another one
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                name = entry["part"]
            except (ValueError, TypeError, KeyError):
                continue
            if entry.get("begins"):
                found[name] = Outcome(name)
                alike[name] = bool(entry.get("dry")) == self._dry
            outcome = found.setdefault(name, Outcome(name))
            if "status" in entry:
                outcome.status, outcome.seconds = entry["status"], entry.get("seconds", 0.0)
            elif (known := read_line(line)) is not None:
                if "note" in known:
                    outcome.notes.append(known["note"])
                else:
                    outcome.figures.append(known)
        passed = {name for name, each in found.items() if each.status == "passed"}
        self.done = {name: found[name] for name in passed if alike.get(name)}
