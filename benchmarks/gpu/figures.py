"""Figures and remarks as lines of JSON, which ``check.py`` reads."""

from __future__ import annotations

import json
from typing import Any

from goals import Goal, goal_of


def figure(
    name: str, value: float | str, unit: str = "", goal: float | None = None, better: str = ""
) -> bool:
    """Print a figure; return whether it misses its goal, whichever GPU that is meant for.

    Args:
        goal: a bound that it should reach, "more" or "less" being ``better``; if not given, that of
            ``goals.GOALS``.
    """
    found: dict[str, Any] = {"name": name, "value": value, "unit": unit}
    if goal is not None:
        found |= {"goal": goal, "better": better}
    elif (known := goal_of(name)) is not None:
        found |= {"goal": known.bound, "better": known.better}
        if known.gpu:
            found["gpu"] = known.gpu
    print(json.dumps(found), flush=True)
    if "goal" not in found or isinstance(value, str):
        return False
    return not Goal("", "", found["goal"], found["better"]).reached(value)


def note(text: str) -> None:
    """Print a remark that belongs into the table, such as what could not be measured and why."""
    print(json.dumps({"note": text}), flush=True)
