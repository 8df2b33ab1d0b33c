"""What fails in one request ends it alone, memory or logits: with drafts, grammars, embeddings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import build, prompt, save_with_tokenizer

from weft import LLM, SamplingParams
from weft.core.errors import OutOfMemoryError
from weft.exec.eager import EagerExecutor

HUNGRY = 77  # a token that no forward pass has memory for
GOOD = [t for t in prompt(20, 1) * 2 if t != HUNGRY]
FREE = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DRAFTS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculation=6)
DIGITS = SamplingParams(temperature=0, max_tokens=30, grammar="start: /[0-9]{12}/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_with_tokenizer(build("llama-gqa"), tmp_path_factory.mktemp("llama"))


def open_llm(folder, **more) -> LLM:
    settings = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB", "max_num_seqs": 8}
    return LLM.in_process(folder, batch_invariant=True, **settings, **more)


def starve(monkeypatch, when):
    compute = EagerExecutor._compute

    def starving(self, inputs):
        if when(inputs.input_ids):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return compute(self, inputs)

    monkeypatch.setattr(EagerExecutor, "_compute", starving)


def test_a_hungry_request_of_any_kind_ends_alone(folder, monkeypatch):
    kinds = [FREE, DRAFTS, DIGITS]
    with open_llm(folder) as llm:
        expected = llm.generate([GOOD] * 3, kinds, progress=False)
        vector = llm.embed([GOOD])[0]
        assert not any(HUNGRY in result.token_ids for result in expected)
        starve(monkeypatch, lambda ids: HUNGRY in ids.tolist())
        both = [kind for kind in kinds for _ in ("good", "bad")]
        results = llm.generate([GOOD, [HUNGRY, 5]] * 3, both, progress=False)
        with pytest.raises(OutOfMemoryError):
            llm.embed([[3, HUNGRY]])
        assert (llm.embed([GOOD])[0] == vector).all()
        llm.engine.built.scheduler.check()
    for wanted, good, bad in zip(expected, results[::2], results[1::2], strict=True):
        assert good.token_ids == wanted.token_ids
        assert good.finish_reason == wanted.finish_reason
        assert bad.error.code == "out_of_memory"
    assert expected[2].text.isdigit()


def test_drafts_are_never_to_blame(folder, monkeypatch):
    """Where memory is short for a step with drafts, its rows are computed without them."""
    one_token = {"logit_bias": {3: 50.0}}
    with open_llm(folder, prefix_caching=False) as llm:
        expected = llm.generate([GOOD] * 2, replace(FREE, **one_token), progress=False)
        drafted = []

        def too_many(ids):
            drafted.append(2 < len(ids) < len(GOOD))
            return drafted[-1]

        starve(monkeypatch, too_many)
        results = llm.generate([GOOD] * 2, replace(DRAFTS, **one_token), progress=False)
    assert any(drafted)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


def test_logits_that_are_not_finite_end_a_request_with_a_grammar_alone(folder, monkeypatch):
    """Before its first token and within its output."""
    later = replace(DIGITS, grammar="start: /(?s:.*)/", logit_bias={HUNGRY: 100.0})
    with open_llm(folder) as llm:
        expected = llm.generate([GOOD] * 2, [FREE, DIGITS], progress=False)
        compute = EagerExecutor._compute

        def breaking(self, inputs):
            hidden = compute(self, inputs)  # [T, C]
            return hidden.masked_fill((inputs.input_ids == HUNGRY).unsqueeze(-1), torch.nan)

        monkeypatch.setattr(EagerExecutor, "_compute", breaking)
        prompts = [GOOD, GOOD, [5, HUNGRY], GOOD]
        *good, first, second = llm.generate(prompts, [FREE, DIGITS, DIGITS, later], progress=False)
        llm.engine.built.scheduler.check()
    assert [r.token_ids for r in good] == [r.token_ids for r in expected]
    assert good[1].text.isdigit()
    assert (first.error.code, list(first.token_ids)) == ("non_finite_logits", [])
    assert (second.error.code, list(second.token_ids)) == ("non_finite_logits", [HUNGRY])
