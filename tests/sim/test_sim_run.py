"""Simulations by hand: virtual time, arrivals, sharing, conversations, backlogs, determinism."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from shareddata import need
from weft.core.errors import InvariantError
from weft.core.plan import RowAdd, StepPlan, SubBatch
from weft.core.schedulers import SCHEDULERS
from weft.core.types import ServiceClass
from weft.cost.model import Terms
from weft.cost.work import Work
from weft.kv.cache import GroupSpec, KVCache
from weft.sched.registry import fcfs, make_scheduler
from weft.sched.resources import Resources
from weft.sched.scheduler import Limits, Scheduler
from weft.sim.clock import VirtualClock
from weft.sim.inbox import SAMPLING
from weft.sim.jobs import SimulatedRequest, answer_text, own_text, shared_text, trace_jobs
from weft.sim.record import CANCELLED, COMPLETED, FAILED, StepLog
from weft.sim.run import Simulated, Traffic, simulate
from weft.sim.simulated import Errors, SimulatedExecutor
from weft.workload.trace import BLOCK_TOKENS, read_trace

EXACT = Errors(0.0, 0.0)
CLASSES = (ServiceClass("urgent", 0, 1e4, 1e4), ServiceClass("batch", 1))
NAMES = [row.name for row in CLASSES]


@dataclass
class SecondAStep:
    """A step takes a second, and a further one for each hundred tokens."""

    layers: int = 1

    def terms(self, work: Work) -> Terms:
        return Terms(dense=work.tokens // 100, host=1.0)


def small(tokens: int = 4096, seqs: int = 8, budget: int = 1024) -> Scheduler:
    cache = KVCache([GroupSpec("full", 16, tokens // 16)])
    return fcfs(cache, Limits(seqs, budget, cache.max_tokens()))


def job(
    at_s: float, given: int, asked: int, index: int = 0, name: str = "interactive"
) -> SimulatedRequest:
    return SimulatedRequest(at_s, (own_text(index, given),), asked, name)


def run(*jobs: SimulatedRequest, errors: Errors = EXACT, **limits: int) -> Simulated:
    return simulate(small(**limits), SecondAStep(), Traffic(iter(jobs)), errors)


def test_one_request_by_hand():
    result = run(job(2.5, 100, 4))
    record = result.record
    # the clock goes on to its arrival; the prompt takes 2 s, each further token 1 s
    assert list(record.arrival_s) == [2.5]
    assert list(record.scheduled_s) == [2.5]
    assert list(record.first_s) == [4.5]
    assert list(record.end_s) == [7.5]
    assert list(record.by_class[1].gaps) == [1.0, 1.0, 1.0]
    assert list(record.ended) == [COMPLETED]
    # with a step in flight, one more was launched before the end was known
    assert result.log.column("start_s").tolist() == [2.5, 4.5, 5.5, 6.5, 7.5]
    assert result.log.column("tokens").tolist() == [100, 1, 1, 1, 1]
    assert result.seconds == 8.5


def test_who_comes_during_a_step_waits_for_those_in_flight():
    result = run(job(0.0, 50, 6, 0), job(0.5, 50, 2, 1))
    record = result.record
    assert record.first_s[0] == 1.0
    # at 1.0 the step of 1.0 to 2.0 is in flight already: planned at 1.0, computed from 2.0 on
    assert (record.scheduled_s[1], record.first_s[1]) == (1.0, 3.0)
    assert record.end_s[1] == 4.0
    assert sum(record.by_class[1].counts) == 5 + 1


def test_a_batch_shares_its_steps():
    result = run(*(job(0.0, 10, 5, i) for i in range(8)))
    assert set(result.record.end_s) == {5.0}
    assert list(result.record.by_class[1].counts) == [8, 8, 8, 8]


def test_prefixes_in_the_cache_cost_nothing():
    system = shared_text(0, 320)
    jobs = [
        SimulatedRequest(at, (system, own_text(i, 64)), 2, "interactive")
        for i, at in enumerate((0.0, 50.0))
    ]
    result = simulate(small(), SecondAStep(), Traffic(iter(jobs)), EXACT)
    assert list(result.record.cached) == [0, 320]
    assert result.log.column("tokens").tolist()[0] == 384
    assert 64.0 in result.log.column("tokens")


def test_recorded_prefixes_are_found_exactly():
    arrivals = read_trace(str(need("mooncake/conversation_trace.jsonl")))[:40]
    tokens = sum(each.input_tokens + each.output_tokens for each in arrivals)
    cache = KVCache([GroupSpec("full", 16, tokens // 16 + 1000)])
    scheduler = fcfs(cache, Limits(8, 2**17, cache.max_tokens()))
    apart = iter([1e6 * index for index in range(len(arrivals))])  # each alone, nothing evicted
    jobs = trace_jobs(arrivals, "interactive", apart)
    result = simulate(scheduler, SecondAStep(), Traffic(jobs), EXACT)
    wanted, seen = [], set()
    for each in arrivals:
        known = 0
        while known < len(each.blocks) and each.blocks[: known + 1] in seen:
            known += 1
        most = min(known * BLOCK_TOKENS, each.input_tokens - 1)  # one token must be computed
        wanted.append(most // 16 * 16)
        seen.update(each.blocks[:n] for n in range(1, each.input_tokens // BLOCK_TOKENS + 1))
    assert list(result.record.cached) == wanted
    assert min(wanted[1:]) >= BLOCK_TOKENS  # all begin alike


def test_a_conversation_finds_what_was_said():
    said = []

    def follow(number: int, now: float) -> SimulatedRequest | None:
        said.append((number, now))
        prompt = (own_text(0, 100), answer_text(number, 41), own_text(1, 20))
        return SimulatedRequest(now + 10.0, prompt, 3, "interactive")

    first = SimulatedRequest(0.0, (own_text(0, 100),), 41, "interactive", follow)
    result = simulate(small(), SecondAStep(), Traffic(iter([first])), EXACT)
    record = result.record
    assert said == [(0, record.end_s[0])]
    assert record.arrival_s[1] == record.end_s[0] + 10.0
    assert list(record.input) == [100, 100 + 40 + 20]
    assert record.cached[1] == 128  # whole blocks of 16 of the 140 tokens that were computed


def test_a_backlog_ends_with_the_others():
    backlog = (job(0.0, 10, 30, 1 + i, "batch") for i in itertools.count())
    arrivals = iter([job(0.0, 10, 5), job(20.0, 10, 5, 10**6)])
    result = simulate(small(), SecondAStep(), Traffic(arrivals, backlog, keep=3), EXACT)
    record = result.record
    batch = [n for n in range(len(record)) if record.kind[n] == 3]
    ends = [record.ended[number] for number in batch]
    assert set(ends) == {CANCELLED}
    assert len(batch) == 3  # 25 steps are not enough for one of them
    assert all(record.ended[n] == COMPLETED for n in range(len(record)) if n not in batch)
    alone = (job(0.0, 10, 4, i, "batch") for i in range(7))
    offline = simulate(small(), SecondAStep(), Traffic(iter(()), alone, keep=2), EXACT)
    assert list(offline.record.ended) == [COMPLETED] * 7
    assert offline.log.column("decodes").max() == 2


def test_what_can_never_run_fails_and_the_rest_goes_on():
    result = run(job(0.0, 5000, 2), job(0.0, 10, 2, 1))
    assert list(result.record.ended) == [FAILED, COMPLETED]
    assert result.record.failures == {"invalid_parameter": 1}
    assert "5000 tokens" in result.record.examples["invalid_parameter"]


def test_answers_have_their_length_under_preemption():
    jobs = [job(0.0, 60, 40 + i, i) for i in range(12)]
    result = run(*jobs, tokens=512, seqs=12)
    assert result.totals.preemptions > 0
    record = result.record
    assert list(record.ended) == [COMPLETED] * 12
    assert sum(record.by_class[1].counts) == sum(each.output_tokens - 1 for each in jobs)
    assert result.log.column("device_kv").max() <= 1.0


def random_jobs(seed: int) -> list[SimulatedRequest]:
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.exponential(3.0, 60))
    names = ("priority", "interactive", "batch")
    return [
        job(float(at), int(draw.integers(1, 300)), int(draw.integers(1, 60)), i, names[i % 3])
        for i, at in enumerate(times)
    ]


def test_equal_seeds_give_equal_runs():
    def figures(seed: int) -> tuple[list[float], list[float]]:
        result = run(*random_jobs(0), errors=Errors(seed=seed), tokens=1024)
        return list(result.record.end_s), result.log.column("seconds").tolist()

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_errors_are_small_and_rarely_large():
    errors = Errors(0.03, 0.01, 5.0, seed=3)
    drawn = np.array([errors.factor() for _ in range(40000)])
    assert np.median(drawn) == pytest.approx(1.0, abs=0.005)
    assert np.mean(drawn > 3) == pytest.approx(0.01, rel=0.2)
    assert np.std(np.log(drawn[drawn < 3])) == pytest.approx(0.03, rel=0.05)


def every_scheduler(limits: Limits) -> dict[str, Scheduler]:
    groups = (GroupSpec("full", 16, 96),)
    given = Resources(groups, limits, CLASSES, host_blocks=(200,), cost=SecondAStep())
    return {name: make_scheduler(name, given) for name in SCHEDULERS}


@searching(30)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 40), st.integers(1, 200), st.integers(1, 40), st.sampled_from(NAMES)
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 5),
)
def test_every_scheduler_answers_all_in_full(drawn, seed):
    for name, scheduler in every_scheduler(Limits(8, 64, 1024)).items():
        drawn = sorted(drawn)
        jobs = [job(at, given, asked, i, n) for i, (at, given, asked, n) in enumerate(drawn)]
        result = simulate(scheduler, SecondAStep(), Traffic(iter(jobs)), Errors(seed=seed), CLASSES)
        record = result.record
        assert list(record.ended) == [COMPLETED] * len(jobs), name
        counted = [sum(each.counts) for each in record.by_class]
        wanted = [
            sum(asked - 1 for _, _, asked, own in drawn if own == row.name) for row in CLASSES
        ]
        assert counted == wanted, name
        moments = zip(
            record.arrival_s, record.scheduled_s, record.first_s, record.end_s, strict=True
        )
        assert all(a <= b < c <= d for a, b, c, d in moments), name
        steps = result.log.column("start_s") + result.log.column("seconds")
        assert np.all(result.log.column("start_s")[1:] >= steps[:-1] - 1e-9), name


def executor(log: StepLog) -> SimulatedExecutor:
    return SimulatedExecutor(
        SecondAStep(), VirtualClock(), {0: 20}, errors=EXACT, log=log, gauges=lambda: (0, 0, 0)
    )


def plan(step: int, add: bool = False) -> StepPlan:
    adds = (RowAdd(0, 0, (1, 2, 3), 3, SAMPLING, frozenset(), ((0,),)),) if add else ()
    return StepPlan(step, (SubBatch((0,), (step,), (1,), (True,)),), add=adds)


def test_tickets_are_collected_once_and_in_order():
    sim = executor(StepLog())
    first = sim.launch(plan(1, add=True))
    second = sim.launch(plan(2))
    with pytest.raises(InvariantError, match="outstanding already"):
        sim.launch(plan(3))
    with pytest.raises(InvariantError, match="never collected"):
        sim.close()
    first.result()
    with pytest.raises(InvariantError, match="twice"):
        first.result()
    assert second.result().step_id == 2
    sim.close()
