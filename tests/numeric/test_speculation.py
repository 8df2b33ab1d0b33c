"""Drafts change the speed and nothing else: the same tokens, probabilities, distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import prompt

from weft import LLM, SamplingParams
from weft.core.plan import RowAdd
from weft.exec.input_batch import InputBatch
from weft.exec.sample import sample
from weft.kernels.ops import select_ops
from weft.kernels.sampling import count_taken

REPEATING = prompt(12, 1) * 4
PROMPTS = [REPEATING, prompt(40, 2), prompt(9, 3) * 3, prompt(5, 4) * 9 + prompt(20, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
ROUND = replace(GREEDY, logit_bias={300: 14.0, 301: 9.0})  # mostly the same token again

OPS = select_ops("cpu", "float32")


def packaged(**settings) -> LLM:
    common = {"threads": 1, "kv_memory": "16MiB", "max_model_len": 512, "max_num_seqs": 8}
    return LLM.in_process("builtin", **common, **settings)


def totals(llm: LLM):
    return llm.engine.built.scheduler.totals


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, min_tokens=20, presence_penalty=1.0, repetition_penalty=1.2),
        replace(GREEDY, ignore_eos=False, stop_token_ids=tuple(range(40, 70))),
        replace(ROUND, temperature=0.7, top_p=0.9, seed=4, frequency_penalty=0.2),
        replace(ROUND, temperature=1.0, top_k=5, seed=9),
        replace(
            ROUND,
            allowed_token_ids=(300, 301),
            bad_token_sequences=((300, 300, 300), (301, 301)),
            logprob_token_ids=(301, 5),
        ),
    ],
)
def test_tokens_and_log_probabilities_are_those_without_drafts(params, depth):
    with packaged(steps_in_flight=depth) as llm:
        plain = llm.generate(PROMPTS, params, progress=False)
        assert totals(llm).drafted_tokens == 0
        drafted = llm.generate(PROMPTS, replace(params, speculation=6), progress=False)
        assert totals(llm).drafted_tokens > 0
        assert all(pool.held == 0 for pool in llm.engine.built.scheduler.cache.pools)
    for with_drafts, without in zip(drafted, plain, strict=True):
        assert with_drafts.token_ids == without.token_ids
        assert with_drafts.logprobs == without.logprobs
        assert with_drafts.finish_reason == without.finish_reason
        assert len(with_drafts.logprobs) == len(with_drafts.token_ids)


def test_the_setting_speaks_for_requests_that_do_not_and_drafts_are_taken():
    always = {300: 100.0}
    params = replace(GREEDY, max_tokens=80, logprobs=None, logit_bias=always)
    with packaged(speculation=8) as llm:
        llm.generate([REPEATING], replace(params, speculation=0), progress=False)
        assert totals(llm).drafted_tokens == 0
        before = totals(llm).steps
        result = llm.generate([REPEATING], params, progress=False)[0]
        assert result.token_ids == [300] * 80
        assert totals(llm).accepted_tokens > 40
        assert totals(llm).steps - before < 30


def test_a_pool_that_is_too_small_for_all_changes_no_token_of_drafts():
    params = replace(GREEDY, logprobs=None)
    with packaged() as roomy:
        expected = roomy.generate(PROMPTS, params, progress=False)
        cost = sum(g.bytes_per_token for g in roomy.engine.built.model.facts.groups)
    settings = {"threads": 1, "max_num_seqs": 8, "kv_memory": 160 * cost, "max_model_len": 128}
    with LLM.in_process("builtin", **settings) as tight:
        results = tight.generate(PROMPTS, replace(params, speculation=6), progress=False)
        assert totals(tight).preemptions > 0
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


def test_the_distribution_is_that_of_the_model():
    """Chi-square of two tokens drawn along a draft, through the functions that verify."""
    size, rounds = 6, 10_000
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(size, generator=draw)
    second = torch.randn(size, size, generator=draw)  # by the first token
    draft = (2,)
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, rounds, 500):
        table = InputBatch(500, 8, [1])
        for row in range(500):
            params = SamplingParams(temperature=1.3, top_k=5, seed=start + row).with_defaults({})
            table._add(RowAdd(row, row, (0,), 1, params, frozenset(), ((0,),)))
        rows, lengths = np.repeat(np.arange(500), 2), np.tile([1, 2], 500)
        logits = torch.stack((first, second[draft[0]])).repeat(500, 1)
        sampled = sample(logits, rows, table, OPS, lengths)
        tokens = sampled.tokens.reshape(500, 2).tolist()
        again = sample(
            torch.stack([second[pair[0]] for pair in tokens]),
            np.arange(500),
            table,
            OPS,
            np.full(500, 2),
        ).tokens
        for row, pair in enumerate(tokens):
            taken = count_taken(pair, [True, True], draft)
            seen[pair[0], pair[1] if taken == 2 else int(again[row])] += 1

    def kept(logits):
        logits = logits / 1.3
        logits = logits.masked_fill(logits < logits.topk(5).values[-1], -torch.inf)
        return torch.softmax(logits.double(), dim=-1)

    expected = kept(first).unsqueeze(1) * torch.stack([kept(row) for row in second])
    pairs = [(a, b) for a in range(size) for b in range(size) if expected[a, b] > 0]
    assert set(seen) <= set(pairs)
    chi = sum((seen[p] - rounds * float(expected[p])) ** 2 / float(expected[p]) for p in pairs)
    chi /= rounds
    degrees = len(pairs) - 1
    assert chi < degrees + 4 * (2 * degrees) ** 0.5  # about one in 30,000


def test_the_distribution_of_the_engine_is_the_one_without_drafts():
    """Two samples of the third token, with and without drafts and with other seeds."""
    bias = dict.fromkeys((300, 301, 302), 12.0)
    common = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "logit_bias": bias}
    counts = []
    with packaged() as llm:
        for base, speculation in ((0, 0), (10_000, 4)):
            params = [
                SamplingParams(seed=base + i, speculation=speculation, **common) for i in range(100)
            ]
            results = llm.generate([[300, 301, 302] * 5] * 100, params, progress=False)
            counts.append(Counter(token for r in results for token in r.token_ids[2:]))
        assert totals(llm).accepted_tokens > 100
    tokens = [token for token in counts[0] if counts[0][token] + counts[1][token] >= 20]
    total = [sum(c[t] for t in tokens) for c in counts]
    chi = 0.0
    for token in tokens:
        both = counts[0][token] + counts[1][token]
        for count, n in zip(counts, total, strict=True):
            expected = both * n / sum(total)
            chi += (count[token] - expected) ** 2 / expected
    # Tokens of one text depend on each other, so the limit is wider than for independent ones.
    assert chi < 4 * (len(tokens) - 1 + 4 * (2 * len(tokens)) ** 0.5)


def test_a_guess_that_is_not_finite_ends_the_draft_and_not_the_request():
    assert count_taken([5, 6, 7], [True, True, True], (5, 6)) == 3
    assert count_taken([5, 6, 7], [True, False, True], (5, 6)) == 1
    assert count_taken([5, 6, 7], [True, True, True], (5, 9)) == 2
    assert count_taken([4, 6, 7], [True, True, True], (5, 6)) == 1
    assert count_taken([4], [True], ()) == 1
