"""Steps that follow under a lease, in Triton and in plain torch: what the host would pack."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import where
from weft.core.plan import SubBatch
from weft.exec.device import HostDevice
from weft.exec.input_batch import InputBatch
from weft.exec.step_packer import PackedStep, StepPacker
from weft.kernels import reference_advance
from weft.kernels.advance import (
    ASKED,
    BLOCKS,
    NUMBERS,
    ROW,
    STEPS,
    LeaseBounds,
    RowBounds,
    StepBuffer,
)
from weft.kernels.sampling import NOT_FINITE
from weft.kernels.triton import advance as kernels

ROWS, LENGTH, PAGE, WINDOWS, SIZES = 9, 80, 4, (None, 6, 13), (1, 2, 4, 8, 16)
WAYS = {"torch": reference_advance.advance, "triton": kernels.advance}


class Leased:
    """Rows of a table, of which some are in a decode step that is packed and uploaded."""

    def __init__(self, seed: int, count: int, ahead: int) -> None:
        self.draw = draw = np.random.default_rng(seed)
        self.table = table = InputBatch(ROWS, LENGTH, [LENGTH // PAGE] * len(WINDOWS))
        self.packer = StepPacker(table, PAGE, WINDOWS, HostDevice(), ROWS * LENGTH, SIZES)
        table.tokens[:] = draw.integers(0, 1000, table.tokens.shape)
        for blocks in table.tables:
            blocks[:] = draw.permutation(blocks.size).reshape(blocks.shape)
        table.columns.choice[:] = draw.random(table.columns.choice.shape)
        table.columns.changes[:] = draw.integers(0, 4, ROWS)
        self.rows = draw.permutation(ROWS)[:count]
        table.length[:] = draw.integers(2, LENGTH - ahead, ROWS)
        table.num_prompt[:] = 1
        self.packed = self.pack(ahead)
        with torch.device("cpu"):
            buffer = self.packer.buffers[self.packed.buffer].clone()
        self.uploaded = buffer.to(where.NAME)
        self.bell = torch.zeros(1, dtype=torch.int32, device="cpu")
        if where.NAME != "cpu":
            self.bell = self.bell.pin_memory()
        self.bounds = LeaseBounds.empty(
            ROWS + 3, self.packer.windows, self.bell, ROWS, torch.device(where.NAME)
        )
        self.bounds.rows.limits[:count] = torch.tensor((table.length[self.rows] + ahead).tolist())

    def pack(self, ahead: int = 0) -> PackedStep:
        starts, ones = (self.table.length[self.rows] - 1).tolist(), [1] * len(self.rows)
        true = [True] * len(self.rows)
        batch = SubBatch(*map(tuple, (self.rows.tolist(), starts, ones, true)))
        return self.packer.pack(batch, None, ahead)

    def step(self, packed: PackedStep, buffer: torch.Tensor) -> StepBuffer:
        layout = self.packer.layout
        assert packed.sample is not None
        samples = packed.sample.views(buffer, self.packer.sample_at(packed.sample))
        return StepBuffer(
            **packed.forward.views(buffer, layout.pivot),
            **{name: samples[name] for name in ("row", "counter", "changes")},
            tables=buffer[layout.pivot + packed.forward.words :],
            hashes=layout.hashes(buffer),
            block_size=PAGE,
        )

    def results(self, tokens: np.ndarray) -> torch.Tensor:
        """What a step gave: padding has tokens, too."""
        found = torch.full((self.packed.forward.size, 2), 17)
        found[: len(tokens), 0] = torch.tensor(tokens.tolist())
        return found

    def stop(self, *ids: list[int]) -> None:
        """Let ids end the rows."""
        parts: RowBounds = self.bounds.rows
        flat = [one for some in ids for one in some]
        parts.stop_ids[: len(flat)] = torch.tensor(flat, dtype=torch.int64)
        parts.stop_from[: len(ids) + 1] = torch.tensor(np.cumsum([0, *map(len, ids)]).tolist())

    def advance(self, way: str, results: torch.Tensor, buffer: torch.Tensor | None = None) -> None:
        buffer = self.uploaded if buffer is None else buffer
        WAYS[way](self.step(self.packed, buffer), self.bounds, results)


def tables_of(step: StepBuffer, count: int) -> list[list[int]]:
    """Of each group and row, its table up to the block of its latest token."""
    return [
        step.tables[start : start + -(-int(length) // PAGE)].tolist()
        for starts in step.table_start
        for start, length in zip(starts[:count], step.seq_lens[:count], strict=True)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("count", "seed"), [(1, 0), (3, 1), (8, 2), (9, 3)])
def test_a_step_that_follows_is_what_the_host_would_pack(way, count, seed) -> None:
    leased = Leased(seed, count, ahead=12)
    table, rows = leased.table, leased.rows
    for _ in range(11):
        tokens = leased.draw.integers(0, 1000, count)
        leased.advance(way, leased.results(tokens))
        table.append_tokens(rows, tokens)
        packed = leased.pack()
        assert packed.sample is not None
        assert packed.forward == leased.packed.forward
        assert packed.sample == leased.packed.sample
        wanted = leased.step(packed, leased.packer.buffers[packed.buffer])
        found = leased.step(leased.packed, leased.uploaded)
        for name, value in vars(wanted).items():
            if name not in ("tables", "table_start", "block_size"):
                assert torch.equal(getattr(found, name).cpu(), value), name
        assert tables_of(found, count) == tables_of(wanted, count)
        words = slice(packed.words.start, leased.packer.layout.pivot)
        buffer = leased.packer.buffers[packed.buffer]
        assert torch.equal(leased.uploaded[words].cpu(), buffer[words])  # all that sampling reads


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", [STEPS, ROW, NUMBERS, ASKED, BLOCKS])
def test_the_step_behind_an_end_is_padding_that_says_why(way, end) -> None:
    leased = Leased(4, 5, ahead=12)
    step = leased.step(leased.packed, leased.uploaded)
    tokens = np.array([5, 6, 7, 8, 9])
    leased.stop([], [5, 9], [], [1, 2, 3, 40])  # tokens of others end nobody
    if end == STEPS:
        leased.bounds.rows.limits[2] = step.positions[2] + 1
    elif end == ROW:
        tokens[3] = 40
    elif end == NUMBERS:
        tokens[3] = NOT_FINITE
    elif end == ASKED:
        leased.bell.fill_(1)
    else:  # the second row lacks a block of the last group
        step.tables[int(step.table_start[2, 1]) + (int(step.positions[1]) + 1) // PAGE] = -1
    leased.advance(way, leased.results(tokens))
    assert step.hashes.tolist() == [0, end]
    padding = leased.packer.pack_padding(leased.packed.forward, leased.packed.sample)
    wanted = leased.step(padding, leased.packer.buffers[padding.buffer])
    for name in ("ids", "positions", "slot_mapping", "query_start", "seq_lens", "row", "changes"):
        assert torch.equal(getattr(step, name).cpu(), getattr(wanted, name)), name
    ended = leased.uploaded.clone()
    leased.advance(way, leased.results(tokens * 0))
    assert torch.equal(leased.uploaded, ended)


def test_both_ways_agree_whatever_ends_a_lease() -> None:
    seen = set()
    for seed in range(120):
        leased = Leased(seed, 1 + seed % ROWS, ahead=12)
        draw, count = leased.draw, len(leased.rows)
        leased.stop(*(draw.integers(0, 6, draw.integers(0, 4)).tolist() for _ in range(count)))
        step = leased.step(leased.packed, leased.uploaded)
        if draw.random() < 0.2:
            leased.bounds.rows.limits[draw.integers(count)] = step.positions[0] + draw.integers(3)
        if draw.random() < 0.2:
            leased.bell.fill_(1)
        if draw.random() < 0.3:
            step.tables[torch.tensor((draw.random(len(step.tables)) < 0.02).tolist())] = -1
        tokens = draw.integers(0, 40, count)
        if draw.random() < 0.2:
            tokens[draw.integers(count)] = NOT_FINITE
        other = leased.uploaded.clone()
        leased.advance("torch", leased.results(tokens))
        leased.advance("triton", leased.results(tokens), other)
        assert torch.equal(leased.uploaded, other)
        seen.add(0 if int(step.hashes[0]) else int(step.hashes[1]))
    assert seen == {0, STEPS, ROW, ASKED, NUMBERS, BLOCKS}


def test_rows_beyond_those_of_a_lease_are_not_looked_at() -> None:
    leased = Leased(7, 3, ahead=5)
    leased.bounds.rows.stop_from[4:] = 10**9
    leased.bounds.rows.limits[3:] = -1
    leased.advance("triton", leased.results(np.array([1, 2, 3])))
    assert int(leased.step(leased.packed, leased.uploaded).hashes[0]) != 0
