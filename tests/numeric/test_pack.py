"""Packing of steps against plain numpy, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from weft.core.plan import SubBatch
from weft.exec.input_batch import InputBatch
from weft.exec.inputs import InputPacker

ROWS, LENGTH, BLOCK_SIZE, GROUPS = 9, 40, 4, 2


@pytest.fixture
def table() -> InputBatch:
    draw = np.random.default_rng(0)
    table = InputBatch(ROWS, LENGTH, [LENGTH // BLOCK_SIZE] * GROUPS)
    table.tokens[:] = draw.integers(0, 1000, table.tokens.shape)
    for blocks in table.tables:
        blocks[:] = draw.permutation(blocks.size).reshape(blocks.shape)
    return table


def random_batch(table: InputBatch, draw: np.random.Generator) -> SubBatch:
    rows = draw.permutation(ROWS)[: draw.integers(1, ROWS + 1)]
    starts = draw.integers(0, LENGTH // 2, len(rows))
    counts = draw.integers(1, LENGTH // 4, len(rows)) if draw.random() < 0.7 else starts * 0 + 1
    samples = draw.random(len(rows)) < draw.choice([0.0, 0.5, 1.0])
    table.length[rows] = starts + counts
    drafts = {
        int(row): tuple(draw.integers(0, 1000, draw.integers(1, 5)).tolist())
        for row, sampled in zip(rows, samples, strict=True)
        if sampled and draw.random() < 0.3
    }
    listed = [tuple(x.tolist()) for x in (rows, starts, counts, samples)]
    return SubBatch(*listed, drafts=drafts)


def test_inputs_equal_those_gathered_one_by_one(table):
    draw = np.random.default_rng(1)
    packer = InputPacker(table, BLOCK_SIZE)
    for _ in range(200):
        batch = random_batch(table, draw)
        inputs = packer.pack(batch)
        ids, positions, ends, context = [], [], [0], []
        slots = [[] for _ in range(GROUPS)]
        wanted = []  # row, index, length
        for row, start, count, samples in zip(
            batch.rows, batch.starts, batch.counts, batch.samples, strict=True
        ):
            draft = batch.drafts.get(row, ())
            known = [*table.tokens[row, : start + count], *draft]
            for at in range(start, len(known)):
                ids.append(known[at])
                positions.append(at)
                for group, blocks in zip(slots, table.tables, strict=True):
                    group.append(blocks[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
                if samples and at >= start + count - 1:
                    wanted.append((row, len(ids) - 1, at + 1))
            ends.append(len(ids))
            context.append(len(known))
        assert inputs.input_ids.tolist() == ids
        assert inputs.positions.tolist() == positions
        assert inputs.rows.tolist() == list(batch.rows)
        assert inputs.starts.tolist() == list(batch.starts)
        assert inputs.counts.tolist() == np.diff(ends).tolist()
        found = (inputs.sample_rows, inputs.sample_at, inputs.sample_lengths)
        assert list(zip(*(x.tolist() for x in found), strict=True)) == wanted
        width = -(-max(context) // BLOCK_SIZE)
        for group, own, blocks in zip(inputs.groups, slots, table.tables, strict=True):
            assert group.slot_mapping.tolist() == own
            assert group.query_start.tolist() == ends
            assert group.seq_lens.tolist() == context
            assert group.block_tables.tolist() == blocks[list(batch.rows), :width].tolist()


def test_more_tokens_than_ever_before_get_room(table):
    packer = InputPacker(table, BLOCK_SIZE)
    small = packer.pack(SubBatch((0,), (0,), (1,), (True,)))
    assert small.input_ids.tolist() == table.tokens[0, :1].tolist()
    rows = tuple(range(ROWS))
    batch = SubBatch(rows, (0,) * ROWS, (LENGTH,) * ROWS, (False,) * ROWS)
    assert packer.pack(batch).input_ids.tolist() == table.tokens.flatten().tolist()


@pytest.mark.parametrize(
    "batch",
    [
        SubBatch((ROWS,), (0,), (1,), (True,)),
        SubBatch((-1,), (0,), (1,), (True,)),
        SubBatch((0,), (LENGTH,), (1,), (True,)),
        SubBatch((0,), (-1,), (1,), (True,)),
        SubBatch((0,), (3,), (0,), (True,)),
        SubBatch((0,) * (ROWS + 1), (0,) * (ROWS + 1), (1,) * (ROWS + 1), (True,) * (ROWS + 1)),
    ],
)
def test_plans_beyond_the_rows_are_refused(table, batch):
    with pytest.raises(IndexError):
        InputPacker(table, BLOCK_SIZE).pack(batch)
