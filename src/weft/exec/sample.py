"""From logits to tokens.

Order: penalties, bias, minimum length, grammar, then greedy choice, or temperature, top-k, top-p,
min-p and a draw. One random number a token, a function of the row's seed and its count of output
tokens.

What is done to all rows at once are operations that treat each row alike whatever the others are,
and the choice is made row by row. So a row's result depends on this row alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import WeftError
from weft.core.types import MAX_LOGPROBS, TokenLogprob
from weft.exec.rows import RowTable
from weft.kernels.cpu.choose import uniform
from weft.kernels.ops import Choose

LOWEST = torch.finfo(torch.float32).min  # of a forbidden token; infinity could breed NaN


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens [S] of the sampled rows.

    Where ``finite`` [S] is False, or a row is in ``faults``, the token means nothing.
    """

    tokens: NDArray[np.int64]
    finite: NDArray[np.bool_]
    logprobs: dict[int, TokenLogprob]  # by index within S
    faults: dict[int, WeftError]  # by row


def sample(
    logits: Tensor,
    rows: NDArray[np.int64],
    table: RowTable,
    choose: Choose,
    lengths: NDArray[np.int64] | None = None,
) -> Sampled:
    """Choose the next token of each row.

    Args:
        logits: [S, V] float32 of the model; changed in place.
        rows: [S] executor rows; a row may stand several times, each time with another length.
        choose: how a token comes of logits that nothing changes any more.
        lengths: [S] tokens of the row that come before; None for all that it knows.
    """
    if lengths is None:
        lengths = table.length[rows]
    settings = table.columns.choice[rows]  # [S, 4]
    draws = uniform(table.columns.seed[rows], lengths - table.num_prompt[rows])
    if not table.changes_logits:
        return Sampled(*choose(logits, settings, draws), {}, {})
    finite = _finite_rows(logits)
    if not finite.all():
        logits[torch.from_numpy(~finite)] = 0.0
    scored = [i for i in _which(rows, table.scored) if finite[i]]
    raw = torch.log_softmax(logits[scored], dim=-1) if scored else None
    _penalise(logits, rows, lengths, table)
    _bias(logits, rows, lengths, table)
    grammars, which = table.grammars, rows.tolist()
    faults = grammars.forbid(logits, which) if grammars is not None else {}
    tokens, _ = choose(logits, settings, draws)
    logprobs: dict[int, TokenLogprob] = {}
    if raw is not None:
        chosen = rows[scored].tolist()
        entries = token_logprobs(raw, tokens[scored], [table.scored[row] for row in chosen])
        logprobs = dict(zip(scored, entries, strict=True))
    if grammars is not None:
        grammars.advance(which, tokens)
    return Sampled(tokens, finite, logprobs, faults)


def count_taken(tokens: Seq[int], finite: Seq[bool], draft: Seq[int]) -> int:
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


def token_logprobs(
    logprobs: Tensor, tokens: NDArray[np.int64], alternatives: Seq[int]
) -> list[TokenLogprob]:
    """Describe one token of each distribution with its rank and the likeliest alternatives.

    Args:
        logprobs: [M, V].
        tokens: [M].
        alternatives: for each row how many, at most ``MAX_LOGPROBS``.
    """
    values = logprobs.numpy()
    own = values[np.arange(len(tokens)), tokens]
    ranks = [1 + int(np.count_nonzero(row > x)) for row, x in zip(values, own, strict=True)]
    width = min(MAX_LOGPROBS, logprobs.shape[1]) if any(alternatives) else 0
    # Always as wide, as which of equal tokens come first depends on the width.
    top_values, top_ids = (found.tolist() for found in logprobs.topk(width, dim=-1))
    return [
        TokenLogprob(
            int(token),
            float(own[i]),
            ranks[i],
            tuple(zip(top_ids[i][:count], top_values[i][:count], strict=True)),
        )
        for i, (token, count) in enumerate(zip(tokens, alternatives, strict=True))
    ]


def _which(rows: NDArray[np.int64], wanted: set[int] | dict[int, int]) -> list[int]:
    """Return the indices of ``rows`` at which a wanted row is."""
    return [i for i, row in enumerate(rows.tolist()) if row in wanted] if wanted else []


def _finite_rows(logits: Tensor) -> NDArray[np.bool_]:
    """Whether all of a row [S] is finite. A finite sum says so fast; an overflow says nothing."""
    finite: NDArray[np.bool_] = torch.isfinite(logits.sum(dim=-1)).numpy()
    for i in np.flatnonzero(~finite):
        finite[i] = bool(torch.isfinite(logits[i]).all())
    return finite


# -- changes to the logits ----------------------------------------------------------------------


def _penalise(
    logits: Tensor, rows: NDArray[np.int64], lengths: NDArray[np.int64], table: RowTable
) -> None:
    """Apply repetition, presence and frequency penalties where a row's tokens [P, L] point."""
    at = _which(rows, table.penalised)
    if not at:
        return
    which = rows[at]
    length, columns = lengths[at, None], table.columns
    place = np.arange(int(length.max()))
    known = table.tokens[which, : len(place)]
    # Beyond its length a row repeats its first token, which is penalised once however often met.
    ids = torch.from_numpy(np.where(place < length, known, known[:, :1]).astype(np.int64))
    is_output = (place >= table.num_prompt[which, None]) & (place < length)
    counts = torch.zeros(len(at), logits.shape[1])
    counts.scatter_add_(1, ids, torch.from_numpy(is_output.astype(np.float32)))
    output = counts.gather(1, ids)  # [P, L] times that the output has the token
    repetition, presence, frequency = (
        torch.from_numpy(column[which]).unsqueeze(1)
        for column in (columns.repetition, columns.presence, columns.frequency)
    )
    index = torch.tensor(at).unsqueeze(1)
    scores = logits[index, ids]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores -= frequency * output
    scores -= presence * (output > 0)
    logits[index, ids] = torch.nan_to_num_(scores)  # a tiny repetition penalty may overflow


def _bias(
    logits: Tensor, rows: NDArray[np.int64], lengths: NDArray[np.int64], table: RowTable
) -> None:
    """Apply logit bias, and forbid stop ids before the minimum length."""
    if not table.bias and not table.delayed:
        return
    size = logits.shape[1]
    for i, row in enumerate(rows.tolist()):
        if row in table.bias:
            ids, values = table.bias[row]
            logits[i, torch.from_numpy(ids)] += torch.from_numpy(values)
        if row in table.delayed:
            stop_ids, min_tokens = table.delayed[row]
            if lengths[i] - table.num_prompt[row] < min_tokens:
                # A model may name end ids that its vocabulary lacks; they never come anyway.
                logits[i, torch.from_numpy(stop_ids[stop_ids < size])] = LOWEST
