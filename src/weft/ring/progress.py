"""Detects whether an engine makes progress, from successive reads of its info page."""

from __future__ import annotations

from collections.abc import Mapping


class Progress:
    """Follows an engine by looks at its info page, which should be seconds apart at the most."""

    def __init__(self) -> None:
        self._steps = -1
        self._ahead_s = 0.0

    def look(self, info: Mapping[str, int]) -> float:
        """When it last made a step or had nothing to do, in seconds on the monotonic clock."""
        if info["steps"] != self._steps or not info["waiting"] + info["running"]:
            self._steps, self._ahead_s = info["steps"], info["updated_ns"] / 1e9
        return self._ahead_s
