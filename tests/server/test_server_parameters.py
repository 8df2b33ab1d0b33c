"""Answers name the parameters that had no effect."""

from __future__ import annotations

import json
import logging
from typing import Any

import openai
import pytest
from scripted import ScriptedClient
from serving import Running, serving

CHAT = {"model": "builtin", "messages": [{"role": "user", "content": "hi", "id": "m1"}]}
FIELDS = {"prompt_cache_key": "k", "verbosity": "low"}
HEADER = "x-weft-ignored"


@pytest.fixture(scope="module")
def server(text: Any) -> Any:
    with serving(ScriptedClient(answer=[700, 701]), text, cors_origin=("*",)) as running:
        yield running


def test_the_header_names_what_was_ignored(server: Running, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "weft.api")
    with server.http() as http:
        plain = http.post("/v1/chat/completions", json={**CHAT, "messages": [{
            "role": "user", "content": "hi"}]})  # fmt: skip
        assert HEADER not in plain.headers
        for stream in (False, True):
            answer = http.post("/v1/chat/completions", json={**CHAT, **FIELDS, "stream": stream})
            assert answer.status_code == 200
            assert answer.headers[HEADER] == "messages[].id, prompt_cache_key, verbosity"
        assert "prompt_cache_key, verbosity" in caplog.text
        wrong = http.post("/v1/chat/completions", json={**CHAT, **FIELDS, "temperature": 9})
        assert (wrong.status_code, wrong.headers.get(HEADER)) == (400, "messages[].id")
        page = http.post(
            "/v1/chat/completions", json={**CHAT, **FIELDS}, headers={"Origin": "http://a.example"}
        )
        assert HEADER in page.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/v1/completions", {"prompt": "hi", "store": True}, "store"),
        (
            "/v1/messages",
            {"messages": CHAT["messages"], "max_tokens": 4, "speed": "fast"},
            "messages[].id, speed",
        ),
        (
            "/v1/messages/count_tokens",
            {"messages": CHAT["messages"], "thinking": {"type": "enabled", "budget_tokens": 1024}},
            "messages[].id, thinking.budget_tokens",
        ),
        ("/v1/responses", {"input": "hi", "client_metadata": {"a": "b"}}, "client_metadata"),
        ("/tokenize", {"messages": CHAT["messages"]}, "messages[].id"),
    ],
)
def test_every_endpoint_names_it(server: Running, path: str, body: Any, ignored: str):
    with server.http() as http:
        answer = http.post(path, json={"model": "builtin", **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == ignored


def test_texts_of_messages_have_no_citations_rather_than_null(server: Running):
    body = {"model": "builtin", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    with server.http() as http:
        [block] = http.post("/v1/messages", json=body).json()["content"]
        assert block.keys() == {"type", "text"}
        events = http.post("/v1/messages", json={**body, "stream": True}).text
        assert '"content_block":{"type":"text","text":""}' in events


def test_a_strict_server_refuses_it(text: Any):
    with serving(ScriptedClient(answer=[5]), text, strict=True) as running, running.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].id"
        answer = http.post("/v1/chat/completions", json={**CHAT, "messages": [
            {"role": "user", "content": "hi"}], **FIELDS})  # fmt: skip
        assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_templates_of_requests_on_a_server_that_takes_them(text: Any):
    client = ScriptedClient(answer=[5])
    with (
        serving(client, text, request_chat_template=True) as running,
        running.http() as http,
    ):
        body = {**CHAT, "chat_template": "{{ messages[0].content }}!"}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        prompt = client.submitted.get(timeout=10).prompt
        assert text[0].decode(list(prompt)) == "hi!"


def test_an_echoed_message_stands_before_what_continues_it(text: Any):
    ids = text[0].encode(" b):", add_special_tokens=False)
    fields = {"continue_final_message": True, "echo": True}
    messages: Any = [*CHAT["messages"], {"role": "assistant", "content": "def add(a,"}]
    with serving(ScriptedClient(answer=ids), text) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        asked = client.chat.completions
        whole = asked.create(model="builtin", messages=messages, extra_body=fields)
        assert whole.choices[0].message.content == "def add(a, b):"
        chunks = asked.create(model="builtin", messages=messages, extra_body=fields, stream=True)
        text_of = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(text_of) == "def add(a, b):"


PATCH = '*** Begin Patch\n+a "b"\n'


@pytest.fixture(scope="module")
def patching(text: Any) -> Any:
    """A server whose model calls a custom tool."""
    arguments = json.dumps({"input": PATCH})
    call = f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'
    ids = text[0].encode(call, add_special_tokens=False, parse_special=True)
    with serving(ScriptedClient(answer=ids), text, tool_parser="hermes") as running:
        yield running


def test_a_call_of_a_custom_tool_bears_its_text(patching: Running):
    client = openai.OpenAI(base_url=f"{patching.url}/v1", api_key="none", max_retries=0)
    tools: Any = [{"type": "custom", "custom": {"name": "patch"}}]
    asked: Any = {"model": "builtin", "messages": CHAT["messages"], "tools": tools}
    whole = client.chat.completions.create(**asked)
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("patch", PATCH)
    assert whole.choices[0].finish_reason == "tool_calls"
    pieces = [c.choices[0].delta for c in client.chat.completions.create(**asked, stream=True)]
    calls = [call.model_dump() for piece in pieces for call in piece.tool_calls or []]
    assert calls[0]["custom"]["name"] == "patch"
    assert "".join(call["custom"]["input"] for call in calls) == PATCH


def test_a_response_has_calls_of_custom_tools(patching: Running):
    client = openai.OpenAI(base_url=f"{patching.url}/v1", api_key="none", max_retries=0)
    tools: Any = [{"type": "custom", "name": "patch"}, {"type": "web_search"}]
    whole = client.responses.create(model="builtin", input="hi", tools=tools)
    [item] = whole.output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("patch", PATCH)
    events = list(client.responses.create(model="builtin", input="hi", tools=tools, stream=True))
    kinds = [event.type for event in events]
    assert "response.custom_tool_call_input.delta" in kinds
    [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert done.input == PATCH
    result: Any = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
    again = client.responses.create(
        model="builtin", input=[result], previous_response_id=whole.id, tools=tools
    )
    assert again.status == "completed"
