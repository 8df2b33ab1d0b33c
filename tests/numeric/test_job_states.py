"""The simulator's mailbox takes the steps of the native one, whose workers are real threads."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hosted import WAIT_S, Hosted, Shape
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.core.errors import InvariantError
from weft.kernels.cpu.host import STATES, HostMailbox, HostWorker
from weft.sim.mailbox import JobState, JobStates

ROWS, LAYERS = 6, 3
QUICK = Shape(rows=ROWS, longest=40, tokens=1, heads=2, kv_heads=1, head_dim=8)
SLOW = Shape(rows=ROWS, longest=4000, tokens=1, heads=16, kv_heads=2, head_dim=64)
NO_BLOCK = 10**6
Slots = list[int]


def test_states_have_the_same_names() -> None:
    assert tuple(JobState) == STATES


class Walk:
    """The same calls on a native mailbox and on the model; rows are slots."""

    def __init__(self, shape: Shape, model: JobStates) -> None:
        self.hosted, self.model = Hosted(shape, filled=False), model
        self.hosted.layers[2] = self.hosted.layers[0]  # so that any layer may come after any
        self.mailbox: HostMailbox = self.hosted.mailbox()
        self.bad: set[int] = set()  # slots whose jobs fail

    def both(self, native: Callable[[], Any], model: Callable[[], Any]) -> object:
        """What the native call returns; the model's is the same, or both refuse the call."""
        try:
            found = native()
        except InvariantError:
            with pytest.raises(InvariantError):
                model()
            return None
        expected = model()
        if expected is not None:
            assert list(found) == expected
        return found

    def ready(self, name: str) -> Slots:
        """Slots that are ready for a call."""
        rows = (row for row in range(ROWS) if self.model.state(row) in SOURCES[name])
        return [row for row in rows if name != "submit" or self.model.has_token(row)]

    def begin(self, slots: Slots, *, bad: bool) -> None:
        wrong = [table.copy() for table in self.hosted.tables]
        for table in wrong:
            table[:, 0] = NO_BLOCK
        self.hosted.contexts[slots] = self.hosted.width if bad else self.hosted.shape.longest - 1
        tables = [table[slots] for table in (wrong if bad else self.hosted.tables)]
        contexts = self.hosted.contexts[slots]
        begin = partial(self.mailbox.begin, slots, contexts, tables)
        if self.both(lambda: (begin(), True), lambda: self.model.begin(slots)):
            (self.bad.update if bad else self.bad.difference_update)(slots)

    def submit(self, slots: Slots, layer: int) -> None:
        self.both(
            lambda: self.hosted.submit(self.mailbox, slots, slots, 0, layer),
            lambda: self.model.submit(slots, layer),
        )

    def take(self, slots: Slots, layer: int) -> None:
        self.both(
            lambda: self.mailbox.take(slots, layer) is None,
            lambda: self.model.take(slots, layer),
        )

    def call(self, name: str, slots: Slots) -> object:
        """``put_back``, ``release`` or ``abort``."""
        return self.both(
            lambda: getattr(self.mailbox, name)(slots), lambda: getattr(self.model, name)(slots)
        )

    def serve(self) -> None:
        """Let workers compute all that waits."""
        with HostWorker(self.mailbox, threads=2):
            until(lambda: not {"submitted", "running"} & set(self.mailbox.states()))
        while rows := self.model.claim():
            for failed in (False, True):
                self.model.finish(
                    [row for row in rows if (row in self.bad) is failed], failed=failed
                )

    def assert_equal(self, most: int = ROWS) -> None:
        assert self.mailbox.states() == [self.model.state(row) for row in range(ROWS)]
        assert self.mailbox.done_counts().tolist() == self.model.done_counts()
        assert list(self.mailbox.failed()) == self.model.failed()
        for layer in range(LAYERS):
            assert self.mailbox.done(layer, most).tolist() == self.model.done(layer, most)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.0002)


SOURCES = {
    "begin": {"empty"},
    "submit": {"empty", "taken"},
    "take": {"done"},
    "put_back": {"taken"},
    "release": {"taken", "failed"},
    "abort": set(STATES),
    "serve": set(),
}
TURNS = (*SOURCES, "submit", "take", "serve")


