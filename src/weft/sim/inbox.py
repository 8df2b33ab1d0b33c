"""The request plane of a simulation: creates each request when its arrival time has come."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import count, islice

from weft.core.errors import InvariantError
from weft.core.plan import StepOutputs
from weft.core.ports import Lease
from weft.core.types import FinishReason, Request, SamplingParams
from weft.sim.clock import VirtualClock
from weft.sim.jobs import END_TOKEN, SimulatedRequest
from weft.sim.record import Record

SAMPLING = SamplingParams(temperature=0.0, seed=0, speculation=0).with_defaults({})


class SimulatedInbox:
    """Implements ``weft.core.ports.Inbox`` on a virtual clock.

    Args:
        arrivals: jobs in order of time.
        backlog: further jobs, of which ``keep`` are always with the engine. They end with the
            others: when those are done, what is left is cancelled. Without arrivals all are done.

    Attributes:
        ends: of each live request, the length at which its answer is complete.
    """

    def __init__(
        self,
        arrivals: Iterator[SimulatedRequest],
        clock: VirtualClock,
        record: Record,
        backlog: Iterator[SimulatedRequest] | None = None,
        keep: int = 0,
    ) -> None:
        self.ends: dict[int, int] = {}
        self._clock = clock
        self._record = record
        self._arrivals = arrivals
        self._next = next(arrivals, None)
        self._later: list[
            tuple[float, int, SimulatedRequest]
        ] = []  # what clients ask after their answers
        self._follows: dict[int, Callable[[int, float], SimulatedRequest | None]] = {}
        self._ties = count()
        self._backlog = iter(()) if backlog is None else backlog
        self._keep = keep
        self._kept: set[int] = set()
        self._until_done = self._next is None  # the backlog is all there is

    @property
    def done(self) -> bool:
        """Whether every request has ended and none will come; true after ``receive`` at best."""
        return not self._record.live and self._next_s() is None

    def receive(self) -> tuple[Seq[Request], Seq[tuple[int, FinishReason]]]:
        now = self._clock.now()
        requests = []
        while self._next is not None and self._next.at_s <= now:
            requests.append(self._request(self._next, self._next.at_s))
            self._next = next(self._arrivals, None)
        while self._later and self._later[0][0] <= now:
            at_s, _, job = heapq.heappop(self._later)
            requests.append(self._request(job, at_s))
        others = len(self._record.live) > len(self._kept) or self._next_s() is not None
        if not others and not self._until_done:
            return requests, [(number, FinishReason.CANCELLED) for number in sorted(self._kept)]
        for job in islice(self._backlog, max(0, self._keep - len(self._kept))):
            requests.append(self._request(job, now))
            self._kept.add(requests[-1].id)
        return requests, ()

    def computing(self, sequence_ids: Seq[int]) -> None:
        self._record.scheduled(sequence_ids, self._clock.now())

    def lend(self, lease: Lease) -> None:
        """Nothing here goes on by itself."""
        lease.recall()

    def publish(self, outputs: StepOutputs) -> None:
        now = self._clock.now()
        for number in self._record.outputs(outputs, now):
            del self.ends[number]
            self._kept.discard(number)
            follow = self._follows.pop(number, None)
            if follow is not None and (job := follow(number, now)) is not None:
                heapq.heappush(self._later, (job.at_s, next(self._ties), job))

    def wait(self) -> None:
        """Advance to the next arrival.

        Raises:
            InvariantError: none will come, but requests are open: the scheduler is stuck.
        """
        at_s = self._next_s()
        if at_s is None:
            raise InvariantError(
                f"{len(self._record.live)} requests are open, but the scheduler plans nothing."
            )
        self._clock.reach(at_s)

    def _next_s(self) -> float | None:
        times = [self._later[0][0]] if self._later else []
        if self._next is not None:
            times.append(self._next.at_s)
        return min(times, default=None)

    def _request(self, job: SimulatedRequest, at_s: float) -> Request:
        prompt = job.tokens()
        number = self._record.arrive(at_s, job, len(prompt))
        self.ends[number] = len(prompt) + job.output_tokens
        if job.follow is not None:
            self._follows[number] = job.follow
        return Request(number, prompt, SAMPLING, (END_TOKEN,), job.service_class)
