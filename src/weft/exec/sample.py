"""From logits to tokens.

Order: penalties, bias, minimum length, grammar, then greedy choice, or temperature, top-k, top-p,
min-p and a draw. One random number a token, a function of the row's seed and its count of output
tokens.

What is done to all rows at once are operations that treat each row alike whatever the others are;
filters and draws go row by row, as they differ in how much of a row they must look at. So a row's
result depends on this row alone.
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
from weft.exec.philox import uniform
from weft.exec.rows import RowTable

SORTED_AT_ONCE = 4096  # candidates; where top-p has more, halves are set aside unsorted first
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
    lengths: NDArray[np.int64] | None = None,
) -> Sampled:
    """Choose the next token of each row.

    Args:
        logits: [S, V] float32 of the model; changed in place.
        rows: [S] executor rows; a row may stand several times, each time with another length.
        lengths: [S] tokens of the row that come before; None for all that it knows.
    """
    if lengths is None:
        lengths = table.length[rows]
    finite = _finite_rows(logits)
    if not finite.all():
        logits[torch.from_numpy(~finite)] = 0.0
    scored = [i for i in _which(rows, table.scored) if finite[i]]
    raw = torch.log_softmax(logits[scored], dim=-1) if scored else None
    _penalise(logits, rows, lengths, table)
    _bias(logits, rows, lengths, table)
    grammars, which = table.grammars, rows.tolist()
    faults = grammars.forbid(logits, which) if grammars is not None else {}
    tokens = _choose(logits, rows, lengths, table)
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


# -- the choice ---------------------------------------------------------------------------------


def _choose(
    logits: Tensor, rows: NDArray[np.int64], lengths: NDArray[np.int64], table: RowTable
) -> NDArray[np.int64]:
    columns = table.columns
    drawn = columns.temperature[rows] > 0  # [S]
    if not drawn.any():
        return logits.argmax(dim=-1).numpy()
    if not drawn.all():
        tokens = logits.argmax(dim=-1).numpy()
        logits = logits[torch.from_numpy(drawn)]
    else:
        tokens = np.empty(len(rows), np.int64)
    which = rows[drawn]
    draws = uniform(columns.seed[which], lengths[drawn] - table.num_prompt[which])
    probabilities = _softmax(logits, torch.from_numpy(columns.temperature[which])).numpy()
    tokens[drawn] = [
        _draw(probabilities[i], draws[i], _Filters.of(table, row))
        for i, row in enumerate(which.tolist())
    ]
    return tokens


def _softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Softmax [N, V] at temperatures [N]; changes ``logits``.

    The likeliest becomes 0 before the division, so that the smallest temperature overflows
    nothing: it leaves the likeliest token, or draws among equally likely ones.
    """
    logits -= logits.amax(dim=-1, keepdim=True)
    logits /= temperature.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    return torch.softmax(logits, dim=-1)


@dataclass(frozen=True, slots=True)
class _Filters:
    """Filters of one row: ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep every token."""

    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, table: RowTable, row: int) -> _Filters:
        columns = table.columns
        return cls(int(columns.top_k[row]), float(columns.top_p[row]), float(columns.min_p[row]))


def _draw(weights: NDArray[np.float32], draw: float, filters: _Filters) -> int:
    """Return the token of probabilities [V] on which a number in [0, 1) falls."""
    size = len(weights)
    ranked = filters.top_p < 1 or 0 < filters.top_k < size
    if not ranked and filters.min_p <= 0:
        return _inverse(weights, draw)
    least, count = _last_kept(weights, filters) if ranked else (np.float32(0), size)
    limit = np.float32(filters.min_p) * weights.max()
    ids = np.flatnonzero(weights >= max(least, limit))
    surplus = len(ids) - count
    if surplus > 0:  # of equally likely tokens the first ones are kept
        equal = np.flatnonzero(weights[ids] == least)
        ids = np.delete(ids, equal[-surplus:])
    return int(ids[_inverse(weights[ids], draw)])


def _inverse(weights: NDArray[np.float32], draw: float) -> int:
    """Return the index of weights [W], not all zero, on which a number in [0, 1) falls."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    total = cumulative[-1]
    target = min(draw * total, np.nextafter(total, 0))  # below the total, whatever rounding does
    return int(np.searchsorted(cumulative, target, side="right"))


def _last_kept(weights: NDArray[np.float32], filters: _Filters) -> tuple[np.float32, int]:
    """Return the smallest probability that top-k and top-p keep, and how many tokens they keep."""
    size, top_k = len(weights), filters.top_k
    rest = weights  # candidates for the last one kept
    if 0 < top_k < size:
        rest = np.partition(weights, size - top_k)[size - top_k :]
        if filters.top_p >= 1:
            return rest.min(), top_k
    total = float(rest.sum(dtype=np.float64))
    share = filters.top_p * total
    # Tokens below (1 - top_p) / V of the mass are less than 1 - top_p together; half, to be safe.
    rest = rest[rest >= np.float32((1 - filters.top_p) * total / len(rest) / 2)]
    mass, count = 0.0, 0  # of tokens likelier than all of the rest
    while len(rest) > SORTED_AT_ONCE:
        half = len(rest) // 2
        rest = np.partition(rest, half)
        upper = float(rest[half:].sum(dtype=np.float64))
        if mass + upper >= share:
            rest = rest[half:]
        else:
            mass, count, rest = mass + upper, count + len(rest) - half, rest[:half]
    rest = np.sort(rest)[::-1]
    before = mass + np.cumsum(rest, dtype=np.float64) - rest
    kept = max(1, int(np.count_nonzero(before < share)))
    return rest[kept - 1], count + kept
