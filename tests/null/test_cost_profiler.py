"""The profiler on made-up machines: its measurements and its reported errors."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from weft.core.errors import ConfigError
from weft.core.plan import StepPlan
from weft.cost.fit import Fitted, ProfileKey
from weft.cost.options import ProfileOptions
from weft.cost.profile_report import format_report
from weft.cost.profiler import profile
from weft.cost.steps import GroupRoom, Stage, StepRoom, StepRow, mixed, structured, work_of
from weft.cost.work import Work

KEY = ProfileKey("a made-up machine", "none", "fp32", "tp1", "all=made-up")
ROOM = StepRoom(16, 512, 256, 16, 100, (GroupRoom(400, None), GroupRoom(120, 64)))


class Machine:
    """Keeps rows and blocks as an executor does, and takes the time that a formula says."""

    def __init__(self, seconds, noise: float = 0.0) -> None:
        self.seconds = seconds
        self.noise = noise
        self.draw = random.Random(5)
        self.rows: dict[int, tuple] = {}
        self.written: set[tuple[int, int]] = set()

    def run(self, plans: Seq[StepPlan]) -> list[float]:
        return [self.step(plan) for plan in plans]

    def step(self, plan: StepPlan) -> float:
        for row in plan.drop:
            del self.rows[row]
        for add in plan.add:
            assert add.row not in self.rows
            self.rows[add.row] = add.tables
            assert len(add.tokens) == add.num_prompt <= ROOM.longest
        work = Work()
        for batch in plan.batches:
            assert batch.num_tokens <= ROOM.tokens
            for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
                self.read(row, start, count)
            work = Work.of(batch)
        return self.seconds(work) * self.draw.gauss(1, self.noise)

    def read(self, row: int, start: int, count: int) -> None:
        """Every block that attention sees is there and, once filled, was written before."""
        for number, (table, group) in enumerate(zip(self.rows[row], ROOM.groups, strict=True)):
            first = 0 if group.window is None else max(0, start + 1 - group.window)
            for position in range(first, start + count):
                block = table[position // ROOM.block_size]
                assert 0 <= block < group.num_blocks
                if position >= start:
                    self.written.add((number, block))
                else:
                    assert (number, block) in self.written


def plain(work: Work) -> float:
    return (
        1e-3
        + 2e-5 * work.tokens
        + 1e-9 * work.prefill_area
        + 3e-8 * work.decode_context
        + 1e-5 * work.decodes
        + 2e-5 * work.sampled
    )


OPTIONS = ProfileOptions(repeats=20, steps=20)


def test_a_machine_of_the_models_form_is_found_exactly(tmp_path):
    machine = Machine(plain)
    fitted, report = profile(machine.run, ROOM, KEY, 4, OPTIONS)
    assert not machine.rows  # nothing is left behind
    assert report["held_out"]["average"] == pytest.approx(1, abs=1e-3)
    assert report["repeatability"] == pytest.approx({"average": 1, "p90": 1})
    assert "the goal is met" in format_report(report, KEY)
    fitted.save(tmp_path / "p.json", report)
    assert Fitted.load(tmp_path / "p.json", KEY) == fitted


def test_noise_shows_in_what_the_machine_repeats():
    fitted, report = profile(Machine(plain, noise=0.05).run, ROOM, KEY, 4, OPTIONS)
    assert 0.97 < report["repeatability"]["average"] < 0.999
    assert report["held_out"]["average"] > 0.94
    assert fitted.coefficients["decode_context"] == pytest.approx(3e-8, rel=0.3)


def test_what_the_model_has_no_term_for_is_reported_as_missed():
    def strange(work: Work) -> float:
        return plain(work) * (1 if work.tokens % 2 else 2)

    _, report = profile(Machine(strange).run, ROOM, KEY, 4, OPTIONS)
    assert report["repeatability"]["average"] == 1
    assert report["held_out"]["average"] < 0.9
    assert "NOT met" in format_report(report, KEY)
    assert "when it is quiet" not in format_report(report, KEY)
    restless = report | {"repeatability": {"average": 0.9, "p90": 0.8}}
    assert "when it is quiet" in format_report(restless, KEY)


def test_steps_fit_the_room_and_differ():
    for step in [*structured(ROOM), *mixed(ROOM, 200, 1)]:
        assert ROOM.holds(step)
        assert work_of(step).tokens == sum(row.tokens for row in step)
    assert len(set(structured(ROOM))) == len(structured(ROOM))
    assert mixed(ROOM, 20, 1) == mixed(ROOM, 20, 1) != mixed(ROOM, 20, 2)
    assert ROOM.share(0.25).groups == (GroupRoom(128, None), GroupRoom(120, 64))
    assert ROOM.share(0).groups == (GroupRoom(32, None), GroupRoom(32, 64))
    assert not ROOM.holds(())
    assert not ROOM.holds((StepRow(500, 20),))
    assert not ROOM.holds((StepRow(0, 257),))
    assert not ROOM.holds((StepRow(5, 1),) * 17)
    assert not ROOM.holds((StepRow(500, 1),) * 13)


def test_the_first_repetition_does_not_count():
    machine = Machine(plain)
    stage = Stage(machine.run, ROOM)
    stage.fill()
    assert stage.measure((StepRow(9, 1),), 7) == [plain(work_of((StepRow(9, 1),)))] * 7


def test_long_steps_are_repeated_less_often():
    for seconds, repeats, run in ((0.08, 7, 1 + 1 + 1 + 7), (0.12, 1, 1 + 1 + 1)):
        calls = []

        def time_of(work, seconds=seconds, calls=calls):
            calls.append(work)
            return seconds

        stage = Stage(Machine(time_of).run, ROOM)
        stage.fill()
        calls.clear()
        assert stage.measure((StepRow(0, 16, False),), 7) == [seconds] * repeats
        assert len(calls) == run, "one that seats the rows, and those that do not count"


def test_rooms_too_small_to_measure_in_are_refused():
    small = StepRoom(1, 512, 256, 16, 100, (GroupRoom(400, None),))
    with pytest.raises(ConfigError, match="two rows"):
        profile(Machine(plain).run, small, KEY, 4, OPTIONS)
    with pytest.raises(ConfigError, match="repeats"):
        ProfileOptions(repeats=19)
