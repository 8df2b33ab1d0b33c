"""The shipped weights are those of the card, and the engine gives the card's perplexity."""

from __future__ import annotations

import hashlib
import json
import math

import pytest

from depth import DEEP
from weft import LLM, SamplingParams
from weft.models.hub import resolve_model

FOLDER = resolve_model("builtin")
CARD = json.loads((FOLDER / "card.json").read_text())
MAX_WEIGHT_BYTES = 12_000_000


def test_the_files_are_those_of_the_card():
    for name, digest in CARD["sha256"].items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
    assert (FOLDER / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES


def perplexity(every: int = 1, **settings: object) -> float:
    """By the method that the card states, through the whole engine: prompt log probabilities.

    Args:
        every: so manyth window of the text is run.
    """
    evaluation = CARD["heldout"]
    text = (FOLDER / "heldout.txt").read_bytes().decode()
    common = {"threads": 1, "kv_memory": "256MiB", "max_num_seqs": 8}
    with LLM.in_process("builtin", **common, **settings) as llm:
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        window = evaluation["window"]
        prompts = [
            [llm.tokenizer.bos_id, *ids[at : at + window]]
            for at in range(0, len(ids), every * window)
        ]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        results = llm.generate(prompts, params, progress=False)
    scores = [entry.logprob for r in results for entry in r.prompt_logprobs[1:]]
    assert len(ids) == evaluation["tokens"]
    assert len(scores) == sum(map(len, prompts)) - len(prompts)
    return math.exp(-sum(scores) / len(scores))


def test_the_perplexity_is_that_of_the_card():
    assert perplexity(dtype="float32") == pytest.approx(CARD["heldout"]["perplexity"], rel=1e-4)


@pytest.mark.parametrize(("kv_dtype", "limit"), [("int8", 1.005), ("fp8", 1.01)])
def test_kv_in_8_bits_costs_little_perplexity(kv_dtype, limit):
    every = 1 if DEEP else 7
    exact = CARD["heldout"]["perplexity"] if DEEP else perplexity(every, dtype="float32")
    worse = perplexity(every, dtype="float32", kv_dtype=kv_dtype) / exact
    assert 1 - 1e-4 < worse < limit


def test_the_card_in_words_says_the_same():
    text = (FOLDER / "README.md").read_text()
    assert f"{CARD['heldout']['perplexity']:.2f}" in text


def test_the_chat_form_ends_its_turn():
    with LLM.in_process("builtin", threads=1, kv_memory="16MiB", max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=60)
        answer = llm.chat([{"role": "user", "content": "What does `str.split` do?"}], params)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in llm.served.eos_token_ids
    assert "Return" in answer.text
