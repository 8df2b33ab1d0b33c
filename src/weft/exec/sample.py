"""From logits to tokens, vectorised over the rows of a step.

Order: penalties, bias, minimum length, then greedy choice, or temperature, top-k, top-p, min-p and
a draw. One random number a token, a function of the row's seed and its count of output tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.types import SamplingParams, TokenLogprob
from weft.exec.philox import uniform
from weft.exec.rows import RowTable

FIRST_CANDIDATES = 1024  # tried before a full sort of the vocabulary


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens [S] of the sampled rows; where ``finite`` [S] is False the token means nothing."""

    tokens: NDArray[np.int64]
    finite: NDArray[np.bool_]
    logprobs: dict[int, TokenLogprob]  # by row


def sample(logits: Tensor, rows: NDArray[np.int64], table: RowTable) -> Sampled:
    """Choose the next token of each row.

    Args:
        logits: [S, V] float32 of the model; changed in place.
        rows: [S] executor rows.
    """
    # A sum is finite only if every entry is: one pass, no [S, V] mask.
    finite = torch.isfinite(logits.sum(dim=-1)).numpy()
    if not finite.all():
        logits[torch.from_numpy(~finite)] = 0.0
    scored = _scored_rows(rows, table)
    raw = {i: torch.log_softmax(logits[i], dim=-1) for i in scored}
    _penalise(logits, rows, table)
    _apply_special(logits, rows, table)
    tokens = _choose(logits, rows, table)
    logprobs = {}
    for i in scored:
        params = _params(table, int(rows[i]))
        if finite[i]:
            logprobs[int(rows[i])] = token_logprob(raw[i], int(tokens[i]), params.logprobs or 0)
    return Sampled(tokens, finite, logprobs)


def token_logprob(logprobs: Tensor, token: int, alternatives: int) -> TokenLogprob:
    """Describe one token of a distribution [V] with its rank and the likeliest alternatives."""
    own = float(logprobs[token])
    rank = int((logprobs > own).sum()) + 1
    values, ids = logprobs.topk(alternatives) if alternatives else (logprobs[:0], logprobs[:0])
    top = tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True))
    return TokenLogprob(token, own, rank, top)


def _params(table: RowTable, row: int) -> SamplingParams:
    params = table.params[row]
    assert params is not None
    return params


def _scored_rows(rows: NDArray[np.int64], table: RowTable) -> list[int]:
    if not table.special:
        return []
    return [
        i
        for i, row in enumerate(rows.tolist())
        if row in table.special and _params(table, row).logprobs is not None
    ]


def _penalise(logits: Tensor, rows: NDArray[np.int64], table: RowTable) -> None:
    """Apply repetition, presence and frequency penalties to the rows that have any."""
    if not table.penalised:
        return
    for i, row in enumerate(rows.tolist()):
        if row not in table.penalised:
            continue
        tokens = torch.from_numpy(table.tokens[row, : table.length[row]].astype(np.int64))
        prompt, size = int(table.num_prompt[row]), logits.shape[1]
        output = torch.bincount(tokens[prompt:], minlength=size)[:size]  # [V]
        seen = torch.bincount(tokens, minlength=size)[:size] > 0
        penalty = float(table.columns.repetition[row])
        scores = logits[i]
        repeated = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(seen, repeated, scores)
        scores = scores - float(table.columns.frequency[row]) * output
        logits[i] = scores - float(table.columns.presence[row]) * (output > 0)


