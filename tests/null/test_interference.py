"""Halves of a step on a made-up machine: the speeds that are put in come out, and decide."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import ProfileError
from weft.core.plan import StepPlan
from weft.core.types import Sequence
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted, ProfileKey
from weft.cost.interference import Interference, Speeds, ridge_tokens, side_by_side
from weft.cost.interference_profiler import halved_steps, profile_interference
from weft.cost.model import step_time
from weft.cost.options import ProfileOptions
from weft.cost.profile_report import format_report
from weft.cost.steps import GroupRoom, StepRoom
from weft.cost.work import Work
from weft.sched.batch import BatchBuilder
from weft.sched.halves import Halves, Measured

KEY = ProfileKey("a made-up machine", "none", "fp32", "tp1", "all=made-up")
ROOM = StepRoom(256, 2048, 1024, 16, 100, (GroupRoom(20_000, None),))
# The weights are read in 4 ms; from 250 tokens on each token takes 16 us.
DENSE = Curve((1, 250, 1024), (4e-3, 4e-3, 4e-3 + 774 * 16e-6))
COSTS = dict.fromkeys(FEATURES, 0.0) | {"decode_context": 1e-7, "prefill_area": 1e-9}
DEVICE = Fitted(KEY, 4, DENSE, COSTS)
TRUE = (
    Speeds(16, 0.9, 0.4, 0.6, 1e-4),
    Speeds(66, 0.8, 0.7, 0.95, 1e-4),
    Speeds(0, 0.45, 0.5, 1.0, 2e-4),
)
OPTIONS = ProfileOptions()


class Machine:
    """Takes the time that the speeds say, at the limit that is set."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise, self.draw, self.speeds = noise, random.Random(3), TRUE[-1]

    def limit(self, programs: int) -> None:
        (self.speeds,) = (speeds for speeds in TRUE if speeds.programs == programs)

    def run(self, plans: list[StepPlan]) -> list[float]:
        return [self.step([Work.of(batch) for batch in plan.batches]) for plan in plans]

    def step(self, works: list[Work]) -> float:
        if not works:
            return 1e-4
        took = step_time(DEVICE, works) if len(works) == 1 else self.speeds.halves_s(DEVICE, works)
        return took * self.draw.uniform(1, 1 + self.noise)


def measured(noise: float = 0.0):
    machine = Machine(noise)
    limits = [speeds.programs for speeds in TRUE]
    return profile_interference(machine.run, ROOM, DEVICE, machine.limit, limits, OPTIONS)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_speeds_are_found(noise) -> None:
    found, report = measured(noise)
    for speeds, true, row in zip(found.at, TRUE, report["limits"], strict=True):
        assert speeds.programs == true.programs
        assert speeds[1:4] == pytest.approx(true[1:4], abs=0.02 + 3 * noise)
        assert speeds.second_s == pytest.approx(true.second_s, abs=1e-5 + 0.05 * noise)
        assert row["held_out"]["average"] > 0.99 - noise
    assert found.chosen.programs == 66
    assert 1.3 < found.chosen.gain == report["gain"] < 2 / (1 / 0.8 + (1 - 0.7 / 0.8) / 0.95)


def test_the_report_says_what_halves_gain() -> None:
    _, found = measured()
    accuracy = {"average": 0.95, "p90": 0.92}
    report = {"fitted_steps": 1, "knots": 2, "repeats": 20, "interference": found}
    report |= dict.fromkeys(("held_out", "fitted", "repeatability"), accuracy)
    words = format_report(report, KEY)
    assert "at most 66" in words
    assert "steps are split where that gains: with 66 programs they take" in words
    found["gain"] = 1.02
    assert "steps run whole" in format_report(report, KEY)
    report["interference"] = {"problem": "Halves of steps were not measured."}
    assert "Halves of steps were not measured." in format_report(report, KEY)


def test_an_engine_without_room_for_such_steps_is_told() -> None:
    with pytest.raises(ProfileError, match="too little arithmetic or too little attention"):
        halved_steps(replace(ROOM, rows=2, tokens=32, longest=64), DEVICE)


def test_a_profile_keeps_what_was_measured(tmp_path) -> None:
    """Also when it is measured again without halves; an old file has none."""
    path, interference = tmp_path / "profile.json", Interference(TRUE)
    replace(DEVICE, interference=interference).save(path)
    DEVICE.save(path)
    assert Fitted.load(path).interference == interference
    read = json.loads(path.read_text())
    del read["interference"]
    path.write_text(json.dumps(read))
    assert Fitted.load(path).interference is None
    read["interference"] = [{**TRUE[0]._asdict(), "dense": 0}]
    path.write_text(json.dumps(read))
    with pytest.raises(ProfileError, match="must be shares above 0"):
        Fitted.load(path)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 1), st.floats(0.1, 1))
def test_what_runs_side_by_side_takes_no_less_than_either(compute, memory, dense, attention):
    both = side_by_side(compute, memory, dense, attention)
    assert both >= max(compute, memory) * (1 - 1e-9)
    assert both <= compute / dense + memory / attention
    assert side_by_side(compute, memory, 1.0, 1.0) == pytest.approx(max(compute, memory))


