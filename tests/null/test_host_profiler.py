"""Costs of a host tier on a made-up machine: what is put in comes out, and no row stays behind."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from costs import LinearCost

from weft.core.errors import ConfigError, HostWorkerError, ProfileError
from weft.core.plan import StepPlan, StepResult, Tier
from weft.cost.carried import carried_s
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted, ProfileKey
from weft.cost.host_costs import CarryCost, HostCosts, MoveCost
from weft.cost.host_fit import CarryPoint, MovePoint, fit_carry, fit_move
from weft.cost.host_profiler import beside_step, grid_of, profile_host
from weft.cost.host_steps import CarryStage, HostCounts, HostStage
from weft.cost.model import step_time
from weft.cost.options import ProfileOptions
from weft.cost.profile_report import format_report
from weft.cost.quick_profile import quick_host_profile
from weft.cost.steps import GroupRoom, HostRoom, StepRoom, StepRow
from weft.cost.work import Work
from weft.sim.piggyback import Piggyback

LAYERS = 3
KEY = ProfileKey("a made-up machine", "none", "fp32", "tp1", "all=made-up")
GROUPS = (GroupRoom(400, None), GroupRoom(120, 64))
THERE = HostRoom("1 thread of the engine", (GroupRoom(900, None), GroupRoom(700, 64)), True, 4096)
ROOM = StepRoom(24, 512, 256, 16, 100, GROUPS, THERE)
DEVICE = Fitted(
    KEY, LAYERS, Curve((1, 256), (1e-3, 6e-3)), {**dict.fromkeys(FEATURES, 0.0), "sampled": 1e-5}
)
TRUE = HostCosts(
    None, MoveCost(4e-5, 2e-7), MoveCost(6e-5, 3e-7), 1.0, False, CarryCost(3e-4, 2e-6)
)
JOB_S, CONTEXT_S = 2e-6, 1e-8
OPTIONS = ProfileOptions(repeats=20, steps=20)


class Attending(Piggyback):
    """Counts jobs and their round trips; those of a layer are computed in one call.

    A worker begins each call after the time that it takes to wake up.
    """

    jobs, busy_s, trips_s, wake_s = 0, 0.0, 0.0, 0.0

    def _call(self, host: int) -> None:
        self._free_at[host] = max(self._free_at[host], self._begins_s(host)) + self.wake_s
        begins_s = self._begins_s(host)
        super()._call(host)
        (call,) = (call for call in self._calls if call.number == self._count)
        self.jobs += len(call.rows)
        self.busy_s += call.back_s - begins_s
        self.trips_s += sum(call.back_s - self._rows[row].arrives_s for row in call.rows)


class Machine:
    """Keeps rows, tables and tiers as an executor does; takes the time that costs say."""

    def __init__(self, costs: HostCosts = TRUE, noise: float = 0.0) -> None:
        self.cost, self.now, self.draw, self.noise = DEVICE, 0.0, random.Random(3), noise
        self.host, self.ids = costs, dict[int, int]()
        self.tables: dict[int, tuple] = {}
        self.contexts: dict[int, int] = {}
        self.fault: Exception | None = None
        self.busy_s = 0.0  # with sub-batches that wait
        self.piggyback = Attending(LAYERS, lambda context: JOB_S + CONTEXT_S * context)

    def counted(self) -> HostCounts:
        worker = self.piggyback
        return HostCounts(worker.jobs, worker.busy_s + self.busy_s, worker.trips_s)

    def run(self, plans: Iterable[StepPlan]) -> list[float]:
        return [seconds for seconds, _ in self.follow(plans)]

    def follow(self, plans: Iterable[StepPlan]) -> Iterator[tuple[float, StepResult]]:
        """With one step in flight: the next plan is taken before a result is known."""
        waiting: list[tuple[float, StepResult]] = []
        for plan in plans:
            waiting.append(self.step(plan))
            if len(waiting) > 1:
                yield waiting.pop(0)
        yield from waiting

    def step(self, plan: StepPlan) -> tuple[float, StepResult]:
        self.now = self.piggyback.before(plan, self.now)
        for row in plan.drop:
            self.piggyback.give_up(row)
            del self.ids[row], self.tables[row]
        for add in plan.add:
            assert add.row not in self.ids
            self.ids[add.row], self.tables[add.row] = add.sequence_id, add.tables
        moved = self.move(plan)
        works = [Work.of(batch) for batch in plan.batches] or [Work()]
        work, host = works[0], DEVICE.planned_with(self.host)
        waits = self.wait_for(plan)
        seconds = (
            step_time(host, works if waits else [replace(work, **moved)])
            if plan.batches
            else 1e-4 + host.terms(Work(**moved)).moving
        )
        finished: list[int] = []
        if plan.piggyback_limits:
            begun = {row: self.contexts[row] for row in plan.piggybacked}
            self.piggyback.begin(begun, self.now)
            carried = self.piggyback.piggyback(self.now, seconds, plan.piggyback_limits)
            finished = carried.finished
            seconds += DEVICE.terms(Work(sampled=len(finished), tokens=1)).head
            if any(carried.by_layer):
                seconds += carried_s(host, work.tokens, carried.by_layer)
        late = 0.05 if self.draw.random() < self.noise else 0.0  # another program had the core
        self.now += seconds + late
        faults = {7: self.fault} if self.fault and (plan.piggybacked or waits) else {}
        result = StepResult(
            plan.step_id, (), (), faults=faults, piggyback_layers=self.piggyback.in_layers,
            piggybacked_results=tuple((self.ids[row], 1) for row in finished),
        )  # fmt: skip
        return seconds + late, result

    def wait_for(self, plan: StepPlan) -> bool:
        """Whether sub-batches wait for the host, which attends to decodes whose KV is there."""
        assert len({row for batch in plan.batches for row in batch.rows}) == sum(
            len(batch.rows) for batch in plan.batches
        )
        waits = False
        for batch in plan.batches:
            for row, start, count, tier in zip(
                batch.rows, batch.starts, batch.counts, batch.row_tiers, strict=True
            ):
                if tier is Tier.HOST:
                    assert count == 1
                    assert start < self.contexts[row] <= start + ROOM.block_size
                    waits = True
        if waits:
            works = [Work.of(batch) for batch in plan.batches]
            self.busy_s += sum(
                self.host.attention.at(work.host_decodes, work.host_context)
                for work in works
                if work.host_decodes
            )
        return waits

    def move(self, plan: StepPlan) -> dict[str, int]:
        moved = {"out_tokens": 0, "in_tokens": 0}
        for move in plan.moves:
            assert self.tables[move.row] == move.source
            self.tables[move.row] = move.target
            tokens = len(move.source[0]) * ROOM.block_size
            if move.to is Tier.HOST:
                self.piggyback.keep(move.row, tokens)
                self.contexts[move.row] = tokens
                held = [block for blocks in move.target for block in blocks]
                assert all(-1 <= block < 900 for block in held)
            else:
                self.piggyback.give_up(move.row)
            moved["out_tokens" if move.to is Tier.HOST else "in_tokens"] += tokens
        return moved


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_host_tier_of_the_models_form_is_found(noise):
    """Also where every tenth step is held up for long."""
    machine = Machine(noise=noise)
    costs, report = profile_host(machine, ROOM, DEVICE, OPTIONS)
    assert not machine.ids  # nothing is left behind
    assert not len(machine.piggyback)
    for found, true in ((costs.out, TRUE.out), (costs.back, TRUE.back)):
        assert found.step_s == pytest.approx(true.step_s, rel=0.02)
        assert found.token_s == pytest.approx(true.token_s, rel=0.02)
    assert costs.stall == pytest.approx(1.0, abs=0.01)
    assert not costs.duplex
    assert costs.carry.step_s == pytest.approx(TRUE.carry.step_s, rel=0.1)
    assert costs.carry.row_layer_s == pytest.approx(TRUE.carry.row_layer_s, rel=0.1)
    assert report["carried"]["held_out"]["average"] > 0.94
    assert report["moves"]["held_out"]["average"] > 0.97
    assert report["out"]["bytes_per_s"] == pytest.approx(4096 / TRUE.out.token_s, rel=0.02)


@pytest.mark.parametrize("wake_s", [0.0, 5e-5, 1e-3])
def test_attention_is_told_from_the_time_until_a_worker_wakes(wake_s):
    machine = Machine()
    machine.piggyback.wake_s = wake_s
    costs, report = profile_host(machine, ROOM, DEVICE, OPTIONS)
    for decodes in costs.attention.decodes:
        for context in costs.attention.contexts:
            blocks = -(-(context + 2) // 16) * 16  # of which the machine reads all
            one_s = JOB_S + CONTEXT_S * blocks
            mean_s = LAYERS * one_s * decodes  # the results of a call come together
            assert costs.attention.at(decodes, decodes * context) == pytest.approx(mean_s, rel=0.02)
    assert costs.wake.step_s == pytest.approx(LAYERS * wake_s, rel=0.05, abs=1e-6)
    assert costs.wake.row_s == pytest.approx(0.0, abs=1e-7)
    assert report["round_trip"]["held_out"]["p90"] > 0.95
    attend_s = costs.attention.at(4, 400)
    assert costs.round_trip_s(4, 400) == pytest.approx(attend_s + LAYERS * wake_s, rel=0.05)


@pytest.mark.parametrize(("stall", "duplex"), [(0.0, True), (0.0, False)])
def test_moves_beside_computing_are_told_from_those_that_stall_it(stall, duplex):
    """A link is slower than the layers of a step only for long moves."""
    link = replace(TRUE, stall=stall, duplex=duplex)
    copies = replace(ROOM, host=replace(THERE, attends=False))
    costs, report = profile_host(Machine(link), copies, DEVICE, OPTIONS)
    assert costs.stall == pytest.approx(0.0, abs=0.01)
    assert costs.duplex == duplex
    assert costs.attention is None
    assert "carried" not in report


def test_the_report_says_what_was_measured():
    _, found = profile_host(Machine(), ROOM, DEVICE, OPTIONS)
    accuracy = {"average": 0.95, "p90": 0.92}
    report = {"fitted_steps": 1, "knots": 2, "repeats": 20, "host": found}
    report |= dict.fromkeys(("held_out", "fitted", "repeatability"), accuracy)
    words = format_report(report, KEY)
    assert "host tier: 1 thread of the engine" in words
    assert "moves to the host: 20.48 GB/s, 40 us each" in words
    assert "computing waits for 100% of a move" in words
    assert "carried rows: 300 us a step, 2.00 us a row and layer" in words
    assert "the goal is met on held-out steps with host rows" in words


def test_an_idle_engine_measures_moves_in_slices():
    machine, slices = Machine(), 0
    going = quick_host_profile(machine.run, ROOM, DEVICE)
    while True:
        try:
            next(going)
        except StopIteration as end:
            fitted = end.value
            break
        assert not machine.ids
        slices += 1
    assert slices > 5
    assert machine.now < 1.0
    assert fitted.hosts[THERE.name].out.token_s == pytest.approx(TRUE.out.token_s, rel=0.05)


def test_a_host_that_fails_or_has_no_room_says_so():
    machine = Machine()
    machine.fault = HostWorkerError("the kernel failed")
    with pytest.raises(ProfileError, match="the host failed: the kernel failed"):
        profile_host(machine, ROOM, DEVICE, OPTIONS)
    tiny = replace(ROOM, host=replace(THERE, groups=(GroupRoom(2, None), GroupRoom(2, 64))))
    with pytest.raises(ConfigError, match="64 tokens or more"):
        profile_host(Machine(), tiny, DEVICE, OPTIONS)


def test_the_grid_fits_the_host():
    for blocks in (16, 64, 900):
        groups = (GroupRoom(blocks, None), GroupRoom(blocks, 64))
        room = replace(ROOM, host=replace(THERE, groups=groups))
        stage = CarryStage(Machine(), room, LAYERS)
        decodes, contexts = grid_of(stage, room, beside_step(room))
        assert len(decodes) > 1 < len(contexts)
        assert stage.holds(beside_step(room), decodes[-1], contexts[-1] + 3)
    full = StepRow(9, 1)
    assert not HostStage(Machine().run, ROOM).holds((full,) * 20, 5, 100)
    assert not HostStage(Machine().run, ROOM).holds((full,), 5, 513)


def test_fits_recover_known_coefficients_in_spite_of_outliers():
    draw = random.Random(1)
    points = []
    for number in range(200):
        base_s, rows = draw.uniform(1e-3, 2e-2), draw.randint(1, 60)
        late_s = 0.1 if number % 5 == 0 else 0.0
        points.append(CarryPoint(base_s, rows, base_s + 2e-4 + 3e-6 * rows + late_s))
    assert fit_carry(points) == pytest.approx((2e-4, 3e-6), rel=0.01)
    cheaper = [CarryPoint(p.base_s, p.row_layers, p.base_s - 1e-5 * p.row_layers) for p in points]
    assert fit_carry(cheaper) == pytest.approx((0.0, -1e-5), abs=1e-9)
    moves = [MovePoint(n, 5e-5 - n * 1e-8, 1e-3) for n in (16, 256, 1024)]
    assert min(fit_move(moves)) >= 0
    moves = [MovePoint(n, 5e-5 + n * 1e-7, 1e-3 + n * 1e-7) for n in (16, 256, 1024)]
    assert fit_move(moves) == pytest.approx((5e-5, 1e-7))
    with pytest.raises(ProfileError, match="two sizes"):
        fit_move(moves[:1])
    with pytest.raises(ProfileError, match="two points"):
        fit_carry(points[:1])
    with pytest.raises(ProfileError, match="took no time"):
        fit_move([*moves, MovePoint(5, 0.0, 0.0)])


def test_carried_rows_have_the_products_of_their_layer_together_with_the_step():
    cost = LinearCost(0.01, 0.001, layers=4)
    assert carried_s(cost, 10, [3, 0, 5, 0]) == pytest.approx((3 + 5) * 0.001 / 4)
    assert carried_s(cost, 0, [3, 0, 0, 0]) == pytest.approx((0.01 + 3 * 0.001) / 4)
    assert carried_s(DEVICE.planned_with(TRUE), 10, [0, 0, 0]) == 0.0
    less = DEVICE.planned_with(replace(TRUE, carry=CarryCost(0.0, -1.0)))
    assert carried_s(less, 10, [1, 0, 0]) == 0.0
