"""The engine: plan, launch, collect, commit.

``depth`` launched steps may be outstanding while the next one is planned, so the host's work hides
behind the device's (rvLLM section 3: ``launch(n+1)`` before ``collect(n)``).
"""

from __future__ import annotations

import contextlib
from collections import deque

from weft.core.errors import WeftError
from weft.core.plan import StepOutputs, Update
from weft.core.ports import Clock, Executor, Inbox, Lease, SchedulerPort, Ticket
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
        news = self._receive()
        if self._in_flight and (lease := self._in_flight[-1].lease) is not None:
            self._wait_for_lease(lease, recall=news)
            return True
        plan = self.scheduler.plan(self.clock.now())
        if plan is not None:
            if plan.add:
                self.inbox.computing([add.sequence_id for add in plan.add])
            ticket = self.executor.launch(plan)
            self._in_flight.append(ticket)
            if ticket.lease is not None:
                return True
        if not self._in_flight:
            return False
        if plan is None or len(self._in_flight) > self.executor.depth:
            self._collect()
        return True

    def _wait_for_lease(self, lease: Lease, *, recall: bool) -> None:
        """Collect what was launched before the leased step, which is the last one, or that step.

        Nothing is planned meanwhile. The lease is granted when nothing else is in flight.

        Args:
            recall: whether there is something new, for which the step must not go on.
        """
        if recall:
            lease.recall()
        elif len(self._in_flight) == 1:
            self.inbox.lend(lease)
        self._collect()

    def _collect(self) -> None:
        """Wait for the oldest launched step, and commit it."""
        result = self._in_flight.popleft().result()
        outputs = self.scheduler.commit(result, self.clock.now())
        if any(update.finish is not None for update in outputs.updates):
            self._recall()  # whoever has just ended has a row in the step that is leased
        self.inbox.publish(outputs)

    def run_until_idle(self) -> None:
        """Step until nothing is queued or in flight, then check that nothing leaked."""
        while self.step():
            pass
        self.scheduler.check()

    def drain(self) -> None:
        """Collect and commit the launched steps without planning more."""
        self._recall()
        while self._in_flight:
            self._collect()

    def abandon(self) -> None:
        """Collect the launched steps and throw their results away, after a step has failed."""
        self._recall()
        while self._in_flight:
            with contextlib.suppress(Exception):
                self._in_flight.popleft().result()

    def _recall(self) -> None:
        """Let no launched step go on by itself."""
        for ticket in self._in_flight:
            if ticket.lease is not None:
                ticket.lease.recall()

    def _receive(self) -> bool:
        """Take what has come; whether anything has."""
        requests, cancels = self.inbox.receive()
        for request in requests:
            self._add(request)
        for sequence_id, reason in cancels:
            self.inbox.publish(StepOutputs([], self.scheduler.cancel(sequence_id, reason)))
        return bool(requests or cancels)

    def _add(self, request: Request) -> None:
        try:
            outputs = self.scheduler.add(request)
        except WeftError as error:
            outputs = [Update(request.id, None, finish=FinishReason.ERROR, error=error)]
        if outputs:
            self.inbox.publish(StepOutputs([], outputs))
