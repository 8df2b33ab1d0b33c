"""Embeddings: the hidden state of the last token, as transformers computes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import build, prompt, save_with_tokenizer

from weft import LLM, SamplingParams
from weft.core.errors import NonFiniteLogitsError

PROMPTS = [prompt(90, 1), prompt(7, 2), prompt(90, 1)[:70] + prompt(5, 3), prompt(33, 4), [5]]
INFINITE = 77  # a token whose embedding is not finite


@pytest.fixture(scope="module")
def model():
    return build("gemma3")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return save_with_tokenizer(model, tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    model = build("llama-gqa")
    with torch.no_grad():
        model.get_input_embeddings().weight[INFINITE] = float("inf")
    return save_with_tokenizer(model, tmp_path_factory.mktemp("broken"))


def expected(model, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        state = model.model(torch.tensor([tokens])).last_hidden_state[0, -1].double()
    return (state / state.norm()).numpy()


SETTINGS = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB", "max_num_seqs": 8}


@pytest.mark.parametrize("chunk", [8, 13, 512])
def test_vectors_equal_the_reference_in_any_batch_and_chunks(model, folder, chunk):
    with LLM.in_process(folder, max_num_batched_tokens=chunk, **SETTINGS) as llm:
        vectors = llm.embed(PROMPTS)
        again = llm.embed(PROMPTS)  # from the prefix cache
        alone = llm.embed(PROMPTS[3])[0]
        scheduler = llm.engine.built.scheduler
        assert scheduler.totals.cached_tokens > 0
        assert scheduler.totals.output_tokens == 0
        assert scheduler.idle
        assert all(pool.held == 0 for pool in scheduler.cache.pools)
    for tokens, vector, second in zip(PROMPTS, vectors, again, strict=True):
        np.testing.assert_allclose(vector, expected(model, tokens), atol=1e-4)
        np.testing.assert_allclose(second, vector, atol=1e-5)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(alone, vectors[3], atol=1e-5)


def test_they_cross_the_ring_beside_streams_and_are_the_same_bits_in_any_company():
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    settings = {"threads": 1, "kv_memory": "16MiB", "max_model_len": 256}
    with LLM("builtin", **settings) as llm:
        alone = llm.embed([PROMPTS[0]])[0]
        stream = llm.stream(PROMPTS[3], params)
        next(stream)
        together = llm.embed(PROMPTS)
        assert len([*stream]) > 0
    with LLM.in_process("builtin", **settings) as local:
        here = local.embed(PROMPTS)
    assert alone.shape == (256,)
    assert np.array_equal(alone, together[0])
    for there, vector in zip(together, here, strict=True):
        assert np.array_equal(there, vector)


@pytest.mark.parametrize("speculation", [0, 4])
def test_a_vector_that_is_not_finite_ends_its_request_alone(broken, speculation):
    """One engine process, streams with and without drafts, and an embedding that overflows."""
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, speculation=speculation, logit_bias={3: 50}
    )
    good = [prompt(20, 1) * 2, prompt(9, 2) * 3]
    good = [[t for t in tokens if t != INFINITE] for tokens in good]
    with LLM(broken, **SETTINGS) as llm:
        before = llm.generate(good, params, progress=False)
        with pytest.raises(NonFiniteLogitsError):
            llm.embed([[1, 2, INFINITE, 3]])
        stream = llm.stream(good[0], params)
        seen = [*next(stream).token_ids]
        mixed = llm.generate([[4, INFINITE], *good], params, progress=False)
        for delta in stream:
            seen += delta.token_ids
        after = llm.embed(good)
    assert mixed[0].error.code == "non_finite_logits"
    assert [r.token_ids for r in mixed[1:]] == [r.token_ids for r in before]
    assert seen == before[0].token_ids
    assert all(np.isfinite(vector).all() for vector in after)
