"""The next decode step of the same rows in plain torch: the truth of the tests of every device."""

from __future__ import annotations

from weft.kernels.advance import ASKED, BLOCKS, NUMBERS, ROW, STEPS, LeaseBounds, StepBuffer
from weft.kernels.arrays import Array


def advance(step: StepBuffer, bounds: LeaseBounds, results: Array) -> None:
    """Rewrite a step in place to the next one of its rows, or to padding if the lease ends.

    A lease that has ended stays so until another step is uploaded.

    Args:
        results: [T, 2] int64 of the step, as ``sampling.verify_drafts`` writes them.
    """
    if int(step.hashes[0]) == 0:
        return
    count = int((step.row < bounds.nobody).sum())
    tokens, positions = results[:count, 0], step.positions[:count] + 1
    index = positions // step.block_size  # [count]
    blocks = []
    for starts in step.table_start:
        at = (starts[:count] + index).clamp(max=len(step.tables) - 1)
        blocks.append(step.tables[at])  # [count]
    end = _end(tokens, positions, blocks, bounds)
    if end:
        _pad(step, bounds, end)
        return
    step.ids[:count] = tokens
    step.positions[:count] = positions
    step.seq_lens[:count] = positions + 1
    step.counter[:count] += 1
    for slots, block in zip(step.slot_mapping, blocks, strict=True):
        slots[:count] = block.long() * step.block_size + positions % step.block_size
    for starts, window in zip(step.table_start, bounds.windows.tolist(), strict=True):
        if window:  # what no query can see any more, as a sliding group gives it up
            unseen = (positions - window + 1).clamp(min=0) // step.block_size
            step.tables[(starts[:count] + unseen - 1)[unseen > 0]] = -1


def _end(tokens: Array, positions: Array, blocks: list[Array], bounds: LeaseBounds) -> int:
    """Why there is no next step; 0 if there is one."""
    limits, stop_from, stop_ids = bounds.rows
    if (positions >= limits[: len(positions)]).any():
        return STEPS
    if (tokens < 0).any():
        return NUMBERS
    starts = stop_from[: len(tokens) + 1].tolist()
    for token, start, stop in zip(tokens.tolist(), starts, starts[1:], strict=False):
        if (stop_ids[start:stop] == token).any():
            return ROW
    if int(bounds.bell[0]):
        return ASKED
    return BLOCKS if any((block < 0).any() for block in blocks) else 0


def _pad(step: StepBuffer, bounds: LeaseBounds, end: int) -> None:
    for part in (step.ids, step.positions, step.query_start, step.seq_lens, step.changes):
        part[:] = 0
    step.slot_mapping[:] = -1
    step.row[:] = bounds.nobody
    step.hashes[0], step.hashes[1] = 0, end
