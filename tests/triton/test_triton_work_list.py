"""The work list of decode attention: what is listed, in which order, and how programs share it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from test_triton_attention import assert_right, few_splits, padded
from torch import Tensor

from attention_cases import Case, Shape, make_case, only_row, row_tokens
from weft.kernels.interface import AttentionMetadata
from weft.kernels.kv_storage import SCALED
from weft.kernels.triton.attention import paged_attention
from weft.kernels.triton.tiles import Plan, Tile
from weft.kernels.triton.work_list import turn_of, turns_of, work_list

FEW, LEAST, SPLITS, BLOCK_N = 3, 32, 4, 16
PLAN = Plan(1, FEW, SPLITS, LEAST, 1, Tile(16, BLOCK_N, 4, 1), Tile(16, BLOCK_N, 4, 1))
# Rows of (tokens, earlier tokens): one of a very long context beside many short ones, several of
# equal length, empty ones, and one of too many tokens.
SKEWED = [(1, 40), (1, 1900), *[(1, 30)] * 9, (0, 0), (2, 100), (4, 300), (0, 0), *[(3, 61)] * 8]


def batch_of(rows: list[tuple[int, int]]) -> AttentionMetadata:
    counts = torch.tensor([count for count, _ in rows], dtype=torch.int32)
    tokens = int(counts.sum())
    return AttentionMetadata(
        block_tables=torch.zeros(len(rows), 1, dtype=torch.int32),
        query_start=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        seq_lens=torch.tensor([sum(row) for row in rows], dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        block_size=16,
    )


def expected(rows: list[tuple[int, int]], window: int) -> list[tuple[int, ...]]:
    """The items, longest first: of one length whole splits before the last ones, row by row."""
    found, start = [], 0
    for row, (count, earlier) in enumerate(rows):
        context, begin, size = count + earlier, 0, LEAST
        if window:
            begin = max(context - count - (window - 1), 0) // BLOCK_N * BLOCK_N
        while size * SPLITS < context - begin:
            size *= 2
        lows = list(range(begin, context, size)) if 0 < count <= FEW else []
        for split, low in enumerate(lows):
            high = min(low + size, context)
            item = row, start, count, context, low, high, split, len(lows)
            found.append((low - high, split == len(lows) - 1, row, split, item))
        start += count
    return [item for *_, item in sorted(found)]


@pytest.mark.parametrize(
    ("rows", "window"),
    [
        *((SKEWED, window) for window in (0, 1, 50)),
        *((rows, 0) for rows in (SKEWED[::-1], [(1, 0)], [(4, 9)])),
        ([(1, n) for n in range(20, 160)], 0),  # more rows than are compared at once
    ],
    ids=lambda value: str(value) if isinstance(value, int) else str(len(value)),
)
def test_every_split_is_listed_once_and_long_ones_first(
    rows: list[tuple[int, int]], window: int
) -> None:
    batch = batch_of(rows)
    work = work_list(batch, PLAN, 2, window)
    wanted = expected(rows, window)
    assert int(work.items[0, 0]) == len(wanted)
    assert list(map(tuple, work.items[1 : 1 + len(wanted)].tolist())) == wanted
    assert work.arrived.shape == (len(rows), 2)
    assert not work.arrived.any()


def test_a_list_is_made_once_for_all_layers_alike() -> None:
    batch = batch_of(SKEWED)
    first = work_list(batch, PLAN, 2, 0)
    assert work_list(batch, PLAN, 2, 0) is first
    other = [work_list(batch, PLAN, 2, 50), work_list(batch, PLAN, 1, 0)]
    other.append(work_list(batch, replace(PLAN, least=64), 2, 0))
    other.append(work_list(replace(batch), PLAN, 2, 0))
    assert all(found is not first for found in other)


@triton.jit
def _taken(counts, of, work, MOST: tl.constexpr):
    """Count how often each of ``of`` pieces of work is taken."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for turn in range(MOST):
        taken = turn < turns_of(work, program, programs)
        piece = turn_of(turn, program, programs)
        tl.store(of + piece, program, mask=taken)
        tl.atomic_add(counts + piece, 1, mask=taken)


def shares(work: int, programs: int) -> list[list[int]]:
    """Which pieces of work each program takes."""
    counts, of = torch.zeros(work + 1, dtype=torch.int32), torch.zeros(work + 1, dtype=torch.int32)
    _taken[(programs,)](counts, of, work, work // programs + 2)
    assert (counts[:work] == 1).all()
    assert counts[work] == 0
    return [(of[:work] == program).nonzero().flatten().tolist() for program in range(programs)]


@pytest.mark.parametrize("programs", [1, 2, 5, 13])
@pytest.mark.parametrize("work", [1, 5, 12, 13, 40])
def test_each_piece_of_work_is_taken_once(work: int, programs: int) -> None:
    assert sum(map(len, shares(work, programs))) == work


@pytest.mark.parametrize("programs", [3, 8])
def test_programs_compute_about_as_many_tokens_each(programs: int) -> None:
    lengths = [high - low for *_, low, high, _, _ in expected(SKEWED, 0)]
    sums = [sum(lengths[i] for i in share) for share in shares(len(lengths), programs)]
    assert max(sums) - min(sums) <= max(lengths)


def skewed_case(shape: Shape) -> Case:
    return make_case([(1, 130), *[(1, 9)] * 3, (2, 40), (18, 3), (1, 0)], shape)


KINDS = [
    (torch.float32, torch.float32, 70, None),
    (torch.bfloat16, torch.bfloat16, None, 30.0),
    *((torch.bfloat16, kind, 70, None) for kind in SCALED),
]


@pytest.mark.parametrize(("dtype", "cache_dtype", "window", "softcap"), KINDS, ids=str)
def test_one_long_context_beside_many_short_ones(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    """The same bits for any number of programs, for a row alone, and with padding around it."""
    few_splits(monkeypatch)
    block = 64 if softcap else 16
    case = skewed_case(Shape(4, 2, 16, block, window, softcap, dtype, cache_dtype))
    together = assert_right(case)
    for programs in (1, 50):
        more = padded(case, 3, 7)
        out = replace(more, batch=replace(more.batch, programs=programs)).run(paged_attention)
        assert torch.equal(out[: len(together)], together)
        assert not out[len(together) :].any()
    for row in (0, 4):
        alone: Tensor = only_row(case, row).run(paged_attention)
        assert torch.equal(alone, together[row_tokens(case, row)])


def test_splits_are_counted_anew_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    few_splits(monkeypatch)
    case = skewed_case(Shape(4, 2, 16))
    first, second = (case.run(paged_attention) for _ in range(2))
    assert torch.equal(first, second)
    (work,) = case.batch.derived.values()
    assert not work.arrived.any()


def test_no_programs_are_refused() -> None:
    case = skewed_case(Shape(4, 2, 16))
    with pytest.raises(ValueError, match="programs is 0; it must be at least 1, or None"):
        replace(case, batch=replace(case.batch, programs=0)).run(paged_attention)
