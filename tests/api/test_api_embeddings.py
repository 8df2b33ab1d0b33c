"""Embeddings: every form of inputs, refusals, and vectors as numbers and as base64."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weft.api import Job, decode_body
from weft.api.embeddings import (
    MAX_INPUTS,
    WAVE,
    EmbeddingBody,
    EmbeddingCollector,
    embedding_job,
    waves,
)
from weft.core.errors import InvariantError, OutOfMemoryError, ParameterError, WeftError
from weft.core.plan import Update
from weft.core.pooling import Pooling
from weft.core.types import FinishReason


def job_of(builder: Any, **fields: Any) -> tuple[Job, EmbeddingBody]:
    data = json.dumps({"model": "builtin", **fields}).encode()
    body = decode_body(EmbeddingBody, data)
    return embedding_job(body, builder), body


def answer_of(job: Job, body: EmbeddingBody, vectors: list[list[float]]) -> dict[str, Any]:
    """The answer when the vectors come in the reverse order of the inputs."""
    collector = EmbeddingCollector(job, body)
    for request, vector in reversed(list(zip(job.requests, vectors, strict=True))):
        left = collector.left
        data = np.array(vector, "<f4").tobytes()
        end = Update(request.id, None, finish=FinishReason.STOP, embedding=data)
        assert collector.push([end]) == []
        assert collector.left == left - 1
    assert collector.done
    return json.loads(collector.body())


def test_all_forms_of_input_are_the_same(builder):
    ids = builder.tokenizer.encode("ab cd")
    for given in ("ab cd", ["ab cd"], ids, [ids]):
        job, _ = job_of(builder, input=given)
        [request] = job.requests
        assert request.embed
        assert request.prompt == tuple(ids)


class Marked:
    """A tokeniser that puts marks around a text, as BERT's does: [CLS] 2 and [SEP] 3."""

    def encode(self, text: str) -> list[int]:
        return [2, *map(ord, text), 3]


@pytest.mark.parametrize("pooled", ["first", "last"])
def test_a_text_that_is_cut_keeps_its_marks(builder, pooled):
    """Vectors are those of marks: of the first token, or of the last."""
    card = replace(builder.card, pooling=Pooling(pooled=pooled))
    marked = copy.copy(builder)
    marked.tokenizer, marked.card = Marked(), card

    def cut(**fields: Any) -> tuple[int, ...]:
        job, _ = job_of(marked, input="abcdef", **fields)
        return job.requests[0].prompt

    begin, end = (2, 97, 98, 3), (2, 101, 102, 3)
    assert cut(truncate_prompt_tokens=4, truncation_side="right") == begin
    assert cut(truncate_prompt_tokens=4, truncation_side="left") == end
    assert cut(truncate_prompt_tokens=4) == (begin if pooled == "first" else end)
    assert cut(truncate_prompt_tokens=8) == cut() == (2, *range(97, 103), 3)
    with pytest.raises(ParameterError, match="beside the 2 tokens that stand around each"):
        cut(truncate_prompt_tokens=2)


def test_numbers_have_length_1_and_stand_in_the_order_of_the_inputs(builder, valid):
    job, body = job_of(builder, input=["a", "b c"], encoding_format="float")
    whole = answer_of(job, body, [[3, 4, 0, 0], [0, 0, 0, 2]])
    valid("CreateEmbeddingResponse", whole)
    assert [row["index"] for row in whole["data"]] == [0, 1]
    assert whole["data"][0]["embedding"] == pytest.approx([0.6, 0.8, 0, 0])
    assert whole["data"][1]["embedding"] == [0, 0, 0, 1]
    tokens = sum(len(request.prompt) for request in job.requests)
    assert whole["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_dimensions_cut_and_scale_again(builder):
    job, body = job_of(builder, input="a", dimensions=2, encoding_format="base64")
    [row] = answer_of(job, body, [[3, 4, 12, 0]])["data"]
    vector = np.frombuffer(base64.b64decode(row["embedding"]), "<f4")
    assert vector.tolist() == pytest.approx([0.6, 0.8])


def test_a_vector_of_zeros_stays_one(builder):
    job, body = job_of(builder, input="a")
    assert answer_of(job, body, [[0, 0]])["data"][0]["embedding"] == [0, 0]


def test_many_inputs_go_in_waves(builder):
    job, _ = job_of(builder, input=["a"] * (WAVE + 1))
    assert [len(wave.requests) for wave in waves(job)] == [WAVE, 1]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "invalid_parameter"),
        ({"input": []}, "input", "invalid_parameter"),
        ({"input": ["a", ""]}, "input", "invalid_parameter"),
        ({"input": [[]]}, "input", "invalid_parameter"),
        ({"input": ["a", 5]}, "input", "invalid_parameter"),
        ({"input": [4096]}, "input", "invalid_parameter"),
        ({"input": [[-1]]}, "input", "invalid_parameter"),
        ({"input": {"a": 1}}, "input", "invalid_parameter"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "invalid_parameter"),
        ({"input": [7] * 256}, "input", "context_length_exceeded"),
        ({"input": "word " * 100_000}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_parameter"),
        ({"input": "a", "dimensions": 9}, "dimensions", "invalid_parameter"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_parameter"),
        ({"input": "a", "model": "other"}, "model", "model_not_found"),
        ({"input": "a", "pooling": "mean"}, "pooling", "unknown_parameter"),
    ],
)
def test_wrong_bodies_are_named(builder, fields, param, code):
    with pytest.raises(WeftError) as caught:
        job_of(builder, **fields)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_other_ends_are_errors(builder):
    job, body = job_of(builder, input="a")
    number = job.requests[0].id
    collector = EmbeddingCollector(job, body)
    error = OutOfMemoryError("full")
    with pytest.raises(OutOfMemoryError):
        collector.push([Update(number, None, finish=FinishReason.ERROR, error=error)])
    with pytest.raises(WeftError, match="cancelled"):
        collector.push([Update(number, None, finish=FinishReason.CANCELLED)])
    with pytest.raises(InvariantError):
        collector.push([Update(number, None, finish=FinishReason.STOP)])