@searching(360)
@given(st.randoms(use_true_random=True))
def test_both_take_the_same_steps_and_refuse_the_same_calls(dice: random.Random) -> None:
    """Calls in any order, most of them legal, while workers serve now and then."""
    walk = Walk(QUICK, JobStates(LAYERS))
    for _ in range(40):
        name = dice.choice(TURNS)
        ready, layer = walk.ready(name), dice.randrange(LAYERS)
        slots = dice.sample(ready, dice.randint(min(1, len(ready)), len(ready)))
        if dice.random() < 0.3:  # maybe illegal
            slots = dice.choices(range(ROWS), k=dice.randint(1, 2))
        elif name == "take":
            slots = walk.model.done(layer, dice.randint(1, ROWS))
        if name == "begin":
            walk.begin(slots, bad=dice.random() < 0.2)
        elif name == "submit":
            walk.submit(slots, layer)
        elif name == "take":
            walk.take(slots, layer)
        elif name == "serve":
            walk.serve()
        elif name != "abort" or dice.random() < 0.3:
            walk.call(name, slots)
        walk.assert_equal(dice.randint(0, ROWS))


# -- while a worker serves ------------------------------------------------------------------------

WORKER_STEPS = {
    JobState.SUBMITTED: {JobState.RUNNING, JobState.DONE, JobState.FAILED},
    JobState.RUNNING: {JobState.DONE, JobState.FAILED},
    JobState.ABORTING: {JobState.EMPTY},
}


class Followed(JobStates):
    """Jobs whose worker takes the steps that were seen of a real one."""

    def see(self, slot: int, state: JobState) -> None:
        """The state of a slot, which only a worker has changed."""
        if (was := self.state(slot)) is state:
            return
        assert state in WORKER_STEPS[was], f"slot {slot} went from {was} to {state}"
        if was is JobState.SUBMITTED:
            del self._submitted[0][slot]
            self._slots[slot].state = JobState.RUNNING
        if state is not JobState.RUNNING:
            self.finish([slot], failed=state is JobState.FAILED)


class Live(Walk):
    """Random calls while a worker serves: each outcome is one of those that the model allows."""

    def __init__(self, seed: int) -> None:
        self.model: Followed
        super().__init__(SLOW, Followed(LAYERS))
        self.dice, self.seen = random.Random(seed), Counter[str]()

    def look(self) -> None:
        for slot, state in enumerate(self.mailbox.states()):
            self.model.see(slot, JobState(state))
            self.seen[state] += 1

    def some(self, name: str) -> Slots:
        fits = self.ready(name)
        return self.dice.sample(fits, self.dice.randint(0, len(fits)))

    def take_some(self, layer: int) -> None:
        slots = self.mailbox.done(layer, self.dice.randint(1, ROWS)).tolist()
        for slot in slots:
            self.model.see(slot, JobState.DONE)
        assert slots == self.model.done(layer, len(slots)), "in the order of their submission"
        self.take(slots, layer)

    def abort_some(self) -> None:
        slots = self.some("abort")
        computed = self.mailbox.abort(slots)
        for slot in slots:
            state = self.model.state(slot)
            if slot in computed and state is JobState.SUBMITTED:
                self.model.see(slot, JobState.RUNNING)
            elif slot not in computed and state in (JobState.RUNNING, JobState.ABORTING):
                self.model.finish([slot])
        assert self.model.abort(slots) == computed
        self.seen["computed"] += len(computed)

    def turn(self) -> None:
        layer = self.dice.randrange(LAYERS)
        name = self.dice.choice(
            ["begin", "submit", "submit", "take", "put_back", "release", "abort"]
        )
        if name == "begin":
            self.begin(self.some(name), bad=self.dice.random() < 0.1)
        elif name == "submit":
            self.submit(self.some(name), layer)
        elif name == "take":
            self.take_some(layer)
        elif name == "abort" and self.dice.random() < 0.3:
            self.abort_some()
        elif name in ("put_back", "release"):
            self.call(name, self.some(name))


@pytest.mark.parametrize("seed", [1, 2])
def test_what_a_serving_worker_does_is_what_the_model_allows(seed: int) -> None:
    """Until every state was seen, and jobs were aborted while they were computed."""
    walk = Live(seed)
    wanted, end = {*STATES, "computed"}, time.monotonic() + WAIT_S
    with HostWorker(walk.mailbox):
        turns = 0
        while turns < 300 or wanted - set(walk.seen):
            assert time.monotonic() < end, f"never seen: {wanted - set(walk.seen)}"
            walk.turn()
            walk.look()
            turns += 1
        until(lambda: not {"submitted", "running", "aborting"} & set(walk.mailbox.states()))
    walk.look()
    walk.assert_equal()
