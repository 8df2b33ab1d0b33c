"""A step under construction, plain or with a time limit, and its records until the commit."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from weft.core.errors import InvariantError
from weft.core.plan import RowAdd, RowExtend, StepResult, Tier, Update
from weft.core.types import FinishReason, Sequence, TokenLogprob
from weft.cost.model import CostModel, step_time
from weft.cost.work import Work


@dataclass(slots=True)
class Totals:
    """Counts since the start.

    Attributes:
        blocks_to_host, blocks_to_device: KV blocks that moved there from the other tier.
        host_tokens: output tokens whose attention the host has computed.
        lost_sequences: preempted because the place with their KV was gone.
        resident_steps: those that were computed under a lease, which nobody has planned.
        split_steps: those in two halves that overlap on the device.
        refused, demoted: requests that would have missed the target of their class, as was
            predicted: answered with an error, or served as best effort.
    """

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    blocks_to_host: int = 0
    blocks_to_device: int = 0
    host_tokens: int = 0
    lost_sequences: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    refused: int = 0
    demoted: int = 0
    resident_steps: int = 0
    split_steps: int = 0

    def count_end(self, reason: FinishReason) -> None:
        """Count a sequence that has ended."""
        if reason is FinishReason.CANCELLED:
            self.cancelled += 1
        elif reason is FinishReason.ERROR:
            self.failed += 1
        else:
            self.finished += 1


@dataclass(slots=True)
class BatchBuilder:
    """A step under construction; the first five lists are parallel.

    Attributes:
        admission_blocked: a class waits for memory on its way back, so lower classes start nothing.
        reserves: by priority, the blocks of each group that its newcomers leave to those that run.
        predicted_s: how long the policy expects it to take; 0 if it does not say.
        whole: the next tokens of a sequence are computed all together, or not yet.
        most: the budget at first.
    """

    budget: int
    admission_blocked: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    adds: list[RowAdd] = field(default_factory=list)
    extends: list[RowExtend] = field(default_factory=list)
    drafts: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list)
    reserves: dict[int, list[int]] = field(default_factory=dict)
    predicted_s: float = 0.0
    whole: bool = False
    most: int = field(init=False)

    def __post_init__(self) -> None:
        self.most = self.budget

    @property
    def image_room(self) -> int:
        """Tokens of an image that the step has room for, whatever limits its time."""
        return self.most - sum(self.counts) - sum(len(draft) for _, draft in self.drafts)

    def room(self, start: int, most: int) -> int:  # noqa: ARG002 - some steps ask where
        """The number of a sequence's next ``most`` tokens, from ``start``, that still fit."""
        return 0 if self.whole and most > self.budget else min(most, self.budget)

    def put_single(self, sequences: list[Sequence], starts: list[int]) -> None:
        """Compute one token of each of these sequences, which count it already."""
        count = len(sequences)
        self.sequences += sequences
        self.rows += [sequence.row for sequence in sequences]
        self.starts += starts
        self.counts += [1] * count
        self.samples += [True] * count
        self.budget -= count

    def put(self, sequence: Sequence, count: int) -> None:
        """Compute the next ``count`` tokens of the sequence in this step."""
        self.sequences.append(sequence)
        self.rows.append(sequence.row)
        self.starts.append(sequence.planned)
        self.counts.append(count)
        self.samples.append(sequence.schedule(count))
        self.budget -= min(count, self.budget)  # of an image there may be more

    def guess(self, sequence: Sequence, draft: tuple[int, ...]) -> None:
        """Compute these tokens too, after the ones that were put last for the sequence."""
        self.drafts.append((sequence, draft))
        self.budget -= len(draft)

    def count_move(self, to: Tier, tokens: int) -> None:
        """Count the KV of so many tokens that moves to the other tier with this step."""


