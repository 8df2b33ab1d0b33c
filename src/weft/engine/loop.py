"""The engine: plan, launch, collect, commit.

``depth`` launched steps may be outstanding while the next one is planned, so the host's work hides
behind the device's (rvLLM section 3: ``launch(n+1)`` before ``collect(n)``).
"""

from __future__ import annotations

import contextlib
from collections import deque

from weft.core.errors import WeftError
from weft.core.plan import StepOutputs, Update
from weft.core.ports import Clock, Executor, Inbox, SchedulerPort, Ticket
from weft.core.types import FinishReason, Request


class EngineLoop:
    """Drives one scheduler and one executor from one inbox."""

    def __init__(
        self, scheduler: SchedulerPort, executor: Executor, inbox: Inbox, clock: Clock
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.inbox = inbox
        self.clock = clock
        self._in_flight: deque[Ticket] = deque()

    def step(self) -> bool:
        """Run the four verbs once; False if there was nothing to do."""
        self._receive()
        plan = self.scheduler.plan(self.clock.now())
        if plan is not None:
            if plan.add:
                self.inbox.computing([add.sequence_id for add in plan.add])
            self._in_flight.append(self.executor.launch(plan))
        if not self._in_flight:
            return False
        if plan is None or len(self._in_flight) > self.executor.depth:
            result = self._in_flight.popleft().result()
            self.inbox.publish(self.scheduler.commit(result, self.clock.now()))
        return True

    def run_until_idle(self) -> None:
        """Step until nothing is queued or in flight, then check that nothing leaked."""
        while self.step():
            pass
        self.scheduler.check()

    def drain(self) -> None:
        """Collect and commit the launched steps without planning more."""
        while self._in_flight:
            result = self._in_flight.popleft().result()
            self.inbox.publish(self.scheduler.commit(result, self.clock.now()))

    def abandon(self) -> None:
        """Collect the launched steps and throw their results away, after a step has failed."""
        while self._in_flight:
            with contextlib.suppress(Exception):
                self._in_flight.popleft().result()

    def _receive(self) -> None:
        requests, cancels = self.inbox.receive()
        for request in requests:
            self._add(request)
        for sequence_id, reason in cancels:
            self.inbox.publish(StepOutputs([], self.scheduler.cancel(sequence_id, reason)))

    def _add(self, request: Request) -> None:
        try:
            outputs = self.scheduler.add(request)
        except WeftError as error:
            outputs = [Update(request.id, None, finish=FinishReason.ERROR, error=error)]
        if outputs:
            self.inbox.publish(StepOutputs([], outputs))
