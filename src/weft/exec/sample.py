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

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import WeftError
from weft.core.types import TokenLogprob
from weft.exec.input_batch import InputBatch
from weft.exec.logprobs import token_logprobs
from weft.kernels.arrays import Array, empty, from_numpy, isfinite, to_numpy
from weft.kernels.interface import OpTable, Sample
from weft.kernels.sampling import LOWEST, PenalisedRows


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

    def first(self, count: int) -> Sampled:
        """The first rows, which alone have log probabilities."""
        tokens, finite, taken = self.tokens[:count], self.finite[:count], self.taken[:count]
        return replace(self, tokens=tokens, finite=finite, taken=taken)


def unsampled(states: Array) -> Sampled:
    """What stands for the tokens of states [S, C] that nobody samples from."""
    finite, none = _finite_rows(states), np.zeros(len(states), np.int64)
    return Sampled(none, finite, {}, {}, none)


def sample(
    logits: Array,
    rows: NDArray[np.int64],
    table: InputBatch,
    ops: OpTable,
    lengths: NDArray[np.int64] | None = None,
) -> Sampled:
    """Choose the next token of each row.

    Args:
        logits: [S, V] float32 of the model; changed in place.
        rows: [S] executor rows; a row may stand several times, each time with another length.
        ops: of the model.
        lengths: [S] tokens of the row that come before; None for all that it knows.
    """
    if lengths is None:
        lengths = table.length[rows]
    columns = table.columns
    asked = columns.choice[rows], columns.seed[rows], lengths - table.num_prompt[rows]
    if not table.changes_logits:
        return Sampled(*_run(ops.sample, logits, *asked), {}, {}, np.zeros(len(rows), np.int64))
    finite = _finite_rows(logits)
    if not finite.all():
        logits[from_numpy(logits, ~finite)] = 0.0
    scored = [i for i in _which(rows, table.scored) if finite[i]]
    raw = ops.log_softmax(logits[scored]) if scored else None
    _penalise(logits, rows, lengths, table, ops)
    _bias(logits, rows, lengths, table)
    grammars, which = table.grammars, rows.tolist()
    faults = _forbid(logits, which, lengths, table)
    tokens, _ = _run(ops.sample, logits, *asked)
    logprobs: dict[int, TokenLogprob] = {}
    if raw is not None:
        chosen = rows[scored].tolist()
        counts = [table.scored[row] for row in chosen]
        entries = token_logprobs(raw, tokens[scored], counts, ops.top_k)
        logprobs = dict(zip(scored, entries, strict=True))
        _score_named(logprobs, raw, which, table)
    if grammars is not None:
        grammars.advance(which, tokens)
    return Sampled(tokens, finite, logprobs, faults, np.zeros(len(rows), np.int64))


def _forbid(
    logits: Array, rows: Seq[int], lengths: NDArray[np.int64], table: InputBatch
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
    logprobs: dict[int, TokenLogprob], raw: Array, rows: Seq[int], table: InputBatch
) -> None:
    """Put the tokens that rows name in the place of the likeliest ones, likeliest first."""
    for at, (i, entry) in enumerate(logprobs.items()):
        ids = table.named.get(rows[i])
        if ids is not None:
            values = raw[at, from_numpy(raw, ids)].tolist()
            top = sorted(zip(ids.tolist(), values, strict=True), key=lambda pair: -pair[1])
            logprobs[i] = replace(entry, top=tuple(top))


def _run(
    op: Sample,
    logits: Array,
    settings: NDArray[np.float64],
    seeds: NDArray[np.int64],
    counters: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the tokens [S] that come of the logits, and whether a row of them is finite."""
    tokens, finite = empty(logits, (len(logits),), "int64"), empty(logits, (len(logits),), "bool")
    asked = from_numpy(logits, settings), from_numpy(logits, seeds), from_numpy(logits, counters)
    op(logits, *asked, tokens, finite)
    return to_numpy(tokens), to_numpy(finite)


def _which(rows: NDArray[np.int64], wanted: set[int] | dict[int, int]) -> list[int]:
    """Return the indices of ``rows`` at which a wanted row is."""
    return [i for i, row in enumerate(rows.tolist()) if row in wanted] if wanted else []


def _finite_rows(logits: Array) -> NDArray[np.bool_]:
    """Whether all of a row [S] is finite: a finite sum proves it; an overflow needs a check."""
    with np.errstate(all="ignore"):
        finite: NDArray[np.bool_] = to_numpy(isfinite(logits.sum(-1)))
    for i in np.flatnonzero(~finite):
        finite[i] = bool(isfinite(logits[i]).all())
    return finite


# -- changes to the logits ----------------------------------------------------------------------


def _penalise(
    logits: Array,
    rows: NDArray[np.int64],
    lengths: NDArray[np.int64],
    table: InputBatch,
    ops: OpTable,
) -> None:
    """Apply repetition, presence and frequency penalties where a row's tokens point."""
    at = _which(rows, table.penalised)
    if not at:
        return
    which = rows[at]
    known = table.tokens, which, lengths[at], table.num_prompt[which]
    ops.penalise(logits, PenalisedRows(np.array(at), *known, table.columns.penalties[which]))


def _bias(
    logits: Array, rows: NDArray[np.int64], lengths: NDArray[np.int64], table: InputBatch
) -> None:
    """Apply logit bias, and forbid stop ids before the minimum length."""
    if not table.bias and not table.delayed:
        return
    size = logits.shape[1]
    for i, row in enumerate(rows.tolist()):
        if row in table.bias:
            ids, values = table.bias[row]
            logits[i, from_numpy(logits, ids)] += from_numpy(logits, values)
        if row in table.delayed:
            stop_ids, min_tokens = table.delayed[row]
            if lengths[i] - table.num_prompt[row] < min_tokens:
                # A model may name end ids that its vocabulary lacks; they never come anyway.
                logits[i, from_numpy(logits, stop_ids[stop_ids < size])] = LOWEST
