"""Samples tokens from logits.

Order: penalties, bias, minimum length, allowed ids and bad words, grammar, then greedy choice, or
temperature, top-k, top-p, min-p and a draw. One random number a token, a function of the row's seed
and its count of output tokens.

What is done to all rows at once are operations that treat each row alike whatever the others are,
and the choice is made row by row. So a row's result depends on this row alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import WeftError
from weft.core.types import TokenLogprob
from weft.exec.input_batch import InputBatch
from weft.exec.logprobs import token_logprobs
from weft.kernels.interface import Sample
from weft.kernels.sampling import LOWEST, penalised


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens [S] of the sampled rows.

    Where ``finite`` [S] is False, or a row is in ``faults``, the token means nothing. ``taken`` [S]
    is, for the first sample of a row, how many of its samples are kept, where the device has said
    so; else 0.
    """

    tokens: NDArray[np.int64]
    finite: NDArray[np.bool_]
    logprobs: dict[int, TokenLogprob]  # by index within S
    faults: dict[int, WeftError]  # by row
    taken: NDArray[np.int64]


def sample(
    logits: Tensor,
    rows: NDArray[np.int64],
    table: InputBatch,
    op: Sample,
    lengths: NDArray[np.int64] | None = None,
) -> Sampled:
    """Choose the next token of each row.

    Args:
        logits: [S, V] float32 of the model; changed in place.
        rows: [S] executor rows; a row may stand several times, each time with another length.
        op: samples from logits that nothing changes any more.
        lengths: [S] tokens of the row that come before; None for all that it knows.
    """
    if lengths is None:
        lengths = table.length[rows]
    columns = table.columns
    asked = columns.choice[rows], columns.seed[rows], lengths - table.num_prompt[rows]
    if not table.changes_logits:
        return Sampled(*_run(op, logits, *asked), {}, {}, np.zeros(len(rows), np.int64))
    finite = _finite_rows(logits)
    if not finite.all():
        logits[_on(logits, ~finite)] = 0.0
    scored = [i for i in _which(rows, table.scored) if finite[i]]
    raw = torch.log_softmax(logits[scored], dim=-1) if scored else None
    _penalise(logits, rows, lengths, table)
    _bias(logits, rows, lengths, table)
    grammars, which = table.grammars, rows.tolist()
    faults = _forbid(logits, which, lengths, table)
    tokens, _ = _run(op, logits, *asked)
    logprobs: dict[int, TokenLogprob] = {}
    if raw is not None:
        chosen = rows[scored].tolist()
        entries = token_logprobs(raw, tokens[scored], [table.scored[row] for row in chosen])
        logprobs = dict(zip(scored, entries, strict=True))
        _score_named(logprobs, raw, which, table)
    if grammars is not None:
        grammars.advance(which, tokens)
    return Sampled(tokens, finite, logprobs, faults, np.zeros(len(rows), np.int64))


def _forbid(
    logits: Tensor, rows: Seq[int], lengths: NDArray[np.int64], table: InputBatch
) -> dict[int, WeftError]:
    """Mask the tokens that rows may not sample; return the rows that cannot continue."""
    grammars, restrictions = table.grammars, table.restrictions
    faults: dict[int, WeftError] = {}
    if not restrictions.empty:
        known = zip(rows, lengths.tolist(), strict=True)
        restrictions.forbid(logits, rows, [table.output(row, length) for row, length in known])
    if grammars is not None:
        faults = grammars.forbid(logits, rows)
    if not restrictions.empty:
        faults = {**restrictions.faults(logits, rows), **faults}
    return faults


def _score_named(
    logprobs: dict[int, TokenLogprob], raw: Tensor, rows: Seq[int], table: InputBatch
) -> None:
    """Put the tokens that rows name in the place of the likeliest ones, likeliest first."""
    for at, (i, entry) in enumerate(logprobs.items()):
        ids = table.named.get(rows[i])
        if ids is not None:
            values = raw[at, _on(raw, ids)].tolist()
            top = sorted(zip(ids.tolist(), values, strict=True), key=lambda pair: -pair[1])
            logprobs[i] = replace(entry, top=tuple(top))


def _run(
    op: Sample,
    logits: Tensor,
    settings: NDArray[np.float64],
    seeds: NDArray[np.int64],
    counters: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the tokens [S] that come of the logits, and whether a row of them is finite."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    asked = _on(logits, settings), _on(logits, seeds), _on(logits, counters)
    op(logits, *asked, tokens, finite)
    return tokens.cpu().numpy(), finite.cpu().numpy()


def _which(rows: NDArray[np.int64], wanted: set[int] | dict[int, int]) -> list[int]:
    """Return the indices of ``rows`` at which a wanted row is."""
    return [i for i, row in enumerate(rows.tolist()) if row in wanted] if wanted else []


def _on(beside: Tensor, array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor on the device of another one."""
    return torch.from_numpy(array).to(beside.device)


def _finite_rows(logits: Tensor) -> NDArray[np.bool_]:
    """Whether all of a row [S] is finite: a finite sum proves it; an overflow needs a check."""
    finite: NDArray[np.bool_] = torch.isfinite(logits.sum(dim=-1)).cpu().numpy()
    for i in np.flatnonzero(~finite):
        finite[i] = bool(torch.isfinite(logits[i]).all())
    return finite


# -- changes to the logits ----------------------------------------------------------------------


def _penalise(
    logits: Tensor, rows: NDArray[np.int64], lengths: NDArray[np.int64], table: InputBatch
) -> None:
    """Apply repetition, presence and frequency penalties where a row's tokens [P, L] point."""
    at = _which(rows, table.penalised)
    if not at:
        return
    which = rows[at]
    length = lengths[at, None]
    place = np.arange(int(length.max()))
    known = table.tokens[which, : len(place)]
    # Beyond its length a row repeats its first token, which is penalised once however often met.
    ids = _on(logits, np.where(place < length, known, known[:, :1]).astype(np.int64))
    is_output = (place >= table.num_prompt[which, None]) & (place < length)
    counts = torch.zeros(len(at), logits.shape[1], device=logits.device)
    counts.scatter_add_(1, ids, _on(logits, is_output.astype(np.float32)))
    output = counts.gather(1, ids)  # [P, L] times that the output has the token
    penalties = _on(logits, table.columns.penalties[which]).unsqueeze(1).unbind(-1)  # of [P, 1]
    index = torch.tensor(at, device=logits.device).unsqueeze(1)
    scores = penalised(logits[index, ids], output, penalties)
    logits[index, ids] = scores


def _bias(
    logits: Tensor, rows: NDArray[np.int64], lengths: NDArray[np.int64], table: InputBatch
) -> None:
    """Apply logit bias, and forbid stop ids before the minimum length."""
    if not table.bias and not table.delayed:
        return
    size = logits.shape[1]
    for i, row in enumerate(rows.tolist()):
        if row in table.bias:
            ids, values = table.bias[row]
            logits[i, _on(logits, ids)] += _on(logits, values)
        if row in table.delayed:
            stop_ids, min_tokens = table.delayed[row]
            if lengths[i] - table.num_prompt[row] < min_tokens:
                # A model may name end ids that its vocabulary lacks; they never come anyway.
                logits[i, _on(logits, stop_ids[stop_ids < size])] = LOWEST
