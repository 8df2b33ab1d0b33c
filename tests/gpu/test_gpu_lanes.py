"""Rows whose attention the host computes, carried by the kernels of GPUs; interpreted where there
is no GPU."""

from __future__ import annotations

import pytest
from checkpoints import build, save_with_tokenizer
from test_piggybacked_rows import Idler, Steps, piggybacking

import where
from depth import deep_on_cpu
from weft.exec import host_attention
from weft.exec.graphs import GraphExecutor
from weft.kernels.triton import lanes
from weft.kernels.triton.launch import interpreted

STEPS = 200  # more than results need to arrive, a layer a step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_with_tokenizer(build("llama-gqa"), tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=deep_on_cpu)])
def test_rows_of_the_host_get_the_tokens_of_rows_of_the_device(folder, graphs, monkeypatch) -> None:
    """Beside a decode, two rows go through the layers; their tokens are those of plain torch."""
    monkeypatch.setattr(host_attention, "HostWorker", Idler)
    settings = {"kernels": "triton", "device": where.NAME, "graphs": graphs}
    with Steps(piggybacking(folder, **settings, max_num_batched_tokens=24)) as steps:
        executor = steps.executor
        assert isinstance(executor, GraphExecutor)
        assert executor._decoder.ops.lanes.choose is lanes.choose_lanes
        assert interpreted() != where.ON_GPU
        for row in range(3):
            steps.start(row)
        [own] = steps.run(steps.decode(0), moves=steps.away(1, 2), piggybacked=(2, 1)).tokens
        found = {}
        for _ in range(STEPS):
            steps.serve()
            found |= dict(steps.run(piggyback_limits=steps.all).piggybacked_results)
            if len(found) == 2:
                break
    with Steps(piggybacking(folder, kernels="cpu")) as plain:
        for row in range(3):
            plain.start(row)
        wanted = plain.run(plain.decode(0, 1, 2)).tokens
    assert (own, found[1], found[2]) == wanted
