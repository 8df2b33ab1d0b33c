"""The SLO-aware scheduler by hand: order, chunks, admission, targets, and help for best effort."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from costs import LinearCost
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.core.errors import ConfigError, TargetError
from weft.core.plan import SubBatch
from weft.core.types import Request, SamplingParams, ServiceClass
from weft.cost.model import step_time
from weft.cost.work import Work
from weft.kv.cache import GroupSpec, KVCache
from weft.sched.batch import TimedBatch
from weft.sched.first_token import first_token_s
from weft.sched.policy_slo import SLOPolicy, prioritise_by_target
from weft.sched.registry import fcfs, slo
from weft.sched.resources import DEFAULT_POLICY, TargetPolicy
from weft.sched.scheduler import Limits, Scheduler
from weft.sim.executor import ModelledExecutor

COST = LinearCost(0.01, 0.001)  # 10 ms a step and 1 ms a token
CLASSES = [
    ServiceClass("interactive", 1, ttft_s=1.0, tpot_s=0.1),
    ServiceClass("lax", 2, ttft_s=4.0, tpot_s=0.4),
    ServiceClass("batch", 3),
    ServiceClass("later", 4),
]


def request(number: int, length: int, service_class: str = "interactive", most: int = 8) -> Request:
    prompt = tuple((number * 17 + i) % 50 for i in range(length))
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    return Request(number, prompt, sampling, service_class=service_class)


def scheduler(
    policy: TargetPolicy = DEFAULT_POLICY, rows: int = 64, blocks: int = 4096
) -> Scheduler:
    cache = KVCache([GroupSpec("full", 4, blocks)], prefix_caching=False)
    return slo(cache, Limits(rows, 1024, 2048), COST, CLASSES, policy)


@dataclass
class World:
    """A scheduler on the modelled executor, whose steps take ``slower`` times their prediction."""

    scheduler: Scheduler
    slower: float = 1.0
    now: float = 1.0
    plans: list = field(default_factory=list)
    first: dict = field(default_factory=dict)
    last: dict = field(default_factory=dict)
    count: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.executor = ModelledExecutor(self.scheduler.cache.groups, 50)

    def step(self) -> bool:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        self.plans.append(plan)
        ticket = self.executor.launch(plan)
        self.now += self.slower * step_time(COST, [Work.of(plan.batches[0])])
        news = self.scheduler.commit(ticket.result(), self.now)
        self.scheduler.check()
        for update in (*news.tokens, *news.updates):
            number = update[0]
            self.first.setdefault(number, self.now)
            self.last[number] = self.now
            self.count[number] = self.count.get(number, 0) + 1
        return True

    def run(self, arrivals: list[tuple[float, Request]], until: float = math.inf) -> None:
        arrivals = sorted(arrivals, key=lambda pair: pair[0])
        while self.now < until:
            while arrivals and arrivals[0][0] <= self.now:
                self.scheduler.add(arrivals.pop(0)[1])
            if not self.step():
                if not arrivals:
                    return
                self.now = max(self.now, arrivals[0][0])

    def tpot(self, number: int) -> float:
        return (self.last[number] - self.first[number]) / (self.count[number] - 1)


def test_classes_with_targets_come_first_and_each_has_its_own_rank():
    table = [ServiceClass("a", 0), ServiceClass("b", 5, ttft_s=1.0), ServiceClass("c", 0)]
    ranks = {row.name: row.priority for row in prioritise_by_target(table)}
    assert ranks == {"b": 0, "a": 1, "c": 1}


def test_room_is_the_largest_chunk_that_keeps_the_limit():
    for limit, most, fits in ((0.1, 500, 90), (0.1, 50, 50), (0.011, 9, 1), (0.0105, 9, 0)):
        step = TimedBatch(1024, cost=COST, limit_s=limit)
        assert step.room(0, most) == fits
        assert step.decodes_that_fit([100] * most) == fits


def test_each_step_is_filled_up_to_the_target_in_the_order_of_the_paper():
    s = scheduler(TargetPolicy(margin=0.0))
    world = World(s)
    s.add(request(1, 20))
    world.step()
    s.add(request(2, 60, "batch"))
    world.step()
    s.add(request(3, 70))
    s.add(request(4, 100, "batch"))
    plan = s.plan(world.now)
    # 100 ms: 10 for the step, 1 for a decode, 70 for the prompt, 19 for a best-effort one, and
    # nothing is left for the best-effort decode
    assert plan.batches[0].counts == (1, 70, 19)
    rows = {add.sequence_id: add.row for add in plan.add}
    assert plan.batches[0].rows[1:3] == (rows[3], rows[4])
    assert s.policy.pace.ends_at(world.now) - world.now == pytest.approx(0.1)


def test_best_effort_prompts_wait_while_a_prompt_with_a_target_is_not_done():
    s = scheduler(TargetPolicy(margin=0.0))
    s.add(request(1, 200))
    s.add(request(2, 50, "batch"))
    plan = s.plan(1.0)
    assert [add.sequence_id for add in plan.add] == [1]
    assert plan.batches[0].counts == (90,)


def test_best_effort_does_not_hold_up_a_first_token_that_is_due():
    s = scheduler(TargetPolicy(margin=0.0, admission="off"))
    world = World(s)
    s.add(request(1, 20))
    s.policy._date_arrivals(world.now)
    world.now += 0.95  # of 1 s, and its prompt takes 0.03
    s.add(request(2, 50, "batch"))
    plan = s.plan(world.now)
    assert plan.batches[0].counts == (20, 20)  # 50 ms in all


def test_first_token_time_steps_through_the_prompts_ahead():
    decodes = Work()
    decodes.add(10, 1)
    # chunks of 89 tokens beside the decode, in steps of 100 ms: 2 full ones, then 22 tokens
    seconds = first_token_s(COST, [(0, 150), (0, 50)], decodes, limit_s=0.1, budget=1024)
    # the first prompt has ended in the second step and decodes in the third
    assert seconds == pytest.approx(0.1 + 0.1 + 0.01 + 0.001 * (2 + 22))
    assert first_token_s(COST, [(0, 5)], decodes, limit_s=0.011, budget=9) == math.inf
    guess = first_token_s(COST, [(0, 10_000)], decodes, limit_s=0.1, budget=1024, patience_s=0.5)
    assert guess == pytest.approx(10_000 / 89 * 0.1, rel=0.01)


def test_a_request_that_would_be_late_is_refused_with_the_time_to_come_again():
    s = scheduler(TargetPolicy("reject", margin=0.0))
    for number in range(4):
        s.add(request(number, 200))
    with pytest.raises(TargetError, match="promises it within 1 s") as refused:
        s.add(request(9, 900))
    assert refused.value.retry_after_s == 1
    assert refused.value.http_status == 429
    with pytest.raises(TargetError, match="by itself") as refused:
        s.add(request(10, 1200))
    assert refused.value.retry_after_s is None
    assert s.totals.refused == 2
    World(s).run([])
    s.add(request(9, 850))


def test_a_request_that_would_be_late_is_demoted_and_answered():
    s = scheduler()
    world = World(s)
    world.run([(1.0, request(number, 500)) for number in range(6)])
    assert s.totals.demoted == 5
    assert sorted(world.last) == list(range(6))


def test_a_request_that_memory_keeps_waiting_is_demoted():
    """Nearly full: those that run are left blocks for 32 tokens more, so it would not start."""
    s = scheduler(rows=8, blocks=60)
    world = World(s)
    for number in range(4):
        s.add(request(number, 20, most=60))
    world.step()
    s.add(request(8, 12))  # 4 * 21 + 4 * 32 + 12 tokens, and 240 find room
    assert s.totals.demoted == 0
    world.step()
    s.add(request(9, 40))
    assert s.totals.demoted == 1


def test_a_recovered_request_keeps_its_promise():
    s = scheduler(TargetPolicy("reject"))
    given = request(1, 1500)
    s.add(Request(1, given.prompt, given.sampling, output=(3,), crashes=1))


@pytest.mark.parametrize("slower", [0.6, 1.0, 1.7])
def test_targets_hold_beside_saturating_best_effort_though_predictions_are_wrong(slower):
    s = scheduler()
    world = World(s, slower)
    calm = [(1.0 + 0.37 * i, request(i, 30 + i % 50, most=20)) for i in range(40)]
    noise = [(0.0, request(100 + i, 100, "batch", most=60)) for i in range(60)]
    world.run([*calm, *noise])
    late = [i for i in range(40) if world.tpot(i) > 0.1 or world.first[i] - calm[i][0] > 1.0]
    assert len(late) <= 2 + s.totals.demoted
    assert s.totals.demoted <= 2
    assert len(world.last) == 100
    # and best effort has used what was left: the steps are filled
    noisy = max(world.last[100 + i] for i in range(60)) - 1.0
    steps = [step_time(COST, [Work.of(plan.batches[0])]) * slower for plan in world.plans]
    full = [seconds for seconds in steps if seconds > 0.04]
    assert sum(full) > 0.8 * noisy


class UnevenWorld(World):
    """One step in 16 takes four times as long as the others; the average is as predicted."""

    def step(self) -> bool:
        self.slower = 3.4 if len(self.plans) % 16 == 0 else 0.84
        return super().step()


def late_ones(monkeypatch, *, catches_up: bool) -> int:
    """Of 60 requests beside best effort, how many had more than their target between tokens."""
    if not catches_up:
        monkeypatch.setattr(SLOPolicy, "_catch_up", lambda _self, limit_s, _begin: limit_s)
    s = scheduler(TargetPolicy("off"))
    world = UnevenWorld(s)
    calm = [(1.0 + 0.31 * i, request(i, 20, most=9)) for i in range(60)]
    noise = [(0.0, request(100 + i, 100, "batch", most=60)) for i in range(60)]
    world.run([*calm, *noise])
    return sum(world.tpot(i) > 0.1 for i in range(60))


def test_a_sequence_that_is_behind_has_shorter_steps_until_it_has_caught_up(monkeypatch):
    behind = late_ones(monkeypatch, catches_up=True)
    assert behind <= 3
    assert late_ones(monkeypatch, catches_up=False) >= 2 * behind + 4


def flood(patience_s: float, blocks: int, seconds: float = 40.0) -> World:
    """Interactive requests without end, more than the machine can serve, and one of best effort."""
    s = scheduler(TargetPolicy("off", patience_s=patience_s), rows=16, blocks=blocks)
    world = World(s)
    crowd = [(0.0 + 0.02 * i, request(i, 40, most=30)) for i in range(int(seconds / 0.02))]
    world.run([*crowd, (2.0, request(10_000, 40, "later", most=30))], until=seconds)
    return world


@pytest.mark.parametrize("blocks", [4096, 60])
def test_best_effort_is_not_starved(blocks):
    assert flood(5.0, blocks).count.get(10_000) == 30
    assert 10_000 not in flood(1e9, blocks).first  # the test can fail


def test_an_aged_prompt_does_not_hold_back_those_with_targets():
    """It computes 16 tokens a step; memory for the rest of it is not kept from the others."""
    s = scheduler(TargetPolicy("off", patience_s=1.0), rows=32, blocks=560)
    world = World(s)
    calm = [(1.0 + 0.3 * i, request(i, 80 + i % 40, most=40)) for i in range(67)]
    world.run([*calm, (1.0, request(10_000, 1800, "batch", most=4))])
    late = [i for i in range(67) if world.first[i] - calm[i][0] > 1.0]
    assert len(late) <= 2
    assert world.count[10_000] == 4


def test_a_class_is_served_first_come_first_served():
    s = scheduler(TargetPolicy("off"), rows=8)
    world = World(s)
    world.run([(1.0 + 0.01 * i, request(i, 50)) for i in range(30)])
    order = sorted(world.first, key=lambda number: (world.first[number], number))
    assert order == sorted(order)


def test_a_class_with_a_laxer_target_skips_steps_that_are_too_full():
    s = scheduler(TargetPolicy("off", margin=0.0), rows=200)
    world = World(s)
    strict = [(1.0, request(i, 4, most=60)) for i in range(60)]
    lax = [(1.0, request(100 + i, 4, "lax", most=15)) for i in range(60)]
    world.run([*strict, *lax])
    assert max(world.tpot(i) for i in range(60)) <= 0.11
    assert max(world.tpot(100 + i) for i in range(60)) <= 0.4


def test_targets_that_no_load_can_meet_are_refused_with_the_figures():
    cache = KVCache([GroupSpec("full", 4, 16)])
    limits = Limits(4, 16, 60)
    with pytest.raises(ConfigError, match=r"tpot_s 0.01, .* takes 0.011 s .* Raise it to 0.0122"):
        slo(cache, limits, COST, [ServiceClass("fast", 0, tpot_s=0.01)])
    with pytest.raises(ConfigError, match="No service class has a target"):
        slo(cache, limits, COST, [ServiceClass("batch", 0)])


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0])
def test_best_effort_slows_interactive_steps_down_by_a_factor_at_the_most(factor):
    """However lax the targets are: each step with an interactive row, as predicted."""
    world = World(scheduler(TargetPolicy(admission="off", slowdown=factor)))
    arrivals = [(1.0, request(number, 60, "batch", 400)) for number in range(100, 140)]
    arrivals += [(1.5 + number / 10, request(number, 60, most=60)) for number in range(1, 5)]
    shared = alone = 0
    numbers: dict[int, int] = {}
    for at, asked in sorted(arrivals, key=lambda pair: pair[0]):
        while world.now < at and world.step():
            numbers |= {add.row: add.sequence_id for add in world.plans[-1].add}
        world.scheduler.add(asked)
        world.now = max(world.now, at)
        for _ in range(20):
            if not world.step():
                break
            numbers |= {add.row: add.sequence_id for add in world.plans[-1].add}
            batch = world.plans[-1].batches[0]
            rows = [i for i, row in enumerate(batch.rows) if numbers[row] < 100]
            if rows:
                part = SubBatch(
                    *(
                        tuple(values[i] for i in rows)
                        for values in (batch.rows, batch.starts, batch.counts, batch.samples)
                    )
                )
                least = step_time(COST, [Work.of(part)])
                taken = step_time(COST, [Work.of(batch)])
                assert taken <= factor * least * (1 + 1e-9)
                shared += len(rows) < len(batch.rows)
                alone += 1
    assert alone > 20
    assert bool(shared) == (factor > 1)


@searching(40)
@given(st.randoms(use_true_random=False))
def test_one_class_alone_is_served_as_by_fcfs_where_targets_are_derived(draw):
    """With nothing to hold back the same plans come out, step for step."""
    rows, blocks = draw.choice([4, 32]), draw.choice([40, 400, 4096])
    asked = [
        request(number, draw.randint(1, 100), most=draw.randint(1, 30)) for number in range(1, 30)
    ]
    arrivals = [(draw.random() * 3, one) for one in asked]
    plans = []
    for make in (fcfs, slo):
        cache = KVCache([GroupSpec("full", 4, blocks)], prefix_caching=False)
        policy = TargetPolicy(admission="off", slowdown=2.0, strict=False)
        more = () if make is fcfs else (COST,)
        last = () if make is fcfs else (policy,)
        world = World(make(cache, Limits(rows, 1024, 2048), *more, CLASSES, *last))
        world.run(arrivals)
        assert len(world.count) == len(asked)
        plans.append(world.plans)
    assert plans[0] == plans[1]
