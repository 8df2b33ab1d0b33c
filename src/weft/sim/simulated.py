"""The simulated executor: advances a virtual clock by the cost model's time of each step.

Unlike the modelled executor of the tests it computes no tokens: an answer repeats one token and
ends at its traced length. Its times come from another cost model than the one that a scheduler
plans with, and from a seeded error on top, since predictions are never right (DESIGN, costs).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.core.errors import InvariantError
from weft.core.plan import PIGGYBACK_WAIT_S, KVMove, StepPlan, StepResult, SubBatch, Tier, TierCopy
from weft.core.ports import Lease
from weft.cost.carried import carried_s
from weft.cost.interference import Speeds
from weft.cost.model import CostModel, step_time
from weft.cost.work import Work
from weft.sim.clock import VirtualClock
from weft.sim.jobs import END_TOKEN, answer_token
from weft.sim.piggyback import Piggyback
from weft.sim.record import StepLog


@dataclass(slots=True)
class Errors:
    """By how much steps take another time than their cost model says.

    Attributes:
        deviation: of the logarithm of a step's time.
        long_share: how many of all steps are long.
        long_factor: how much longer they take.
    """

    deviation: float = 0.03
    long_share: float = 0.001
    long_factor: float = 5.0
    seed: int = 0
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"errors {self.seed}")

    def factor(self) -> float:
        """The random factor of the next step's time; the median is 1."""
        long = self.long_factor if self._draw.random() < self.long_share else 1.0
        return long * math.exp(self._draw.gauss(0.0, self.deviation))


@dataclass(slots=True)
class _TracedRow:
    """Attributes:
    end: length at which the answer is complete.
    length: tokens that there are, as far as steps with samples have told.
    """

    sequence_id: int
    end: int
    token: int
    length: int = 0


class SimulatedTicket:
    """A step that is over at a time of the virtual clock."""

    lease: Lease | None = None  # each is planned

    def __init__(self, executor: SimulatedExecutor, end_s: float, result: StepResult) -> None:
        self._executor = executor
        self._end_s = end_s
        self._result: StepResult | None = result

    def result(self) -> StepResult:
        if self._result is None:
            raise InvariantError("a step was collected twice")
        result, self._result = self._result, None
        self._executor.collected(self, self._end_s)
        return result


