"""Structured output, calls of tools and reasoning over HTTP before a real engine."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field
from serving import serving

from typed import unknown_fields
from weft.text import ChatTemplate

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CHAT: Any = {"model": "builtin", "messages": MESSAGES}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True},
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class Step(BaseModel):
    action: Literal["go", "stop"]
    seconds: int = Field(ge=0, le=99)  # so that it ends at every temperature


def test_the_client_parses_what_a_model_of_pydantic_asks_for(client):
    answer = client.chat.completions.parse(**CHAT, response_format=Step, temperature=1.5, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Step)
    assert unknown_fields(answer) == []


def test_every_extension_is_honoured_by_both_endpoints(real):
    wanted: list[tuple[dict[str, Any], Any]] = [
        ({"response_format": of_schema({"type": "null"})}, {"null"}.__contains__),
        ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}, lambda t: t[3] == "-"),
        ({"structured_outputs": {"choice": ["north", "south"]}}, {"north", "south"}.__contains__),
        ({"structured_outputs": {"json": {"const": [1, "a"]}}}, lambda t: json.loads(t)[1] == "a"),
        ({"guided_json": '{"type": "boolean"}'}, {"true", "false"}.__contains__),
        ({"guided_grammar": 'start: "x" /[0-4]{4}/ "y"'}, lambda t: len(t) == 6),
        ({"guided_choice": ["a"], "min_tokens": 40}, {"a"}.__contains__),
    ]
    base = {"model": "builtin", "max_tokens": 200, "temperature": 1.0, "seed": 2}
    with real.http() as http:
        for fields, holds in wanted:
            body = {**base, **fields}
            chat = http.post("/v1/chat/completions", json={**body, "messages": MESSAGES}).json()
            plain = http.post("/v1/completions", json={**body, "prompt": "Hm: "}).json()
            texts = [chat["choices"][0]["message"]["content"], plain["choices"][0]["text"]]
            assert all(map(holds, texts)), (fields, texts)
            assert chat["choices"][0]["finish_reason"] == "stop"
            assert plain["choices"][0]["finish_reason"] == "stop"


def test_what_may_be_sampled_and_scored_over_http(real):
    body = {"model": "builtin", "max_tokens": 12, "temperature": 1.0, "seed": 3}
    tokenizer = real.service.builder.tokenizer
    digits = [tokenizer.encode(d, add_special_tokens=False)[0] for d in "0123456789"]
    body |= {"allowed_token_ids": digits, "logprob_token_ids": digits[:3], "logprobs": True}
    body |= {"bad_words": ["7"], "prompt_logprobs": 2, "return_tokens_as_token_ids": True}
    with real.http() as http:
        chat = http.post("/v1/chat/completions", json={**body, "messages": MESSAGES}).json()
        plain = http.post("/v1/completions", json={**body, "logprobs": 1, "prompt": "1 2"}).json()
    text = chat["choices"][0]["message"]["content"]
    assert len(text) == 12
    assert set(text) <= set("012345689")
    assert set(plain["choices"][0]["text"]) <= set("012345689")
    for entry in chat["choices"][0]["logprobs"]["content"]:
        named = {top["token"] for top in entry["top_logprobs"]}
        assert named == {f"token_id:{token}" for token in digits[:3]}
    for scored in (chat["prompt_logprobs"], plain["choices"][0]["prompt_logprobs"]):
        assert scored[0] is None
        assert all(2 <= len(entry) <= 3 for entry in scored[1:])
        assert all(1 in {told["rank"] for told in entry.values()} for entry in scored[1:])


def test_any_object_is_an_object(client):
    answer = client.chat.completions.create(
        **CHAT, response_format={"type": "json_object"}, temperature=0.7, seed=1, n=4
    )
    for choice in answer.choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_whole_and_streamed(client, choice):
    options = {**CHAT, "tools": [WEATHER, TIME], "tool_choice": choice, "temperature": 1.3}
    options |= {"parallel_tool_calls": False, "seed": 4}
    whole = client.chat.completions.create(**options)
    message = whole.choices[0].message
    [call] = message.tool_calls
    assert (message.content, whole.choices[0].finish_reason) == (None, "tool_calls")
    assert call.id.startswith("call_")
    if choice is NAMED or call.function.name == "get_weather":
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert unknown_fields(whole) == []

    chunks = list(client.chat.completions.create(**options, stream=True))
    assert all(unknown_fields(chunk) == [] for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    deltas = [d for chunk in chunks for d in chunk.choices[0].delta.tool_calls or []]
    first, *rest = deltas
    assert (first.index, first.type, first.function.name) == (0, "function", call.function.name)
    assert first.function.arguments == ""
    assert first.id
    assert [(d.id, d.type, d.function.name) for d in rest] == [(None, None, None)] * len(rest)
    assert "".join(d.function.arguments for d in rest) == call.function.arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_calls_in_parallel_and_the_result_of_a_call(client):
    call = {"type": "function", "id": "c1", "function": {"name": "get_time", "arguments": "{}"}}
    answer = client.chat.completions.create(
        model="builtin",
        messages=[
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        ],
        tools=[TIME],
        tool_choice="required",
        temperature=0,
    )
    calls = answer.choices[0].message.tool_calls
    assert len(calls) > 1  # this small model never ends by itself
    assert len({call.id for call in calls}) == len(calls)
    assert {call.function.name for call in calls} == {"get_time"}


def test_a_call_that_may_come_is_left_to_the_model(client):
    answer = client.chat.completions.create(**CHAT, tools=[WEATHER], temperature=0, n=2)
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "length")
        assert choice.message.content
        assert choice.message.tool_calls is None


REFUSED = [
    ({"response_format": of_schema(s)}, p)
    for p, s in (
        ("response_format.json_schema.schema", {"type": "array", "uniqueItems": True}),
        ("response_format.json_schema.schema", {"type": "string", "format": "made-up"}),
        (
            "response_format.json_schema.schema",
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}},
        ),
        ("response_format.json_schema.schema", {"enum": list(range(10_001))}),
    )
] + [
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "((a{99}){99}){99}"}, "guided_regex"),
    ({"guided_grammar": "start: missing"}, "guided_grammar"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_before_anything_is_computed(real, stream):
    with real.http() as http:
        for fields, param in REFUSED:
            body = {"model": "builtin", "messages": MESSAGES, "stream": stream, **fields}
            answer = http.post("/v1/chat/completions", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_grammar"), fields
            assert error["param"] == param
            assert param in error["message"]
            assert len(error["message"]) < 600
    assert real.service.num_open == 0


def test_the_event_loop_answers_while_a_costly_schema_is_compiled(real):
    """Compiling is beside the event loop: /health is answered between its start and its end."""
    done = threading.Event()
    answers = []

    def ask() -> None:
        with real.http() as http:
            for i in range(4):
                properties = {f"p{i}_{n}": {"type": "string"} for n in range(900)}
                schema = {"type": "object", "properties": properties}
                schema["required"] = list(properties)
                answers.append(
                    http.post(
                        "/v1/completions",
                        json={
                            "model": "builtin",
                            "prompt": "x",
                            "max_tokens": 1,
                            "structured_outputs": {"json": schema},
                        },
                    ).status_code
                )
        done.set()

    thread = threading.Thread(target=ask)
    thread.start()
    healthy = 0
    with real.http() as http:
        while not done.is_set():
            assert http.get("/health").status_code == 200
            healthy += 1
            time.sleep(0.002)
    thread.join()
    assert answers == [200] * 4
    assert healthy > 8


def test_reasoning_is_apart_and_can_be_left_out(engine, text):
    """A template that opens the reasoning: all that this model writes is reasoning."""
    tokenizer, _, card = text
    source = "{{ messages[0]['content'] }}<think>\n{# </think> #}"
    template = ChatTemplate({"default": source})
    body = {**CHAT, "temperature": 0, "max_tokens": 12}
    with serving(engine[1].inbox, (tokenizer, template, card)) as running, running.http() as http:
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == ("", "length")
        assert message["reasoning_content"]
        schema = {"guided_json": {"const": 7}, "max_tokens": 40}
        grammar = http.post("/v1/chat/completions", json={**body, **schema}).json()["choices"][0]
        assert grammar["message"]["reasoning_content"]
        assert grammar["message"]["content"] in ("", "7")
        hidden = {**body, "include_reasoning": False}
        message = http.post("/v1/chat/completions", json=hidden).json()["choices"][0]["message"]
        assert "reasoning_content" not in message
    with (
        serving(engine[1].inbox, (tokenizer, template, card), reasoning_parser="none") as running,
        running.http() as http,
    ):
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message["content"]
        assert "reasoning_content" not in message


@pytest.mark.parametrize("extra", [{}, {"speculation": 4}, {"guided_json": {"const": 7}}])
def test_a_thinking_budget_ends_reasoning_after_so_many_tokens(engine, text, extra):
    tokenizer, _, card = text
    source = "{{ messages[0]['content'] }}<think>\ndef add(a, b):\n    {# </think> #}<think>"
    template = ChatTemplate({"default": source})
    budget, body = 5, {**CHAT, "temperature": 0, "max_tokens": 24, **extra}
    with serving(engine[1].inbox, (tokenizer, template, card)) as running, running.http() as http:
        asked = {**body, "thinking_token_budget": budget, "return_token_ids": True}
        choice = http.post("/v1/chat/completions", json=asked).json()["choices"][0]
        thought = tokenizer.decode(choice["token_ids"][:budget])
        whole = tokenizer.decode(choice["token_ids"])
        assert whole.startswith(f"{thought}</think>")
        assert choice["message"]["reasoning_content"].strip() == thought.strip()
        if "guided_json" in extra:
            assert choice["message"]["content"] == "7"
        thinking = {"type": "enabled", "budget_tokens": budget}
        asked = {**CHAT, "temperature": 0, "max_tokens": 24, "thinking": thinking}
        first = http.post("/v1/messages", json=asked).json()["content"][0]
        assert (first["type"], first["thinking"].strip()) == ("thinking", thought.strip())
        asked = {"input": MESSAGES, "temperature": 0, "max_output_tokens": 24}
        answer = http.post("/v1/responses", json={**asked, "thinking_token_budget": budget}).json()
        first = answer["output"][0]
        assert first["content"][0]["text"].strip() == thought.strip()
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] <= budget
