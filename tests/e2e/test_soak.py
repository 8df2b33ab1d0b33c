"""Random clients and kills on a real server: every answer right, nothing left."""

from __future__ import annotations

import pytest

from depth import deep
from soak import soak

KINDS = ["engine", "standby", "frontend"]


@pytest.mark.parametrize(
    ("minutes", "every_s", "size"), [(0.15, 2.5, 12), pytest.param(1.0, 8.0, 40, marks=deep)]
)
def test_random_clients_and_kills(minutes, every_s, size):
    """Seconds of them, and in the deep tests a minute."""
    served = ("--frontends", "2", "--standby")
    result = soak(minutes, seed=1, kinds=KINDS, every_s=every_s, size=size, arguments=served)
    assert result["faults"] == []
    assert set(result["kills"]) == set(KINDS)
    assert min(result["requests"].get(kind, 0) for kind in ("whole", "stream", "slow")) > 0
