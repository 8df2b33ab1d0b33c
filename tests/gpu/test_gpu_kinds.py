"""Features of an engine on the device: 8 bits, each kind of request, KV on the host."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from checkpoints import CASES, build, prompt, randomise, save
from served import Truth, opened, serve, tight, told

import where
from weft.core.plan import Tier
from weft.core.types import SamplingParams
from weft.engine.executors import make_executor
from weft.models.layout import storage_of

TOLERANCE = 5e-4  # of float32 logits; see test_gpu_families
BFLOAT16 = 0.15  # of logits that are computed in it, of a deviation of about 1
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, seed=0)
SCORED = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
PROMPTS = [prompt(90, 1), prompt(7, 2), [5], prompt(40, 3)]
KERNELS = "triton" if where.ON_GPU else "reference"  # there are none for FP8 weights on a CPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(build("llama-gqa"), tmp_path_factory.mktemp("models") / "llama-gqa")


@pytest.fixture(scope="module")
def aligned(tmp_path_factory):
    """Sizes that are multiples of 16, as torch's product of FP8 wants."""
    config = CASES["qwen3-full"].config()
    config.intermediate_size, config.head_dim = 96, 32
    config._attn_implementation = "eager"
    model = transformers.Qwen3ForCausalLM(config).eval().requires_grad_(False)
    randomise(model, 0)
    return save(model, tmp_path_factory.mktemp("models") / "aligned")


def both_ways(folder, asked, **settings):
    """Answers of captured steps, which must be those of uncaptured ones."""
    found = []
    for graphs in (True, False):
        with opened(folder, graphs=graphs, **settings) as engine:
            assert (engine.executor.captured > 0) == graphs
            found.append(serve(engine, PROMPTS, asked))
    captured, uncaptured = found
    assert [a.tokens for a in captured] == [a.tokens for a in uncaptured]
    assert all(torch.equal(told(a), told(b)) for a, b in zip(captured, uncaptured, strict=True))
    return captured


def test_weights_in_fp8(aligned) -> None:
    """As plain torch with the same codes; a tie may fall to either side."""
    exact = Truth(aligned)
    rounded = Truth(aligned, partial(storage_of, quantize="fp8", group=64))
    settings = {"quantize": "fp8", "kernels": KERNELS}
    answers = both_ways(aligned, [SCORED, SCORED, GREEDY, SCORED], **settings)
    for tokens, answer in zip(PROMPTS, answers, strict=True):
        if len(tokens) > 1:
            lost = float((exact.logprobs(tokens) - rounded.logprobs(tokens)).abs().max())
            assert rounded.gap(tokens, answer) < 0.3 * lost


def test_weights_in_fp8_beside_bfloat16(aligned) -> None:
    """Other activations round to other codes; what is lost in all is about the same."""
    exact = Truth(aligned)
    rounded = Truth(aligned, partial(storage_of, quantize="fp8", group=64))
    settings = {"quantize": "fp8", "dtype": "bfloat16", "kernels": KERNELS}
    answers = both_ways(aligned, [SCORED, SCORED, GREEDY, SCORED], **settings)
    for tokens, answer in zip(PROMPTS, answers, strict=True):
        if len(tokens) > 8:
            truth = exact.logprobs(tokens)
            lost = (truth - rounded.logprobs(tokens)).abs().mean()
            assert 0.5 * lost < (truth - told(answer)).abs().mean() < 1.6 * lost


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_kv_in_8_bits(aligned, kv_dtype) -> None:
    """As plain torch with the same KV; what is lost beside that of floats is more."""
    exact = Truth(aligned)
    asked = [SCORED, SCORED, GREEDY, SCORED]
    with opened(aligned, device="cpu", kernels="reference", kv_dtype=kv_dtype) as engine:
        expected = serve(engine, PROMPTS, asked)
    answers = both_ways(aligned, asked, kv_dtype=kv_dtype)
    for tokens, answer, truth in zip(PROMPTS, answers, expected, strict=True):
        if len(tokens) > 1:
            lost = exact.gap(tokens, truth)
            gap = float((told(answer) - told(truth)).abs().max())
            assert gap < 0.3 * lost


def test_a_model_in_bfloat16(aligned) -> None:
    exact = Truth(aligned)
    answers = both_ways(aligned, [SCORED, SCORED, GREEDY, SCORED], dtype="bfloat16")
    for tokens, answer in zip(PROMPTS, answers, strict=True):
        if len(tokens) > 1:
            assert 0 < exact.gap(tokens, answer) < BFLOAT16


