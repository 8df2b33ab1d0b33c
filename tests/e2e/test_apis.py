"""Responses and messages as their clients meet them: a real server, both real clients."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from anthropic import Anthropic

from live import START_S, Server, eventually, serving
from typed import unknown_fields

ASKED = "What is a list?"


def anthropic_client(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_three_endpoints_say_the_same_to_the_same(server):
    """Chats, responses and messages are one path: greedy answers are equal, whole and streamed."""
    with server.client() as openai, anthropic_client(server) as anthropic:
        said = [{"role": "user", "content": ASKED}]
        chat = openai.chat.completions.create(
            model="builtin", messages=said, temperature=0, max_completion_tokens=24
        )
        fields = {"model": "builtin", "temperature": 0, "max_output_tokens": 24}
        response = openai.responses.create(**fields, input=ASKED)
        with openai.responses.stream(**fields, input=ASKED) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        greedy = {"model": "builtin", "max_tokens": 24, "extra_body": {"temperature": 0}}
        message = anthropic.messages.create(**greedy, messages=said)
        with anthropic.messages.stream(**greedy, messages=said) as stream:
            streamed = stream.get_final_message()
    text = chat.choices[0].message.content
    assert text
    texts = [response.output_text, "".join(deltas)]
    texts += [message.content[0].text, streamed.content[0].text]
    assert texts == [text] * 4
    assert unknown_fields([response, message, streamed]) == []
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert streamed.usage.output_tokens == message.usage.output_tokens
    read = message.usage.cache_read_input_tokens
    assert message.usage.input_tokens + read == response.usage.input_tokens


def test_a_conversation_is_the_same_as_its_messages(server):
    with server.client() as openai:
        fields = {"model": "builtin", "temperature": 0, "max_output_tokens": 12}
        first = openai.responses.create(**fields, input=ASKED)
        second = openai.responses.create(
            **fields, input="And a tuple?", previous_response_id=first.id
        )
        again = openai.responses.create(
            **fields,
            input=[
                {"role": "user", "content": ASKED},
                *[item.model_dump() for item in first.output],
                {"role": "user", "content": "And a tuple?"},
            ],
        )
        assert second.usage.input_tokens == again.usage.input_tokens
        assert second.output_text == again.output_text
        assert openai.responses.retrieve(second.id) == second


def test_a_client_that_leaves_frees_its_sequence(server):
    body = {"model": "builtin", "max_tokens": 1500, "stream": True}
    said = [{"role": "user", "content": ASKED}]
    for path, fields in (
        ("messages", {**body, "messages": said}),
        ("responses", {"model": "builtin", "input": ASKED, "stream": True, "ignore_eos": True}),
    ):
        with httpx.stream(
            "POST", f"{server.url}/v1/{path}", json=fields, timeout=START_S
        ) as answer:
            next(answer.iter_lines())
    eventually(server.idle, START_S)


def test_embeddings_cross_whole_and_many(server):
    with server.client() as openai:
        texts = [f"text number {i}" for i in range(100)]
        answer = openai.embeddings.create(model="builtin", input=texts)
        assert unknown_fields(answer) == []
        assert [row.index for row in answer.data] == list(range(100))
        vectors = np.array([row.embedding for row in answer.data])
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert len({vector.tobytes() for vector in vectors}) == 100
        alone = openai.embeddings.create(
            model="builtin", input=texts[7], encoding_format="float", dimensions=16
        )
    short = vectors[7][:16] / np.linalg.norm(vectors[7][:16])
    assert np.allclose(alone.data[0].embedding, short, atol=1e-4)
    eventually(server.idle, START_S)


def test_stored_responses_outlive_the_server(tmp_path):
    path = str(tmp_path / "responses.db")
    kept = ("--responses-db", path)
    with serving(tmp_path, *kept, modelled=True) as running, running.client() as openai:
        first = openai.responses.create(model="builtin", input=ASKED, max_output_tokens=4)
    with serving(tmp_path, *kept, modelled=True) as running, running.client() as openai:
        assert openai.responses.retrieve(first.id) == first


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    file = str(tmp_path / "no" / "file.db")
    with (
        pytest.raises(AssertionError, match="Cannot open the stored responses"),
        serving(tmp_path, "--responses-db", file),
    ):
        pass
