"""Best effort on the host's CPUs beside latency targets on the device (OmniServe section 3.2).

Sequences that do not fit on the device under scheduler slo move to the host with their KV: decodes
for which a step has no time, and the newest ones when memory runs short. There each token goes
through the layers as a piggybacked row: the host attends, and results are piggybacked with later
steps, as many in each layer as the target allows, counted greedily from the first layer upward. A
sequence comes back only between two tokens, when the step has time for it and the device has room
(delayed swap-in). One whose token is on its way is neither moved nor preempted; if it ends
meanwhile, the next plan aborts the token. The host may be several: the device's own, and remote
places (``kv.places``). What lies with one of those is computed again, both when it is wanted back
and when the place is gone.

What the paper leaves open: a step that carries rows takes longer than the sum of its products (T_pb
of section 3.3.4), by how much is learned from such steps. Where that breaks a target, the step
carries none, and nothing is sent away for want of time. Else one result in each layer may always be
carried, and after ``patience_s`` without a token of the host in any case, so no sequence starves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import chain

from weft.core.errors import InvariantError
from weft.core.plan import StepOutputs, StepPlan, StepResult, Tier
from weft.core.types import Sequence, SequenceState
from weft.cost.carried import dense_s
from weft.cost.work import Work
from weft.sched.batch import BatchBuilder, TimedBatch
from weft.sched.memory_host import HostMemory
from weft.sched.policy_slo import SLOPolicy
from weft.sched.preempt import covers
from weft.sched.scheduler import Scheduler, Slower

# Layers that a piggybacked row may have come further since the last result: steps in flight.
STALE_LAYERS = 2
NEGLIGIBLE = 0.05  # of a target: what carrying rows may always add to a step
KEPT_ROWS = 8  # one row in so many is kept for sequences with targets
RECALL = 8  # tokens that a sequence must have left for each step that computes it again
PROBE_TOKENS = 4096  # tokens whose move is costed, to know what one takes


class PiggybackPart:
    """See the module docstring; a ``weft.sched.scheduler.SchedulerPart`` beside an SLO policy."""

    def __init__(self, memory: HostMemory, policy: SLOPolicy) -> None:
        self._memory = memory
        self._tiers, self._host = memory.tiers, memory.host
        self._cache = memory.cache
        self._policy = policy
        self._cost = policy.cost
        self._scheduler: Scheduler
        self._piggybacking: dict[int, Sequence] = {}
        self._aborted: dict[int, Sequence] = {}  # ended ones, until their abort is committed
        self._aborts: deque[list[int]] = deque()  # their ids, for each launched step
        self._in_layers: tuple[int, ...] = (0,) * self._cost.layers
        self._wanted = 0
        self._last_s = 0.0
        self._out_s = self._cost.terms(Work(out_tokens=PROBE_TOKENS)).moving / PROBE_TOKENS
        self._back_s = self._cost.terms(Work(in_tokens=PROBE_TOKENS)).moving / PROBE_TOKENS
        one, two = (self._cost.terms(Work(piggyback_layers=n)).piggybacked for n in (1, 2))
        self._row_layer_s, self._any_s = two - one, 2 * one - two  # of a row, and of any step
        # Of the step that is being filled:
        self._begun: list[int] = []
        self._caps: tuple[int, ...] = ()
        self._crowded = False  # decodes of best effort do not fit
        self._holds_back = False  # carrying rows would break a target
        self._token_at = 0.0  # when a token of the host came, or there was none on its way
        self._now = 0.0
        memory.watermark_tokens = 0  # sequences without room on the device decode on the host
        policy.part = self

    @property
    def slower(self) -> Slower:
        """Steps that carry rows take so much longer."""
        return Slower(surplus_s=max(0.0, self._policy.pace.surplus.value))

    def attach(self, scheduler: Scheduler) -> None:
        """Attach to this scheduler."""
        self._scheduler = scheduler

    def _on_host(self, sequence: Sequence) -> bool:
        return sequence.id in self._memory.hosted

    def _between_tokens(self) -> Iterator[Sequence]:
        """Sequences of the host that have no token on its way."""
        for sequence in self._scheduler.sequences.running:
            if sequence.id not in self._piggybacking and self._on_host(sequence):
                yield sequence

    # -- planning -----------------------------------------------------------------------------

    def busy(self) -> bool:
        """Whether a step without rows has something to do."""
        return bool(self._memory.moves or self._begun or self._piggybacking)

    def before_best_effort(self, step: TimedBatch, now: float, target_s: float) -> None:
        """Keep room for piggybacked rows, then plan moves; the device's own best effort follows."""
        self._begun = []
        self._now = now
        if not self._piggybacking:
            self._token_at = now
        self._holds_back = self._breaks_target(step, target_s)
        self._bring_back(step)
        if not self._holds_back:
            self._begin_tokens(step)
            step.piggybacked = math.ceil(sum(self._count_piggybacked(step)[0]) / self._cost.layers)
        self._make_headroom(step)
        too_many = [] if self._holds_back else self._too_many(step)
        self._send_away(step, too_many)
        self._crowded = bool(too_many)

    def after_best_effort(self, step: TimedBatch) -> set[int]:
        """The step is full: price piggybacked rows with what is in it; return the priorities that
        are piggybacked.
        """
        step.piggybacked = 0
        self._caps = ()
        if self._piggybacking and not self._holds_back:
            piggybacked, seconds = self._count_piggybacked(step)
            step.beside_s += max(seconds, self._surplus_s) if step.rows else seconds
            step.carries = True
            self._caps = tuple(max(1, count) for count in piggybacked)
        self._wanted = 0 if self._crowded else self._count_wanted(step)
        self._last_s = step.seconds()
        return {sequence.order[0] for sequence in self._piggybacking.values()}

    def filled(self, step: BatchBuilder) -> None:
        """The policy has asked already."""

    @property
    def _surplus_s(self) -> float:
        """What carrying rows adds to a step, as the cost model counts seconds."""
        return self._policy.pace.surplus.value / self._policy.pace.correction

    def _breaks_target(self, step: TimedBatch, target_s: float) -> bool:
        """Whether the sequences with targets in a step would get their tokens too late."""
        pace, patience_s = self._policy.pace, self._policy.targets.patience_s
        if not (pace.urgent and step.rows) or self._now - self._token_at > patience_s:
            return False
        room_s = max(step.limit_s - step.seconds(), NEGLIGIBLE * target_s)
        return max(self._surplus_s, self._any_s) > room_s

    def _count_piggybacked(self, step: TimedBatch) -> tuple[list[int], float]:
        """Piggybacked rows layer by layer, from the first one upward, for which the step has time.

        Returns them with what they add to the time of the step.
        """
        layers, tokens = self._cost.layers, step.work.tokens
        alone_s, room_s = dense_s(self._cost, tokens), step.limit_s - step.seconds()
        costs: dict[int, float] = {}

        def cost_s(piggybacked: int) -> float:
            if piggybacked not in costs:
                added_s = (dense_s(self._cost, tokens + piggybacked) - alone_s) / layers
                costs[piggybacked] = max(0.0, added_s + piggybacked * self._row_layer_s)
            return costs[piggybacked]

        found, seconds = [], self._any_s
        for layer in range(layers):
            piggybacked = max(self._in_layers[max(0, layer - STALE_LAYERS) : layer + 1])
            piggybacked += len(self._begun) if layer <= STALE_LAYERS else 0
            while piggybacked > 1 and cost_s(piggybacked) > room_s - seconds:
                piggybacked //= 2
            if piggybacked > 0:
                seconds += cost_s(piggybacked)
            found.append(piggybacked)
        return found, seconds

    def _begin_tokens(self, step: TimedBatch) -> None:
        """Begin the next token of every sequence of the host that has none on its way."""
        for sequence in list(self._between_tokens()):
            if sequence.state is not SequenceState.RUNNING or sequence.known >= sequence.end:
                continue
            if not self._grow_on_host(step, sequence):
                continue
            sequence.schedule(1)
            self._piggybacking[sequence.id] = sequence
            self._begun.append(sequence.row)

    def _grow_on_host(self, step: TimedBatch, sequence: Sequence) -> bool:
        """Reserve the block of the next token, preempting the newest of its host if need be."""
        host = self._tiers.of(sequence.id)

        def newest() -> Sequence | None:
            rest = [
                other
                for other in self._between_tokens()
                if other.order > sequence.order and self._tiers.of(other.id) is host
            ]
            return rest[-1] if rest else None

        return self._memory.grow_on_host(step, sequence, sequence.known, newest)

    def blocks_come_back(self) -> bool:
        """Whether moves in flight give up blocks of the device."""
        return any(self._tiers.coming())

    def may_begin(self, fits: bool) -> bool:
        """Whether best-effort prompts may begin: decodes that do not fit can leave for the host.

        Memory on its way back is for those who wait for it, and some rows are for targets.

        Args:
            fits: whether the step holds all best-effort decodes of the class.
        """
        if self._memory.moves or any(self._tiers.coming()):
            return False
        sequences = self._scheduler.sequences
        rows = len(sequences.free_rows) > self._scheduler.limits.max_num_seqs // KEPT_ROWS
        if not self._memory.victims():
            return rows or not self._memory.hosted
        if not rows:
            return False
        waiting = (sequences.waiting.of_priority(priority) for priority in self._policy.best_effort)
        first = next(chain.from_iterable(waiting), None)
        if first is None:
            return False
        spare = self._reserve()
        size = [-(-first.end // group.block_size) for group in self._cache.groups]
        wanted = [rest + need for rest, need in zip(spare, size, strict=True)]
        if not covers(self._cache.available(), wanted):
            return False
        return fits or self._tiers.hosts.choose([n + 1 for n in size]) is not None

    # -- between the tiers --------------------------------------------------------------------

    def _reserve(self) -> list[int]:
        """Blocks of the device kept free, so that no target waits for a move: two steps' prompts.

        At most a quarter of the device, where steps may be larger than that.
        """
        tokens = STALE_LAYERS * self._scheduler.limits.max_num_batched_tokens
        return [
            min(-(-tokens // group.block_size), group.num_blocks // 4)
            for group in self._cache.groups
        ]

    def _headroom(self) -> list[int]:
        """Blocks of the device for which decodes leave."""
        return self._reserve()

    def _make_headroom(self, step: TimedBatch) -> None:
        """Send the newest best-effort decodes away before memory runs short."""
        free = [a + b for a, b in zip(self._cache.available(), self._tiers.coming(), strict=True)]
        reserve = self._headroom()
        leaving = [
            s for priority in self._policy.best_effort for s in self._policy.running_of(priority)
        ]
        for sequence in reversed(leaving):
            if covers(free, reserve):
                return
            held = self._cache.held(sequence.id)
            if self._can_leave(sequence) and self._memory.move(step, sequence):
                free = [a + b for a, b in zip(free, held, strict=True)]

    def _too_many(self, step: TimedBatch) -> list[Sequence]:
        """Best-effort decodes that the step could not hold even without best-effort prompts.

        One that only waits for the prompts of a few steps stays: on the device each of its tokens
        takes one step, on the host as many as there are layers.
        """
        decodes = [
            sequence
            for priority in self._policy.best_effort
            for sequence in self._policy.running_of(priority)
            if sequence.known - sequence.planned == 1
        ]
        return decodes[step.decodes_that_fit([s.planned for s in decodes]) :]

    def _send_away(self, step: TimedBatch, sequences: Seq[Sequence]) -> None:
        """Send sequences to the host, as many as the link takes within the step."""
        room_s = step.seconds() - self._out_s * step.work.out_tokens
        for sequence in sequences:
            room_s -= self._out_s * sequence.planned
            if room_s < 0:
                return
            if self._can_leave(sequence):
                self._memory.move(step, sequence)

    def _bring_back(self, step: TimedBatch) -> None:
        """Bring sequences of the host back that are between two tokens, the oldest first.

        As many as the last step had time for, the link takes and the device has ample room for.
        """
        room_s, reserve, recalled = self._last_s, self._reserve(), False
        for sequence in list(self._between_tokens()):
            if self._tiers.hosts.remote_of(sequence.id) is not None:
                recalled = recalled or self._recall(sequence)
                continue
            held = self._host.held(sequence.id)
            needs = [2 * rest + need for rest, need in zip(reserve, held, strict=True)]
            room_s -= self._back_s * sequence.planned
            if (
                not self._wanted
                or room_s < 0
                or not covers(self._cache.available(), needs)
                or self._tiers.moving(sequence.id)
                or not self._memory.move(step, sequence)
            ):
                return
            self._wanted -= 1

    def _recall(self, sequence: Sequence) -> bool:
        """Have a sequence of a remote place computed again on the device, if nothing else waits.

        Its KV does not come back over the network, for which a step would have to wait.
        """
        needs = [
            2 * rest - (-sequence.end // group.block_size)
            for rest, group in zip(self._reserve(), self._cache.groups, strict=True)
        ]
        steps = -(-sequence.known // self._scheduler.limits.max_num_batched_tokens)
        if (
            not self._wanted
            or len(self._scheduler.sequences.waiting)
            or sequence.end - sequence.known <= RECALL * steps
            or not covers(self._cache.available(), needs)
        ):
            return False
        self._wanted -= 1
        self._memory.preempt(sequence)
        return True

    def _count_wanted(self, step: TimedBatch) -> int:
        """The number of host sequences that the step had time for on the device."""
        if any(self._tiers.coming()):
            return 0
        on_host = [s.planned for s in self._scheduler.sequences.running if self._on_host(s)]
        return step.decodes_that_fit(on_host)

    def _can_leave(self, sequence: Sequence) -> bool:
        """Whether the host can go on with a sequence: it decodes, and its tokens are all it wants.

        Log probabilities, grammars and drafts need a step of their own.
        """
        sampling = sequence.request.sampling
        return (
            sequence.known - sequence.planned == 1
            and sequence.planned > 0
            and sequence.known < sequence.end
            and sequence.drafter is None
            and sampling.grammar is None
            and not sampling.restricted
            and sampling.logprobs is None
            and sampling.prompt_logprobs is None
            and not sequence.request.embed
            and sequence.end <= self._tiers.hosts.max_tokens()
            and not self._tiers.moving(sequence.id)
        )

    # -- launching and committing -------------------------------------------------------------

    def launch(self, step: BatchBuilder, plan: StepPlan) -> StepPlan:  # noqa: ARG002
        """Add the piggybacked rows that begin or have ended, and how many may go through each
        layer.
        """
        ended = [s for s in self._piggybacking.values() if s.finish is not None]
        for sequence in ended:
            self._aborted[sequence.id] = self._piggybacking.pop(sequence.id)
        self._aborts.append([sequence.id for sequence in ended])
        return replace(
            plan,
            piggybacked=tuple(self._begun),
            piggyback_limits=self._caps,
            abort=tuple(sequence.row for sequence in ended),
        )

    def commit(self, result: StepResult, outputs: StepOutputs, now: float) -> None:  # noqa: ARG002
        """Take in the tokens of piggybacked rows that a step has ended; let go of those it has
        aborted.

        A step that was launched before an abort may still have ended the token.
        """
        if result.piggybacked_results:
            self._token_at = self._now
        for sequence_id, token in result.piggybacked_results:
            piggybacked = self._piggybacking if sequence_id in self._piggybacking else self._aborted
            self._scheduler.committer.piggyback(piggybacked.pop(sequence_id), token, outputs)
        for sequence_id in result.lost:
            self._lose(sequence_id)
        self._tiers.hosts.update(result.places)
        for sequence_id in self._aborts.popleft():
            if (sequence := self._aborted.pop(sequence_id, None)) is not None:
                sequence.abort()
        if result.piggyback_layers:
            self._in_layers = result.piggyback_layers

    def _lose(self, sequence_id: int) -> None:
        """The KV of a sequence is gone with its place: it is computed again from its tokens.

        One that has ended, or been preempted, has lost nothing.
        """
        sequence = self._scheduler.sequences.find(sequence_id)
        remote = self._tiers.hosts.remote_of(sequence_id) is not None
        if sequence is None or not remote or sequence.state is not SequenceState.RUNNING:
            return
        if self._piggybacking.pop(sequence_id, None) is not None:
            sequence.roll_back()
        self._scheduler.totals.lost_sequences += 1
        self._memory.preempt(sequence)

    def check(self) -> None:
        """Raise InvariantError if a piggybacked row is not one."""
        for sequence in chain(self._piggybacking.values(), self._aborted.values()):
            if sequence.pending != 1 or self._tiers.tier_of(sequence.id) is Tier.DEVICE:
                raise InvariantError(f"sequence {sequence.id} piggybacks, but not from the host")
        launched = [sequence_id for ids in self._aborts for sequence_id in ids]
        if not set(self._aborted) <= set(launched):
            raise InvariantError("an ended piggybacked row is aborted by no launched step")
