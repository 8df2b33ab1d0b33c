"""Embedding models and rerankers of Qwen 3: their checkpoints, and the numbers of transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

import pooled
from weft import LLM
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, UnsuitableModelError, UnsupportedModelError, WeftError
from weft.core.types import NEUTRAL, Request, SamplingParams
from weft.engine.model import find_model
from weft.models.hub import ALLOWED, IGNORED
from weft.models.spec_reader import spec_from_config
from weft.text import Tokenizer
from weft.text.pairs import QWEN3_RERANKER, WEB_SEARCH, PairTemplate

SETTINGS = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB", "max_num_seqs": 8}
QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts two bodies.", "", "no " * 40]
_ids = itertools.count(1)


def states(model, prompts: list[list[int]]) -> np.ndarray:
    with torch.no_grad():
        found = [
            model.model(torch.tensor([tokens])).last_hidden_state[0, -1].double().numpy()
            for tokens in prompts
        ]
    return np.array(found)


def scored(llm: LLM, prompts: list[list[int]], **values: object) -> np.ndarray:
    """What embedding requests of prompts give."""
    sampling = SamplingParams(**{**NEUTRAL, "max_tokens": 1, "seed": 0, **values})
    asked = [Request(10**6 + next(_ids), tuple(ids), sampling, embed=True) for ids in prompts]
    found = {}
    for update in llm._updates(asked):
        assert update.error is None
        if update.embedding is not None:
            found[update.sequence_id] = np.frombuffer(update.embedding, np.float32)
    return np.array([found[request.id] for request in asked])


def pair_prompts(folder: Path) -> list[list[int]]:
    template = PairTemplate(QWEN3_RERANKER, Tokenizer.load(folder))
    return [
        template.encode({"instruction": WEB_SEARCH, "query": QUERY, "document": text})
        for text in DOCUMENTS
    ]


# -- embeddings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("tied", [True, False])
def test_vectors_of_a_checkpoint_without_prefix_and_head(tmp_path, tied, kernels):
    """The last token is the end that the tokeniser's template appends."""
    model = pooled.model(tie_word_embeddings=tied)
    folder = pooled.save_embedding(model, tmp_path / "embedding")
    texts = [text for text in (QUERY, *DOCUMENTS) if text]
    ids = [Tokenizer.load(folder).encode(text) for text in texts]
    assert all(tokens[-1] == pooled.tokenizer().token_to_id("<|endoftext|>") for tokens in ids)
    with LLM.in_process(folder, kernels=kernels, **SETTINGS) as llm:
        vectors = np.array(llm.embed(texts))
    expected = states(model, ids)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_vectors_keep_their_length_without_a_module_that_normalises(tmp_path, architecture):
    model = pooled.model()
    folder = pooled.save_embedding(model, tmp_path / "raw", unit=False, architecture=architecture)
    ids = Tokenizer.load(folder).encode(QUERY)
    with LLM.in_process(folder, **SETTINGS) as llm:
        [vector] = llm.embed([QUERY])
        pooling = llm.served.pooling
    np.testing.assert_allclose(vector, states(model, [ids])[0], rtol=1e-4, atol=1e-4)
    assert (pooling.unit, pooling.generates, pooling.scoring) == (False, False, "similarity")


def test_prompts_of_the_checkpoint_go_before_texts(tmp_path):
    model = pooled.model()
    folder = pooled.save_embedding(model, tmp_path / "prompts", default_prompt="query")
    led = pooled.PROMPTS["query"] + QUERY
    with LLM.in_process(folder, **SETTINGS) as llm:
        [default], [named] = llm.embed(QUERY), llm.embed([QUERY], "query")
        [bare], [same] = llm.embed(QUERY, "document"), llm.embed(led, "document")
        with pytest.raises(WeftError, match="'passage'; its prompts: 'query', 'document'"):
            llm.embed(QUERY, "passage")
    assert np.array_equal(default, named)
    assert np.array_equal(default, same)
    assert not np.allclose(default, bare, atol=1e-3)


