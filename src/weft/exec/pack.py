"""From a planned sub-batch to the tensors that one forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.plan import SubBatch
from weft.exec.rows import RowTable
from weft.kernels.ops import AttentionBatch


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

    input_ids: Tensor
    positions: Tensor
    groups: tuple[AttentionBatch, ...]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    sample_at: Tensor
    sample_lengths: NDArray[np.int64]


def pack(batch: SubBatch, table: RowTable, block_size: int) -> StepInputs:
    """Gather tokens, positions, write slots and block tables of a sub-batch."""
    rows = np.array(batch.rows, np.int64)
    starts = np.array(batch.starts, np.int64)
    drafted = np.array([len(batch.drafts.get(row, ())) for row in batch.rows], np.int64)
    for row, draft in batch.drafts.items():
        table.guess(row, draft)
    counts = np.array(batch.counts, np.int64) + drafted
    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    row_of_token = np.repeat(rows, counts)  # [T]
    positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)  # [T]
    context_len = starts + counts
    sampled = np.where(np.array(batch.samples, bool), drafted + 1, 0)  # [R] next tokens wanted
    last = np.repeat(query_start[1:] - 1, sampled)  # [S]
    back = _countdown(sampled)  # [S]
    groups = tuple(
        AttentionBatch(
            block_tables=torch.from_numpy(_tables(tables, rows, context_len, block_size)),
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            context_len=torch.from_numpy(context_len.astype(np.int32)),
            slots=torch.from_numpy(
                tables[row_of_token, positions // block_size].astype(np.int64) * block_size
                + positions % block_size
            ),
            block_size=block_size,
        )
        for tables in table.tables
    )
    return StepInputs(
        input_ids=torch.from_numpy(table.tokens[row_of_token, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        groups=groups,
        rows=rows,
        starts=starts,
        counts=counts,
        sample_rows=np.repeat(rows, sampled),
        sample_at=torch.from_numpy(last - back),
        sample_lengths=np.repeat(context_len, sampled) - back,
    )


def _countdown(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each count n the numbers n - 1 to 0, one after the other."""
    return np.repeat(np.cumsum(counts), counts) - np.arange(int(counts.sum())) - 1


def _tables(
    tables: NDArray[np.int32],
    rows: NDArray[np.int64],
    context_len: NDArray[np.int64],
    block_size: int,
) -> NDArray[np.int32]:
    """Block tables [R, B] of the rows, as wide as the longest context."""
    width = -(-int(context_len.max()) // block_size)
    return np.ascontiguousarray(tables[rows, :width])
