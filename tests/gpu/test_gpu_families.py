"""Every family on the device: captured as uncaptured, bit for bit, and as plain torch on the CPU.

Prompts in chunks beside decodes, greedy and drawn, with the prefix cache, in a pool that is full.
"""

from __future__ import annotations

import pytest
import torch
from checkpoints import build, prompt, save
from served import Truth, opened, serve, tight, told

from depth import deep_on_cpu
from weft.core.types import FinishReason, SamplingParams

# Of float32 logits whose deviation is about 1: sums in another order, through up to 7 layers.
TOLERANCE = 5e-4
FAMILIES = ["llama-gqa", "gemma3", "qwen3-moe", "phi4-partial", "gemma4-shared-kv", "gpt-oss"]
FAMILIES += ["deepseek-v3", "mistral4"]
OTHERS = ["llama3-rope", "mistral-window", "qwen2-window", "qwen3-full", "gemma2", "gemma4"]
OTHERS += ["granite-swa", "muse-glimmer", "youtu-one-query-matrix", "glm-flash", "deepseek-v2"]
OTHERS += ["minicpm3", "ministral3"]
OTHERS += ["gemma4-moe-key-is-value", "exaone4", "glm4", "granite", "hunyuan", "olmo3"]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, seed=0)
LONGER = SamplingParams(temperature=0.5, seed=8, max_tokens=72, ignore_eos=True)
DRAWN = [
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.1, top_k=12, top_p=0.9, seed=2**40, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, min_p=0.05, seed=4, max_tokens=9, ignore_eos=True),
]
SCORED = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=0, prompt_logprobs=0)
# One longer than a step and than every captured one, one of a token, two with the same beginning.
LONG = prompt(90, 1)
PROMPTS = [LONG, [5], prompt(20, 2), prompt(7, 3), [*LONG[:64], 9, 8], prompt(33, 4)]


def crowd(engine):
    """Answers to greedy and drawn requests, with the prefix cache and in a pool that is full."""
    asked = [GREEDY, *DRAWN, GREEDY, GREEDY]
    first = serve(engine, PROMPTS, asked)
    again = [answer for _ in range(2) for answer in serve(engine, [LONG], [GREEDY])]
    assert again[1].cached_tokens > 0
    # These fit in the pool when they begin, but not when they have grown: some give way.
    grown = serve(engine, [prompt(6, 9 + i) for i in range(4)], [LONGER] * 4)
    assert engine.scheduler.totals.preemptions > 0
    answers = first + again + grown
    assert {answer.finish for answer in answers} == {FinishReason.LENGTH}
    return answers


@pytest.fixture(params=[*FAMILIES, *(pytest.param(name, marks=deep_on_cpu) for name in OTHERS)])
def folder(request, tmp_path):
    return save(build(request.param), tmp_path / request.param)


def test_captured_steps_are_uncaptured_ones_and_plain_torch(folder) -> None:
    truth, found = Truth(folder), {}
    memory = tight(folder)
    for graphs in (True, False):
        with opened(folder, graphs=graphs, kv_memory=memory) as engine:
            assert (engine.executor.captured > 0) == graphs
            found[graphs] = crowd(engine)
            scored = serve(engine, [LONG[:70], PROMPTS[3]], [SCORED, SCORED])
            found[graphs] += scored
    captured, uncaptured = found[True], found[False]
    assert [a.tokens for a in captured] == [a.tokens for a in uncaptured]
    for one, other in zip(captured, uncaptured, strict=True):
        assert torch.equal(told(one), told(other))
    for number in (0, 4, 5):  # the greedy ones
        assert truth.miss(PROMPTS[number], captured[number]) < TOLERANCE
    for tokens, answer in zip((LONG[:70], PROMPTS[3]), captured[-2:], strict=True):
        assert truth.gap(tokens, answer) < TOLERANCE