def test_a_model_without_modules_embeds_and_generates_but_does_not_score(tmp_path):
    folder = pooled.save(pooled.model(), tmp_path / "plain")
    pooling = find_model(EngineConfig(model=str(folder))).pooling
    assert pooling.describe() == "text; embeddings of the last token, of length 1"


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "mean, lasttoken"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken", "max"]}, "lasttoken, max"),
        ({"word_embedding_dimension": 64}, "none"),
    ],
)
def test_other_pooling_is_refused_by_name(tmp_path, pooling, named):
    folder = pooled.save_embedding(pooled.model(), tmp_path / "other", pooling=pooling)
    with pytest.raises(UnsupportedModelError, match=rf"'{named}' .*remove modules\.json"):
        find_model(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("modules.json", "{}", "not a list of up to"),
        ("modules.json", "[", "not a list of up to"),
        ("modules.json", '[{"type": "a.Dense", "path": "2_Dense"}]', "module 'Dense'"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../.."}]', "not a list of up to"),
        ("modules.json", '[{"type": "a.Pooling", "path": "/etc"}]', "not a list of up to"),
        ("modules.json", '[{"type": "a.Pooling", "path": "9_None"}]', "config.json cannot be read"),
        ("1_Pooling/config.json", "[]", "config.json is not a JSON object"),
        ("config_sentence_transformers.json", '{"prompts": [1]}', "prompts must be"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}', "prompts must be"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "b"}', "no such text"),
    ],
)
def test_malformed_modules_are_refused_by_file(tmp_path, file, text, words):
    folder = pooled.save_embedding(pooled.model(), tmp_path / "broken")
    (folder / file).write_text(text)
    with pytest.raises(UnsupportedModelError, match=words):
        find_model(EngineConfig(model=str(folder)))


# -- rerankers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_answers_of_a_reranker_are_its_logits(tmp_path, kernels):
    """Documents share their query's prefix; the probability is that of transformers' logits."""
    model = pooled.model(tie_word_embeddings=True)
    folder = pooled.save(model, tmp_path / "Qwen3-Reranker-tiny")
    prompts = pair_prompts(folder)
    yes, no = (pooled.tokenizer().token_to_id(word) for word in ("yes", "no"))
    with LLM.in_process(folder, kernels=kernels, max_num_batched_tokens=48, **SETTINGS) as llm:
        assert llm.served.pooling.scoring == "yes-no"
        found = scored(llm, prompts, logprobs=2, logprob_token_ids=(no, yes))
        totals = llm.engine.built.scheduler.totals
        assert (totals.cached_tokens > 0, totals.output_tokens) == (True, 0)
        vectors = llm.embed(prompts)  # the same model's states, beside
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0, -1].double() for ids in prompts]
    expected = [torch.log_softmax(row, -1)[[no, yes]].numpy() for row in logits]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.shape(vectors) == (len(prompts), 64)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_classification_head_gives_its_one_number(tmp_path, tied, kernels):
    model = pooled.model("Qwen3ForSequenceClassification", num_labels=1, tie_word_embeddings=tied)
    folder = pooled.save(model, tmp_path / "classifier")
    prompts = pair_prompts(folder)
    with LLM.in_process(folder, kernels=kernels, **SETTINGS) as llm:
        pooling = llm.served.pooling
        found = scored(llm, prompts)
    assert (pooling.scoring, pooling.generates, pooling.embeds) == ("head", False, False)
    assert pooling.describe() == "scores by a classification head"
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].double().numpy() for ids in prompts]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_a_converted_reranker_scores_as_the_original(tmp_path):
    """The head is the difference of two rows of the output head."""
    original = pooled.model(tie_word_embeddings=False)
    converted = pooled.model("Qwen3ForSequenceClassification", num_labels=1)
    yes, no = (pooled.tokenizer().token_to_id(word) for word in ("yes", "no"))
    converted.model.load_state_dict(original.model.state_dict())
    head = original.lm_head.weight
    converted.score.weight.copy_((head[yes] - head[no])[None])
    first = pooled.save(original, tmp_path / "qwen3-reranker")
    second = pooled.save(converted, tmp_path / "converted")
    prompts = pair_prompts(first)
    with LLM.in_process(first, **SETTINGS) as llm:
        answers = scored(llm, prompts, logprobs=2, logprob_token_ids=(yes, no))
    with LLM.in_process(second, **SETTINGS) as llm:
        heads = scored(llm, prompts)
    np.testing.assert_allclose(answers[:, 0] - answers[:, 1], heads[:, 0], atol=2e-4)