@dataclass(slots=True, kw_only=True)
class TimedBatch(BatchBuilder):
    """An open step that knows how long it will take.

    Attributes:
        limit_s: seconds of ``cost`` that the step may take; ``room`` keeps it.
        work: the tally of what the step computes.
        beside_s: seconds for what the step does beside its own rows.
        carries: whether results of piggybacked rows may be carried, or tokens of them begin.
        piggybacked: tokens for which room is kept in each layer, on average, while the step is
            filled.
    """

    cost: CostModel
    limit_s: float
    work: Work = field(default_factory=Work)
    beside_s: float = 0.0
    piggybacked: int = 0
    carries: bool = False

    def lift_limit(self, budget: int) -> None:
        """Let a step without rows take any time for so many tokens, and admit anew."""
        self.limit_s, self.budget = inf, min(budget, self.budget)
        self.admission_blocked = False

    def seconds(self) -> float:
        """Predicted seconds of what is in the step."""
        work, piggybacked = self.work, self.piggybacked
        if not piggybacked:
            return self.beside_s + (step_time(self.cost, [work]) if work.tokens else 0.0)
        in_layers = piggybacked * self.cost.layers
        work.tokens += piggybacked
        work.piggyback_layers += in_layers
        seconds = step_time(self.cost, [work])
        work.tokens -= piggybacked
        work.piggyback_layers -= in_layers
        return self.beside_s + seconds

    def room(self, start: int, most: int) -> int:
        """The largest number of tokens, up to ``most``, with which the step keeps its limit.

        Found by halving, since more tokens never take less time (OmniServe section 3.3.4).
        """
        most = min(most, self.budget)
        if self.limit_s <= 0:
            return 0
        if most <= 0 or self.limit_s == inf or self._seconds_with(start, most) <= self.limit_s:
            return most
        fits, too_many = 0, most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._seconds_with(start, middle) <= self.limit_s:
                fits = middle
            else:
                too_many = middle
        return fits

    def _seconds_with(self, start: int, count: int) -> float:
        self.work.add(start, count)
        seconds = self.seconds()
        self.work.remove(start, count)
        return seconds

    def decodes_that_fit(self, contexts: Seq[int]) -> int:
        """The number of these sequences, from the first, that can decode one token each.

        Args:
            contexts: tokens of each sequence whose KV is there.
        """
        most = min(len(contexts), self.budget) if self.limit_s > 0 else 0
        if not most:
            return 0
        sums = [0, *accumulate(contexts[:most])]
        if self._seconds_with_decodes(most, sums[most]) <= self.limit_s:
            return most
        fits, too_many = 0, most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._seconds_with_decodes(middle, sums[middle]) <= self.limit_s:
                fits = middle
            else:
                too_many = middle
        return fits

    def _seconds_with_decodes(self, count: int, context: int) -> float:
        self._count_decodes(count, context)
        seconds = self.seconds()
        self._count_decodes(-count, -context)
        return seconds

    def _count_decodes(self, count: int, context: int) -> None:
        work = self.work
        work.tokens += count
        work.sampled += count
        work.decodes += count
        work.decode_context += context + count

    def put_single(self, sequences: list[Sequence], starts: list[int]) -> None:
        """Compute one token of each of these sequences, which count it already."""
        BatchBuilder.put_single(self, sequences, starts)
        self._count_decodes(len(starts), sum(starts))

    def put(self, sequence: Sequence, count: int) -> None:
        """Compute the next ``count`` tokens of the sequence in this step."""
        start = sequence.planned
        BatchBuilder.put(self, sequence, count)
        self.work.add(start, count, self.samples[-1])

    def guess(self, sequence: Sequence, draft: tuple[int, ...]) -> None:
        """Compute these tokens too, after the one that was put last for the sequence."""
        BatchBuilder.guess(self, sequence, draft)
        start = sequence.planned - 1
        self.work.remove(start, 1)
        self.work.add(start, 1 + len(draft), 1 + len(draft))

    def count_move(self, to: Tier, tokens: int) -> None:
        """Count the KV of so many tokens that moves to the other tier with this step."""
        if to is Tier.HOST:
            self.work.out_tokens += tokens
        else:
            self.work.in_tokens += tokens


@dataclass(frozen=True, slots=True)
class Launched:
    """The tokens that a planned step will have computed at its commit.

    Attributes:
        lease: steps that may follow it under its lease.
        at: when it was planned, in seconds.
        predicted_s: see `BatchBuilder`.
        split: whether it is computed in two halves.
    """

    step_id: int
    sequences: list[Sequence]
    counts: list[int]
    samples: list[bool]
    drafts: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list)
    lease: int = 0
    at: float = 0.0
    predicted_s: float = 0.0
    split: bool = False


def end_after(sequence: Sequence, token: int) -> FinishReason | None:
    """The finish reason of a sequence whose output ends with this token, if it ends."""
    if token in sequence.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.tokens) >= sequence.end else None


def update_of(
    sequence: Sequence, token: int | None = None, logprob: TokenLogprob | None = None
) -> Update:
    """The update of a sequence: its new token, and its finish reason if it has ended."""
    return Update(
        sequence.id,
        token,
        logprob,
        max(sequence.cached, 0),
        finish=sequence.finish,
        error=sequence.error,
        scheduled_ns=sequence.scheduled_ns,
        prefilled_ns=sequence.prefilled_ns,
    )


def spread(samples: list[bool], result: StepResult) -> tuple[Seq[int], Seq[int]]:
    """Sequence ids and tokens of a result, one for each row of its step; -1 where none was due."""
    if len(result.tokens) == len(samples):
        return result.sequence_ids, result.tokens
    if len(result.tokens) != sum(samples):
        raise InvariantError(f"step {result.step_id} gave {len(result.tokens)} tokens")
    ids, tokens = iter(result.sequence_ids), iter(result.tokens)
    pairs = [(next(ids), next(tokens)) if due else (-1, -1) for due in samples]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
