"""The request side over a memory that delays and reorders what was not flushed."""

from __future__ import annotations

import json
import subprocess

import pytest

EPISODES = 2000


def run(program, seed: int, *broken: str) -> subprocess.CompletedProcess[str]:
    words = [str(program), str(seed), str(EPISODES), *broken]
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
    ["flush-payload", "flush-piece", "flush-word", "read-records", "read-end", "read-words"],
)
def test_a_missing_flush_or_read_is_found(build, broken):
    done = run(build("delayed"), 1, broken)
    assert done.returncode == 1
    assert done.stderr
