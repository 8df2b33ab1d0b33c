"""Prepares inputs: turns a planned sub-batch into the arrays that a forward pass reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.plan import SubBatch
from weft.exec.input_batch import InputBatch
from weft.kernels.arrays import Array
from weft.kernels.cpu import _native
from weft.kernels.interface import AttentionMetadata

VIEWS = 256  # shapes of steps whose views of memory are remembered


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one forward pass over T tokens of R rows.

    Attributes:
        input_ids, positions: [T] int64.
        groups: attention metadata of each KV group.
        rows: [R] the executor rows, in batch order.
        starts, counts: [R] first token and number of tokens of each row, drafts included.
        sample_rows: [S] rows whose next token is wanted; one with d drafts stands d + 1 times.
        sample_at: [S] int64 index within T of the token after which it is wanted.
        sample_lengths: [S] tokens of the row up to there.
    """

    input_ids: Array
    positions: Array
    groups: tuple[AttentionMetadata, ...]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    sample_at: Array
    sample_lengths: NDArray[np.int64]


class InputPacker:
    """Gathers tokens, positions, write slots and block tables of sub-batches, in one native call.

    All steps use the same memory, and steps of the same shape the same views of it: what ``pack``
    returned is overwritten by the next call.

    Args:
        wrap: makes the arrays of a forward pass of numpy's, of the same memory.
    """

    def __init__(
        self,
        table: InputBatch,
        block_size: int,
        wrap: Callable[[NDArray[Any]], Array] = lambda array: array,
    ) -> None:
        self._wrap = wrap
        self._table = table
        self._block_size = block_size
        self._native = _native.Packer(table.tokens, table.tables, block_size)
        self._capacity = 0
        self._reserve(1)

    def pack(self, batch: SubBatch) -> StepInputs:
        """Write the inputs of a sub-batch. Raises IndexError for a plan beyond the rows."""
        guessed: tuple[int, ...] = ()
        if batch.drafts:
            guessed = tuple(len(batch.drafts.get(row, ())) for row in batch.rows)
            for row, draft in batch.drafts.items():
                self._table.guess(row, draft)
        tokens = sum(batch.counts) + sum(guessed)
        if tokens > self._capacity:
            self._reserve(tokens)
        shape = self._native.pack(batch.rows, batch.starts, batch.counts, batch.samples, guessed)
        inputs = self._views.get(shape)
        if inputs is None:
            if len(self._views) == VIEWS:
                self._views.clear()
            inputs = self._views[shape] = self._view(*shape)
        return inputs

    def pack_tables(
        self,
        windows: list[int],
        blocks: NDArray[np.int32],
        starts: NDArray[np.int32],
        ahead: int = 0,
    ) -> int:
        """Write the block tables of the latest sub-batch one behind the other.

        Blocks that no query of the step can see are -1, as a sliding group has given them up.

        Args:
            windows: of each group; 0 for none.
            blocks: gets the tables of all groups.
            starts: [G, R] gets where each begins; 0 where there is no row.
            ahead: tokens of each row beyond those of the sub-batch that its table is for.

        Returns:
            how many entries were written.

        Raises:
            IndexError: ``blocks`` is too small, or the tables of the rows are.
        """
        return self._native.pack_tables(windows, blocks, starts, ahead)

    def _reserve(self, tokens: int) -> None:
        table = self._table
        max_rows = len(table.sequence_ids)
        self._capacity = max(2 * self._capacity, tokens, max_rows)
        self._numbers = np.zeros((8, self._capacity), np.int64)
        self._bounds = np.zeros((2, max_rows + 1), np.int32)
        self._slots = [np.zeros(self._capacity, np.int64) for _ in table.tables]
        self._block_tables = [np.zeros_like(blocks) for blocks in table.tables]
        self._native.write_to(self._numbers, self._bounds, self._slots, self._block_tables)
        self._views: dict[tuple[int, int, int, int], StepInputs] = {}

    def _view(self, rows: int, tokens: int, samples: int, blocks: int) -> StepInputs:
        """The views of R rows, T tokens, S samples, and block tables so wide."""
        input_ids, positions, row, start, count, sample_row, sample_at, length = self._numbers
        query_start, seq_lens = self._bounds
        wrap = self._wrap
        groups = tuple(
            AttentionMetadata(
                block_tables=wrap(block_tables[:rows, :blocks]),
                query_start=wrap(query_start[: rows + 1]),
                seq_lens=wrap(seq_lens[:rows]),
                slot_mapping=wrap(slots[:tokens]),
                block_size=self._block_size,
            )
            for block_tables, slots in zip(self._block_tables, self._slots, strict=True)
        )
        return StepInputs(
            input_ids=wrap(input_ids[:tokens]),
            positions=wrap(positions[:tokens]),
            groups=groups,
            rows=row[:rows],
            starts=start[:rows],
            counts=count[:rows],
            sample_rows=sample_row[:samples],
            sample_at=wrap(sample_at[:samples]),
            sample_lengths=length[:samples],
        )