def _apply_special(logits: Tensor, rows: NDArray[np.int64], table: RowTable) -> None:
    """Apply logit bias, and forbid stop ids before the minimum length."""
    if not table.special:
        return
    for i, row in enumerate(rows.tolist()):
        if row not in table.special:
            continue
        params = _params(table, row)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
            logits[i, ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        if table.length[row] - table.num_prompt[row] < params.min_tokens and table.stop_ids[row]:
            logits[i, torch.tensor(sorted(table.stop_ids[row]), dtype=torch.int64)] = -torch.inf


def _choose(logits: Tensor, rows: NDArray[np.int64], table: RowTable) -> NDArray[np.int64]:
    tokens = logits.argmax(dim=-1).numpy()  # [S]
    drawn = np.flatnonzero(table.columns.temperature[rows] > 0)
    if not len(drawn):
        return tokens
    columns, chosen = table.columns, rows[drawn]
    counters = table.length[chosen] - table.num_prompt[chosen]
    draws = torch.from_numpy(uniform(columns.seed[chosen], counters))  # [N]
    temperature = torch.from_numpy(columns.temperature[chosen]).unsqueeze(1)
    scaled = logits[torch.from_numpy(drawn)] / temperature  # [N, V]
    tokens[drawn] = _draw(scaled, draws, _Filters.of(table, chosen)).numpy()
    return tokens


@dataclass(frozen=True, slots=True)
class _Filters:
    """Filters of N rows: top_k [N] int64 (0: all), top_p [N] and min_p [N] float64."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, table: RowTable, rows: NDArray[np.int64]) -> _Filters:
        columns = table.columns
        return cls(
            torch.from_numpy(columns.top_k[rows]),
            torch.from_numpy(columns.top_p[rows]),
            torch.from_numpy(columns.min_p[rows]),
        )

    def pick(self, index: Tensor) -> _Filters:
        return _Filters(self.top_k[index], self.top_p[index], self.min_p[index])

    @property
    def open(self) -> Tensor:
        """[N] bool: rows in which no token is filtered away."""
        return (self.top_k == 0) & (self.top_p >= 1) & (self.min_p <= 0)


def _draw(scaled: Tensor, draws: Tensor, filters: _Filters) -> Tensor:
    """Draw from [N, V] scaled logits by one number each; a row's result depends on it alone."""
    tokens = torch.empty(len(scaled), dtype=torch.int64)
    for mask, draw in ((filters.open, _draw_open), (~filters.open, _draw_filtered)):
        index = mask.nonzero().squeeze(1)
        if len(index):
            tokens[index] = draw(scaled[index], draws[index], filters.pick(index))
    return tokens


def _draw_open(scaled: Tensor, draws: Tensor, filters: _Filters) -> Tensor:  # noqa: ARG001
    probabilities = torch.softmax(scaled.double(), dim=-1)
    return _inverse(probabilities, draws)


def _draw_filtered(scaled: Tensor, draws: Tensor, filters: _Filters) -> Tensor:
    """Draw among the candidates, likeliest first; sort the whole vocabulary only if need be."""
    size = scaled.shape[1]
    total = torch.logsumexp(scaled.double(), dim=-1, keepdim=True)  # [N, 1]
    tokens = torch.empty(len(scaled), dtype=torch.int64)
    index = torch.arange(len(scaled))
    for width in (min(FIRST_CANDIDATES, size), size):
        values, ids = scaled[index].topk(width, dim=-1)  # [N, W] falling
        probabilities = torch.exp(values.double() - total[index])
        kept, sure = _filter(probabilities, filters.pick(index), width == size)
        position = _inverse(kept, draws[index])
        tokens[index[sure]] = ids.gather(1, position.unsqueeze(1)).squeeze(1)[sure]
        index = index[~sure]
        if not len(index):
            break
    return tokens


def _filter(probabilities: Tensor, filters: _Filters, complete: bool) -> tuple[Tensor, Tensor]:
    """Zero what the filters drop from [N, W] falling probabilities.

    Returns the kept probabilities and [N] bool: whether a token beyond W could not have been kept.
    """
    rank = torch.arange(probabilities.shape[1]).unsqueeze(0)
    top_k = torch.where(filters.top_k == 0, torch.iinfo(torch.int64).max, filters.top_k)
    by_rank = rank < top_k.unsqueeze(1)
    kept = probabilities * by_rank
    mass = kept.sum(dim=-1, keepdim=True)
    limited = top_k <= probabilities.shape[1]
    share = torch.where(limited, filters.top_p * mass.squeeze(1), filters.top_p).unsqueeze(1)
    before = kept.cumsum(dim=-1) - kept
    by_mass = (before < share) | (filters.top_p >= 1).unsqueeze(1)
    by_mass[:, 0] = True
    by_share = probabilities >= filters.min_p.unsqueeze(1) * probabilities[:, :1]
    kept = kept * by_mass * by_share
    last_dropped = ~(by_rank & by_mass & by_share)[:, -1]
    return kept, last_dropped | limited | torch.tensor(complete)


def _inverse(weights: Tensor, draws: Tensor) -> Tensor:
    """Return for each row of [N, W] weights the index that the draw in [0, 1) falls on."""
    cumulative = weights.cumsum(dim=-1)
    target = (draws * cumulative[:, -1]).unsqueeze(1)
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    last = (weights > 0).long().cumsum(dim=-1).argmax(dim=-1)  # the last index with any weight
    return torch.minimum(index, last)
