"""Constraints of the output that a body asks for, as the grammar and the parameters of its job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.api import Builder, Notes, decode_body
from weft.api.bodies import ChatBody, CompletionBody
from weft.api.chat import chat_job
from weft.api.completions import completion_job
from weft.api.jobs import Job
from weft.api.structured import check_grammar
from weft.core.errors import ParameterError
from weft.text.dialect import Dialect

HI = [{"role": "user", "content": "hi"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(builder: Builder, notes: Notes | None = None, **fields: Any) -> Job:
    """The job of a chat, its grammar compiled."""
    body = {"model": "builtin", "messages": HI, **fields}
    job = chat_job(decode_body(ChatBody, json.dumps(body).encode(), notes=notes), builder, notes)
    check_grammar(job, builder)
    return job


@pytest.fixture(scope="module")
def thinking(builder: Builder) -> Builder:
    """The packaged model's builder, as if its turns could think."""
    return Builder(
        builder.tokenizer,
        builder.chat_template,
        builder.card,
        dialect=Dialect.named("hermes", "think"),
    )


def test_a_thinking_budget_constrains_a_turn_that_can_think(builder, thinking):
    assert chat(builder, thinking_token_budget=9).requests[0].sampling.grammar is None
    job = chat(thinking, thinking_token_budget=9)
    assert job.constrained_by == "thinking_token_budget"
    assert "max_tokens=9" in job.requests[0].sampling.grammar
    job = chat(thinking, thinking_token_budget=0, tools=[LOOK])
    assert job.constrained_by == "tools"
    assert "max_tokens=0" in job.requests[0].sampling.grammar
    job = chat(thinking, thinking_token_budget=9, response_format={"type": "json_object"})
    assert job.constrained_by == "response_format"
    assert chat(thinking).requests[0].sampling.grammar is None
    assert chat(thinking, thinking_token_budget=-1).requests[0].sampling.grammar is None
    with pytest.raises(ParameterError) as caught:
        chat(thinking, thinking_token_budget=-2)
    assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize("strict", [None, True, False])
def test_forced_calls_follow_the_schema_whatever_strict_says(builder, strict):
    parameters = {"type": "object", "properties": {"city": {}}, "required": ["city"]}
    function = {"name": "look", "parameters": parameters, "strict": strict}
    tools = [{"type": "function", "function": function}]
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        job = chat(builder, tools=tools, tool_choice=choice)
        assert "city" in job.requests[0].sampling.grammar
    free = chat(builder, tools=tools, parallel_tool_calls=False).requests[0].sampling.grammar
    assert ("city" in free) == bool(strict)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
        {"guided_json": {}},
        {"structured_outputs": {"json_object": True}},
        {"tools": [LOOK], "tool_choice": "required"},
        {"tools": [LOOK], "parallel_tool_calls": False},
    ],
)
def test_white_space_of_json_is_chosen_by_the_body(builder, fields):
    for white in (None, "compact", "flexible"):
        grammar = chat(builder, json_whitespace=white, **fields).requests[0].sampling.grammar
        assert ("x0A" in grammar) == (white == "flexible")
    if "tools" not in fields:
        body = {"model": "builtin", "prompt": "a", "json_whitespace": "flexible", **fields}
        job = completion_job(decode_body(CompletionBody, json.dumps(body).encode()), builder)
        assert "x0A" in job.requests[0].sampling.grammar
    with pytest.raises(ParameterError) as caught:
        chat(builder, json_whitespace="none", **fields)
    assert caught.value.param == "json_whitespace"


def completion(builder: Builder, notes: Notes | None = None, **fields: Any) -> Job:
    body = {"model": "builtin", "prompt": "a b", **fields}
    decoded = decode_body(CompletionBody, json.dumps(body).encode(), notes=notes)
    return completion_job(decoded, builder, notes)


@pytest.mark.parametrize("make", [chat, completion])
def test_what_may_be_sampled_reaches_the_engine(builder, make):
    job = make(builder, allowed_token_ids=[5, 7], bad_words=[" the", "the", "x y"])
    sampling = job.requests[0].sampling
    assert sampling.allowed_token_ids == (5, 7)
    texts = {builder.tokenizer.decode(ids) for ids in sampling.bad_token_sequences}
    assert texts == {"the", " the", "x y", " x y"}
    assert len(sampling.bad_token_sequences) == 4
    assert not make(builder, bad_words=[]).requests[0].sampling.restricted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [4096]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": ["é" * 100]}, "bad_words"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"logprob_token_ids": list(range(21))}, "logprob_token_ids"),
        ({"logprob_token_ids": [4096]}, "logprob_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_bounds_of_what_may_be_sampled_and_scored(builder, make, fields, param):
    with pytest.raises(ParameterError) as caught:
        make(builder, **fields)
    assert caught.value.param.startswith(param)


def test_the_whole_vocabulary_is_more_than_may_be_scored(builder):
    for make, name in ((chat, "top_logprobs"), (completion, "logprobs")):
        fields = {**({"logprobs": True} if make is chat else {}), name: -1, "prompt_logprobs": -1}
        notes = Notes()
        job = make(builder, notes, **fields)
        sampling = job.requests[0].sampling
        assert (sampling.logprobs, sampling.prompt_logprobs, job.prompt_logprobs) == (20, 20, 20)
        assert notes.names == [name, "prompt_logprobs"]
        with pytest.raises(ParameterError, match=f"{name} may be 20") as caught:
            make(builder, Notes(strict=True), **fields)
        assert caught.value.param == name
    echoed = completion(builder, logprobs=-1, echo=True).requests[0].sampling
    assert (echoed.logprobs, echoed.prompt_logprobs) == (20, 20)


def test_no_alternatives_without_log_probabilities_is_the_default(builder):
    for more in ({}, {"logprobs": False}, {"logprobs": None}):
        assert not chat(builder, top_logprobs=0, **more).logprobs


def test_scores_of_named_tokens_and_of_the_prompt(builder):
    job = chat(builder, logprob_token_ids=[5, 7], n=2, prompt_logprobs=3)
    first, second = (request.sampling for request in job.requests)
    assert (job.logprobs, first.logprobs, first.logprob_token_ids) == (True, 2, (5, 7))
    assert (first.prompt_logprobs, second.prompt_logprobs) == (3, None)
    for fields, wanted in (
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 4}, 4),
        ({"echo": True, "logprob_token_ids": [5]}, 0),
        ({"prompt_logprobs": 1}, 1),
        ({"logprobs": 2}, None),
    ):
        assert completion(builder, **fields).requests[0].sampling.prompt_logprobs == wanted


def test_json_without_any_white_space_is_compact(builder):
    def grammar(make: Any, outputs: dict[str, Any], **fields: Any) -> str | None:
        asked = {"json": {"type": "object"}, **outputs}
        job: Job = make(builder, structured_outputs=asked, **fields)
        return job.requests[0].sampling.grammar

    for make in (chat, completion):
        compact = grammar(make, {})
        flexible = grammar(make, {}, json_whitespace="flexible")
        assert compact != flexible
        off = {"disable_any_whitespace": True}
        assert grammar(make, off, json_whitespace="flexible") == compact
        on = {"disable_any_whitespace": False}
        assert grammar(make, on, json_whitespace="flexible") == flexible
    with pytest.raises(ParameterError, match="asks for nothing; it may have one of json, "):
        chat(builder, structured_outputs={"disable_any_whitespace": True})
