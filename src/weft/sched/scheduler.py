"""The scheduler: adds requests, plans steps and commits results, with a policy and a memory.

The policy orders sequences, shares out each step, and admits requests
(``policy_fcfs.py``, ``policy_slo.py``). The memory decides what happens when KV blocks run out, and
what moves between the tiers (``memory_device.py``, ``memory_host.py``). Each policy works with each
memory. Parts plug into the pair: decodes of the host beside a step of the device
(``two_batch.py``), or piggybacked along with it (``piggyback.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.core.errors import ParameterError
from weft.core.plan import (
    CommittedStep,
    StateRow,
    StepOutputs,
    StepPlan,
    StepResult,
    SubBatch,
    Tier,
    Update,
)
from weft.core.types import FinishReason, Request, Sequence, ServiceClass
from weft.sched.admission import Admission
from weft.sched.batch import BatchBuilder, Launched, end_after, update_of
from weft.sched.commit import Committer
from weft.sched.filling import Filler
from weft.sched.halves import Halves
from weft.sched.invariants import check_drafts
from weft.sched.lease import extend_lease
from weft.sched.memory_device import DeviceMemory
from weft.sched.requests import sequence_of
from weft.sched.sequences import SequenceManager


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step and one sequence.

    Attributes:
        max_num_seqs: executor rows, so sequences that run at once.
        max_num_batched_tokens: tokens in one step, at least ``max_num_seqs``.
        max_model_len: tokens in one sequence, prompt and output.
        speculation: tokens of the longest draft of a request that does not say; 0 for none.
        lease_steps: steps that the executor may compute on its own after a planned one.
        whole_prompts: a prompt is computed in one step, or not yet.
        groups: of a pipeline, how many steps the decoding sequences are shared out over, since each
            waits for its last token before the next is planned; else 0.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    speculation: int = 0
    lease_steps: int = 0
    groups: int = 0
    whole_prompts: bool = False


class Policy(Protocol):
    """Orders sequences, shares out each step, and admits requests.

    Attributes:
        name: as in ``core.schedulers.POLICIES``.
        classes: the table of service classes; the policy may have given them other priorities.
        preempts_ahead: see ``SwapMemory``; whether newest sequences may be preempted before memory
            runs short.
    """

    name: str
    classes: Seq[ServiceClass]
    preempts_ahead: bool

    def attach(self, scheduler: Scheduler) -> None:
        """Attach to this scheduler."""

    def consider(self, sequence: Sequence) -> None:
        """Check a sequence before it is queued; a typed error refuses it."""

    def fill(self, now: float) -> BatchBuilder | None:
        """Return the next step, or None if there is nothing to do at present."""

    def collected(self, now: float, *, leased: bool = False) -> None:
        """The oldest launched step has ended; ``now`` is 0 if the time is unknown.

        Args:
            leased: whether others followed it under its lease.
        """

    def check(self) -> None:
        """Raise InvariantError if the policy's state is inconsistent."""


class Slower(NamedTuple):
    """How much longer than predicted steps take that carry rows of the host, as was measured.

    Attributes:
        ratio: seconds for each that was predicted, beside steps without; 1: nothing was found.
        surplus_s: seconds a step beyond its prediction without them; 0: nothing was found.
    """

    ratio: float = 1.0
    surplus_s: float = 0.0


class SchedulerPart(Protocol):
    """Scheduling work beside policy and memory."""

    @property
    def slower(self) -> Slower:
        """What decisions assume of steps that carry rows of the host."""

    def attach(self, scheduler: Scheduler) -> None:
        """Attach to this scheduler."""

    def filled(self, step: BatchBuilder) -> None:
        """The policy has filled a step."""

    def launch(self, step: BatchBuilder, plan: StepPlan) -> StepPlan:
        """Add to the plan of a step."""

    def commit(self, result: StepResult, outputs: StepOutputs, now: float) -> None:
        """Apply a result to this part."""

    def check(self) -> None:
        """Raise InvariantError if the part's state is inconsistent."""


