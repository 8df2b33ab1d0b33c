"""A minute of random clients on a real server: every answer right, nothing left, nothing grown."""

from __future__ import annotations

from soak import soak


def test_a_minute_of_random_clients():
    result = soak(1.0, seed=1)
    assert result["faults"] == []
    assert min(result["requests"].get(kind, 0) for kind in ("whole", "stream", "slow")) > 0
