"""The policy of a server that sets none: FCFS, then SLO when the engine has measured itself."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from costs import LinearCost
from test_quick_profile import BLOCK_S, KEY, MOVE_S, Machine

from weft.core.class_table import class_table
from weft.core.errors import ProfileError
from weft.core.plan import StepPlan
from weft.core.types import Request, SamplingParams
from weft.cost.fit import Fitted
from weft.cost.host_costs import HostCosts, MoveCost
from weft.cost.steps import GroupRoom, HostRoom, StepRoom
from weft.engine import self_profile
from weft.engine.self_profile import Costs, PolicyChoice
from weft.kv.cache import GroupSpec
from weft.sched.registry import make_scheduler
from weft.sched.resources import Resources
from weft.sched.scheduler import Limits
from weft.sched.targets import TargetSettings
from weft.sim.executor import ModelledExecutor

GROUPS = (GroupSpec("full", 16, 512),)
LIMITS = Limits(16, 256, 1024)
ROOM = StepRoom(16, 1024, 256, 16, 100, (GroupRoom(512, None),))
HOST_ROOM = replace(ROOM, host=HostRoom("copies", (GroupRoom(256, None),), False, 1024))
ASSUMED = HostCosts(None, MoveCost(1.0, 1.0), MoveCost(1.0, 1.0), assumed="as a guess")
COST = LinearCost(step_s=1e-3, token_s=2e-5, context_s=1e-8)


class Serving:
    """A scheduler on the modelled executor, and steps that are measured on a machine of its own."""

    def __init__(self, path, seconds: float = 60.0, classes=None, room: StepRoom = ROOM) -> None:
        changes = classes or {}
        host = () if room.host is None else (room.host.groups[0].num_blocks,)
        resources = Resources(GROUPS, LIMITS, class_table(changes), host_blocks=host)
        self.machine = Machine(COST)
        self.executor = ModelledExecutor(GROUPS, 100, host_blocks=host)
        self.scheduler = make_scheduler("fcfs-swap" if host else "fcfs", resources)

        def complete(fitted: Fitted) -> Fitted:
            return fitted.planned_with(fitted.hosts.get("copies", ASSUMED)) if host else fitted

        self.choice = PolicyChoice(
            resources, TargetSettings(changes, 0.5), seconds,
            Costs(KEY, path, complete), self.machine.run, room, 2,
        )  # fmt: skip

    def idle(self) -> bool:
        scheduler = self.choice.idle(self.scheduler, self.executor)
        self.scheduler = scheduler or self.scheduler
        return scheduler is not None

    def answer(self, number: int) -> None:
        """Serve a request to its end."""
        sampling = SamplingParams(max_tokens=5, ignore_eos=True)
        self.scheduler.add(Request(number, tuple(range(40)), sampling))
        tokens = 0
        while not self.scheduler.idle:
            plan = self.scheduler.plan(1.0)
            outputs = self.scheduler.commit(self.executor.launch(plan).result(), 1.0)
            tokens += len(outputs.tokens) + sum(u.token is not None for u in outputs.updates)
        self.scheduler.plan(1.0)
        assert tokens == 5


@pytest.fixture(autouse=True)
def _virtual_clock(monkeypatch):
    quick = self_profile.quick_profile

    def measured(run, room, key, layers, seconds):
        return quick(run, room, key, layers, seconds, run.__self__.clock)

    monkeypatch.setattr(self_profile, "quick_profile", measured)


def test_an_idle_engine_measures_itself_and_goes_over_to_slo(tmp_path):
    path = tmp_path / "profiles" / "model.json"
    serving = Serving(path)
    assert serving.choice.policy == "fcfs"
    assert "measures" in serving.choice.describe()
    number = 0
    while serving.choice.policy == "fcfs":
        assert serving.idle()
        number += 1
        if number % 40 == 0:  # requests in between find rows and blocks as ever
            serving.answer(number)
            serving.scheduler.check()
    finished = serving.scheduler.totals.finished
    assert finished == number // 40 > 0
    assert serving.scheduler.policy.name == "slo"
    assert str(path) in serving.choice.describe()
    assert "interactive: first token in" in serving.choice.describe_with_targets()
    assert not serving.idle()
    serving.answer(10**6)
    assert serving.scheduler.totals.finished == finished + 1
    fitted = Fitted.load(path, KEY)
    assert fitted.dense.at(100) == pytest.approx(3e-3, rel=0.05)


def test_prefixes_that_were_overwritten_are_not_found_again(tmp_path):
    serving = Serving(tmp_path / "model.json")
    serving.answer(1)
    assert serving.scheduler.cache.find_prefix
    assert any(pool._cached for pool in serving.scheduler.cache.pools)
    serving.idle()
    assert not any(pool._cached for pool in serving.scheduler.cache.pools)


def profiled(path):
    """The profile that another engine of this machine keeps."""
    fitted, report = drained(self_profile.quick_profile(Machine(COST).run, ROOM, KEY, 2, 60.0))
    fitted.save(path, report)


def drained(steps):
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_an_engine_that_takes_over_looks_for_the_profile_once_more(tmp_path, seconds):
    path = tmp_path / "model.json"
    standby = Serving(path, seconds)
    assert standby.choice.look(standby.scheduler) is None
    profiled(path)
    scheduler = standby.choice.look(standby.scheduler)
    assert scheduler.policy.name == standby.choice.policy == "slo"
    assert str(path) in standby.choice.describe()
    assert standby.choice.look(scheduler) is None
    standby.scheduler = scheduler
    assert not standby.idle()
    standby.answer(1)
    assert standby.machine.now == 0


def test_a_profile_that_another_engine_kept_is_taken_instead_of_measuring(tmp_path):
    path = tmp_path / "model.json"
    serving = Serving(path)
    serving.answer(1)
    profiled(path)
    assert serving.idle()
    assert serving.scheduler.policy.name == "slo"
    assert serving.machine.now == 0
    assert any(pool._cached for pool in serving.scheduler.cache.pools)
    serving.answer(2)  # in the row of the first one
    assert serving.scheduler.totals.finished == 2
    assert not serving.idle()


def test_a_kept_profile_with_targets_out_of_reach_leaves_it_with_fcfs(tmp_path):
    path = tmp_path / "model.json"
    profiled(path)
    for ask in (lambda one: one.choice.look(one.scheduler), Serving.idle):
        serving = Serving(path, classes={"interactive": {"tpot_s": 1e-4}})
        assert not ask(serving)
        assert serving.choice.policy == "fcfs"
        assert "Raise it to" in serving.choice.reason
        assert not serving.idle()
        assert serving.machine.now == 0


def test_without_time_for_it_nothing_is_measured(tmp_path):
    serving = Serving(tmp_path / "model.json", seconds=0)
    assert not serving.idle()
    assert "there is no profile" in serving.choice.describe()
    assert "measures" not in serving.choice.describe()


def test_targets_out_of_reach_leave_it_with_fcfs_and_say_what_is_within(tmp_path, caplog):
    serving = Serving(tmp_path / "model.json", classes={"interactive": {"tpot_s": 1e-4}})
    while serving.idle():
        pass
    assert serving.choice.policy == "fcfs"
    assert "Raise it to" in serving.choice.reason
    assert any("stays with fcfs" in record.getMessage() for record in caplog.records)


def test_an_engine_that_cannot_be_measured_stays_with_fcfs(tmp_path):
    tiny = StepRoom(1, 8, 8, 4, 100, (GroupRoom(4, None),))
    serving = Serving(tmp_path / "model.json", room=tiny)
    while serving.idle():
        pass
    assert serving.choice.policy == "fcfs"
    assert "could not be measured" in serving.choice.describe()
    with pytest.raises(ProfileError):
        Fitted.load(tmp_path / "model.json", KEY)


def test_steps_that_drift_are_measured_again(tmp_path):
    serving = Serving(tmp_path / "model.json")
    while serving.idle():
        pass
    policy = serving.scheduler.policy
    for step in range(200):
        policy.pace.launched(1.0, float(2 * step))
        policy.pace.collected(2.0 * step + 2)
    assert policy.pace.drift == pytest.approx(2, rel=0.1)
    start = 10**6
    serving.choice.watch(serving.scheduler, start)
    serving.choice.watch(serving.scheduler, start + self_profile.DRIFT_S / 2)
    assert not serving.idle()
    serving.choice.watch(serving.scheduler, start + self_profile.DRIFT_S + 1)
    measured_s = serving.machine.now
    assert serving.idle()
    while serving.idle():
        pass
    assert serving.machine.now > measured_s  # the profile on disk is the one that is wrong
    assert serving.scheduler.policy is not policy
    assert serving.scheduler.policy.pace.drift == 1
    serving.executor.launch(StepPlan(0, ())).result()


def test_costs_that_were_measured_on_a_busy_machine_are_used_not_kept_and_measured_again(
    tmp_path, caplog, monkeypatch
):
    path = tmp_path / "model.json"
    serving = Serving(path)
    draw = random.Random(1)
    with monkeypatch.context() as busy:
        busy.setattr(serving.machine, "_noise", 1.0)
        busy.setattr(serving.machine._draw, "random", lambda: math.exp(draw.gauss(0, 4)))
        while serving.idle():
            pass
    assert serving.scheduler.policy.name == "slo"
    assert "beside other programs" in serving.choice.describe()
    assert any("They are not kept" in record.getMessage() for record in caplog.records)
    assert not path.exists()
    before = serving.choice._measured_at
    serving.choice.watch(serving.scheduler, before + self_profile.AGAIN_S / 2)
    assert not serving.idle()
    serving.choice.watch(serving.scheduler, before + self_profile.AGAIN_S + 1)
    while serving.idle():
        pass
    assert str(path) in serving.choice.describe()
    assert Fitted.load(path, KEY).dense.at(100) == pytest.approx(3e-3, rel=0.05)
    serving.choice.watch(serving.scheduler, serving.choice._measured_at + self_profile.AGAIN_S + 1)
    assert not serving.idle()


def test_disturbed_costs_that_allow_no_target_are_measured_again_too(tmp_path):
    serving = Serving(tmp_path / "model.json")
    serving.choice._disturbed, serving.choice._measured_at = True, 0.0
    serving.choice._wanted = False
    assert serving.choice.policy == "fcfs"
    serving.choice.watch(serving.scheduler, self_profile.AGAIN_S + 1)
    while serving.idle():
        pass
    assert serving.choice.policy == "slo"


def test_an_idle_engine_measures_the_moves_of_its_host_tier_too(tmp_path):
    path = tmp_path / "model.json"
    serving = Serving(path, room=HOST_ROOM)
    while serving.choice.policy == "fcfs":
        assert serving.idle()
    assert "costs of the host tier are assumed (as a guess)" in serving.choice.describe()
    number = 0
    while serving.idle():
        number += 1
        if number % 3 == 0:
            serving.answer(number)
            serving.scheduler.check()
    assert number > 5
    assert "costs of the host tier are measured" in serving.choice.describe()
    host = serving.scheduler.policy.cost.host
    for move in (host.out, host.back):
        assert move.step_s == pytest.approx(MOVE_S)
        assert move.token_s == pytest.approx(BLOCK_S / 16)
    assert host.stall == pytest.approx(1.0)
    assert Fitted.load(path, KEY).hosts == {"copies": host}


def test_moves_are_measured_alone_where_a_profile_lacks_them(tmp_path):
    path = tmp_path / "model.json"
    profiled(path)
    serving = Serving(path, room=HOST_ROOM)
    serving.answer(1)
    assert any(pool._cached for pool in serving.scheduler.cache.pools)
    while serving.idle():
        pass
    assert serving.machine.now < 1.0
    assert "costs of the host tier are measured" in serving.choice.describe()
    again = Serving(path, room=HOST_ROOM)
    again.scheduler = again.choice.look(again.scheduler)
    assert not again.idle()
    assert again.machine.now == 0


def test_moves_that_cannot_be_measured_stay_assumed(tmp_path, caplog):
    path = tmp_path / "model.json"
    profiled(path)
    tiny = replace(HOST_ROOM, host=HostRoom("copies", (GroupRoom(4, None),), False, 1024))
    serving = Serving(path, room=tiny)
    while serving.idle():
        pass
    assert serving.choice.policy == "slo"
    assert "are assumed (as a guess)" in serving.choice.describe()
    assert "costs of the host tier stay assumed: moves of KV are measured with" in caplog.text
    never = Serving(path, seconds=0, room=HOST_ROOM)
    never.scheduler = never.choice.look(never.scheduler)
    assert not never.idle()
