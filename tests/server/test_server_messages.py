"""Anthropic's messages over HTTP: its own client before an engine whose every step is decided."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from anthropic import Anthropic, APIStatusError, AuthenticationError, BadRequestError
from scripted import ScriptedClient
from serving import serving

from live import eventually
from typed import unknown_fields
from weft.core.errors import EngineBusyError
from weft.core.types import FinishReason

HELLO: Any = {
    "model": "builtin",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.fixture
def asking(scripted):
    with Anthropic(base_url=scripted.url, api_key="x", max_retries=0) as client:
        yield client


def ids_of(running: Any, text: str) -> list[int]:
    return running.service.builder.tokenizer.encode(text, add_special_tokens=False)


def test_a_whole_message(scripted, asking):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            asking.messages.create, **HELLO, system="Be kind.", extra_body={"top_k": 3}
        )
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, *ids_of(scripted, "Hello you"), finish="stop")
        message = future.result(10)
    assert unknown_fields(message) == []
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert [block.model_dump() for block in message.content] == [
        {"type": "text", "text": "Hello you", "citations": None}
    ]
    assert message.usage.input_tokens == len(request.prompt)
    assert message.usage.output_tokens == len(ids_of(scripted, "Hello you"))
    assert request.sampling.top_k == 3
    assert request.sampling.max_tokens == 50
    prompt = scripted.service.builder.tokenizer.decode(request.prompt, skip_special_tokens=False)
    assert "Be kind." in prompt


def test_the_events_of_a_stream(scripted):
    with ThreadPoolExecutor(1) as pool, scripted.http() as http:
        body = {**HELLO, "stream": True, "stop_sequences": [" stop"]}
        future = pool.submit(http.post, "/v1/messages", json=body)
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, *ids_of(scripted, "Hello"))
        scripted.client.send(request, *ids_of(scripted, " stop more"))
        assert scripted.client.cancelled.get(timeout=10) == (request.id, FinishReason.STOP)
        scripted.client.send(request, finish="stop")
        answer = future.result(10)
    lines = [line for line in answer.text.split("\n\n") if line]
    events = []
    for line in lines:
        name, data = line.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert events[0]["message"]["usage"]["input_tokens"] == len(request.prompt)
    assert events[0]["message"]["content"] == []
    texts = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(texts) == "Hello"
    kinds = [e["type"] for e in events if e["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " stop"}
    assert events[-2]["usage"]["output_tokens"] == len(ids_of(scripted, "Hello stop"))


def test_the_client_puts_a_stream_together(scripted, asking):
    def read() -> tuple[list[Any], Any]:
        with asking.messages.stream(**HELLO) as stream:
            return list(stream), stream.get_final_message()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(read)
        request = scripted.client.submitted.get(timeout=10)
        for token in ids_of(scripted, "naïve 🙂"):
            scripted.client.send(request, token)
        scripted.client.send(request, finish="length")
        events, message = future.result(10)
    assert unknown_fields(message) == []
    assert [unknown_fields(event) for event in events] == [[]] * len(events)
    assert message.content[0].text == "naïve 🙂"
    assert message.stop_reason == "max_tokens"


def test_an_error_in_a_stream_is_an_event(scripted, asking):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: list(asking.messages.create(**HELLO, stream=True)))
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, *ids_of(scripted, "Hello"))
        eventually(lambda: scripted.service.metrics.generation_tokens > 0)
        scripted.client.send(request, finish="cancelled")
        with pytest.raises(APIStatusError) as caught:
            future.result(10)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "overloaded_error"


def error_of(response: Any, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    return body["error"]["message"]


def test_errors_have_anthropic_s_form(scripted, asking):
    with scripted.http() as http:
        path = "/v1/messages"
        wrong = "invalid_request_error"
        error_of(http.get(path), 405, wrong)
        error_of(http.get(f"{path}/x"), 404, "not_found_error")
        error_of(http.post(path, content=b"{"), 400, wrong)
        error_of(http.post(path, content=b" " * 5 * 2**20), 413, "request_too_large")
        error_of(http.post(path, json={**HELLO, "model": "x"}), 404, "not_found_error")
        without = {k: v for k, v in HELLO.items() if k != "max_tokens"}
        assert "max_tokens" in error_of(http.post(path, json=without), 400, wrong)
        assert "error" in http.get("/v1/messagesx").json()
        assert "type" not in http.get("/v1/messagesx").json()
    with pytest.raises(BadRequestError, match="max_tokens"):
        asking.messages.create(**{**HELLO, "max_tokens": 0})


def test_a_busy_engine_and_a_bug(scripted, monkeypatch):
    def refuse(*_: Any) -> None:
        raise EngineBusyError("No room.")

    def break_down(*_: Any) -> None:
        raise ValueError("/secret/path")

    monkeypatch.setattr(scripted.client, "submit", refuse)
    with scripted.http() as http:
        busy = http.post("/v1/messages", json=HELLO)
        error_of(busy, 429, "rate_limit_error")
        assert busy.headers["retry-after"] == "1"
        monkeypatch.setattr(scripted.client, "submit", break_down)
        assert "secret" not in error_of(http.post("/v1/messages", json=HELLO), 500, "api_error")


def test_keys(text):
    with (
        serving(ScriptedClient([700]), text, api_key=("right",)) as running,
        Anthropic(base_url=running.url, api_key="right", max_retries=0) as knowing,
        Anthropic(base_url=running.url, api_key="wrong", max_retries=0) as guessing,
    ):
        assert knowing.messages.create(**HELLO).role == "assistant"
        with pytest.raises(AuthenticationError) as caught:
            guessing.messages.create(**HELLO)
    assert caught.value.body["error"]["type"] == "authentication_error"
    assert caught.value.request_id == caught.value.body["request_id"]


def test_tokens_are_counted_like_a_prompt(scripted, asking):
    fields = {"model": "builtin", "messages": HELLO["messages"], "system": "Be kind."}
    count = asking.messages.count_tokens(**fields)
    assert unknown_fields(count) == []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asking.messages.create, max_tokens=5, **fields)
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, 700, finish="stop")
        future.result(10)
    assert count.input_tokens == len(request.prompt)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", HELLO),
        ("responses", {"model": "builtin", "input": "hi"}),
        ("embeddings", {"model": "builtin", "input": ["a", "b"]}),
    ],
)
def test_deadlines_hold_for_every_endpoint(scripted, path, body):
    with scripted.http(headers={"X-Request-Timeout": "2"}) as http:
        answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 504
    if path == "messages":
        error_of(answer, 504, "timeout_error")
    cancelled, _ = scripted.client.cancelled.get(timeout=10)
    assert cancelled == scripted.client.submitted.get(timeout=10).id
    eventually(lambda: scripted.service.num_open == 0)
