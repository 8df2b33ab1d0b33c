"""A minute of random clients and kills on a real server: every answer right, nothing left."""

from __future__ import annotations

from soak import soak

KINDS = ["engine", "standby", "frontend"]


def test_a_minute_of_random_clients_and_kills():
    served = ("--frontends", "2", "--standby")
    result = soak(1.0, seed=1, kinds=KINDS, every_s=8.0, arguments=served)
    assert result["faults"] == []
    assert set(result["kills"]) == set(KINDS)
    assert min(result["requests"].get(kind, 0) for kind in ("whole", "stream", "slow")) > 0
