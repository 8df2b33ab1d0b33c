"""Counts of several request planes: summed on every page, and kept when one of them dies."""

from __future__ import annotations

import os
import signal
import time

import pytest

from weft.server.counts import MAX_USES, OTHERS, Board, Counts, Use, create_board
from weft.server.metrics import Metrics
from weft.server.probe import NoProbe


@pytest.fixture
def memory():
    fd = create_board(3)
    yield fd
    os.close(fd)


def plane(memory: int, number: int) -> Metrics:
    metrics = Metrics("m", NoProbe())
    metrics.share(Board(memory, number))
    return metrics


def busy(metrics: Metrics, times: int) -> None:
    metrics.prompt_tokens += 10 * times
    metrics.running += times
    metrics.finished["stop"] += times
    metrics.rejected["engine_busy"] += times
    place = metrics.place_of("flex")
    metrics.latencies_of(place).time_to_first_token.observe(0.03, times)
    metrics.use("alice", "batch", Use(times, 10 * times, times))


def lines(metrics: Metrics) -> dict[str, float]:
    page = metrics.render().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in page if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_every_page_has_the_sum(memory):
    planes = [plane(memory, number) for number in range(3)]
    for times, metrics in enumerate(planes, 1):
        busy(metrics, times)
        metrics.show()
    pages = [lines(metrics) for metrics in planes]
    assert pages[0] == pages[1] == pages[2]
    one = pages[0]
    assert one['weft:prompt_tokens_total{model_name="m"}'] == 60
    assert one['weft:num_requests_running{model_name="m"}'] == 6
    assert one['weft:request_success_total{finished_reason="stop",model_name="m"}'] == 6
    assert one['weft:request_rejected_total{model_name="m",reason="engine_busy"}'] == 6
    labels = 'model_name="m",service_class="flex"'
    bucket = 'weft:time_to_first_token_seconds_bucket{le="%s",%s}'
    assert (one[bucket % (0.02, labels)], one[bucket % (0.04, labels)]) == (0, 6)
    assert one[f"weft:time_to_first_token_seconds_sum{{{labels}}}"] == pytest.approx(0.18)
    other = labels.replace("flex", "interactive")
    assert one[f"weft:time_to_first_token_seconds_count{{{other}}}"] == 0
    labels = 'key="alice",model_name="m",service_class="batch"'
    used = [f"weft:key_{name}_total" for name in ("requests", "prompt_tokens", "generation_tokens")]
    assert [one[f"{name}{{{labels}}}"] for name in used] == [6, 60, 6]


def test_keys_on_the_board_are_bounded_and_none_is_lost(memory):
    first, second = plane(memory, 0), plane(memory, 1)
    for number in range(MAX_USES + 100):
        first.use(f"{number:x}".rjust(64, "k"), "batch", Use(10**9, 10**12, 10**12))
    first.show()
    found = second.total().usage
    assert len(found) == MAX_USES + 1
    assert found[f"{first.place_of('batch')} {OTHERS}"] == Use(100 * 10**9, 10**14, 10**14)
    assert len(first.uses()) == MAX_USES + 100  # the store of usage has each


def test_a_page_counts_its_own_at_once(memory):
    first, second = plane(memory, 0), plane(memory, 1)
    busy(first, 2)
    assert lines(first)['weft:prompt_tokens_total{model_name="m"}'] == 20
    assert lines(second)['weft:prompt_tokens_total{model_name="m"}'] == 0


def test_a_successor_goes_on_but_has_nothing_running(memory):
    dead, other = plane(memory, 0), plane(memory, 1)
    busy(dead, 2)
    dead.show()
    successor = plane(memory, 0)
    successor.show()
    for metrics in (successor, other):
        assert lines(metrics)['weft:prompt_tokens_total{model_name="m"}'] == 20
        assert lines(metrics)['weft:num_requests_running{model_name="m"}'] == 0


def test_who_writes_signs(memory):
    metrics, supervisor = plane(memory, 1), Board(memory, 1)
    supervisor.sign(0)  # nobody has begun
    before = time.monotonic_ns()
    metrics.show()
    assert before <= supervisor.signed_ns() <= time.monotonic_ns()
    assert Board(memory, 0).signed_ns() == 0
    supervisor.sign(0)
    assert supervisor.read_own()["prompt_tokens"] == 0


def test_a_writer_that_is_killed_leaves_what_was_valid(memory):
    """A child shows ever more tokens until it is killed: what is read always makes sense."""
    for _ in range(20):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            board, counts = Board(memory, 1), Counts()
            while True:
                counts.prompt_tokens += 1
                counts.generation_tokens += 1
                board.write(counts)
                os.write(write_end, b".")
        os.read(read_end, 1)
        reader = Board(memory, 0)
        before = 0
        for _ in range(50):
            (found, _) = reader.read_others()
            assert found["prompt_tokens"] == found["generation_tokens"] >= before
            before = found["prompt_tokens"]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
        os.close(write_end)
        (found, nothing) = reader.read_others()
        assert found["prompt_tokens"] == found["generation_tokens"] >= before
        assert nothing == {}
