"""Sampling: its inputs on a device, and rules that every implementation follows.

``SETTINGS`` says which sampling parameters choose a token, in the order of their columns; whoever
fills rows, and every sampler, goes by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import Array, from_numpy, nan_to_num, where

SETTINGS = ("temperature", "top_k", "top_p", "min_p")
PENALISED, EDITED, MASKED = 1, 2, 4  # bits of ``SampleBatch.changes``
IN_PROMPT = 1 << 30  # beside the count of a token in ``RowState.counts``
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
HEADER, EDIT = (
    len(PENALTIES) + 1,
    3,
)  # words of ``RowState.asked``: before the edits, and of an edit
NOT_FINITE = -1  # stands for the token of a sample whose logits are not all finite
LOWEST = float(np.finfo(np.float32).min)  # of a forbidden token; infinity could breed NaN
# Of a token that a mask allows at the least: one that is forbidden otherwise comes before all that
# the mask forbids, as the end of a grammar before the minimum length.
LOWEST_ALLOWED = float(np.nextafter(np.float32(LOWEST), np.float32(0)))
MASK_BITS = 32  # tokens in a word of a mask


@dataclass(frozen=True)
class SampleBatch:
    """The samples [S] of a step, on the device.

    Attributes:
        rows: [S] int64 executor rows; padding has the last row of the ``RowState``.
        counters: [S] int64 tokens that the output has before the sample.
        changes: [S] int32 what is to be done to the logits: some of ``PENALISED``,
            ``EDITED`` and ``MASKED``, in this order.
        guesses: [S] int32 the token of a draft right before the sample; -1 for a row's first
            sample. The samples of a row stand one behind the other.
    """

    rows: Array
    counters: Array
    changes: Array
    guesses: Array


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
        masks: [R + 1, W] int32, a bit for each token that the row may have next, the lowest first.
    """

    asked: Array
    counts: Array
    last_token: Array
    masks: Array

    @classmethod
    def empty(cls, rows: int, edits: int, vocab_size: int, device: Any) -> RowState:
        """Return the state of so many rows on a torch device, each with room for so many edits."""
        import torch

        words = HEADER + EDIT * edits
        return cls(
            torch.zeros(rows + 1, words, dtype=torch.int32, device=device),
            torch.zeros(rows + 1, vocab_size, dtype=torch.int32, device=device),
            torch.zeros(rows + 1, dtype=torch.int64, device=device),
            torch.zeros(rows + 1, mask_words(vocab_size), dtype=torch.int32, device=device),
        )


def state_bytes(rows: int, edits: int, vocab_size: int) -> int:
    """Return the bytes of ``RowState.empty``."""
    words = HEADER + EDIT * edits + vocab_size + mask_words(vocab_size)
    return (rows + 1) * (4 * words + 8)


def mask_words(vocab_size: int) -> int:
    """Return the words of a row's mask: its bits, filled up to 16 bytes."""
    return -(-vocab_size // (4 * MASK_BITS)) * 4


class ProcessLogits(Protocol):
    """See ``reference_sampling.process_logits``."""

    def __call__(self, logits: Array, samples: SampleBatch, state: RowState, /) -> None: ...


@dataclass(frozen=True)
class PenalisedRows:
    """Rows of a step with penalties, and the tokens that those point at; all of it on the host.

    Attributes:
        at: [P] int64, which of the step's samples they are.
        tokens: [R, most] int32, the tokens of executor rows.
        rows: [P] int64, the executor row of each.
        lengths: [P] int64, how many of its tokens count.
        num_prompt: [P] int64, how many of them are its prompt.
        penalties: [P, 3] float32, in the order of ``PENALTIES``.
    """

    at: NDArray[np.int64]
    tokens: NDArray[np.int32]
    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_prompt: NDArray[np.int64]
    penalties: NDArray[np.float32]


class Penalise(Protocol):
    """Apply penalties to logits [S, V] float32 in place, as ``penalised`` does."""

    def __call__(self, logits: Array, asked: PenalisedRows, /) -> None: ...


class VerifyDrafts(Protocol):
    """See ``reference_sampling.verify_drafts``."""

    def __call__(
        self,
        tokens: Array,
        finite: Array,
        samples: SampleBatch,
        state: RowState,
        results: Array,
        /,
    ) -> None: ...


def penalised(scores: Array, output: Array, penalties: Sequence[Array]) -> Array:
    """Return the logits of tokens that a row has, with its penalties; ``scores`` are overwritten.

    Args:
        scores: float32 logits.
        output: how often the output has each of these tokens.
        penalties: those of ``PENALTIES``.
    """
    repetition, presence, frequency = penalties
    scores = where(scores > 0, scores / repetition, scores * repetition)
    scores -= frequency * output
    scores -= presence * (output > 0)
    return nan_to_num(scores)  # a tiny repetition penalty may overflow


def penalise(logits: Array, asked: PenalisedRows) -> None:
    """See ``Penalise``; on any device."""
    length = asked.lengths[:, None]
    place = np.arange(int(length.max()))
    known = asked.tokens[asked.rows, : len(place)]
    # Beyond its length a row repeats its first token, which is penalised once however often met.
    ids = np.where(place < length, known, known[:, :1]).astype(np.int64)
    is_output = (place >= asked.num_prompt[:, None]) & (place < length)
    rows_of = np.arange(len(asked.at))[:, None]
    counts = np.zeros((len(asked.at), logits.shape[1]), np.float32)
    np.add.at(counts, (rows_of, ids), is_output.astype(np.float32))
    output = from_numpy(logits, counts[rows_of, ids])  # [P, L] times that the output has the token
    places = from_numpy(logits, asked.at[:, None]), from_numpy(logits, ids)
    given = [from_numpy(logits, column[:, None]) for column in asked.penalties.T]
    logits[places] = penalised(logits[places], output, given)


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
