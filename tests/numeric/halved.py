"""Engines whose steps are computed in two halves, on a device that runs branches in any order."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from graphed import graph_executor, use_graphs

from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted, ProfileKey
from weft.cost.interference import Speeds
from weft.engine.halves import HalvesChoice
from weft.exec.captured import CapturedSteps
from weft.sched.halves import Halves, Measured

SIZES = (4, 8, 16)
LEAST = 4
# As if halves hid all that they can, and reading weights took no time.
ALL_HIDDEN = Measured(
    Fitted(
        ProfileKey("", "", "", "", ""),
        6,
        Curve((1, 1000), (1e-3, 1.0)),
        dict.fromkeys(FEATURES, 0.0) | {"decode_context": 1e-3},
    ),
    Speeds(0, 1.0, 1.0),
)


def use_halves(
    monkeypatch: pytest.MonkeyPatch,
    seed: int | None = None,
    least: int = LEAST,
    measured: Measured | None = None,
) -> Counter[str]:
    """Have every engine that is built from now on split each step that it can.

    Args:
        seed: of the order in which the device runs branches.
        least: tokens of a step that is split.
        measured: what says which ones; None for each that can be.

    Returns:
        counts of split steps by kind, as they come: ``captured``, ``uncaptured``, ``mixed`` for
        those with prompts.
    """
    use_graphs(monkeypatch)
    monkeypatch.setattr("weft.engine.build.make_executor", partial(graph_executor, seed=seed))
    choice = HalvesChoice("split", SIZES, None, Halves(SIZES, least, measured))
    monkeypatch.setattr("weft.engine.build.choose_halves", lambda *_: choice)
    found, overlapped = Counter[str](), CapturedSteps.overlapped

    def watched(self: CapturedSteps, packed: Any, *given: Any) -> int:
        of = packed.overlapped
        known = (of.sizes, of.max_query_len) in self.overlapped_graphs and of.captured
        found["captured" if known else "uncaptured"] += 1
        found["mixed"] += of.max_query_len is None
        return overlapped(self, packed, *given)

    monkeypatch.setattr(CapturedSteps, "overlapped", watched)
    return found
