"""Costs measured in slices: what is put in comes out, no slice is long, no row is left behind."""

from __future__ import annotations

import random

import pytest
from costs import LinearCost

from weft.core.errors import ProfileError
from weft.cost.fit import ProfileKey
from weft.cost.model import step_time
from weft.cost.quick_profile import GROWTH, LONGEST_S, PASSES, SLICE_S, quick_profile
from weft.cost.steps import GroupRoom, StepRoom, mixed, work_of
from weft.cost.work import Work

KEY = ProfileKey("none", "model", "float32", "tp1", "none")
ROOM = StepRoom(32, 2048, 512, 16, 100, (GroupRoom(4096, None),))
EMPTY_S, MOVE_S, BLOCK_S = 1e-5, 2e-5, 3e-5


class Machine:
    """Runs plans in virtual time, as long as a cost model says."""

    def __init__(self, cost, noise: float = 0.0) -> None:
        self.cost, self.now, self.rows, self.longest_s = cost, 0.0, {}, 0.0
        self._noise, self._draw = noise, random.Random(1)

    def clock(self) -> float:
        return self.now

    def run(self, plans):
        return [self._one(plan) for plan in plans]

    def _one(self, plan) -> float:
        for row in plan.drop:
            del self.rows[row]
        for add in plan.add:
            assert add.row not in self.rows
            self.rows[add.row] = add
        work = Work()
        for batch in plan.batches:
            for row, start, count, samples in zip(
                batch.rows, batch.starts, batch.counts, batch.samples, strict=True
            ):
                assert row in self.rows
                work.add(start, count, samples)
        seconds = step_time(self.cost, [work]) if plan.batches else EMPTY_S
        seconds += sum(MOVE_S + BLOCK_S * move.num_blocks for move in plan.moves)
        seconds *= 1 + self._noise * self._draw.random()
        self.now += seconds
        return seconds


def measured(machine: Machine, seconds: float = 30.0):
    """The result of measuring, and the length of each slice."""
    slices, before = [], machine.now
    going = quick_profile(machine.run, ROOM, KEY, 2, seconds, machine.clock)
    while True:
        try:
            next(going)
        except StopIteration as end:
            return end.value, slices
        assert not machine.rows
        slices.append(machine.now - before)
        before = machine.now


def test_costs_come_out_as_they_were_put_in():
    cost = LinearCost(step_s=1e-3, token_s=2e-5, context_s=1e-8)
    (fitted, report), slices = measured(Machine(cost))
    for step in mixed(ROOM, 50, 7):
        want = step_time(cost, [work_of(step)])
        assert step_time(fitted, [work_of(step)]) == pytest.approx(want, rel=0.02)
    assert report["held_out"]["average"] > 0.98
    # Repetitions, and the step before them that does not count.
    assert max(slices) <= 2 * max(SLICE_S, LONGEST_S) + 1e-9


def test_noise_is_no_obstacle():
    cost = LinearCost(step_s=1e-3, token_s=2e-5, context_s=1e-8)
    (_, report), _ = measured(Machine(cost, noise=0.3))
    assert report["held_out"]["average"] > 0.85


def test_no_step_is_measured_that_takes_much_longer_than_a_token():
    cost = LinearCost(step_s=0.1, token_s=2e-3)
    machine = Machine(cost)
    (fitted, report), slices = measured(machine, seconds=60.0)
    single = step_time(cost, [work_of(((0, 1, False),))])
    # The next knot lies at most a third beyond, and a step is met once before it is known.
    assert max(slices) <= 2 * 2.5 * single * GROWTH + 1e-9
    assert report["knots"] < 20
    assert fitted.dense.at(1) == pytest.approx(single, rel=0.1)


def test_it_ends_in_time_after_the_first_pass():
    slow = Machine(LinearCost(step_s=0.02, token_s=1e-4))
    (_, report), _ = measured(slow, seconds=1.0)
    quick = Machine(LinearCost(step_s=1e-4, token_s=1e-6))
    (_, more), _ = measured(quick, seconds=1000.0)
    assert report["seconds"] < 60
    assert more["seconds"] < 1000
    assert PASSES > 1


def test_an_engine_without_room_says_so():
    tiny = StepRoom(1, 8, 8, 4, 100, (GroupRoom(4, None),))
    machine = Machine(LinearCost(1e-3, 1e-5))
    with pytest.raises(ProfileError, match="64 tokens in a sequence"):
        list(quick_profile(machine.run, tiny, KEY, 2, 1.0, machine.clock))
