"""sentence-transformers' modules behind an encoder: Dense layers, prompts, vectors that are cut."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from encoder_models import CASES, SETTINGS, add_modules, build, expected, save, tokenizer

from weft import LLM
from weft.core.config import EngineConfig
from weft.core.errors import CheckpointError, ParameterError, UnsupportedModelError
from weft.engine.model import find_model

PROMPTS = {"query": "what is ", "document": "the ", "Clustering": "two "}
TEXT = "The capital of China is Beijing."


def dense() -> tuple[torch.nn.Linear, ...]:
    """As EmbeddingGemma's, which are wider in between; the second one here has a bias."""
    torch.manual_seed(1)
    return torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 48)


@pytest.mark.parametrize("activation", ["linear.Identity", "activation.Tanh", "activation.GELU"])
def test_dense_modules_follow_pooling(tmp_path, activation) -> None:
    model, layers = build(CASES["embedding-gemma"]), dense()
    folder = add_modules(
        save(model, tmp_path / "gemma"),
        "mean_tokens",
        dense=layers,
        activation=f"torch.nn.modules.{activation}",
        prompts=PROMPTS,
    )
    kind = {"linear": torch.nn.Identity}.get(activation.split(".")[0])
    function = (kind or getattr(torch.nn, activation.split(".")[1]))()

    def wanted(text: str) -> np.ndarray:
        state = expected(model, tokenizer().encode(text).ids, "mean_tokens", unit=False)
        state = torch.tensor(state)
        for layer in layers:
            state = function(layer.double()(state))
        return (state / state.norm()).detach().numpy()

    with LLM.in_process(folder, **SETTINGS) as llm:
        assert llm.served.hidden_size == 48
        plain, led = llm.embed(TEXT)[0], llm.embed(TEXT, input_type="search_query")[0]
        short = llm.embed(TEXT, input_type="passage", dimensions=8)[0]
        np.testing.assert_array_equal(llm.embed(TEXT, "Clustering")[0], llm.embed("two " + TEXT)[0])
        with pytest.raises(ParameterError, match=r"no prompt 'classification'; its prompts: 'que"):
            llm.embed(TEXT, input_type="classification")
        with pytest.raises(ParameterError, match="either input_type or prompt_name"):
            llm.embed(TEXT, "query", input_type="query")
        with pytest.raises(ParameterError, match="from 1 to 48, not 49"):
            llm.embed(TEXT, dimensions=49)
    np.testing.assert_allclose(plain, wanted(TEXT), atol=1e-5)
    np.testing.assert_allclose(led, wanted("what is " + TEXT), atol=1e-5)
    document = wanted("the " + TEXT)[:8]
    np.testing.assert_allclose(short, document / np.linalg.norm(document), atol=1e-5)


def test_modules_that_weft_does_not_compute_are_refused(tmp_path) -> None:
    folder = add_modules(
        save(build(CASES["bert"]), tmp_path / "bert"), "mean_tokens", dense=dense(), prompts=PROMPTS
    )

    def refused(words: str, kind: type[Exception] = UnsupportedModelError) -> None:
        with pytest.raises(kind, match=words):
            find_model(EngineConfig(model=str(folder)))

    first, listed = folder / "2_Dense" / "config.json", folder / "modules.json"
    sizes, modules = json.loads(first.read_text()), json.loads(listed.read_text())
    find_model(EngineConfig(model=str(folder)))
    first.write_text(json.dumps(sizes | {"in_features": 63}))
    refused("in_features is 63, but it is given 64")
    first.write_text(json.dumps(sizes | {"activation_function": "torch.nn.ReLU"}))
    refused("activation_function.*Identity, Tanh, GELU")
    first.write_text(json.dumps(sizes | {"module_input_name": "token_embeddings"}))
    refused("module_input_name")
    first.write_text(json.dumps(sizes))
    listed.write_text(json.dumps([modules[0], modules[2], modules[1]]))
    refused("'Dense' is not supported there")
    listed.write_text(json.dumps(modules))
    pooling = folder / "1_Pooling" / "config.json"
    flags = json.loads(pooling.read_text())
    pooling.write_text(json.dumps(flags | {"include_prompt": False}))
    refused("without the tokens of prompts")
    pooling.write_text(json.dumps(flags))
    (folder / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="3_Dense has no weights"):
        LLM.in_process(folder, **SETTINGS)
    shutil.copy(folder / "2_Dense" / "model.safetensors", folder / "3_Dense")
    with pytest.raises(CheckpointError, match=r"3_Dense/linear\.bias"):
        LLM.in_process(folder, **SETTINGS)
