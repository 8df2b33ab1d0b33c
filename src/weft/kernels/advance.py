"""From a decode step to the next one of the same rows, in the device's own copy of its inputs.

Where rows are leased, nothing is packed or uploaded between two steps: what the next one reads is
made of what the one before has given. A lease ends on the device when a row does, when a row comes
to its limit or lacks a block, when logits are not finite, and when the bell is rung. A step after
that is only padding, and says so by its hashes: 0, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from weft.kernels.arrays import Array

# Why a lease has ended, by the numbers of ``End`` in resident/loop.hpp and one more. ``STEPS`` is
# that a row has come to its limit.
STEPS, ROW, ASKED, NUMBERS, BLOCKS = 1, 2, 3, 5, 8
STOP_IDS = 8  # of a row, on average: those of a lease must fit into so many for each


@dataclass(frozen=True)
class StepBuffer:
    """A decode step in the uploaded buffer: T tokens, a sample of each, padding last.

    See ``exec.step_layout`` for what the parts mean.

    Attributes:
        ids, positions: [T] int64.
        slot_mapping: [G, T] int64.
        query_start, seq_lens: [R + 1] and [R] int32, where R is not above T.
        table_start: [G, R] int32.
        tables: [N] int32, with room for all steps of a lease.
        row, counter: [T] int64.
        changes: [T] int32.
        hashes: [2] int64.
    """

    ids: Array
    positions: Array
    slot_mapping: Array
    query_start: Array
    seq_lens: Array
    table_start: Array
    tables: Array
    row: Array
    counter: Array
    changes: Array
    hashes: Array
    block_size: int


class RowBounds(NamedTuple):
    """How far M rows may go, in the order of a step.

    Attributes:
        limits: [M] int64, tokens that a row may compute in all.
        stop_from: [M + 1] int64: the ids that end row i are ``stop_ids[stop_from[i] :
            stop_from[i + 1]]``.
        stop_ids: [STOP_IDS * M] int64.
    """

    limits: Array
    stop_from: Array
    stop_ids: Array

    @classmethod
    def of(cls, told: Array) -> RowBounds:
        """The parts of one array of ``told_size(M)`` numbers."""
        rows = (len(told) - 1) // (2 + STOP_IDS)
        return cls(told[:rows], told[rows : 2 * rows + 1], told[2 * rows + 1 :])


def told_size(rows: int) -> int:
    """Numbers of the ``RowBounds`` of so many rows."""
    return (2 + STOP_IDS) * rows + 1


@dataclass(frozen=True)
class LeaseBounds:
    """What ends a lease, on the device.

    Attributes:
        told: int64, a ``RowBounds``.
        windows: [G] int32, of each KV group; 0 for none.
        bell: [1] int32 in memory of the host: whoever sets it to another number than 0 ends it.
        bell_at: [1] int64 on the device, the address of ``bell``.
        nobody: the executor row of padding; all others are less.
    """

    told: Array
    windows: Array
    bell: Array
    bell_at: Array
    nobody: int

    @property
    def rows(self) -> RowBounds:
        return RowBounds.of(self.told)

    @classmethod
    def empty(
        cls, rows: int, windows: list[int], bell: Any, nobody: int, where: Any
    ) -> LeaseBounds:
        """Return bounds of so many rows on a torch device; ``bell`` is as above."""
        import torch

        return cls(
            torch.zeros(told_size(rows), dtype=torch.int64, device=where),
            torch.tensor(windows, dtype=torch.int32, device=where),
            bell,
            torch.tensor([bell.data_ptr()], device=where),
            nobody,
        )


class Advance(Protocol):
    """Rewrite a step in place to the next one of its rows; see ``reference_advance.advance``."""

    def __call__(self, step: StepBuffer, bounds: LeaseBounds, results: Array, /) -> None: ...
