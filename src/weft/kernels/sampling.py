"""Sampling on a device in plain torch: its inputs, and the steps around the choice of a token.

``process_logits`` changes logits as requests ask for it; ``verify_drafts`` takes the tokens that
were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PENALISED, EDITED = 1, 2  # bits of ``SampleBatch.changes``
IN_PROMPT = 1 << 30  # beside the count of a token in ``RowState.counts``
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
HEADER, EDIT = (
    len(PENALTIES) + 1,
    3,
)  # words of ``RowState.asked``: before the edits, and of an edit
NOT_FINITE = -1  # stands for the token of a sample whose logits are not all finite
LOWEST = torch.finfo(torch.float32).min  # of a forbidden token; infinity could breed NaN


@dataclass(frozen=True)
class SampleBatch:
    """The samples [S] of a step, on the device.

    Attributes:
        rows: [S] int64 executor rows; padding has the last row of the ``RowState``.
        counters: [S] int64 tokens that the output has before the sample.
        changes: [S] int32 what is to be done to the logits: ``PENALISED``, ``EDITED``, both or 0.
        guesses: [S] int32 the token of a draft right before the sample; -1 for a row's first
            sample. The samples of a row stand one behind the other.
    """

    rows: Tensor
    counters: Tensor
    changes: Tensor
    guesses: Tensor


@dataclass(frozen=True)
class RowState:
    """Sampling state of executor rows [R] on the device, plus one row for padding.

    ``asked`` has for each row its ``PENALTIES`` as float32, the number of edits, and the edits. An
    edit is a token id, a float32 value and a count: while the output has fewer tokens than that the
    token is impossible; from then on the value is added to its logit. Each id is edited once.

    Attributes:
        asked: [R + 1, HEADER + EDIT * E] int32, with the bits of floats.
        counts: [R + 1, V] int32, how often the output has a token, plus ``IN_PROMPT`` if the
            prompt has it.
        last_token: [R + 1] int64, the latest token of each row.
    """

    asked: Tensor
    counts: Tensor
    last_token: Tensor

    @classmethod
    def empty(cls, rows: int, edits: int, vocab_size: int, device: torch.device) -> RowState:
        """Return the state of so many rows, each with room for so many edits."""
        words = HEADER + EDIT * edits
        return cls(
            torch.zeros(rows + 1, words, dtype=torch.int32, device=device),
            torch.zeros(rows + 1, vocab_size, dtype=torch.int32, device=device),
            torch.zeros(rows + 1, dtype=torch.int64, device=device),
        )


def state_bytes(rows: int, edits: int, vocab_size: int) -> int:
    """Return the bytes of ``RowState.empty``."""
    return (rows + 1) * (4 * (HEADER + EDIT * edits) + 4 * vocab_size + 8)


class ProcessLogits(Protocol):
    """See ``process_logits``."""

    def __call__(self, logits: Tensor, samples: SampleBatch, state: RowState, /) -> None: ...


class VerifyDrafts(Protocol):
    """See ``verify_drafts``."""

    def __call__(
        self,
        tokens: Tensor,
        finite: Tensor,
        samples: SampleBatch,
        state: RowState,
        results: Tensor,
        /,
    ) -> None: ...


def process_logits(logits: Tensor, samples: SampleBatch, state: RowState) -> None:
    """Apply penalties and edits to logits [S, V] float32 in place.

    Numbers that are not finite stay as they are, so that who chooses notices them.
    """
    for sample, changes in enumerate(samples.changes.tolist()):
        if not changes:
            continue
        row, raw = int(samples.rows[sample]), logits[sample].clone()
        asked = state.asked[row]
        if changes & PENALISED:
            counts = state.counts[row].clone()
            guess = sample
            while samples.guesses[guess] >= 0:
                counts[int(samples.guesses[guess])] += 1
                guess -= 1
            penalties = asked[: HEADER - 1].view(torch.float32)
            scores = penalised(raw.clone(), counts % IN_PROMPT, list(penalties))
            logits[sample] = torch.where(counts > 0, scores, raw)
        if changes & EDITED:
            ids, values, until = asked[HEADER:].view(-1, EDIT)[: int(asked[HEADER - 1])].unbind(1)
            wanted = logits[sample, ids.long()] + values.contiguous().view(torch.float32)
            forbidden = samples.counters[sample] < until
            logits[sample, ids.long()] = torch.where(forbidden, LOWEST, wanted)
        logits[sample] = torch.where(torch.isfinite(raw), logits[sample], raw)


def penalised(scores: Tensor, output: Tensor, penalties: Sequence[Tensor]) -> Tensor:
    """Return the logits of tokens that a row has, with its penalties; ``scores`` are overwritten.

    Args:
        scores: float32 logits.
        output: how often the output has each of these tokens.
        penalties: those of ``PENALTIES``.
    """
    repetition, presence, frequency = penalties
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores -= frequency * output
    scores -= presence * (output > 0)
    return torch.nan_to_num_(scores)  # a tiny repetition penalty may overflow


def verify_drafts(
    tokens: Tensor, finite: Tensor, samples: SampleBatch, state: RowState, results: Tensor
) -> None:
    """Take the tokens that were chosen, and of drafts those that came out as guessed.

    The tokens that are kept are counted where their row has penalties, and the last one becomes the
    row's ``last_token``; 0 if its logits were not finite.

    Args:
        tokens, finite: [S] as ``interface.Sample`` writes them.
        results: [S, 2] int64 gets the token of each sample or ``NOT_FINITE``, and for the first
            sample of a row how many of its samples are kept, else 0.
    """
    results.zero_()
    results[:, 0] = torch.where(finite, tokens, NOT_FINITE)
    chosen, good, guesses = tokens.tolist(), finite.tolist(), samples.guesses.tolist()
    firsts = [sample for sample, guess in enumerate(guesses) if guess < 0]
    for first, end in zip(firsts, [*firsts[1:], len(guesses)], strict=True):
        draft = guesses[first + 1 : end]
        taken = count_taken(chosen[first:end], good[first:end], draft) if good[first] else 1
        results[first, 1] = taken
        row = int(samples.rows[first])
        state.last_token[row] = chosen[first + taken - 1] if good[first] else 0
        if samples.changes[first] & PENALISED and good[first]:
            for token in chosen[first : first + taken]:
                state.counts[row, token] += 1


def count_taken(tokens: Sequence[int], finite: Sequence[bool], draft: Sequence[int]) -> int:
    """Return how many of the tokens sampled along a draft are kept: at least the first.

    Each token was sampled from what the target model says after the draft so far; it is kept if
    that is what came out so far. So the output has the model's own distribution, and with the same
    random numbers it is the very output of one token at a time. For a draft that is certain this
    keeps each guess with its probability, as rejection sampling does (Leviathan et al. 2023).

    Args:
        tokens, finite: [d + 1] what was sampled after 0 to d tokens of the draft.
        draft: [d].
    """
    taken = 1
    while taken <= len(draft) and tokens[taken - 1] == draft[taken - 1] and finite[taken]:
        taken += 1
    return taken