def test_scores_from_python(tmp_path):
    """Of each kind, in the order of the documents; models without text or vectors say so."""
    models = {
        "head": pooled.model("Qwen3ForSequenceClassification", num_labels=1),
        "similarity": pooled.model(),
    }
    head = pooled.save(models["head"], tmp_path / "head")
    embedding = pooled.save_embedding(models["similarity"], tmp_path / "similarity")
    with torch.no_grad():
        logits = [models["head"](torch.tensor([ids])).logits[0, 0] for ids in pair_prompts(head)]
    with LLM.in_process(head, **SETTINGS) as llm:
        found = llm.score(QUERY, DOCUMENTS)
        with pytest.raises(UnsuitableModelError, match="has no embeddings"):
            llm.embed([QUERY])
        with pytest.raises(WeftError, match="generates no text: it is served for scores"):
            llm.generate([QUERY])
        with pytest.raises(WeftError, match="list of documents is empty"):
            llm.score(QUERY, [])
    assert found == pytest.approx([float(torch.sigmoid(one)) for one in logits], abs=1e-5)
    with LLM.in_process(embedding, **SETTINGS) as llm:
        cosines = llm.score(QUERY, DOCUMENTS[:2])
        query, *others = llm.embed([QUERY, *DOCUMENTS[:2]])
    assert cosines == pytest.approx([float(query @ other) for other in others], abs=1e-6)


def test_folders_with_a_number_are_fetched_from_the_hub():
    """Those of sentence-transformers' modules, and no other formats of the weights."""
    files = ["config.json", "modules.json", "1_Pooling/config.json", "onnx/config.json"]
    files += ["2_Dense/model.safetensors", "original/params.json", "model.safetensors"]
    fetched = filter_repo_objects(files, allow_patterns=ALLOWED, ignore_patterns=IGNORED)
    assert set(files) - set(fetched) == {"onnx/config.json", "original/params.json"}


@pytest.mark.parametrize(
    ("changes", "sigmoid"),
    [
        ({}, True),
        ({"sentence_transformers": {"version": "5.0"}}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, None),
        ({"sentence_transformers": {"activation_fn": 3}}, None),
    ],
)
def test_the_activation_of_a_cross_encoder(changes, sigmoid):
    config = pooled.model("Qwen3ForSequenceClassification", num_labels=1).config.to_dict()
    config |= {"architectures": ["Qwen3ForSequenceClassification"]} | changes
    if sigmoid is None:
        with pytest.raises(UnsupportedModelError, match="must be Sigmoid or Identity"):
            spec_from_config(config)
    else:
        assert spec_from_config(config).sigmoid_scores == sigmoid


def test_several_labels_are_refused(tmp_path):
    model = pooled.model("Qwen3ForSequenceClassification", num_labels=3)
    folder = pooled.save(model, tmp_path / "three")
    with pytest.raises(UnsupportedModelError, match="'num_labels': 3 is not supported"):
        find_model(EngineConfig(model=str(folder)))


def test_a_module_names_the_answers(tmp_path):
    """As sentence-transformers saves cross encoders that answer yes or no."""
    folder = pooled.save(pooled.model(), tmp_path / "cross")
    modules = [
        {"type": "t.Transformer", "path": ""},
        {"type": "t.LogitScore", "path": "1_LogitScore"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    config = folder / "1_LogitScore" / "config.json"
    config.write_text('{"true_token_id": 7, "false_token_id": 9}')
    pooling = find_model(EngineConfig(model=str(folder))).pooling
    assert (pooling.answers, pooling.scoring, pooling.generates) == ((7, 9), "yes-no", True)
    config.write_text('{"true_token_id": true, "false_token_id": 9}')
    with pytest.raises(UnsupportedModelError, match="must be token ids"):
        find_model(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("classifier", {"scoring": "yes-no"}, "leave it at auto"),
        ("embedding", {"scoring": "yes-no"}, "needs an output head"),
        ("embedding", {"score_template": "pair.txt"}, "not served"),
        ("plain", {"score_template": "pair.txt"}, "not served"),
        ("plain", {"scoring": "yes-no", "score_template": "half.txt"}, "{query} and {document}"),
        ("plain", {"scoring": "yes-no", "score_template": "none.txt"}, "none.txt cannot be read"),
        ("llama", {"scoring": "yes-no"}, "no prompt for rerankers of the family llama"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(tmp_path, kind, settings, words):
    (tmp_path / "pair.txt").write_text("{query}: {document}")
    (tmp_path / "half.txt").write_text("{query}: {query}")
    folder = tmp_path / kind
    if kind == "embedding":
        pooled.save_embedding(pooled.model(), folder)
    elif kind == "classifier":
        pooled.save(pooled.model("Qwen3ForSequenceClassification", num_labels=1), folder)
    else:
        pooled.save(pooled.model(), folder)
    if kind == "llama":
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        config = {name: config[name] for name in config if name not in NOT_OF_LLAMA}
        (folder / "config.json").write_text(json.dumps(config))
    if "score_template" in settings:
        settings = settings | {"score_template": str(tmp_path / settings["score_template"])}
    with pytest.raises(WeftError, match=words) as refused:
        find_model(EngineConfig(model=str(folder), **settings))
    assert isinstance(refused.value, ConfigError)


NOT_OF_LLAMA = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
