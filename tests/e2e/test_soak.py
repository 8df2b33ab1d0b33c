"""A minute of random clients and kills on a real server: every answer right, nothing left."""

from __future__ import annotations

from soak import soak


def test_a_minute_of_random_clients_and_kills():
    result = soak(1.0, seed=1, kinds=["engine", "frontend"], arguments=("--frontends", "2"))
    assert result["faults"] == []
    assert result["kills"]
    assert min(result["requests"].get(kind, 0) for kind in ("whole", "stream", "slow")) > 0