class Scheduler:
    """See the module docstring; implements ``weft.core.ports.SchedulerPort``.

    Attributes:
        cache: the KV of the device.
        sequences: all sequences that have not ended.
        filler, admission: what policies fill steps with.
        halves: splits steps; None where they run whole.
    """

    def __init__(
        self, policy: Policy, memory: DeviceMemory, limits: Limits, parts: Seq[SchedulerPart] = ()
    ) -> None:
        self.policy, self.memory, self.limits, self.parts = policy, memory, limits, tuple(parts)
        self.cache = memory.cache
        self.sequences = SequenceManager(memory.kv, limits.max_num_seqs)
        self.filler = Filler(memory, self._share if limits.groups else None)
        self.admission = Admission(self.sequences, memory, limits.max_num_batched_tokens)
        self.committer = Committer(self.sequences, synchronous=bool(limits.groups))
        self.totals = self.sequences.totals
        self.halves: Halves | None = None
        self._priorities = {row.name: row.priority for row in policy.classes}
        self._launched: deque[Launched] = deque()
        self._ended_s = 0.0  # when the latest step was committed
        memory.attach(self.sequences, limits.max_num_batched_tokens)
        policy.attach(self)
        for part in self.parts:
            part.attach(self)

    # -- arrivals and cancellations -----------------------------------------------------------

    def add(self, request: Request) -> list[Update]:
        """Queue a request; return its end if the output that it brings along is complete.

        Raises:
            ParameterError: duplicate id, unknown class, empty or over-long prompt.
            OutOfMemoryError: the sequence could never fit into the KV memory.
            TargetError: it would miss a target of its class, and the policy refuses such requests.
        """
        if request.id in self.sequences.by_id:
            raise ParameterError(f"Request id {request.id} is in use already.", param="id")
        if request.service_class not in self._priorities:
            raise ParameterError(
                f"Unknown service class '{request.service_class}'; "
                f"known: {', '.join(self._priorities)}.",
                param="service_class",
            )
        sequence = sequence_of(
            request,
            (self._priorities[request.service_class], self.admission.arrivals + 1),
            max_model_len=self.limits.max_model_len,
            kv_tokens=self.memory.max_tokens(),
            speculation=self.limits.speculation,
            synchronous=bool(self.limits.groups),
        )
        self.admission.arrivals += 1
        if request.output and (end := end_after(sequence, request.output[-1])) is not None:
            sequence.finish = end
            return [update_of(sequence)]
        self.policy.consider(sequence)
        self.sequences.arrive(sequence)
        return []

    def cancel(self, sequence_id: int, reason: FinishReason) -> list[Update]:
        """End a sequence; unknown or ended ones are ignored, since they may just have finished."""
        sequence = self.sequences.find(sequence_id)
        if sequence is None:
            return []
        self.sequences.finish(sequence, reason)
        self.sequences.close()
        return [update_of(sequence)]

    @property
    def idle(self) -> bool:
        return not self.sequences.by_id

    # -- planning -----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed at present."""
        self.admission.planned_ns = int(now * 1e9)
        self.sequences.close()
        self.memory.open_plan()
        step = self.policy.fill(now)
        if step is not None:
            return self._launch(step, now)
        if self.cache.lower is not None:
            self.cache.lower.nothing_launched()
        return None

    @property
    def launched(self) -> bool:
        """Whether a launched step is not committed yet."""
        return bool(self._launched)

    def _share(self) -> int:
        """Sequences that may decode in the next step of a pipeline: of even groups, one each."""
        groups = self.limits.groups
        return 0 if len(self._launched) >= groups else -(-len(self.sequences.running) // groups)

    def _launch(self, step: BatchBuilder, now: float) -> StepPlan:
        """Remember the step and return its plan, with all rows in one sub-batch on the device.

        Or in two that overlap there, unless it is leased. A step that only moves KV has no
        sub-batch, so that nothing is computed for it.
        """
        step_id = self.totals.steps = self.totals.steps + 1
        lease = 0
        if self.limits.lease_steps and not self.parts and not self.memory.moves:
            lease = extend_lease(step, self.sequences, self.cache, self.limits.lease_steps)
        cut = whole = len(step.rows)
        if self.halves is not None and not lease:
            cut = self.halves.split(step)
        halves = [(0, cut), (cut, whole)] if cut < whole else [(0, whole)]
        self.totals.split_steps += cut < whole
        states = self._states(step, lent=lease > 0)
        self._launched.append(
            Launched(
                step_id, step.sequences, step.counts, step.samples, step.drafts, lease,
                now, step.predicted_s, cut < whole,
            )
        )  # fmt: skip
        plan = StepPlan(
            step_id,
            tuple(sub_batch(step, *half, states=states) for half in halves) if step.rows else (),
            drop=self.sequences.take_dropped(),
            add=tuple(step.adds),
            extend=tuple(step.extends),
            zero=self.cache.take_zero(),
            lease=lease,
        )
        if (lower := self.cache.lower) is not None:
            plan = lower.added(plan)
            self.totals.blocks_to_host += len(plan.spills)
        plan = self.memory.launch(plan)
        for part in self.parts:
            plan = part.launch(step, plan)
        return plan

    def _states(self, step: BatchBuilder, *, lent: bool) -> tuple[StateRow, ...]:
        """What the rows of a step read and write of recurrent states; empty without any.

        Args:
            lent: and what leased steps write that follow.
        """
        if (slots := self.cache.states) is None:
            return ()
        rows = zip(step.sequences, step.starts, step.counts, strict=True)
        drafts = {sequence.id: len(draft) for sequence, draft in step.drafts}
        planned = tuple(
            slots.plan(sequence.id, start, count, drafts.get(sequence.id, 0))
            for sequence, start, count in rows
        )
        if not lent:
            return planned
        return tuple(
            row._replace(lent=slots.lend(sequence.id, start + 1))
            for row, sequence, start in zip(planned, step.sequences, step.starts, strict=True)
        )

    # -- committing ---------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float = 0.0) -> StepOutputs:
        """Commit the oldest launched step and return its outputs."""
        steps = 1 if result.leased is None else 1 + len(result.leased.steps)
        host_tokens = self.totals.host_tokens
        self.totals.steps += steps - 1
        self.totals.resident_steps += steps - 1
        self.policy.collected(now, leased=steps > 1)
        launched = self._launched.popleft()
        if launched.lease and (slots := self.cache.states) is not None:
            for sequence in launched.sequences:
                slots.take_back(sequence.id, steps - 1)
        outputs = self.committer.commit(launched, result, int(now * 1e9))
        for part in self.parts:
            part.commit(result, outputs, now)
        self.memory.complete_moves(self.committer)
        if not now:
            return outputs
        host_tokens = self.totals.host_tokens - host_tokens
        committed = self._committed(launched, steps, host_tokens, now)
        return StepOutputs(outputs.tokens, outputs.updates, committed)

    def _committed(self, step: Launched, steps: int, host_tokens: int, now: float) -> CommittedStep:
        """What the step was that ends now. It began when the one before it had ended."""
        began_s, self._ended_s = max(step.at, self._ended_s), now
        return CommittedStep(
            step.step_id + steps - 1, began_s, now, step.predicted_s, steps, step.split,
            sum(len(draft) for _, draft in step.drafts), host_tokens, step.sequences, step.counts,
        )  # fmt: skip

    def check(self) -> None:
        """Raise InvariantError if sequences, rows, queue or blocks do not agree."""
        self.sequences.check()
        for launched in self._launched:
            check_drafts(launched.drafts, self.memory.kv)
        self.policy.check()
        for part in self.parts:
            part.check()


def sub_batch(
    step: BatchBuilder,
    first: int,
    end: int,
    tiers: tuple[Tier, ...] = (),
    states: tuple[StateRow, ...] = (),
) -> SubBatch:
    """Rows [first, end) of a step, with their drafts, and their part of the states of all rows."""
    rows = tuple(step.rows[first:end])
    here = set(rows) if step.drafts else ()
    return SubBatch(
        rows,
        tuple(step.starts[first:end]),
        tuple(step.counts[first:end]),
        tuple(step.samples[first:end]),
        tiers,
        {sequence.row: draft for sequence, draft in step.drafts if sequence.row in here},
        states[first:end],
    )
