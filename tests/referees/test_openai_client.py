"""The `openai` client against a real server: models, completions, chats, all typed."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from typed import unknown_fields

PROMPT = {"model": "builtin", "prompt": "def f(", "max_tokens": 6, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": "builtin",
    "messages": [{"role": "user", "content": "What is a list?"}],
    "max_completion_tokens": 30,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def client(server):
    with server.client() as made:
        yield made


def test_models(client):
    models = client.models.list()
    assert [model.id for model in models.data] == ["builtin"]
    assert unknown_fields(models) == [".data[0].max_model_len"]  # as vLLM has it
    assert unknown_fields(client.models.retrieve("builtin")) == [".max_model_len"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize("more", [{}, {"logprobs": 2, "n": 2, "echo": True, "seed": 1}])
def test_completions(client, more):
    ask = {**PROMPT, **more}
    whole = client.completions.create(**ask)
    assert unknown_fields(whole) == []
    chunks = list(
        client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert unknown_fields(chunks) == []
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2, "n": 2, "seed": 1}])
def test_chat_completions(client, more):
    ask = {**CHAT, **more}
    whole = client.chat.completions.create(**ask)
    assert unknown_fields(whole) == []
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options=options))
    assert unknown_fields(chunks) == []
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage


def test_the_helper_that_gathers_a_chat_stream(client):
    with client.chat.completions.stream(**{**CHAT, "stop": ["e"]}) as stream:
        for _ in stream:
            pass
        whole = stream.get_final_completion()
    assert whole.choices[0].finish_reason == "stop"


def test_errors_are_the_clients_own_kinds(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**PROMPT, "max_tokens": -1})
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**PROMPT, "model": "gpt-9"})