KINDS = [
    replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    replace(GREEDY, logit_bias={7: 3.0, 9: -50.0}, logprobs=3),
    replace(GREEDY, ignore_eos=False, stop_token_ids=tuple(range(0, 198, 2)), min_tokens=6),
    replace(GREEDY, speculation=4, logit_bias={3: 50.0}, max_tokens=24),
    replace(GREEDY, allowed_token_ids=(3, 7, 9), bad_token_sequences=((3, 3), (7,)), logprobs=2),
    replace(GREEDY, temperature=0.9, seed=11, repetition_penalty=1.2, logprobs=0),
]


def test_requests_that_need_the_host(folder) -> None:
    """Penalties, bias, least lengths, log probabilities, drafts: the tokens of plain torch."""
    prompts = [PROMPTS[0], prompt(4, 5) * 5, PROMPTS[1], prompt(5, 6) * 6, PROMPTS[2], PROMPTS[3]]
    found = []
    for settings in ({}, {"graphs": False}, {"device": "cpu", "kernels": "reference"}):
        with opened(folder, **settings) as engine:
            answers = serve(engine, prompts, KINDS)
            assert engine.scheduler.totals.drafted_tokens > 0
            found.append([answer.tokens for answer in answers])
    captured, uncaptured, plain = found
    assert captured == uncaptured
    assert captured == plain
    assert [len(tokens) for tokens in plain[:2]] == [10, 10]
    assert len(plain[2]) >= 6


def test_kv_that_gives_way_to_the_host_comes_back(folder, monkeypatch) -> None:
    memory = {"kv_memory": tight(folder), "host_kv_memory": 2**20}
    prompts = [prompt(6 + i, i) for i in range(5)]
    asked = [replace(GREEDY, max_tokens=40)] * 5
    with opened(folder, **memory) as engine:
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


def test_memory_that_runs_out_ends_one_request(folder, monkeypatch) -> None:
    """In a step of several rows, which is not captured; captured ones go on as before."""
    hungry = 77
    good = [[t for t in tokens if t != hungry] for tokens in PROMPTS]
    with opened(folder, max_num_batched_tokens=128) as engine:
        functions = engine.executor._functions
        compute, kept = functions._compute, []

        def starving(ids, *more):
            assert all(held() is None for held in kept), "memory of a failed step is not free"
            if len(ids) > 64 and hungry in ids.tolist():
                activations = torch.ones(1000, device=ids.device)
                kept.append(weakref.ref(activations))
                torch.empty(2**50, dtype=torch.uint8, device=ids.device)
            return compute(ids, *more)

        monkeypatch.setattr(functions, "_compute", starving)
        prompts = [good[1], [hungry, *good[0][:79]], *good[1:]]
        ill, well = serve_apart(serve(engine, prompts, [GREEDY] * len(prompts)))
        again = serve(engine, good, [GREEDY] * len(good))
    assert [answer.error.code for answer in ill] == ["out_of_memory"]
    assert len(kept) == 2  # all rows together, then the one
    truth = Truth(folder)
    for tokens, answer in zip([good[1], *good[1:], *good], [*well, *again], strict=True):
        assert truth.miss(tokens, answer) < TOLERANCE


def serve_apart(answers):
    """Those with an error, and the others."""
    return [a for a in answers if a.error], [a for a in answers if not a.error]


def test_an_engine_as_it_is_served(folder, monkeypatch) -> None:
    """The executor that the settings give: on a GPU with every size captured."""
    monkeypatch.setattr("weft.engine.build.make_executor", make_executor)
    truth = Truth(folder)
    with opened(folder, max_num_batched_tokens=512) as engine:
        assert getattr(engine.executor, "captured", 0) == (35 + 4 + 4 if where.ON_GPU else 0)
        answers = serve(engine, PROMPTS, [GREEDY] * 4)
    for tokens, answer in zip(PROMPTS, answers, strict=True):
        assert truth.miss(tokens, answer) < TOLERANCE


def test_kernels_for_gpus_give_the_tokens_of_plain_torch(folder) -> None:
    """Greedy, drawn, and with penalties, in one batch; where there is no GPU interpreted."""
    short = replace(GREEDY, max_tokens=2)
    asked = [
        short,
        replace(short, temperature=0.9, top_k=20, top_p=0.9, seed=3),
        replace(short, temperature=1.2, repetition_penalty=1.3, seed=5),
    ]
    prompts, found = [prompt(5, 1), prompt(2, 2), prompt(3, 3)], []
    for settings in (
        {"kernels": "triton"},
        {"kernels": "reference", "device": "cpu"},
    ):
        with opened(folder, max_num_batched_tokens=16, graphs=False, **settings) as engine:
            found.append([answer.tokens for answer in serve(engine, prompts, asked)])
    assert found[0] == found[1]
