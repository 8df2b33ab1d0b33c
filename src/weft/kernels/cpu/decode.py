"""Decode steps without Python: the resident loop of ``resident/loop.hpp`` on a CPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.kernels.cpu import _native
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.cpu.stack import CpuStack

# Why a lease has ended, in the order of `End` in loop.hpp.
ENDS = ("none", "steps", "row", "asked", "late", "numbers", "failed")

LIMIT_S = 0.1  # of a lease: what the host does from time to time waits for so long
MOST_SPARE = 3  # `LeasedStates::most` in decode.hpp
UNPUBLISHED_S = 0.02  # the same where tokens, or those of a row, come with the end of the lease


Choose = Callable[[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]], bool]


class Lent(Protocol):
    """Such as ``core.plan.LentSlots``."""

    @property
    def spare(self) -> tuple[int, ...]: ...

    @property
    def kept(self) -> bool: ...

    @property
    def every(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LeasedStates:
    """Slots of recurrent states of rows [R].

    Attributes:
        now: [R] int32, what the first step reads.
        spare: [R, MOST_SPARE] int32, what steps write, the last one first; -1 behind that.
        kept: [R] bool, whether ``now`` is never written.
        every: [R] int64, the tokens between states that are kept; 0 for none.
    """

    now: NDArray[np.int32]
    spare: NDArray[np.int32]
    kept: NDArray[np.bool_]
    every: NDArray[np.int64]

    @classmethod
    def of(cls, now: Sequence[int], lent: Sequence[Lent]) -> LeasedStates:
        """Return what rows are lent that have come to the states ``now``."""
        spare = np.full((len(lent), MOST_SPARE), -1, np.int32)
        for row, slots in enumerate(lent):
            spare[row, : len(slots.spare)] = slots.spare
        return cls(
            np.array(now, np.int32),
            spare,
            np.array([slots.kept for slots in lent], np.bool_),
            np.array([slots.every for slots in lent], np.int64),
        )


NO_STATES = LeasedStates.of((), ())


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What rows [R] are leased with.

    Attributes:
        rows: of the executor, [R] int64.
        ids: of their sequences, [R] uint64.
        settings, seeds: [R, len(SETTINGS)] and [R]; see ``interface.Sample``.
        counters: [R] int64, tokens of output that each has.
        stop_ids: of each row the token ids that end it.
        given: [R] int64, the token that each row got last.
        edits: of the rows' logits.
        guest: [R] bool, rows whose tokens ``choose`` chooses.
        withheld: [R] bool, rows whose tokens are not published here.
        choose: is called in each step with logits [R, V] float32, tokens [R] int64 and whether rows
            can go on [R] bool, writes those of guests, and returns whether that went well; None
            without guests. What it raises ends the lease.
        states: of a model with recurrent layers.
        steps: to compute at most.
        step_s: seconds that a step takes, about.
    """

    rows: NDArray[np.int64]
    ids: NDArray[np.uint64]
    settings: NDArray[np.float64]
    seeds: NDArray[np.int64]
    counters: NDArray[np.int64]
    stop_ids: Sequence[NDArray[np.int64]]
    given: NDArray[np.int64]
    edits: _native.RowEdits
    guest: NDArray[np.bool_]
    withheld: NDArray[np.bool_]
    choose: Choose | None
    states: LeasedStates | None
    steps: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a lease gave.

    Attributes:
        given: tokens of each step [S + 1, R], first those of the step before the lease.
        finite: [R], whether the tokens of the last step mean something.
        published: whether all tokens are out already but withheld ones and those of the last step.
        end: one of ``ENDS``.
    """

    given: list[list[int]]
    finite: list[bool]
    published: bool
    end: str


def id_lists(ids: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of all rows [R], one row after the other, and where those of each begin."""
    bounds = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return np.concatenate([np.zeros(0, np.int64), *ids]), bounds


class CpuDecodeLoop:
    """Decodes rows of an executor until a lease ends.

    Args:
        stack: the model, bound to the executor's KV.
        head: its output head.
        logit_scale: multiplies the logits.
        softcap: of the logits then; None for none.
        tokens: [rows, max_tokens] int32 of the executor.
        length: [rows] int64, tokens that each row knows.
        tables: of each KV group [rows, max_blocks] int32.

    Raises:
        ValueError: the parts do not fit each other.
    """

    def __init__(
        self,
        stack: CpuStack,
        head: CpuMatrix,
        logit_scale: float,
        softcap: float | None,
        tokens: NDArray[np.int32],
        length: NDArray[np.int64],
        tables: Sequence[NDArray[np.int32]],
        block_size: int,
    ) -> None:
        self._kept = stack, head
        self._native = _native.DecodeLoop(
            stack.native, head.native, logit_scale, softcap or 0.0, tokens, length, list(tables),
            block_size,
        )  # fmt: skip

    def run(self, lease: _native.Lease, terms: LeaseTerms) -> Decoded:
        """Wait until the lease is granted or recalled, then decode until it ends.

        Raises:
            IndexError: a row has no room for the steps; nothing was computed.
            ValueError: the terms differ in their rows.
            Exception: what ``choose`` has raised.
        """
        states = terms.states or NO_STATES
        try:
            given, finite, published, end = self._native.run(
                lease, terms.rows, terms.ids, terms.settings, terms.seeds, terms.counters,
                *id_lists(terms.stop_ids), terms.given, terms.edits, terms.guest, terms.withheld,
                terms.choose, states.now, states.spare, states.kept, states.every, terms.steps,
                int(LIMIT_S * 1e9), int(UNPUBLISHED_S * 1e9), int(terms.step_s * 1e9),
            )  # fmt: skip
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # of arrays that are the loop's
            raise
        return Decoded(given, finite, published, ENDS[end])
