"""Encoders (BERT and its kin, EmbeddingGemma): vectors of texts, as transformers computes them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import prompt
from encoder_models import CASES, SETTINGS, add_modules, build, expected, save, tokenizer

from weft import LLM, SamplingParams
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, UnsuitableModelError, UnsupportedModelError
from weft.engine import encoders
from weft.engine.model import find_model, resolve_settings
from weft.models.layout import num_parameters
from weft.models.spec_reader import spec_from_config

PROMPTS = [prompt(90, 1), prompt(7, 2), prompt(33, 4), [5], prompt(70, 1), prompt(2, 5)]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens"])
@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_transformers_in_any_batch(tmp_path, name, mode, kernels) -> None:
    """Several texts of a step, which holds no two of the longest, and none is cut."""
    model = build(CASES[name])
    folder = add_modules(save(model, tmp_path / name), mode)
    with LLM.in_process(
        folder, max_num_batched_tokens=128, max_model_len=128, kernels=kernels, **SETTINGS
    ) as llm:
        vectors = llm.embed(PROMPTS)
        alone = llm.embed(PROMPTS[2])[0]
        scheduler = llm.engine.built.scheduler
        scheduler.check()
        assert scheduler.totals.steps == 3
        assert scheduler.totals.cached_tokens == 0
    for tokens, vector in zip(PROMPTS, vectors, strict=True):
        np.testing.assert_allclose(vector, expected(model, tokens, mode), atol=1e-5)
    np.testing.assert_allclose(alone, vectors[2], atol=1e-6)
    assert kernels == "reference" or np.array_equal(alone, vectors[2])


def test_texts_have_marks_around_them_and_vectors_any_length(tmp_path) -> None:
    model = build(CASES["bert"])
    folder = add_modules(save(model, tmp_path / "bert"), "mean_tokens", unit=False)
    text = "What is the capital of China?"
    ids = tokenizer().encode(text).ids
    assert (ids[0], ids[-1]) == (2, 3)
    with LLM.in_process(folder, **SETTINGS) as llm:
        found = llm.embed(text)[0]
        assert (
            llm.served.pooling.describe()
            == "embeddings by the mean of tokens; scores by similarity"
        )
        assert len(llm.score(text, ["beijing", "gravity attracts two bodies"])) == 2
        with pytest.raises(UnsuitableModelError, match="generates no text"):
            llm.generate("what", SamplingParams(max_tokens=1))
    np.testing.assert_allclose(found, expected(model, ids, "mean_tokens", unit=False), atol=1e-5)


def test_a_model_without_modules_takes_the_mean(tmp_path) -> None:
    model = build(CASES["bert"])
    with LLM.in_process(save(model, tmp_path / "bert"), **SETTINGS) as llm:
        found = llm.embed([PROMPTS[2]])[0]
    np.testing.assert_allclose(found, expected(model, PROMPTS[2], "mean_tokens"), atol=1e-5)


def test_bfloat16_and_int8_weights_stay_near(tmp_path) -> None:
    model = build(CASES["xlm-roberta"])
    folder = add_modules(save(model, tmp_path / "xlm"), "cls_token")
    for settings in ({"dtype": "bfloat16"}, {"quantize": "int8"}):
        with LLM.in_process(folder, **(SETTINGS | settings)) as llm:
            vectors = llm.embed(PROMPTS)
        for tokens, vector in zip(PROMPTS, vectors, strict=True):
            assert vector @ expected(model, tokens, "cls_token") > 0.995


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scheduler": "slo"}, "set scheduler to fcfs"),
        ({"tensor_parallel": 2}, "set tensor_parallel to 1"),
        (
            {"max_num_batched_tokens": 64, "max_num_seqs": 8},
            "set that to 130, or max_model_len to 65",
        ),
        ({"max_model_len": 132}, "max_model_len is at most 131"),
        ({"host_kv_memory": "64MiB"}, "set host_kv_memory to None"),
    ],
)
def test_settings_that_encoders_have_not_are_refused(tmp_path, changes, words) -> None:
    folder = add_modules(save(build(CASES["bert"]), tmp_path / "bert"), "cls_token")
    with pytest.raises(ConfigError, match=words):
        find_model(EngineConfig(model=str(folder), device="cpu", **changes))


def test_a_step_has_room_for_the_longest_text_unless_it_is_set(tmp_path, monkeypatch) -> None:
    folder = add_modules(save(build(CASES["bert"]), tmp_path / "bert"), "cls_token")
    monkeypatch.setattr(encoders, "DEFAULT_STEP", 64)
    config = EngineConfig(
        model=str(folder), device="cpu", max_num_batched_tokens=64, max_num_seqs=8
    )
    _, resolved = resolve_settings(config)
    assert (resolved.max_model_len, resolved.max_num_batched_tokens) == (131, 130)
    _, resolved = resolve_settings(replace(config, max_model_len=32))
    assert resolved.max_num_batched_tokens == 64


def test_pooling_of_other_kinds_is_refused(tmp_path) -> None:
    folder = add_modules(save(build(CASES["bert"]), tmp_path / "bert"), "weightedmean_tokens")
    with pytest.raises(UnsupportedModelError, match="only by one of lasttoken, cls, mean"):
        find_model(EngineConfig(model=str(folder)))
    shutil.rmtree(folder / "1_Pooling")
    with pytest.raises(UnsupportedModelError, match="config"):
        find_model(EngineConfig(model=str(folder)))


# As their config.json on the hub says.
HUB = {
    "bge-small-en-v1.5": {
        "architectures": ["BertModel"],
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": None,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 384,
        "id2label": {"0": "LABEL_0"},
        "initializer_range": 0.02,
        "intermediate_size": 1536,
        "label2id": {"LABEL_0": 0},
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_type": "bert",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "torch_dtype": "float32",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": 30522,
    },
    "multilingual-e5-large": {
        "architectures": ["XLMRobertaModel"],
        "attention_probs_dropout_prob": 0.1,
        "bos_token_id": 0,
        "classifier_dropout": None,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514,
        "model_type": "xlm-roberta",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "output_past": True,
        "pad_token_id": 1,
        "position_embedding_type": "absolute",
        "type_vocab_size": 1,
        "use_cache": True,
        "vocab_size": 250002,
    },
}


def test_hub_configs_and_their_parameter_counts() -> None:
    """Model cards count the pooler, a matrix and its biases, which vectors do not need."""
    bge, e5 = (spec_from_config(HUB[name]) for name in HUB)
    assert num_parameters(bge) + 384 * 385 == 33_360_000
    assert num_parameters(e5) + 1024 * 1025 == 559_890_432
    assert (bge.max_position_embeddings, e5.max_position_embeddings) == (513, 513)
    with pytest.raises(UnsupportedModelError, match="position_embedding_type"):
        spec_from_config(HUB["bge-small-en-v1.5"] | {"position_embedding_type": "relative_key"})
