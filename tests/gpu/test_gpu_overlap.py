"""Sub-batches that overlap with attention on the host, computed by the kernels of GPUs; interpreted
where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checkpoints import build, prompt, save_with_tokenizer
from test_overlap import GREEDY, of, overlapping
from test_piggybacked_rows import Steps
from tight_kv import settings_for

import where
from depth import deep_on_cpu
from weft.core.plan import RowAdd, SubBatch, Tier
from weft.exec.graphs import GraphExecutor
from weft.kernels.triton import lanes
from weft.kernels.triton.launch import interpreted

DEVICE, HOST = Tier.DEVICE, Tier.HOST


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_with_tokenizer(build("llama-gqa"), tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=deep_on_cpu)])
def test_overlapped_rows_get_the_tokens_of_rows_of_the_device(folder, graphs) -> None:
    """In one sub-batch and in two, and of a prompt that the host keeps, in two chunks."""
    settings = {"kernels": "triton", "device": where.NAME, "graphs": graphs}
    settings |= {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    given = tuple(prompt(20, 7))

    def add(steps: Steps, tier: Tier) -> RowAdd:
        tables = (steps.BLOCKS[3],) * steps._groups
        sampling = replace(GREEDY, seed=0)
        return RowAdd(3, 3, given, 20, sampling, frozenset(), tables, tier=tier)

    with Steps(overlapping(folder, **settings)) as steps:
        executor = steps.executor
        assert isinstance(executor, GraphExecutor)
        assert executor._decoder.ops.lanes.wait is lanes.wait_for_lanes
        assert interpreted() != where.ON_GPU
        for row in range(3):
            steps.start(row)
        away = steps.away(1, 2)
        found = [steps.run(of(steps.decode(0, 1), DEVICE, HOST), steps_of(2), moves=away).tokens]
        chunk = SubBatch((1, 3), (21, 0), (1, 12), (True, False), (HOST, HOST))
        found.append(steps.run(chunk, add=(add(steps, HOST),)).tokens)
        chunk = SubBatch((0, 3), (21, 12), (1, 8), (True, True), (DEVICE, HOST))
        found.append(steps.run(chunk).tokens)
        found.append(steps.run(SubBatch((3,), (20,), (1,), (True,), (HOST,))).tokens)
    with Steps(settings_for(folder, kernels="cpu", max_num_seqs=4)) as plain:
        for row in range(3):
            plain.start(row)
        wanted = [plain.run(plain.decode(0, 1, 2)).tokens]
        rest = plain.run(plain.decode(0, 1, at=21)).tokens
        chunk = SubBatch((3,), (0,), (20,), (True,))
        of_prompt = plain.run(chunk, add=(add(plain, DEVICE),)).tokens
        wanted += [rest[1:], (rest[0], *of_prompt)]
        wanted.append(plain.run(SubBatch((3,), (20,), (1,), (True,))).tokens)
    assert found == wanted


def steps_of(row: int) -> SubBatch:
    """A decode of a row on the host, whose prompt has 20 tokens."""
    return SubBatch((row,), (20,), (1,), (True,), (HOST,))
