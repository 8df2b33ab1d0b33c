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


ONE: Any = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": ONE}}
PATHS: Any = {
    "chat/completions": {
        "messages": MESSAGES,
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "responses": {
        "input": ASKED,
        "tools": [{"type": "function", "name": "f", "parameters": ONE}],
        "tool_choice": "required",
    },
    "messages": {
        "messages": MESSAGES,
        "tools": [{"name": "f", "input_schema": ONE}],
        "tool_choice": {"type": "any"},
    },
}
LIMITS = {"chat/completions": "max_tokens", "responses": "max_output_tokens"}


def shown_whole(path: str, answer: Any) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and its calls with their arguments as they were written."""
    if path == "chat/completions":
        message = answer["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"] or "", [(f["name"], f["arguments"]) for f in functions]
    if path == "responses":
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        texts = [part["text"] for item in answer["output"] for part in item.get("content", ())]
        return "".join(texts), [(call["name"], call["arguments"]) for call in calls]
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    return "".join(texts), [(call["name"], written(call["input"])) for call in calls]


def written(given: dict[str, Any]) -> str:
    return given["partial_json"] if "partial_json" in given else json.dumps(given)


def shown_streamed(path: str, data: str) -> tuple[str, list[tuple[str, str]]]:
    """The same of the events of a stream."""
    lines = [line.removeprefix("data: ") for line in data.splitlines() if line.startswith("data: ")]
    text, calls = "", []
    for event in [json.loads(line) for line in lines if line != "[DONE]"]:
        if path == "responses":
            if event["type"] == "response.output_text.delta":
                text += event["delta"]
            elif event["type"] == "response.function_call_arguments.done":
                calls.append([event["name"], event["arguments"]])
        elif path == "messages":
            delta = event.get("delta", {})
            text += delta.get("text", "")
            if event.get("content_block", {}).get("type") == "tool_use":
                calls.append([event["content_block"]["name"], ""])
            elif "partial_json" in delta:
                calls[-1][1] += delta["partial_json"]
        else:
            delta = event["choices"][0]["delta"]
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    return text, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("path", PATHS)
def test_a_forced_call_that_is_cut_shows_no_form_of_it(real, path):
    """Wherever the tokens end: no text, and of calls only what has come of name and arguments."""
    seen = set()
    with real.http() as http:
        for limit in range(2, 62, 6):
            body = {"model": "builtin", "temperature": 0, **PATHS[path]}
            body[LIMITS.get(path, "max_tokens")] = limit
            answer = http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            text, calls = shown_whole(path, answer.json())
            stream = http.post(f"/v1/{path}", json={**body, "stream": True}).text
            streamed, calls_streamed = shown_streamed(path, stream)
            assert (text, streamed) == ("", "")
            assert [name for name, _ in calls] == ["f"] * len(calls)
            if path != "messages":  # which shows whole arguments as an object
                assert calls_streamed == calls
            assert len(calls_streamed) == len(calls)
            for _, arguments in calls_streamed:
                assert '{"a": 1}'.startswith(arguments.replace(" ", "").replace(":", ": "))
                seen.add(arguments)
            seen.add(len(calls))
    assert seen >= {0, 1, '{"a": 1}'}
