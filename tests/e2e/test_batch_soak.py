"""Random kills while batches and clients are answered: each line once, with the same text."""

from __future__ import annotations

from batch_soak import KINDS, batch_soak

KILLS, LINES = 10, 40


def test_kills_at_random_lose_and_repeat_nothing():
    """The short form; tools/deep.py runs the long one."""
    result = batch_soak(KILLS, LINES, seed=2, modelled=True)
    assert result["faults"] == []
    assert sum(result["kills"].values()) == KILLS
    assert set(result["kills"]) == set(KINDS)
