"""Costs of overlapped sub-batches on a made-up machine: what is put in comes out, and decides."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from test_host_profiler import DEVICE, KEY, OPTIONS, ROOM, THERE, TRUE, Machine

from weft.core.errors import HostWorkerError, ProfileError
from weft.cost.curves import Grid
from weft.cost.fit import Fitted
from weft.cost.host_costs import HostCosts, OverlapCost
from weft.cost.host_profiler import profile_host
from weft.cost.overlap_fit import OverlapPoint, fit_overlap, predicted_s
from weft.cost.overlap_steps import Overlapping, OverlapStage, as_planned, at_random
from weft.cost.profile_report import format_report
from weft.cost.steps import StepRow
from weft.cost.work import Work
from weft.engine import profiling
from weft.engine.profiling import load_aware_splits, profiled_config
from weft.sched.balance import Balance, HostWork

GRID = Grid((1, 16), (16, 256), ((1e-4, 4e-4), (6e-4, 5e-3)))
COST = OverlapCost(5e-4, 1e-5, -3e-4, 4e-4, 0.2)
OVERLAPPED = replace(TRUE, attention=GRID, overlap=COST)
OVERLAPS = replace(ROOM, host=replace(THERE, overlaps=True))
NOT_CARRIED = replace(ROOM, host=replace(THERE, overlaps=True, carries=False))
LIMITS = 16, 256


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_costs_of_overlapping_are_found(noise):
    """Also where every tenth step is held up for long."""
    machine = Machine(OVERLAPPED, noise)
    costs, report = profile_host(machine, NOT_CARRIED, DEVICE, OPTIONS, load_aware_splits)
    assert not machine.ids  # nothing is left behind
    assert costs.overlap == pytest.approx(COST, rel=0.1, abs=2e-5)
    found = report["overlapped"]
    assert found["held_out"]["average"] > 0.97
    for kind in ("one", "two"):
        assert found[kind]["held_out"]["average"] > found[kind]["parts"]["average"] + 0.03
    held = [bool(point["second"]) for point in found["points"] if point["use"] == "held out"]
    assert held == [False, True] * 4
    assert "carried" not in report
    for decodes, context in ((1, 16), (2, 64), (8, 200)):
        assert costs.attention.at(decodes, decodes * context) == pytest.approx(
            GRID.at(decodes, decodes * context), rel=0.1
        )


@pytest.mark.parametrize(
    ("given", "scheduler"),
    [
        ({"host_threads": 1}, "load-aware"),
        ({"host_process": True}, "load-aware"),
        ({"host_threads": 1, "tensor_parallel": 2}, "slo-piggyback"),
        ({"host_threads": 1, "device": "cuda"}, "slo-piggyback"),
        ({"host_threads": 1, "scheduler": "slo-piggyback"}, "slo-piggyback"),
        ({}, "auto"),
    ],
)
def test_the_engine_that_is_measured_overlaps_where_it_can(given, scheduler, monkeypatch):
    monkeypatch.setattr(profiling, "pick_device", {"cpu": "cpu", "cuda": "cuda:0"}.__getitem__)
    config = profiled_config({"device": "cpu", "host_kv_memory": 2**22, **given})
    assert config.scheduler == scheduler


class Slow(Machine):
    """All that it does takes so many times as long as the profile of the device says."""

    def step(self, plan):
        seconds, result = super().step(plan)
        return 1.5 * seconds, result


def test_a_slow_phase_of_the_machine_is_not_taken_for_the_cost_of_overlapping():
    """Unlike steps that were held out, it is no part of what is fitted to."""
    costs, report = profile_host(Slow(OVERLAPPED), NOT_CARRIED, DEVICE, OPTIONS, load_aware_splits)
    assert costs.overlap == pytest.approx(COST, rel=0.3, abs=5e-5)
    points = report["overlapped"]["points"]
    for point in points:
        assert point["paced"] == pytest.approx(point["seconds"] / (1.5 if point["own"] else 1))
    fitted_to = [
        OverlapPoint(
            Overlapping(
                tuple(StepRow(*row) for row in point["own"]),
                tuple(point["first"]),
                tuple(point["second"]),
            ).works,
            point["paced"],
        )
        for point in points
        if point["use"] == "fitted"
    ]
    known = DEVICE.planned_with(replace(costs, overlap=OverlapCost()))
    assert fit_overlap(known, fitted_to) == costs.overlap


def test_the_report_says_how_overlapped_steps_are_predicted():
    _, found = profile_host(Machine(OVERLAPPED), OVERLAPS, DEVICE, OPTIONS, load_aware_splits)
    accuracy = {"average": 0.95, "p90": 0.92}
    report = {"fitted_steps": 1, "knots": 2, "repeats": 20, "host": found}
    report |= dict.fromkeys(("held_out", "fitted", "repeatability"), accuracy)
    words = format_report(report, KEY)
    assert "one sub-batch, held out" in words
    assert "two sub-batches, held out" in words
    assert f"us each, {found['overlapped']['cost']['row_s'] * 1e6:.1f} us a row" in words
    assert "on held-out steps with host rows" in words
    assert "on held-out overlapped sub-batches" in words
    bad = found["overlapped"] | {"held_out": {"average": 0.95, "p90": 0.9}}
    words = format_report(report | {"host": found | {"overlapped": bad}}, KEY)
    assert "the goal is NOT met on held-out overlapped sub-batches" in words


def test_nothing_is_measured_that_the_executor_cannot_do():
    machine = Machine(OVERLAPPED)
    costs, report = profile_host(machine, ROOM, DEVICE, OPTIONS, load_aware_splits)
    assert costs.overlap is None
    assert "overlapped" not in report
    assert machine.busy_s == 0.0


def test_a_host_that_fails_says_so():
    machine = Machine(OVERLAPPED)
    machine.fault = HostWorkerError("the kernel failed")
    with pytest.raises(ProfileError, match="the host failed: the kernel failed"):
        profile_host(machine, NOT_CARRIED, DEVICE, OPTIONS, load_aware_splits)


def test_steps_hold_what_they_are_to():
    stage = OverlapStage(Machine(OVERLAPPED), OVERLAPS)
    known = DEVICE.planned_with(OVERLAPPED)
    planned = as_planned(stage, OVERLAPS, LIMITS, 20, 3, partial(load_aware_splits, known))
    made = at_random(stage, OVERLAPS, LIMITS, 20, 3)
    assert len(planned) == len(made) == 20
    for steps in (planned, made):
        assert [bool(step.second) for step in steps] == [False, True] * 10
    for step in planned + made:
        contexts = (*step.first, *step.second)
        assert stage.holds_each(step.own, contexts)
        assert max(contexts) <= LIMITS[1]
        assert len(contexts) <= LIMITS[0]
        assert sum(work.tokens for work in step.works) <= OVERLAPS.tokens
        assert sum(work.host_context for work in step.works) == sum(contexts)
        assert step.own or step.first
    assert not all(step.own for step in made)


def test_a_host_that_no_scheduler_would_use_is_measured_as_well():
    slow = replace(OVERLAPPED, attention=Grid((1, 16), (16, 256), ((1.0, 4.0), (6.0, 50.0))))
    costs, report = profile_host(Machine(slow), NOT_CARRIED, DEVICE, OPTIONS, load_aware_splits)
    assert costs.attention.at(16, 16 * 200) == pytest.approx(slow.attention.at(16, 16 * 200), 0.1)
    held = [point for point in report["overlapped"]["points"] if point["use"] == "held out"]
    assert len(held) == 8
    assert report["overlapped"]["held_out"]["average"] > 0.97


def fitted_to(cost: OverlapCost, number: int = 60) -> list[OverlapPoint]:
    """Steps of a machine with these costs, every fifth held up."""
    draw = random.Random(5)
    points = []
    for index in range(number):
        own = (StepRow(64, 1),) * draw.randint(1, 30)
        contexts = tuple(draw.randint(16, 250) for _ in range(draw.randint(2, 16)))
        cut = draw.randrange(len(contexts)) if index % 2 else len(contexts)
        works = Overlapping(own, contexts[:cut], contexts[cut:]).works
        seconds = predicted_s(DEVICE.planned_with(OVERLAPPED), cost, works)
        points.append(OverlapPoint(works, seconds + (0.05 if index % 5 == 0 else 0.0)))
    return points


@pytest.mark.parametrize("cost", [COST, OverlapCost(), OverlapCost(-2e-4, 5e-5, 1e-3, 0.0, 0.5)])
def test_fits_recover_known_costs_in_spite_of_outliers(cost):
    found = fit_overlap(DEVICE.planned_with(OVERLAPPED), fitted_to(cost))
    assert found == pytest.approx(cost, rel=0.01, abs=1e-6)


@pytest.mark.parametrize("cost", [{"wait_s": -2e-4}, {"drag": -0.5}])
def test_no_wait_and_no_drag_is_below_zero(cost):
    (name,) = cost
    found = fit_overlap(DEVICE.planned_with(OVERLAPPED), fitted_to(COST._replace(**cost)))
    assert getattr(found, name) == 0.0


def test_fits_refuse_what_they_cannot_use():
    known = DEVICE.planned_with(OVERLAPPED)
    points = fitted_to(COST)
    with pytest.raises(ProfileError, match="two points"):
        fit_overlap(known, points[:1])
    with pytest.raises(ProfileError, match="took no time"):
        fit_overlap(known, [*points, points[0]._replace(seconds=0.0)])


def choice(overlap: OverlapCost | None):
    """What load-aware adds to eight decodes of the device, with these costs."""
    host = HostCosts(GRID, TRUE.out, TRUE.back, overlap=overlap)
    known: Fitted = DEVICE.planned_with(host)
    base = Work(tokens=8, sampled=8, decodes=8, decode_context=800)
    return Balance(known, 256).choose(base, HostWork([100] * 8, (), 200))


def test_the_scheduler_decides_by_the_costs_that_were_measured():
    """Costs of a second sub-batch, of rows and of waits each change what goes along."""
    cheap = choice(OverlapCost(0.0, 0.0, -2e-3, 0.0))
    assert cheap.second
    assert not choice(OverlapCost(0.0, 0.0, 5e-3, 0.0)).second
    dear = choice(OverlapCost(0.0, 1e-3, 0.0, 0.0))
    assert (dear.first, dear.second) == ((), ())
    assert choice(OverlapCost(0.0, 0.0, -2e-3, 0.0, 1.0)).rate < cheap.rate
    late = choice(OverlapCost(0.0, 0.0, -2e-3, 5e-4))
    assert 0 < len(late.second) < len(cheap.second)
