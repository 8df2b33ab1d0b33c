"""Vectors and scores of an engine on the device, beside sequences that generate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import prompt
from served import answers_to, opened

import pooled
from weft.core.types import Request, SamplingParams

PROMPTS = [prompt(90, 1), prompt(7, 2), [5], prompt(40, 3)]
ASKED = SamplingParams(temperature=0, max_tokens=1, seed=0).with_defaults({})
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=0).with_defaults({})
NAMED = (7, 3)


def numbers(engine, sampling: SamplingParams, *, beside: bool) -> np.ndarray:
    """What embedding requests give, and check the tokens of those between them."""
    requests = [Request(i, tuple(p), sampling, embed=True) for i, p in enumerate(PROMPTS)]
    if beside:
        requests.insert(1, Request(99, tuple(PROMPTS[3]), GREEDY))
    answers = answers_to(engine, requests)
    if beside:
        assert len(answers.pop(1).tokens) == GREEDY.max_tokens
    assert all(answer.error is None and answer.tokens == [] for answer in answers)
    return np.array([np.frombuffer(answer.embedding, np.float32) for answer in answers])


@pytest.mark.parametrize("graphs", [True, False])
def test_scores_of_both_kinds_are_those_of_transformers(tmp_path, graphs):
    classifier = pooled.model("Qwen3ForSequenceClassification", num_labels=1)
    causal = pooled.model()
    folders = [
        pooled.save(model, tmp_path / name)
        for name, model in {"classifier": classifier, "causal": causal}.items()
    ]
    with torch.no_grad():
        heads = [classifier(torch.tensor([ids])).logits[0].numpy() for ids in PROMPTS]
        rows = [causal(torch.tensor([ids])).logits[0, -1] for ids in PROMPTS]
        states = [causal.model(torch.tensor([ids]))[0][0, -1] for ids in PROMPTS]
    named = [row.log_softmax(-1)[list(NAMED)].numpy() for row in rows]
    units = [(state / state.norm()).numpy() for state in states]
    with opened(folders[0], graphs=graphs) as engine:
        found = numbers(engine, ASKED, beside=False)
        np.testing.assert_allclose(found, heads, rtol=1e-4, atol=1e-3)
    wanted = replace(ASKED, logprobs=2, logprob_token_ids=NAMED)
    with opened(folders[1], graphs=graphs) as engine:
        found = numbers(engine, wanted, beside=True)
        np.testing.assert_allclose(found, named, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(numbers(engine, ASKED, beside=True), units, atol=1e-4)
