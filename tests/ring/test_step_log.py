"""The log of steps: counts by class, entries that are read while they are written, successors."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from modelled import GROUPS, LIMITS, info

from weft.core.plan import StepOutputs
from weft.core.types import DEFAULT_CLASSES, Request, SamplingParams, ServiceClass
from weft.cost.hardware import hardware
from weft.cost.roofline import Roofline
from weft.cost.shape import model_shape
from weft.kv.cache import KVCache
from weft.ring import _native
from weft.ring.client import RingClient
from weft.ring.codec import SAMPLING
from weft.ring.inbox import RingInbox
from weft.ring.layout import (
    COUNTED_CLASSES,
    OTHER_CLASSES,
    SIZES,
    EngineInfo,
    LoggedStep,
    counted_classes,
    places_of_classes,
)
from weft.ring.segment import create_ring
from weft.ring.step_log import StepWriter
from weft.sched.registry import fcfs, slo
from weft.sim.executor import ModelledExecutor

KEPT = SIZES["logged_steps"]
NAMES = [row.name for row in DEFAULT_CLASSES]
FIELDS = len(_native.STEP_FIELDS) - 1  # all but the engine's number

# Appends entries whose fields are all equal, as fast as it can.
WRITER = """
import sys
from weft.ring import _native
from weft.ring.codec import SAMPLING
engine = _native.Engine([(int(sys.argv[1]), int(sys.argv[2]))], SAMPLING)
print("ready", flush=True)
number = int(sys.argv[3])
while True:
    engine.log_step([number] * {fields})
    number += 1
