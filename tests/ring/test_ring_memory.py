"""The request side over a memory that delays and reorders what was not flushed."""

from __future__ import annotations

import json
import subprocess

import pytest

EPISODES = 2000


def run(program, seed: int) -> subprocess.CompletedProcess[str]:
    words = [str(program), str(seed), str(EPISODES)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_requests_survive_delays_and_reordering(build):
    program = build("delayed")
    for seed in range(1, 6):
        done = run(program, seed)
        assert done.returncode == 0, done.stderr
        tally = json.loads(done.stdout)
        assert tally["requests"] > EPISODES
        assert tally["tokens"] > 100 * EPISODES
        assert tally["cancelled"] > 0


@pytest.mark.parametrize(
    "broken",
    ["DROP_FLUSH=1", "DROP_FLUSH=2", "DROP_FLUSH=3", "DROP_READ=1", "DROP_READ=2", "DROP_READ=3"],
)
def test_a_missing_flush_or_read_is_found(build, broken):
    """Behind payload, behind the place of a piece, behind words; of records, ends and words."""
    done = run(build("delayed", f"-D{broken}"), 1)
    assert done.returncode == 1
    assert done.stderr
