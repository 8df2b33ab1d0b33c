"""Restricts the tokens that rows may sample, beside grammars: allowed ids and bad words.

What a row may not sample follows from its parameters and tokens alone, so that drafts, preemption
and recovery need nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import ParameterError, WeftError
from weft.core.types import SamplingParams
from weft.kernels.arrays import Array, from_numpy


@dataclass(frozen=True, slots=True)
class _RestrictedRow:
    """What one row may sample.

    Attributes:
        allowed: ids [A]; None for all.
        ends: the tokens that end a bad sequence, by the tokens before them.
        lengths: those of the keys of ``ends``.
    """

    allowed: NDArray[np.int64] | None
    ends: dict[tuple[int, ...], list[int]]
    lengths: frozenset[int]

    def banned(self, output: NDArray[np.int32]) -> list[int]:
        """Tokens that would end a bad sequence after some output [N]."""
        found: list[int] = []
        for length in self.lengths:
            if length <= len(output):
                before = tuple(output[len(output) - length :].tolist())
                found += self.ends.get(before, ())
        return found


class Restrictions:
    """The rows that may not sample everything."""

    def __init__(self) -> None:
        self._rows: dict[int, _RestrictedRow] = {}

    @property
    def empty(self) -> bool:
        return not self._rows

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def add(self, row: int, params: SamplingParams) -> None:
        """Take a row in that is restricted."""
        ends: dict[tuple[int, ...], list[int]] = {}
        for *before, last in params.bad_token_sequences:
            ends.setdefault(tuple(before), []).append(last)
        ids = params.allowed_token_ids
        allowed = np.unique(np.array(ids, np.int64)) if ids else None
        self._rows[row] = _RestrictedRow(allowed, ends, frozenset(map(len, ends)))

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)

    def forbid(self, logits: Array, rows: Seq[int], outputs: Seq[NDArray[np.int32]]) -> None:
        """Make what rows may not sample impossible: minus infinity, as grammars do.

        Args:
            logits: [S, V] of the rows, changed in place.
            rows: [S].
            outputs: [S] the output tokens [N] of each before the one to be sampled.
        """
        for i, number in enumerate(rows):
            row = self._rows.get(number)
            if row is None:
                continue
            if row.allowed is not None:
                ids = from_numpy(logits, row.allowed)
                kept = logits[i, ids]  # a copy
                logits[i] = -np.inf
                logits[i, ids] = kept
            banned = row.banned(outputs[i])
            if banned:
                logits[i, banned] = -np.inf

    def faults(self, logits: Array, rows: Seq[int]) -> dict[int, WeftError]:
        """The rows without any token to sample, with the reason; their logits become finite.

        Args:
            logits: [S, V] after everything that forbids tokens.
            rows: [S].
        """
        found: dict[int, WeftError] = {}
        for i, number in enumerate(rows):
            row = self._rows.get(number)
            if row is not None and bool((logits[i] == -np.inf).all()):
                param = "bad_words" if row.allowed is None else "allowed_token_ids"
                found[number] = ParameterError(
                    "No token is left to sample: allowed_token_ids, bad_words and structured "
                    "output together exclude all.",
                    param=param,
                )
                logits[i] = 0.0
        return found
