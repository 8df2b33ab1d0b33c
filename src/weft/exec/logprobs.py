"""Log probabilities of tokens: computed on the device of the logits, formatted on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.types import MAX_LOGPROBS, TokenLogprob

COLUMNS = 2 + 2 * MAX_LOGPROBS  # of ``score``, at the most
SCORED_TOKENS_AT_ONCE = 64


def score(logprobs: Tensor, tokens: Tensor, alternatives: bool) -> Tensor:
    """Return what ``describe`` needs of one token of each distribution, on their device.

    Args:
        logprobs: [M, V].
        tokens: [M] int64.
        alternatives: whether the likeliest tokens are wanted as well.

    Returns:
        [M, 2 + 2W] float64, exactly: log probability, rank, and the log probabilities and ids of
        the W likeliest tokens. W is always the same, as which of equal tokens come first depends
        on it: ``MAX_LOGPROBS``, or as many as there are; or 0.
    """
    own = logprobs.gather(1, tokens.unsqueeze(1))  # [M, 1]
    ranks = 1 + (logprobs > own).sum(dim=-1, keepdim=True)  # [M, 1]
    width = min(MAX_LOGPROBS, logprobs.shape[1]) if alternatives else 0
    values, ids = logprobs.topk(width, dim=-1)  # [M, W]
    return torch.cat([part.double() for part in (own, ranks, values, ids)], dim=-1)


def describe(
    scores: Tensor, tokens: Seq[int] | NDArray[np.int64], alternatives: Seq[int]
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
    logprobs: Tensor, tokens: NDArray[np.int64], alternatives: Seq[int]
) -> list[TokenLogprob]:
    """``describe`` tokens [M] of distributions [M, V]."""
    at = torch.from_numpy(tokens).to(logprobs.device)
    return describe(score(logprobs, at, any(alternatives)).cpu(), tokens, alternatives)
