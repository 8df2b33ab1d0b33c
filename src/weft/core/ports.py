"""Protocols of the engine; the loop depends on nothing else."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from weft.core.plan import StepOutputs, StepPlan, StepResult, Update
from weft.core.sinks import Sink
from weft.core.types import FinishReason, Request


class Clock(Protocol):
    """Time in seconds from an arbitrary start; never goes back."""

    def now(self) -> float: ...


class SchedulerPort(Protocol):
    """Decides what the next step computes. Deterministic for equal inputs."""

    def add(self, request: Request) -> list[Update]:
        """Queue a request; return its end if there is nothing left to compute.

        Raises a typed error if it can never run.
        """

    def cancel(self, sequence_id: int, reason: FinishReason) -> list[Update]:
        """End a sequence now; its memory returns once no launched step touches it."""

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed before a commit or an add."""

    def commit(self, result: StepResult, now: float = 0.0) -> StepOutputs:
        """Apply a collected step. Steps are committed in the order in which they were planned.

        ``now`` dates what was computed; 0 leaves it undated.
        """

    def check(self) -> None:
        """Raise InvariantError if any internal invariant is broken."""

    @property
    def idle(self) -> bool:
        """Whether no sequence is queued, running or still holding memory."""


class Lease(Protocol):
    """What the host says about a launched step that may go on without it; see ``StepPlan.lease``.

    The steps after the first wait for one of the two calls. Any thread may call ``recall``.
    """

    def grant(self, outlet: object | None) -> None:
        """Go on. Until the lease ends, only who computes may use ``outlet`` and what it is of.

        Args:
            outlet: takes the tokens of steps, and tells when there is something to receive; with
                None they come with the result.
        """

    def recall(self) -> None:
        """End after the step that is being computed, or do not go on at all, whatever follows."""


class Ticket(Protocol):
    """A launched step. ``result`` must be called exactly once.

    Attributes:
        lease: of a step that may go on; None for others.
    """

    lease: Lease | None

    def result(self) -> StepResult:
        """Wait for the step. Raises InvariantError if it was collected before."""


class Executor(Protocol):
    """Computes plans in the order of their launch.

    Attributes:
        depth: how many launched steps may wait for collection while another one is launched.
        overlaps: whether arithmetic of a sub-batch runs beside the reads of KV of another one.
    """

    depth: int
    overlaps: bool

    def launch(self, plan: StepPlan) -> Ticket: ...

    def close(self) -> None: ...


class BlockDisk(Protocol):
    """The prefix cache on disk, as an executor sees it. A block is known by group and hash."""

    def save(self, key: tuple[int, bytes], content: memoryview) -> None:
        """Write a block that was reserved, soon; ``content`` must not change any more."""

    def take(self, key: tuple[int, bytes]) -> memoryview:
        """The content of a claimed block. Raises InvariantError if it was not claimed."""


class EngineClient(Protocol):
    """The request plane's side of the meeting point with the engine."""

    def submit(self, requests: Seq[Request], sink: Sink) -> None:
        """Hand over requests whose updates ``sink`` gets, in order, until each has ended.

        The sink must not block. Raises a typed error if the engine cannot take the requests.
        """

    def cancel(self, sequence_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ask for the end of a request; its last update still comes. Unknown ids are ignored."""


class Inbox(Protocol):
    """The engine's side of the meeting point with the request plane."""

    def receive(self) -> tuple[Seq[Request], Seq[tuple[int, FinishReason]]]:
        """Return new requests and cancellations (sequence id, reason) since the last call."""

    def computing(self, sequence_ids: Seq[int]) -> None:
        """Record the sequences that have got a row: they are in the steps from now on."""

    def publish(self, outputs: StepOutputs) -> None:
        """Hand out tokens and ends."""

    def lend(self, lease: Lease) -> None:
        """Grant a lease, which ends as soon as there is something to receive."""

    def wait(self) -> None:
        """Block until there may be something to receive."""
