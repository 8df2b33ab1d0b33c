"""Best effort on the host's CPUs beside latency targets on the device (OmniServe section 3.2).

What scheduler slo cannot hold on the device goes to the host with its KV: decodes for which a step
has no time, and the newest ones when memory runs short. There each token goes through the layers as
a rider: the host attends, and results ride along with later steps, as many in each layer as the
target allows, counted greedily from the first layer upward. A sequence comes back only between two
tokens, when the step has time for it and the device has room (delayed swap-in). One whose token is
on its way is neither moved nor preempted. One rider in each layer may always ride: within a tile of
the GEMM it costs nothing, and so nobody is starved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from weft.core.errors import InvariantError
from weft.core.plan import Commit, KVMove, RowExtend, StepPlan, StepResult, Tier
from weft.core.types import DEFAULT_CLASSES, Sequence, SequenceState, ServiceClass
from weft.cost.model import CostModel
from weft.cost.work import Work
from weft.kv.tiers import Lease, TieredCache
from weft.sched.planner import Limits
from weft.sched.preempt import covers
from weft.sched.slo import AGED, DEFAULT_POLICY, Policy, SLOScheduler
from weft.sched.step import OpenStep
from weft.sched.timed import TimedStep

STALE_LAYERS = 2  # layers that a rider may have come further since the last result: steps in flight
KEPT_ROWS = 8  # one row in so many is kept for sequences with targets
PROBE_TOKENS = 4096  # tokens whose move is costed, to know what one takes


@dataclass(slots=True, kw_only=True)
class RidingStep(TimedStep):
    """An open step with moves between the tiers, and tokens of riders that begin."""

    moves: list[KVMove] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    begun: list[int] = field(default_factory=list)
    caps: tuple[int, ...] = ()


class RidingScheduler(SLOScheduler):
    """See the module docstring; implements ``weft.core.ports.Scheduler``."""

    ahead_tokens = 0  # who gives way is computed on the host: that is how it fills

    def __init__(
        self,
        cache: TieredCache,
        limits: Limits,
        cost: CostModel,
        classes: Seq[ServiceClass] = DEFAULT_CLASSES,
        policy: Policy = DEFAULT_POLICY,
    ) -> None:
        super().__init__(cache, limits, cost, classes, policy)
        self.tiers = cache
        self.host = cache.host
        self._leases: deque[list[Lease]] = deque()
        self._riding: dict[int, Sequence] = {}
        self._in_layers: tuple[int, ...] = (0,) * cost.layers
        self._wanted = 0
        self._last_s = 0.0
        self._move_s = cost.terms(Work(out_tokens=PROBE_TOKENS)).kv_move / PROBE_TOKENS

    # -- who is where -------------------------------------------------------------------------

    def _is_on_device(self, sequence: Sequence) -> bool:
        return self.host.table(sequence.id) is None

    def _running_of(self, rank: int) -> list[Sequence]:
        """Running sequences of a rank whose KV lies on the device."""
        running = super()._running_of(rank)
        if rank not in self._best_effort:
            return running
        return [sequence for sequence in running if self._is_on_device(sequence)]

    def _victims(self) -> Seq[Sequence]:
        return [sequence for sequence in self.running if self._is_on_device(sequence)]

    def _between_tokens(self) -> Iterator[Sequence]:
        """Sequences of the host that have no token on its way."""
        for sequence in self.running:
            if sequence.id not in self._riding and not self._is_on_device(sequence):
                yield sequence

    # -- planning -----------------------------------------------------------------------------

    def _new_step(self, budget: int, limit_s: float) -> TimedStep:
        return RidingStep(budget, cost=self.cost, limit_s=limit_s)

    def _is_empty(self, step: TimedStep) -> bool:
        assert isinstance(step, RidingStep)
        return not (step.rows or step.moves or step.begun or self._riding)

    def _plan_best_effort(self, step: TimedStep, now: float, *, prompts: bool) -> None:
        """Riders first, which cost little; then what the device can do itself; then moves."""
        assert isinstance(step, RidingStep)
        self._bring_back(step)
        self._begin_tokens(step)
        self._cap_riders(step)
        self._make_headroom(step)
        too_many = self._too_many(step)
        self._send_away(step, too_many)
        super()._plan_best_effort(step, now, prompts=prompts)
        self._wanted = 0 if too_many else self._count_wanted(step)
        self._last_s = step.seconds()
        for sequence in self._riding.values():
            self._served_at[sequence.order[0]] = now

    def _cap_riders(self, step: RidingStep) -> None:
        """Allow riders layer by layer, from the first one upward, as long as the step has time."""
        layers, tokens = self.cost.layers, step.work.tokens
        alone_s, room_s = self._dense_s(tokens), step.limit_s - step.seconds()
        costs: dict[int, float] = {}

        def cost_s(riders: int) -> float:
            if riders not in costs:
                costs[riders] = (self._dense_s(tokens + riders) - alone_s) / layers
            return costs[riders]

        caps = []
        for layer in range(layers):
            riders = max(self._in_layers[max(0, layer - STALE_LAYERS) : layer + 1])
            riders += len(step.begun) if layer <= STALE_LAYERS else 0
            while riders > 1 and cost_s(riders) > room_s:
                riders //= 2
            if riders > 0:
                room_s -= cost_s(riders)
                step.beside_s += cost_s(riders)
            caps.append(max(1, riders))
        step.caps = tuple(caps)

    def _dense_s(self, tokens: int) -> float:
        return self.cost.terms(Work(tokens=tokens)).linear if tokens else 0.0

    def _begin_tokens(self, step: RidingStep) -> None:
        """Begin the next token of every sequence of the host that has none on its way."""
        for sequence in list(self._between_tokens()):
            if sequence.state is not SequenceState.RUNNING or sequence.known >= sequence.end:
                continue
            if not self._grow_on_host(step, sequence):
                continue
            sequence.planned = sequence.known
            sequence.known += 1
            self._riding[sequence.id] = sequence
            step.begun.append(sequence.row)

    def _grow_on_host(self, step: RidingStep, sequence: Sequence) -> bool:
        """Reserve the block of the next token, preempting the newest of the host if need be."""
        while (grown := self.host.extend(sequence.id, sequence.known)) is None:
            rest = [other for other in self._between_tokens() if other.order > sequence.order]
            if not rest or self.live.closing:
                return False
            self.live.preempt(rest[-1])
            if rest[-1].state is not SequenceState.PAUSED:
                return False
        step.extends += [RowExtend(sequence.row, group, blocks) for group, blocks in grown]
        sequence.capacity = min(self.host.capacity(sequence.id), sequence.lockstep_at)
        return True

    def _plan_aged(self, step: TimedStep) -> None:
        super()._plan_aged(step)
        if self.waiting.ranks()[:1] == [AGED] and any(self.tiers.coming()):
            step.held_back = True  # what the device gets back is for it

    def _may_begin(self, step: TimedStep, contexts: list[int]) -> bool:
        """Whether prompts may begin: decodes that do not fit can leave, if the host has room.

        Memory on its way back is for those who wait for it, and some rows are for targets.
        """
        assert isinstance(step, RidingStep)
        if step.moves or any(self.tiers.coming()):
            return False
        if not self._victims():
            return True
        if len(self.live.free_rows) <= self.limits.max_num_seqs // KEPT_ROWS:
            return False
        first = next((s for rank in self._best_effort for s in self.waiting.of_rank(rank)), None)
        if first is None:
            return False
        spare = self._reserve()
        size = [-(-first.end // group.block_size) for group in self.cache.groups]
        wanted = [rest + need for rest, need in zip(spare, size, strict=True)]
        if not covers(self.cache.available(), wanted):
            return False
        pools = zip(size, self.host.pools, strict=True)
        return super()._may_begin(step, contexts) or all(n < pool.available for n, pool in pools)

    # -- between the tiers --------------------------------------------------------------------

    def _reserve(self) -> list[int]:
        """Blocks of the device kept free, so that no target waits for a move: two steps' prompts.

        At most a quarter of the device, where steps may be larger than that.
        """
        tokens = STALE_LAYERS * self.limits.max_num_batched_tokens
        return [
            min(-(-tokens // group.block_size), group.num_blocks // 4)
            for group in self.cache.groups
        ]

    def _make_headroom(self, step: RidingStep) -> None:
        """Send the newest best-effort decodes away before memory runs short."""
        free = [a + b for a, b in zip(self.cache.available(), self.tiers.coming(), strict=True)]
        reserve = self._reserve()
        leaving = [s for rank in self._best_effort for s in self._running_of(rank)]
        for sequence in reversed(leaving):
            if covers(free, reserve):
                return
            held = self.cache.held(sequence.id)
            if self._can_leave(sequence) and self._move(step, sequence):
                free = [a + b for a, b in zip(free, held, strict=True)]

    def _too_many(self, step: RidingStep) -> list[Sequence]:
        """Best-effort decodes that the step could not hold even without best-effort prompts.

        One that only waits for the prompts of a few steps stays: on the device each of its tokens
        takes one step, on the host as many as there are layers.
        """
        decodes = [
            sequence
            for rank in self._best_effort
            for sequence in self._running_of(rank)
            if sequence.known - sequence.planned == 1
        ]
        return decodes[step.decodes_that_fit([s.planned for s in decodes]) :]

    def _send_away(self, step: RidingStep, sequences: Seq[Sequence]) -> None:
        """Send sequences to the host, as many as the link takes within the step."""
        room_s = step.seconds() - self._move_s * step.work.out_tokens
        for sequence in sequences:
            room_s -= self._move_s * sequence.planned
            if room_s < 0:
                return
            if self._can_leave(sequence):
                self._move(step, sequence)

    def _bring_back(self, step: RidingStep) -> None:
        """Bring sequences of the host back that are between two tokens, the oldest first.

        As many as the last step had time for, the link takes and the device has ample room for.
        """
        room_s, reserve = self._last_s, self._reserve()
        for sequence in list(self._between_tokens()):
            held = self.host.held(sequence.id)
            needs = [2 * rest + need for rest, need in zip(reserve, held, strict=True)]
            room_s -= self._move_s * sequence.planned
            if (
                not self._wanted
                or room_s < 0
                or not covers(self.cache.available(), needs)
                or self.tiers.moving(sequence.id)
                or not self._move(step, sequence)
            ):
                return
            self._wanted -= 1

    def _count_wanted(self, step: RidingStep) -> int:
        """How many more sequences the step would have had time for on the device."""
        if any(self.tiers.coming()):
            return 0
        on_host = [s.planned for s in self.running if not self._is_on_device(s)]
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
            and sequence.end <= self.host.max_tokens()
            and not self.tiers.moving(sequence.id)
        )

    def _move(self, step: RidingStep, sequence: Sequence) -> bool:
        """Move a sequence to the other tier before the step computes, if there is room."""
        done = self.tiers.move(sequence.id, sequence.row, sequence.planned)
        if done is None:
            return False
        step.moves.append(done[0])
        step.leases.append(done[1])
        if done[0].to is Tier.HOST:
            step.work.out_tokens += sequence.planned
        else:
            step.work.in_tokens += sequence.planned
        sequence.capacity = 0  # whoever plans it looks at its blocks first
        return True

    # -- launching and committing -------------------------------------------------------------

    def _launch(self, step: OpenStep) -> StepPlan:
        assert isinstance(step, RidingStep)
        self._leases.append(step.leases)
        return replace(
            super()._launch(step),
            moves=tuple(step.moves),
            zero_host=self.host.take_zero(),
            riders=tuple(step.begun),
            rider_caps=step.caps if self._riding else (),
        )

    def commit(self, result: StepResult, now: float = 0.0) -> Commit:
        """Take in the oldest launched step, and the tokens of riders that it has ended."""
        news = super().commit(result, now)
        for sequence_id, token in result.ridden:
            self._committer.ride(self._riding.pop(sequence_id), token, news)
        if result.rider_layers:
            self._in_layers = result.rider_layers
        self._committer.settle(self.tiers, self._leases.popleft())
        self.live.close()
        return news

    def check(self) -> None:
        """Raise InvariantError if sequences, rows, queue, blocks or riders do not agree."""
        super().check()
        for sequence in self._riding.values():
            if sequence.pending != 1 or self._is_on_device(sequence):
                raise InvariantError(f"sequence {sequence.id} rides, but not from the host")