def test_the_ridge_is_where_tokens_take_what_the_weights_do() -> None:
    assert ridge_tokens(DENSE) == pytest.approx(250, abs=1)
    assert ridge_tokens(Curve((1, 1024), (4e-3, 4e-3))) is None


# -- what is split ---------------------------------------------------------------------------------


def step_of(prompts: list[int], contexts: list[int]) -> BatchBuilder:
    """A step of decodes with these contexts, then prompts."""
    step = BatchBuilder(4096)
    for row, (start, count) in enumerate([*((n, 1) for n in contexts), *((0, n) for n in prompts)]):
        step.sequences.append(Sequence.__new__(Sequence))
        step.rows.append(row)
        step.starts.append(start)
        step.counts.append(count)
        step.samples.append(True)
    return step


FASTER = replace(DEVICE, coefficients=COSTS | {"decode_context": 2e-8})  # reads of KV
SIZES = (128, 256, 384, 512)
RULE = Halves(SIZES, 256, Measured(FASTER, TRUE[1]))


def works_of(step: BatchBuilder, cut: int) -> list[Work]:
    works = []
    for part in (slice(cut), slice(cut, None)):
        work = Work()
        for start, count in zip(step.starts[part], step.counts[part], strict=True):
            work.add(start, count)
        works.append(work)
    return works


def gain_of(works: list[Work]) -> float:
    whole = step_time(FASTER, [works[0].joined(works[1])])
    return whole / TRUE[1].halves_s(FASTER, works)


def test_padding_counts_against_halves() -> None:
    """Which is more than the gain here, though not without it."""
    contexts = [1500] * 258
    padded = Halves((384, 512), 256, Measured(FASTER, TRUE[1]))
    exact = Halves((), 256, Measured(FASTER, TRUE[1]))
    assert padded.split(step_of([60], contexts)) == 259
    assert exact.split(step_of([60], contexts)) < 259


def test_prompts_hide_the_attention_of_decodes() -> None:
    step = step_of([800], [2000] * 200)
    before = dict(zip(step.rows, step.starts, strict=True))
    cut = RULE.split(step)
    first, second = works_of(step, cut)
    assert first.prefills == 1
    assert second.prefills == 0
    assert second.decodes >= 100
    assert first.decodes + second.decodes == 200
    assert dict(zip(step.rows, step.starts, strict=True)) == before  # in another order
    assert gain_of([first, second]) > 1.2


def test_decodes_are_dealt_out_evenly() -> None:
    """Above the ridge, to sizes that are captured, with half of the reads each."""
    step = step_of([], [200 + 40 * (i % 60) for i in range(512)])
    cut = RULE.split(step)
    first, second = works_of(step, cut)
    assert cut == 256
    assert first.decode_context == pytest.approx(second.decode_context, rel=0.05)


@pytest.mark.parametrize(
    ("prompts", "contexts"),
    [
        ([], [2000] * 200),  # below the ridge, where halves read all weights twice
        ([800], []),  # nothing but arithmetic
        ([400, 400], []),
        ([800], [16] * 100),  # hardly any reads
        ([], [16] * 512),
        ([], []),
        ([600], [0]),
    ],
)
def test_steps_that_gain_nothing_run_whole(prompts, contexts) -> None:
    step = step_of(prompts, contexts)
    rows = list(step.rows)
    assert RULE.split(step) == len(rows)
    assert step.rows == rows


def test_a_gain_below_3_per_cent_splits_nothing() -> None:
    step, slow = step_of([800], [2000] * 200), Speeds(0, 0.5, 0.51)
    assert Halves(SIZES, 256, Measured(FASTER, slow)).split(step) == 201
    assert Halves(SIZES, 256, Measured(FASTER, slow._replace(attention=0.8))).split(step) < 201


def test_unmeasured_every_large_step_is_split() -> None:
    rule = Halves(SIZES, 256, None)
    assert rule.split(step_of([800], [16] * 10)) == 1
    assert rule.split(step_of([], [16] * 256)) == 128
    assert rule.split(step_of([], [16] * 255)) == 255
    assert rule.split(step_of([800], [])) == 1


@given(
    st.lists(st.integers(1, 900), max_size=3),
    st.lists(st.integers(1, 2047), max_size=400),
    st.booleans(),
)
def test_no_row_is_lost_whatever_the_step(prompts, contexts, known) -> None:
    step = step_of(prompts, contexts)
    rows = sorted(zip(step.rows, step.starts, step.counts, strict=True))
    rule = Halves(SIZES, 256, Measured(FASTER, TRUE[1]) if known else None)
    cut = rule.split(step)
    assert sorted(zip(step.rows, step.starts, step.counts, strict=True)) == rows
    assert 0 < cut <= len(rows) or not rows
    if cut < len(rows) and known:
        assert gain_of(works_of(step, cut)) > 1.03


def test_prompts_are_dealt_out_where_either_half_then_has_work_for_its_weights() -> None:
    """Decodes alone would read the weights for too few tokens."""
    step = step_of([400, 380], [2000] * 100)
    cut = RULE.split(step)
    first, second = works_of(step, cut)
    assert first.prefills == second.prefills == 1
    assert first.tokens > 250 < second.tokens
    assert first.decodes + second.decodes == 100
