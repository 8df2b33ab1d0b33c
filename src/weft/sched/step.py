"""A step while it is put together, and what is remembered of it until it is committed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from weft.core.errors import InvariantError
from weft.core.plan import RowAdd, RowExtend, StepResult, Update
from weft.core.types import FinishReason, Sequence, TokenLogprob


@dataclass(slots=True)
class Totals:
    """Counts since the start.

    Attributes:
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
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    refused: int = 0
    demoted: int = 0

    def count_end(self, reason: FinishReason) -> None:
        """Count a sequence that has ended."""
        if reason is FinishReason.CANCELLED:
            self.cancelled += 1
        elif reason is FinishReason.ERROR:
            self.failed += 1
        else:
            self.finished += 1


@dataclass(slots=True)
class OpenStep:
    """A step under construction; the first five lists are parallel.

    Attributes:
        held_back: a class waits for memory on its way back, so lower classes start nothing.
        reserves: by rank, the blocks of each group that its newcomers leave to those that run.
    """

    budget: int
    held_back: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    adds: list[RowAdd] = field(default_factory=list)
    extends: list[RowExtend] = field(default_factory=list)
    drafts: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list)
    reserves: dict[int, list[int]] = field(default_factory=dict)

    def room(self, start: int, most: int) -> int:  # noqa: ARG002 - some steps ask where
        """How many of the next ``most`` tokens of a sequence, from ``start`` on, fit as well."""
        return min(most, self.budget)

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
        start = sequence.planned
        samples = start + count == sequence.known
        self.sequences.append(sequence)
        self.rows.append(sequence.row)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(samples)
        self.budget -= count
        sequence.planned = start + count
        sequence.known += samples

    def guess(self, sequence: Sequence, draft: tuple[int, ...]) -> None:
        """Compute these tokens too, after the ones that were put last for the sequence."""
        self.drafts.append((sequence, draft))
        self.budget -= len(draft)


@dataclass(frozen=True, slots=True)
class Launched:
    """What a planned step will have computed once it is committed."""

    step_id: int
    sequences: list[Sequence]
    counts: list[int]
    samples: list[bool]
    drafts: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list)


def end_after(sequence: Sequence, token: int) -> FinishReason | None:
    """Why a sequence whose tokens end with this one ends there, if it does."""
    if token in sequence.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.tokens) >= sequence.end else None


def news_of(
    sequence: Sequence, token: int | None = None, logprob: TokenLogprob | None = None
) -> Update:
    """What there is to say about a sequence: its new token, and how it ended if it has."""
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
