"""The parts of contexts that decode attention computes in every layer of a step, listed once.

Each row of few tokens is cut into splits by its own context alone; each split is an item. The
list is made on the device and read there, so one captured step serves all contexts. Items of many
tokens come first, and programs take them to and fro (``turn_of``), so that what two programs
compute differs by no more than the longest item.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.interface import AttentionMetadata
from weft.kernels.triton import pdl
from weft.kernels.triton.loop import bound
from weft.kernels.triton.tiles import Plan

DOUBLINGS = tl.constexpr(16)  # of a split: enough for contexts of 2^26 tokens
WORDS = tl.constexpr(8)  # of an item, and before the first one
_ROWS, _OTHERS = 16, 128  # rows that a program lists, and that it compares them with at once


@dataclass(frozen=True)
class WorkList:
    """What persistent programs compute.

    Attributes:
        items: [1 + R * splits, 8] int32. The first word is the number of items, which lie behind:
            row, its first token, its tokens, its context, first and last position to read, which
            split of the row, and how many it has.
        arrived: [R, KV heads] int32, zeros: programs count there which splits of a row are
            computed, and the last one leaves a zero.
    """

    items: Tensor
    arrived: Tensor


def work_list(batch: AttentionMetadata, chosen: Plan, kv_heads: int, window: int) -> WorkList:
    """Return the list of a batch, made at its first call for the same heads, plan and window.

    Args:
        window: 0 for none.
    """
    rows = len(batch.seq_lens)
    sizes = {
        "KV_HEADS": kv_heads,
        "WINDOW": window,
        "BLOCK_N": chosen.decode.block_n,
        "SPLITS": chosen.splits,
        "LEAST": chosen.least,
        "FEW": chosen.few,
    }
    key = WorkList, *sizes.values()
    found = batch.derived.get(key)
    if found is None:
        where = batch.seq_lens.device
        found = WorkList(
            torch.empty(1 + rows * chosen.splits, WORDS.value, dtype=torch.int32, device=where),
            torch.empty(rows, kv_heads, dtype=torch.int32, device=where),
        )
        list_kernel[(triton.cdiv(rows, _ROWS),)](
            batch.query_start, batch.seq_lens, found.items, found.arrived, rows,
            **sizes, ROWS=_ROWS, OTHERS=_OTHERS, num_warps=4, num_stages=1,
            **pdl.options(where),
        )  # fmt: skip
        batch.derived[key] = found
    assert isinstance(found, WorkList)
    return found


@triton.jit
def cut(
    context, count,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Return begin, size and number of the splits of rows.

    They depend on each row's own context alone: LEAST tokens, doubled until SPLITS are enough.
    """
    first = context * 0
    if WINDOW:
        first = tl.maximum(context - count - (WINDOW - 1), 0)
    begin = first // BLOCK_N * BLOCK_N
    size = context * 0 + LEAST
    for doubling in tl.static_range(DOUBLINGS):
        size += tl.where((LEAST << doubling) < tl.cdiv(context - begin, SPLITS), size, 0)
    return begin, size, tl.cdiv(context - begin, size)


@triton.jit
def _rows(
    query_start, seq_lens, row, rows,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Return first token, tokens, context, begin, size and number of the splits of rows [N].

    Rows without tokens, or of more than FEW, have no splits.
    """
    start = tl.load(query_start + row, mask=row < rows, other=0)
    count = tl.load(query_start + row + 1, mask=row < rows, other=0) - start
    context = tl.load(seq_lens + row, mask=row < rows, other=1)
    begin, size, splits = cut(context, count, WINDOW, BLOCK_N, SPLITS, LEAST)
    few = (row < rows) & (count > 0) & (count <= FEW)
    return start, count, context, begin, size, tl.where(few, splits, 0)


@triton.jit
def _before(longer, equal, items, row, other):
    """How many items of other rows [M] come before those of rows [N] that are as long or shorter.

    Of items of one length those of the first row come first.
    """
    earlier = longer | (equal & (other[None, :] < row[:, None]))
    return tl.sum(tl.where(earlier, items[None, :], 0), 1)


@triton.jit(do_not_specialize=["rows"])
def list_kernel(
    query_start, seq_lens, items, arrived, rows,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """List the items of ROWS rows, whose places are counted over all rows. Grid: R / ROWS.

    The last split of a row is an item of its own length; the others are as long as each other.
    """
    pdl.wait(PDL)
    pdl.launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start, count, context, begin, size, splits = _rows(
        query_start, seq_lens, row, rows, WINDOW, BLOCK_N, SPLITS, LEAST, FEW
    )
    last = context - begin - (splits - 1) * size
    place, place_of_last, total = row * 0, row * 0, rows * 0
    for at in range(0, bound(rows), OTHERS):
        other = at + tl.arange(0, OTHERS)
        _, _, end, low, whole, count_of = _rows(
            query_start, seq_lens, other, rows, WINDOW, BLOCK_N, SPLITS, LEAST, FEW
        )
        wholes, lasts = tl.maximum(count_of - 1, 0), tl.minimum(count_of, 1)
        rest = (end - low - wholes * whole)[None, :]
        whole = whole[None, :]
        longer, equal = whole > size[:, None], whole == size[:, None]
        place += _before(longer, equal, wholes, row, other)
        place += tl.sum(tl.where(rest > size[:, None], lasts[None, :], 0), 1)
        longer, equal = rest > last[:, None], rest == last[:, None]
        place_of_last += _before(longer, equal, lasts, row, other)
        place_of_last += tl.sum(tl.where(whole >= last[:, None], wholes[None, :], 0), 1)
        total += tl.sum(count_of, 0)
    if tl.program_id(0) == 0:
        tl.store(items, total)
    for head in range(KV_HEADS):
        tl.store(arrived + row * KV_HEADS + head, 0, mask=row < rows)
    for split in range(bound(tl.max(splits, 0))):
        mask, low = split < splits, begin + split * size
        item = items + (1 + tl.where(split < splits - 1, place + split, place_of_last)) * WORDS
        tl.store(item, row, mask=mask)
        tl.store(item + 1, start, mask=mask)
        tl.store(item + 2, count, mask=mask)
        tl.store(item + 3, context, mask=mask)
        tl.store(item + 4, low, mask=mask)
        tl.store(item + 5, tl.minimum(low + size, context), mask=mask)
        tl.store(item + 6, row * 0 + split, mask=mask)
        tl.store(item + 7, splits, mask=mask)


@triton.jit
def load_item(items, number):
    """Return an item's row, first token, tokens, context, bounds, split and splits."""
    at = items + (1 + number) * WORDS
    row, start, count, context = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    low, high, split, splits = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    return row, start, count, context, low, high, split, splits


@triton.jit
def turn_of(turn, program, programs):
    """Which piece of work a program takes in a turn: 0 1 2 in the first, 5 4 3 in the second."""
    return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)


@triton.jit
def turns_of(work, program, programs):
    """How many turns a program has until all pieces of work are taken."""
    whole = work // programs
    return whole + (turn_of(whole, program, programs) < work).to(tl.int32)
