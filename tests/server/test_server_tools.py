"""Forced calls and schemas through responses and messages, before a real engine."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic
from test_server_structured import MESSAGES, PARAMETERS, Step

from typed import unknown_fields

ASKED = MESSAGES[0]["content"]


@pytest.fixture(scope="module")
def anthropic(real):
    with Anthropic(base_url=real.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_forced_call_of_a_response(client, choice):
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    options: Any = {
        "model": "builtin",
        "input": ASKED,
        "tools": [tool],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "extra_body": {"seed": 4},
    }
    whole = client.responses.create(**options)
    [call] = whole.output
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    assert (whole.status, call.status, call.name) == ("completed", "completed", "get_weather")
    with client.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    # The description requires a name in the event of complete arguments; the client has none there.
    named = [f"[{i}].name" for i, e in enumerate(events) if e.type.endswith("arguments.done")]
    assert unknown_fields(whole) == []
    assert unknown_fields(events[:-1]) == named
    assert final.output[0].arguments == call.arguments
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more = client.responses.create(
        model="builtin", input=[result], previous_response_id=whole.id, max_output_tokens=4
    )
    assert more.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_of_a_message(anthropic, choice):
    tool = {"name": "get_weather", "input_schema": PARAMETERS, "strict": True}
    options: Any = {
        "model": "builtin",
        "max_tokens": 100,
        "messages": MESSAGES,
        "tools": [tool],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 0},
    }
    whole = anthropic.messages.create(**options)
    [block] = whole.content
    jsonschema.validate(block.input, PARAMETERS)
    assert (block.name, whole.stop_reason) == ("get_weather", "tool_use")
    with anthropic.messages.stream(**options) as stream:
        final = stream.get_final_message()
    assert unknown_fields([whole, final]) == []
    assert final.content[0].input == block.input
    assert final.stop_reason == "tool_use"

    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    more = anthropic.messages.create(
        model="builtin",
        max_tokens=4,
        tools=[tool],
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": [block.model_dump()]},
            {"role": "user", "content": [result]},
        ],
    )
    assert more.stop_reason == "max_tokens"


def test_an_answer_by_a_schema(client, anthropic):
    response = client.responses.parse(
        model="builtin", input=ASKED, text_format=Step, temperature=1.5, extra_body={"seed": 1}
    )
    assert response.output_parsed.action in ("go", "stop")
    schema = {**Step.model_json_schema(), "additionalProperties": False}
    message = anthropic.messages.create(
        model="builtin",
        max_tokens=60,
        messages=MESSAGES,
        extra_body={"temperature": 0},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert message.stop_reason == "end_turn"
    Step.model_validate_json(message.content[0].text)


BAD: Any = {"type": "object", "properties": {"a": {"type": "tree"}}}
FUNCTION: Any = {"type": "function", "name": "f", "parameters": BAD}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("responses", {"tools": [FUNCTION], "tool_choice": "required"}, "tools"),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
            "text.format",
        ),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
            "output_config.format",
        ),
        (
            "messages",
            {"tools": [{"name": "f", "input_schema": BAD}], "tool_choice": {"type": "any"}},
            "tools",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named_as_the_endpoint_does(real, path, fields, param, stream):
    base = {"input": ASKED} if path == "responses" else {"messages": MESSAGES, "max_tokens": 9}
    body = {"model": "builtin", **base, **fields, "stream": stream}
    with real.http() as http:
        answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert f"'{param}" in error["message"]
    if path == "responses":
        assert error["param"].startswith(param)
