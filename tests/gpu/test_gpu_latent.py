"""Latent attention with the kernels of GPUs, interpreted where there is none: captured and moved.

A step's graph has its rows, absorbed queries and experts; blocks have one array a layer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import build, prompt, save
from served import Truth, opened, serve, tight, told

from depth import deep_on_cpu
from weft.core.errors import ConfigError
from weft.core.plan import Tier
from weft.core.types import SamplingParams
from weft.exec.workspace import (
    ATTENTION_SPLITS,
    LISTED_BYTES,
    StepSizes,
    _attention_bytes,
    _list_bytes,
)
from weft.kernels.triton.tiles import Heads, by_rule
from weft.models.spec_reader import read_spec

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, seed=0)
SCORED = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
PROMPTS = [prompt(19, 1), prompt(7, 2), [5]]  # in chunks, beside each other
TOLERANCE = 5e-4  # of float32 logits
BETWEEN_CODES = 0.3  # of what 8 bits lose: a number between two codes may go to either


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """48 numbers of a latent behind 16 rotated ones; queries without a latent."""
    name = "youtu-one-query-matrix"
    return save(build(name), tmp_path_factory.mktemp("models") / name)


@pytest.mark.parametrize(
    "kv_dtype", ["int8", *(pytest.param(kv, marks=deep_on_cpu) for kv in ("auto", "fp8"))]
)
def test_captured_steps_are_uncaptured_ones_and_plain_torch(folder, kv_dtype) -> None:
    exact, found = Truth(folder), []
    settings = {"kv_dtype": kv_dtype, "max_num_batched_tokens": 12}
    asked = [SCORED, SCORED, GREEDY]
    for more in (
        {"kernels": "triton", "graphs": True},
        {"kernels": "triton", "graphs": False},
        {"kernels": "reference", "device": "cpu"},
    ):
        with opened(folder, **settings, **more) as engine:
            found.append(serve(engine, PROMPTS, asked))
    captured, uncaptured, plain = found
    assert [a.tokens for a in captured] == [a.tokens for a in uncaptured]
    for one, other in zip(captured, uncaptured, strict=True):
        assert torch.equal(told(one), told(other))
    for tokens, truth, answer in zip(PROMPTS[:2], plain, captured, strict=False):
        lost = exact.gap(tokens, truth)
        assert (lost > TOLERANCE) == (kv_dtype != "auto")
        most = TOLERANCE if kv_dtype == "auto" else BETWEEN_CODES * lost
        assert float((told(answer) - told(truth)).abs().max()) < most


@pytest.mark.parametrize("kernels", ["auto", pytest.param("triton", marks=deep_on_cpu)])
def test_rows_that_give_way_to_the_host_come_back(folder, kernels, monkeypatch) -> None:
    """A block of a layer is one array, which is copied once."""
    memory = {"kv_memory": tight(folder), "host_kv_memory": 2**20, "kernels": kernels}
    prompts, asked = [prompt(6 + i, i) for i in range(5)], [replace(GREEDY, max_tokens=40)] * 5
    with opened(folder, **memory, graphs=False) as engine:
        moves, launch = [], engine.executor.launch
        monkeypatch.setattr(
            engine.executor, "launch", lambda plan: (moves.extend(plan.moves), launch(plan))[1]
        )
        answers = serve(engine, prompts, asked)
    assert {move.to for move in moves} == set(Tier)
    truth = Truth(folder)
    for tokens, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == 40
        assert truth.miss(tokens, answer) < TOLERANCE


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel": 2}, r"all of its heads read one cached row \(MLA\)"),
        (
            {"scheduler": "slo-piggyback", "host_kv_memory": 2**20},
            r"one latent row \(MLA\), which the host does not know",
        ),
    ],
)
def test_what_does_not_know_latents_is_refused(folder, settings, words) -> None:
    with (
        pytest.raises(ConfigError, match=words),
        opened(folder, kernels="triton", graphs=False, **settings),
    ):
        pass


@pytest.mark.parametrize("heads", [4, 16, 20, 37, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_attention_takes_beside_its_result_is_counted(folder, heads, dtype) -> None:
    """Sums of splits, and a counter for each tile of heads, of steps of few and of many tokens."""
    spec = replace(read_spec(folder, None), num_heads=heads)
    rank = spec.latent.rank
    sizes = StepSizes(tokens=64, rows=8, samples=8, blocks=[4])
    bound = _attention_bytes(spec, 0, sizes, 64)
    for capability, shared in ((8, 99), (9, 227)):
        found = Heads(1, heads, spec.latent.row_dim, dtype, dtype, rank)
        plan = by_rule(found, None, shared * 1024, capability)
        assert plan.splits <= ATTENTION_SPLITS
        taken = min(64, 8 * plan.few) * heads * plan.splits * (rank + 2) * 4
        assert taken <= bound
        if heads in (4, 16, 128):  # which fill tiles, whatever these are
            assert taken == bound
        listed = (1 + 8 * plan.splits) * LISTED_BYTES + 8 * (heads // plan.group) * 4
        assert listed <= _list_bytes(spec, 8)
