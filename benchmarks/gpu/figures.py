"""Figures as lines of JSON, which ``check.py`` reads."""

from __future__ import annotations

import json
from typing import Any


def figure(
    name: str, value: float, unit: str = "", goal: float | None = None, better: str = ""
) -> None:
    """Print a figure; ``goal`` is a bound that it should reach, "more" or "less" being better."""
    found: dict[str, Any] = {"name": name, "value": value, "unit": unit}
    if goal is not None:
        found |= {"goal": goal, "better": better}
    print(json.dumps(found), flush=True)
