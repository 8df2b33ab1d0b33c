"""What a body asks of its output as the grammar and the parameters of its job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.api import Builder, decode_body
from weft.api.bodies import ChatBody, CompletionBody
from weft.api.chat import chat_job
from weft.api.completions import completion_job
from weft.api.jobs import Job
from weft.api.structured import check_grammar
from weft.core.errors import ParameterError
from weft.text.dialect import Dialect

HI = [{"role": "user", "content": "hi"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(builder: Builder, **fields: Any) -> Job:
    """The job of a chat, its grammar compiled."""
    body = {"model": "builtin", "messages": HI, **fields}
    job = chat_job(decode_body(ChatBody, json.dumps(body).encode()), builder)
    check_grammar(job, builder)
    return job


@pytest.fixture(scope="module")
def thinking(builder: Builder) -> Builder:
    """The packaged model's builder, as if its turns could think."""
    return Builder(
        builder.tokenizer, builder.chat_template, builder.card, dialect=Dialect("hermes", "think")
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
