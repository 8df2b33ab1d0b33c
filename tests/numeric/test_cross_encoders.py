"""Cross encoders: scores of pairs as transformers computes them, with their tokens and types."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from encoder_models import CROSS, SETTINGS, build, save, tokenizer
from tokenizers import processors

from weft import LLM
from weft.core.config import EngineConfig
from weft.core.errors import (
    ConfigError,
    ParameterError,
    UnsuitableModelError,
    UnsupportedModelError,
)
from weft.engine.model import find_model

QUERY = "What is the capital of China?"
DOCUMENTS = [
    "Beijing is the capital of China.",
    "gravity attracts two bodies",
    "a " * 60,
    "the capital " * 30,
    "",
    "?",
]
IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}


def logits(model: object, *, doubled: bool, typed: bool) -> np.ndarray:
    """Of each document, as transformers has them."""
    found = []
    for document in DOCUMENTS:
        pair = tokenizer(doubled=doubled).encode(QUERY, document)
        types = {"token_type_ids": torch.tensor([pair.type_ids])} if typed else {}
        with torch.no_grad():
            found.append(model(torch.tensor([pair.ids]), **types).logits[0].item())  # type: ignore
    return np.array(found)


@pytest.mark.parametrize("name", CROSS)
def test_scores_are_those_of_transformers(tmp_path, name) -> None:
    model = build(CROSS[name], num_labels=1)
    doubled, typed = "roberta" in name, name == "bert"
    wanted = logits(model, doubled=doubled, typed=typed)
    assert np.ptp(wanted) > 0.02
    folder = save(model, tmp_path / name, doubled=doubled)
    with LLM.in_process(folder, **SETTINGS) as llm:
        scores = llm.score(QUERY, DOCUMENTS)
        alone = llm.score(QUERY, DOCUMENTS[1:2])
        assert llm.served.pooling.describe() == "scores by a classification head"
        with pytest.raises(UnsuitableModelError, match="has no embeddings"):
            llm.embed(QUERY)
        with pytest.raises(ParameterError, match="no place for an instruction"):
            llm.score(QUERY, DOCUMENTS, instruction="find")
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-wanted)), atol=1e-5)
    assert alone == scores[1:2]


def test_the_config_says_that_scores_are_logits(tmp_path) -> None:
    model = build(CROSS["bert"], num_labels=1)
    folder = save(model, tmp_path / "bert", **IDENTITY)
    with LLM.in_process(folder, **SETTINGS) as llm:
        scores = llm.score(QUERY, DOCUMENTS)
    np.testing.assert_allclose(scores, logits(model, doubled=False, typed=True), atol=1e-4)


def test_texts_do_not_spell_marks(tmp_path) -> None:
    """What spells the mark between texts is text, and what follows it keeps its type."""
    model = build(CROSS["bert"], num_labels=1)
    query, document = "what [SEP] is", "beijing [CLS] . [SEP]"
    with LLM.in_process(save(model, tmp_path / "bert", **IDENTITY), **SETTINGS) as llm:
        plain = [llm.tokenizer.encode(text)[1:-1] for text in (query, document)]
        assert not {2, 3} & {*plain[0], *plain[1]}
        [score] = llm.score(query, [document])
    ids = [2, *plain[0], 3, *plain[1], 3]
    types = [int(at > len(plain[0]) + 1) for at in range(len(ids))]
    with torch.no_grad():
        found = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits.item()
    assert score == pytest.approx(found, abs=1e-4)


def test_bfloat16_and_int8_scores_stay_near(tmp_path) -> None:
    model = build(CROSS["xlm-roberta"], num_labels=1)
    wanted = 1 / (1 + np.exp(-logits(model, doubled=True, typed=False)))
    folder = save(model, tmp_path / "xlm", doubled=True)
    for settings in ({"dtype": "bfloat16"}, {"quantize": "int8"}):
        with LLM.in_process(folder, **(SETTINGS | settings)) as llm:
            np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), wanted, atol=0.15)


def test_what_does_not_fit_a_cross_encoder_is_refused(tmp_path) -> None:
    folder = save(build(CROSS["bert"], num_labels=3), tmp_path / "three")
    with pytest.raises(UnsupportedModelError, match="'num_labels': 3"):
        find_model(EngineConfig(model=str(folder)))
    folder = save(build(CROSS["bert"], num_labels=1), tmp_path / "one")
    (tmp_path / "pair.txt").write_text("{query}: {document}")
    with pytest.raises(ConfigError, match="tokeniser joins the texts"):
        find_model(EngineConfig(model=str(folder), score_template=str(tmp_path / "pair.txt")))
    made = tokenizer()
    untyped = "[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0"
    for pair in (untyped, "[CLS]:0 $A:0 $B:1 [SEP]:1"):
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        made.save(str(folder / "tokenizer.json"))
        with (
            LLM.in_process(folder, **SETTINGS) as llm,
            pytest.raises(UnsuitableModelError, match="does not join two texts"),
        ):
            llm.score(QUERY, DOCUMENTS)
