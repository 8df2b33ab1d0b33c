"""Log probabilities of tokens: computed where the logits are, formatted on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from weft.core.types import MAX_LOGPROBS, TokenLogprob
from weft.kernels.arrays import Array, as_float64, concatenate, from_numpy, to_numpy
from weft.kernels.interface import TopK

COLUMNS = 2 + 2 * MAX_LOGPROBS  # of ``score``, at the most
SCORED_TOKENS_AT_ONCE = 64


def score(logprobs: Array, tokens: Array, alternatives: bool, top_k: TopK) -> Array:
    """Return what ``describe`` needs of one token of each distribution, beside them.

    Args:
        logprobs: [M, V].
        tokens: [M] int64.
        alternatives: whether the likeliest tokens are wanted as well.

    Returns:
        [M, 2 + 2W] float64, exactly: log probability, rank, and the log probabilities and ids of
        the W likeliest tokens. W is always the same, as which of equal tokens come first depends
        on it: ``MAX_LOGPROBS``, or as many as there are; or 0.
    """
    rows = from_numpy(logprobs, np.arange(len(logprobs)))
    own = logprobs[rows, tokens][:, None]  # [M, 1]
    ranks = 1 + (logprobs > own).sum(-1)[:, None]  # [M, 1]
    width = min(MAX_LOGPROBS, logprobs.shape[1]) if alternatives else 0
    values, ids = top_k(logprobs, width)  # [M, W]
    return concatenate([as_float64(part) for part in (own, ranks, values, ids)], -1)


def describe(
    scores: Array, tokens: Seq[int] | NDArray[np.int64], alternatives: Seq[int]
) -> list[TokenLogprob]:
    """Describe tokens with their ranks and the likeliest alternatives.

    Args:
        scores: [M, 2 + 2W] of ``score``, on the host.
        tokens: [M].
        alternatives: for each token how many, at most ``MAX_LOGPROBS``.
    """
    width = (scores.shape[1] - 2) // 2
    return [
        TokenLogprob(
            int(token),
            value,
            int(rank),
            tuple(zip(map(int, top[width : width + count]), top[:count], strict=True)),
        )
        for (value, rank, *top), token, count in zip(
            scores.tolist(), tokens, [min(count, width) for count in alternatives], strict=True
        )
    ]


def token_logprobs(
    logprobs: Array, tokens: NDArray[np.int64], alternatives: Seq[int], top_k: TopK
) -> list[TokenLogprob]:
    """``describe`` tokens [M] of distributions [M, V]."""
    found = score(logprobs, from_numpy(logprobs, tokens), any(alternatives), top_k)
    return describe(to_numpy(found), tokens, alternatives)