"""


class Taken:
    """What a step log would write."""

    def __init__(self) -> None:
        self.rows: list[LoggedStep] = []

    def log_step(self, values: list[int]) -> None:
        self.rows.append(LoggedStep.read(len(self.rows), [1, *values]))


# -- classes ---------------------------------------------------------------------------------------


def test_classes_beyond_those_that_have_a_place_share_the_last_one():
    few = ["b", "a"]
    assert counted_classes(few) == ["a", "b"]
    assert places_of_classes(few) == {"a": 0, "b": 1}
    many = [f"c{number:02}" for number in range(COUNTED_CLASSES + 3)]
    names = counted_classes(many)
    assert (len(names), names[-1]) == (COUNTED_CLASSES, OTHER_CLASSES)
    places = places_of_classes(list(reversed(many)))
    assert [places[name] for name in many[: COUNTED_CLASSES - 1]] == list(range(7))
    assert {places[name] for name in many[COUNTED_CLASSES - 1 :]} == {COUNTED_CLASSES - 1}
    assert len(counted_classes(many[:COUNTED_CLASSES])) == COUNTED_CLASSES
    assert OTHER_CLASSES not in counted_classes(many[:COUNTED_CLASSES])


def test_queues_are_those_of_the_page():
    page = EngineInfo(waiting_0=3, running_0=4, waiting_7=5, running_7=6)
    assert page.queues[0] == (3, 4)
    assert page.queues[-1] == (5, 6)
    assert len(page.queues) == COUNTED_CLASSES


def classes_of(count: int) -> tuple[ServiceClass, ...]:
    urgent = ServiceClass("c0", 0, ttft_s=100.0)
    return urgent, *(ServiceClass(f"c{number}", number % 3) for number in range(1, count))


@pytest.mark.parametrize("policy", ["fcfs", "slo"])
@pytest.mark.parametrize("count", [4, 11])
def test_counts_by_class_add_up_to_what_was_computed(policy, count):
    """Also with more classes than there are places, and with sequences that come and go."""
    draw, classes = random.Random(count), classes_of(count)
    if policy == "slo":
        cost = Roofline(model_shape("llama-3.1-8b"), hardware("h100"))
        scheduler = slo(KVCache(GROUPS), LIMITS, cost, classes=classes)
    else:
        scheduler = fcfs(KVCache(GROUPS), LIMITS, classes=classes)
    executor = ModelledExecutor(GROUPS, 997)
    names = [row.name for row in classes]
    places, taken = places_of_classes(names), Taken()
    log = StepWriter(taken, names)
    prompts, outputs, ends, tokens = Counter(), Counter(), Counter(), Counter()
    of, left = {}, 60
    now = 1.0
    while left or not scheduler.idle:
        if left and draw.random() < 0.4:
            left -= 1
            name, length = draw.choice(names), draw.randrange(1, 60)
            most = draw.randrange(1, 30)
            prompt = tuple(left * 1000 + i for i in range(length))  # none shares a prefix
            of[left] = places[name]
            prompts[places[name]] += length
            outputs[places[name]] += most
            ends[places[name]] += 1
            params = SamplingParams(max_tokens=most, ignore_eos=True).with_defaults({})
            scheduler.add(Request(left, prompt, params, (), name))
        plan = scheduler.plan(now)
        now += 0.01
        if plan is None:
            continue
        done = scheduler.commit(executor.launch(plan).result(), now)
        tokens.update(of[number] for number, _ in done.tokens)
        tokens.update(of[update.sequence_id] for update in done.updates)
        assert done.step is not None
        log.write(done.step)
    assert tokens == outputs
    sums = [Counter(), Counter()]
    for row in taken.rows:
        for sum_, counts in zip(sums, (row.prefill, row.decode), strict=True):
            sum_.update(dict(enumerate(counts)))
    prefill, decode = (+one for one in sums)
    assert prefill == prompts
    assert decode == outputs - ends  # the prompt's last token brings the first one of the output
    assert [row.step for row in taken.rows] == list(range(1, len(taken.rows) + 1))
    assert all(row.ended_ns > row.began_ns for row in taken.rows)
    assert all(bool(row.predicted_ns) == (policy == "slo") for row in taken.rows)
    executor.close()


def test_steps_without_a_time_are_not_logged():
    scheduler = fcfs(KVCache(GROUPS), LIMITS)
    scheduler.add(Request(1, (1, 2), SamplingParams(max_tokens=2).with_defaults({})))
    executor = ModelledExecutor(GROUPS, 997)
    plan = scheduler.plan(0.0)
    assert scheduler.commit(executor.launch(plan).result()).step is None


# -- entries ---------------------------------------------------------------------------------------


def engine_of(ring) -> _native.Engine:
    return _native.Engine([(ring.memory, ring.wake)], SAMPLING)


def test_the_last_entries_are_there_and_numbers_go_on(ring):
    engine, client = engine_of(ring), RingClient(ring)
    assert client.steps(0) == (0, [])
    for number in range(KEPT + 10):
        engine.log_step([number] * FIELDS)
    written, steps = client.steps(0)
    assert written == KEPT + 10
    assert [step.number for step in steps] == list(range(10, KEPT + 10))
    assert [step.step for step in steps] == [step.number for step in steps]
    assert {step.engine for step in steps} == {1}
    assert [step.number for step in client.steps(written - 2)[1]] == [written - 2, written - 1]
    assert client.steps(written) == (written, [])
    assert len(client.steps(written + 1)[1]) == KEPT  # of another ring: all that there is
    with pytest.raises(ValueError, match="missing"):
        engine.log_step([1])
    client.close()


def test_every_ring_of_an_engine_has_the_log():
    rings = [create_ring(4, 1 << 16) for _ in range(2)]
    engine = _native.Engine([(ring.memory, ring.wake) for ring in rings], SAMPLING)
    engine.log_step([7] * FIELDS)
    for ring in rings:
        client = RingClient(ring)
        assert [step.step for step in client.steps(0)[1]] == [7]
        client.close()
        ring.close()


def test_an_entry_that_is_half_written_is_left_out(ring):
    """Its turn is odd, or that of another round, however the rest of it looks."""
    engine, client = engine_of(ring), RingClient(ring)
    for number in range(3):
        engine.log_step([number] * FIELDS)
    at = _native.offsets(ring_slots(client))["log"] + 8 + 8 * (len(_native.STEP_FIELDS) + 1)
    whole = os.pread(ring.memory, 8, at)
    assert int.from_bytes(whole, "little") == 2 * 1 + 2
    for turn in (2 * 1 + 1, 0, 2 * (1 + KEPT) + 2):
        os.pwrite(ring.memory, turn.to_bytes(8, "little"), at)
        assert [step.number for step in client.steps(0)[1]] == [0, 2]
    os.pwrite(ring.memory, whole, at)
    assert [step.number for step in client.steps(0)[1]] == [0, 1, 2]
    client.close()


def ring_slots(client: RingClient) -> int:
    return client._ring.slots


@contextlib.contextmanager
def writer(ring, first: int):
    command = [sys.executable, "-c", WRITER.format(fields=FIELDS)]
    command += [str(ring.memory), str(ring.wake), str(first)]
    process = subprocess.Popen(command, pass_fds=ring.pass_fds, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_nothing_torn_is_read_while_another_process_writes_and_after_it_was_killed(ring):
    """Each entry has one value in all its fields; the next engine goes on behind it."""
    client, since, read, lost = RingClient(ring), 0, 0, 0
    for engine in (1, 2, 3):
        first = since
        with writer(ring, first) as process:
            end = time.monotonic() + 0.7
            while time.monotonic() < end:
                written, steps = client.steps(0 if read % 3 else since)
                for step in steps:
                    values = (step.step, step.began_ns, step.ended_ns, *step.prefill, *step.decode)
                    assert set(values) == {step.number}, step
                    assert step.engine <= engine
                read += len(steps)
                lost += written - since - len([s for s in steps if s.number >= since])
                assert written >= since
                since = written
            process.send_signal(signal.SIGKILL)
            process.wait()
        since = client.steps(0)[0]
        assert since > first
    assert read > 1000
    assert lost > 0  # the writer does not wait for readers
    assert [one.engine for one in client.recoveries()] == [2, 3]
    client.close()


# -- engines that follow each other ----------------------------------------------------------------


def test_a_successor_marks_when_the_one_before_it_died(ring):
    client = RingClient(ring)
    first = engine_of(ring)
    assert client.recoveries() == []
    first.log_step([1] * FIELDS)
    first.write_info(info(updated_ns=123).values())
    engine_of(ring)
    (one,) = client.recoveries()
    assert (one.engine, one.next_step, one.died_ns) == (2, 1, 123)  # nobody saw it die
    before_ns = time.monotonic_ns()
    _native.Page(ring.memory).not_ready()
    third = engine_of(ring)
    two = client.recoveries()[1]
    assert two.engine == 3
    assert before_ns <= two.died_ns <= two.back_ns <= time.monotonic_ns()
    third.log_step([2] * FIELDS)
    assert [(step.engine, step.step) for step in client.steps(0)[1]] == [(1, 1), (3, 2)]
    for _ in range(SIZES["logged_recoveries"]):
        engine_of(ring)
    kept = [one.engine for one in client.recoveries()]
    assert kept == list(range(4, 4 + SIZES["logged_recoveries"]))
    client.close()


def test_a_copy_on_another_machine_has_the_log(ring):
    """As much of it as is still there, also if it was not told for long."""
    engine, agent = engine_of(ring), _native.Agent(ring.memory, SAMPLING)
    agent.attach()
    engine.log_step([0] * FIELDS)
    copy = create_ring(64, 1 << 20)
    remote = _native.RemoteClient(copy.memory, SAMPLING, agent.snapshot())
    assert [number for number, _ in remote.steps(0)[1]] == [0]
    engine = engine_of(ring)
    for number in range(1, KEPT + 6):
        engine.log_step([number] * FIELDS)
    for part in agent.collect(True):
        remote.apply(part)
    written, entries = remote.steps(0)
    assert written == KEPT + 6
    assert [(number, values[1]) for number, values in entries] == [
        (number, number) for number in range(6, KEPT + 6)
    ]
    assert [values[:2] for _, values in remote.recoveries()[1]] == [[2, 1]]
    agent.detach()
    copy.close()


def test_an_inbox_logs_the_steps_that_it_publishes(ring):
    inbox = RingInbox([ring], classes=NAMES)
    client = RingClient(ring)
    scheduler, executor = fcfs(KVCache(GROUPS), LIMITS), ModelledExecutor(GROUPS, 997)
    inbox.write_info(info())
    params = SamplingParams(max_tokens=4, ignore_eos=True).with_defaults({})
    client.submit([Request(1, (1, 2, 3), params, (), "batch")], lambda _: None)
    (request,) = inbox.receive()[0]
    scheduler.add(request)
    began_ns = time.monotonic_ns()
    while (plan := scheduler.plan(time.monotonic())) is not None:
        inbox.publish(scheduler.commit(executor.launch(plan).result(), time.monotonic()))
    inbox.publish(StepOutputs([], []))
    steps = client.steps(0)[1]
    place = places_of_classes(NAMES)["batch"]
    assert [(step.prefill[place], step.decode[place]) for step in steps] == [(3, 0)] + 3 * [(0, 1)]
    for step in steps:
        assert began_ns <= step.began_ns <= step.ended_ns <= time.monotonic_ns()
    inbox.close()
    client.close()
