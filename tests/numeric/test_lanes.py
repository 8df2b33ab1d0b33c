"""Rows whose attention the host computes, in the lanes of captured steps: the tokens of an engine
that has room on the device.

The device is the host, and a captured function sees nothing but what was uploaded. Courier and host
worker are real threads, so that results arrive in the middle of steps, too.
"""

from __future__ import annotations

import pytest
from graphed import LANES, use_graphs
from test_piggybacked_rows import (
    FAMILIES,
    Dawdler,
    Sluggard,
    assert_same_as_ample,
    folders,  # noqa: F401
    host,  # noqa: F401
)

from depth import deep
from weft.exec.lane_rows import LaneRows


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    use_graphs(monkeypatch)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=deep), pytest.param(3, marks=deep)])
@pytest.mark.parametrize(
    ("family", "host"),
    [*((name, None) for name in FAMILIES), ("gemma3", Dawdler), ("llama-gqa", Sluggard)],
    indirect=["host"],
)
def test_attention_on_the_host_changes_no_token(folders, family, seed, monkeypatch) -> None:  # noqa: F811
    begun, carry = [], LaneRows.carry

    def watched(self, plan, output):
        carried = carry(self, plan, output)
        begun.append(0 if carried is None else len(carried.begun))
        return carried

    monkeypatch.setattr(LaneRows, "carry", watched)
    assert_same_as_ample(folders[family], FAMILIES[family], seed, monkeypatch)
    assert max(begun) <= LANES