class SimulatedExecutor:
    """Implements ``weft.core.ports.Executor`` in virtual time, with one device.

    Args:
        cost: what steps really take, up to the errors.
        ends: by sequence id, the length at which its answer is complete.
        log: gets a line for each step.
        gauges: shares of device and host KV memory in use, and requests that wait.
        block_size: tokens of a block, for KV that moves.
        depth: steps that may be in flight while another one is launched, as with real devices.
        piggyback: carries the piggybacked rows of plans that have some.
        speeds: of what the halves of a step do side by side; None where they run in turn.
        state_tokens: as large as the KV of so many tokens is a slot of recurrent state.
    """

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        ends: Mapping[int, int],
        *,
        errors: Errors,
        log: StepLog,
        gauges: Callable[[], tuple[float, float, float]],
        block_size: int = 16,
        depth: int = 1,
        piggyback: Piggyback | None = None,
        speeds: Speeds | None = None,
        state_tokens: int = 0,
    ) -> None:
        self.depth = depth
        self.overlaps = speeds is not None
        self._speeds = speeds
        self._cost = cost
        self._clock = clock
        self._ends = ends
        self._errors = errors
        self._log = log
        self._gauges = gauges
        self._block_size, self._state_tokens = block_size, state_tokens
        self._rows: dict[int, _TracedRow] = {}
        self._free_at = 0.0
        self._piggyback = piggyback
        self._outstanding: deque[SimulatedTicket] = deque()

    def launch(self, plan: StepPlan) -> SimulatedTicket:
        """Queue a step behind those that run.

        Raises:
            InvariantError: more than ``depth`` steps are outstanding, or the plan has drafts.
        """
        if len(self._outstanding) > self.depth:
            raise InvariantError(f"{len(self._outstanding)} steps are outstanding already")
        start_s = max(self._clock.now(), self._free_at)
        if self._piggyback is not None:
            start_s = self._piggyback.before(plan, start_s)
        for row in plan.drop:
            del self._rows[row]
            if self._piggyback is not None:
                self._piggyback.give_up(row)
        for add in plan.add:
            number = add.sequence_id
            self._rows[add.row] = _TracedRow(number, self._ends[number], answer_token(number))
        works = [Work.of(batch) for batch in plan.batches] or [Work()]
        works[0].out_tokens += self._moved(plan.moves, Tier.HOST)
        works[0].in_tokens += self._moved(plan.moves, Tier.DEVICE)
        works[0].out_tokens += self._copied(plan.spills)
        works[0].in_tokens += self._copied(plan.fills)
        seconds = self._step_s(works) * self._errors.factor()
        result = self._result(plan)
        if self._piggyback is not None:
            start_s, carried_s, piggybacked_results = self._piggyback_results(
                plan, works, start_s, seconds
            )
            seconds += carried_s
            result = replace(
                result,
                piggybacked_results=piggybacked_results,
                piggyback_layers=self._piggyback.in_layers,
            )
        self._free_at = start_s + seconds
        self._write(works, start_s, seconds)
        ticket = SimulatedTicket(self, self._free_at, result)
        self._outstanding.append(ticket)
        return ticket

    def _step_s(self, works: list[Work]) -> float:
        if self._speeds is not None and len(works) == 2:
            return self._speeds.halves_s(self._cost, works)
        return step_time(self._cost, works)

    def _piggyback_results(
        self, plan: StepPlan, works: list[Work], start_s: float, seconds: float
    ) -> tuple[float, float, tuple[tuple[int, int], ...]]:
        """Carry piggybacked rows; when the step starts, what they add to it, and tokens that they
        end.

        A step that has nothing else to do starts when the first result is back, but new requests
        wait for no longer than an engine lets them.
        """
        piggybacked = self._piggyback
        assert piggybacked is not None
        for move in plan.moves:
            if move.to is Tier.HOST:
                piggybacked.keep(move.row, len(move.source[0]) * self._block_size)
            else:
                piggybacked.give_up(move.row)
        begun = {row: self._rows[row].length for row in plan.piggybacked}
        piggybacked.begin(begun, start_s)
        tokens = sum(work.tokens for work in works)
        if plan.piggyback_limits and len(piggybacked) and not (tokens or plan.piggybacked):
            patience_s = start_s + PIGGYBACK_WAIT_S
            start_s = min(max(start_s, piggybacked.next_back_s()), patience_s)
        piggybacked_results = piggybacked.piggyback(start_s, seconds, plan.piggyback_limits)
        ended = []
        for number in piggybacked_results.finished:
            row_of = self._rows[number]
            row_of.length += 1
            token = row_of.token if row_of.length < row_of.end else END_TOKEN
            ended.append((row_of.sequence_id, token))
        carried = [len(begun) + piggybacked_results.by_layer[0], *piggybacked_results.by_layer[1:]]
        return start_s, carried_s(self._cost, tokens, carried), tuple(ended)

    def collected(self, ticket: SimulatedTicket, end_s: float) -> None:
        """Advance to the end of the oldest outstanding step."""
        if self._outstanding.popleft() is not ticket:
            raise InvariantError("steps must be collected in the order of their launch")
        self._clock.reach(end_s)

    def close(self) -> None:
        """Raises InvariantError if a launched step was never collected."""
        if self._outstanding:
            raise InvariantError(f"{len(self._outstanding)} steps were never collected")

    def _result(self, plan: StepPlan) -> StepResult:
        ids: list[int] = []
        tokens: list[int] = []
        for batch in plan.batches:
            rows = [self._rows[row] for row in batch.rows]
            if batch.drafts:
                raise InvariantError("simulated answers cannot be guessed: plan without drafts")
            if all(batch.samples):
                chosen: Iterable[tuple[_TracedRow, int, int]] = zip(
                    rows, batch.starts, batch.counts, strict=True
                )
            else:
                chosen = _sampled(rows, batch)
            for row, start, count in chosen:
                ids.append(row.sequence_id)
                row.length = start + count + 1
                tokens.append(row.token if row.length < row.end else END_TOKEN)
        return StepResult(plan.step_id, tuple(ids), tuple(tokens))

    def _copied(self, copies: Sequence[TierCopy]) -> int:
        """Tokens whose KV is copied, by the blocks of the first group; slots count as theirs."""
        sizes = (self._block_size, self._state_tokens)
        return sum(sizes[group] for group, _, _ in copies)

    def _moved(self, moves: Iterable[KVMove], to: Tier) -> int:
        """Tokens of the full group whose KV moves there; whole blocks are copied, and states."""
        there = [move for move in moves if move.to is to]
        states = sum(move.state is not None for move in there)
        blocks = sum(len(move.source[0]) for move in there)
        return blocks * self._block_size + states * self._state_tokens

    def _write(self, works: list[Work], start_s: float, seconds: float) -> None:
        work = works[0] if len(works) == 1 else works[0].joined(works[1])
        cpu_s = move_s = 0.0
        if work.host_decodes or work.out_tokens or work.in_tokens:
            terms = [self._cost.terms(each) for each in works]
            cpu_s = sum(term.cpu_attention for term in terms)
            move_s = sum(term.kv_move for term in terms)
        self._log.add(
            (
                start_s, seconds, work.tokens, work.sampled, work.prefills, work.prefill_area,
                work.prefill_context, work.decodes, work.decode_context, work.host_decodes,
                work.host_context, work.out_tokens, work.in_tokens, len(works), cpu_s, move_s,
                *self._gauges(),
            )
        )  # fmt: skip


def _sampled(rows: list[_TracedRow], batch: SubBatch) -> list[tuple[_TracedRow, int, int]]:
    """Rows whose next token the step gives."""
    return [
        (row, start, count)
        for row, start, count, samples in zip(
            rows, batch.starts, batch.counts, batch.samples, strict=True
        )
        if samples
    ]
