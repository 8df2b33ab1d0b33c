"""The next decode step of the same rows in Triton: one small program, before the forward pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels import advance as rules
from weft.kernels.advance import LeaseBounds, StepBuffer
from weft.kernels.triton.launch import power_of_2, warps

SIZES = 32, 256  # of a program, up to that number of rows: each compiles
_STEPS = tl.constexpr(rules.STEPS)
_ROW = tl.constexpr(rules.ROW)
_ASKED = tl.constexpr(rules.ASKED)
_NUMBERS = tl.constexpr(rules.NUMBERS)
_BLOCKS = tl.constexpr(rules.BLOCKS)


@triton.jit
def _any(x):
    return tl.max(x.to(tl.int32), 0) > 0


@triton.jit
def _stopped(token, here, stop_from, stop_ids, i):
    """Whether an id that ends a row is its token."""
    at = tl.load(stop_from + i, mask=here, other=0)
    stop = tl.load(stop_from + i + 1, mask=here, other=0)
    found, left = i < 0, tl.max(stop - at, 0)
    while left > 0:
        wanted = tl.load(stop_ids + at, mask=here & (at < stop), other=-1)
        found = found | (here & (at < stop) & (wanted == token))
        at += 1
        left -= 1
    return _any(found)


@triton.jit(do_not_specialize=["tokens", "rows", "slot_stride", "start_stride", "nobody"])
def _advance(
    ids, positions, slots, query_start, seq_lens, table_start, tables, row, counter, changes,
    hashes, results, limits, stop_from, stop_ids, windows, bell_at, tokens, rows, slot_stride,
    start_stride, nobody, GROUPS: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    if tl.load(hashes) != 0:
        i = tl.arange(0, SIZE)
        here = tl.load(row + i, mask=i < tokens, other=nobody) < nobody
        token = tl.load(results + 2 * i, mask=here, other=0)
        at = tl.load(positions + i, mask=here, other=0) + 1
        fits = here & (at < tl.load(limits + i, mask=here, other=0))
        bell = tl.load(tl.load(bell_at).to(tl.pointer_type(tl.int32)), volatile=True)
        lacks = i < 0
        for group in tl.static_range(GROUPS):
            start = tl.load(table_start + group * start_stride + i, mask=fits, other=0)
            block = tl.load(tables + start + at // PAGE, mask=fits, other=0)
            lacks = lacks | (block < 0)
        end = tl.where(_any(lacks), _BLOCKS, 0)
        end = tl.where(bell != 0, _ASKED, end)
        end = tl.where(_stopped(token, here, stop_from, stop_ids, i), _ROW, end)
        end = tl.where(_any(here & (token < 0)), _NUMBERS, end)
        end = tl.where(_any(here & (fits == 0)), _STEPS, end)
        if end == 0:
            tl.store(ids + i, token, mask=here)
            tl.store(positions + i, at, mask=here)
            tl.store(seq_lens + i, (at + 1).to(tl.int32), mask=here)
            tl.store(counter + i, tl.load(counter + i, mask=here, other=0) + 1, mask=here)
            for group in tl.static_range(GROUPS):
                start = tl.load(table_start + group * start_stride + i, mask=here, other=0)
                block = tl.load(tables + start + at // PAGE, mask=here, other=0)
                slot = block.to(tl.int64) * PAGE + at % PAGE
                tl.store(slots + group * slot_stride + i, slot, mask=here)
                window = tl.load(windows + group)
                unseen = tl.maximum(at - window + 1, 0) // PAGE
                # What no query can see any more, as a sliding group gives it up.
                tl.store(tables + start + unseen - 1, -1, mask=here & (window > 0) & (unseen > 0))
        else:
            tl.store(ids + i, 0, mask=i < tokens)
            tl.store(positions + i, 0, mask=i < tokens)
            tl.store(changes + i, 0, mask=i < tokens)
            tl.store(row + i, nobody, mask=i < tokens)
            tl.store(seq_lens + i, 0, mask=i < rows)
            tl.store(query_start + i, 0, mask=i < rows)
            tl.store(query_start + rows, 0)
            for group in tl.static_range(GROUPS):
                tl.store(slots + group * slot_stride + i, -1, mask=i < tokens)
            tl.store(hashes, tl.zeros([], tl.int64))
            tl.store(hashes + 1, end.to(tl.int64))


def advance(step: StepBuffer, bounds: LeaseBounds, results: Tensor) -> None:
    """Rewrite a step to the next one of its rows; see ``reference_advance.advance``."""
    tokens = len(step.ids)
    size = next((some for some in SIZES if tokens <= some), power_of_2(tokens))
    limits, stop_from, stop_ids = bounds.rows
    _advance[(1,)](
        step.ids, step.positions, step.slot_mapping, step.query_start, step.seq_lens,
        step.table_start, step.tables, step.row, step.counter, step.changes, step.hashes, results,
        limits, stop_from, stop_ids, bounds.windows, bounds.bell_at, tokens, len(step.seq_lens),
        step.slot_mapping.stride(0), step.table_start.stride(0), bounds.nobody,
        GROUPS=len(step.slot_mapping), PAGE=step.block_size, SIZE=size,
        num_warps=warps(4 * size),
    )  # fmt: skip
