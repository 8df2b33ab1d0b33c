"""Answers over HTTP before a real engine: the `openai` client and plain requests."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from live import eventually
from typed import unknown_fields

MESSAGES: Any = [
    {"role": "user", "content": "Write a function that adds two numbers, please. " * 3}
]
COMPLETION = {"model": "builtin", "prompt": "def add(a, b):\n", "temperature": 0}


def lines_of(response: httpx.Response) -> list[Any]:
    """Events of a stream; the mark of its end must be the last."""
    events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_chat_whole_and_streamed_agree(client):
    options: Any = {"model": "builtin", "messages": MESSAGES, "max_tokens": 24, "seed": 3}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert unknown_fields(whole) == []
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert all(unknown_fields(chunk) == [] for chunk in chunks)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0  # the second request found the first's


def test_completion_whole_and_streamed_agree(client):
    options: Any = {**COMPLETION, "max_tokens": 16, "logprobs": 2, "echo": True}
    whole = client.completions.create(**options).choices[0]
    chunks = [c.choices[0] for c in client.completions.create(**options, stream=True)]
    assert whole.text.startswith(COMPLETION["prompt"])
    assert "".join(c.text for c in chunks) == whole.text
    for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        streamed = [x for c in chunks if c.logprobs for x in getattr(c.logprobs, key)]
        assert len(streamed) == len(getattr(whole.logprobs, key))
        if key in ("tokens", "text_offset"):
            assert streamed == getattr(whole.logprobs, key)
    assert whole.logprobs.token_logprobs[0] is None
    assert whole.logprobs.tokens[1] == "def"
    greedy = [max(top.values()) for top in whole.logprobs.top_logprobs[-16:]]
    assert greedy == whole.logprobs.token_logprobs[-16:]


def test_choices_are_those_of_their_seeds(client):
    options: Any = {"model": "builtin", "prompt": ["x =", "import"], "max_tokens": 8}
    many = client.completions.create(**options, n=3, seed=10)
    assert [c.index for c in many.choices] == list(range(6))
    assert len({c.text for c in many.choices}) > 2
    alone = client.completions.create(**{**options, "prompt": "import"}, seed=12)
    assert alone.choices[0].text == many.choices[5].text


def test_streamed_choices_are_those_of_the_whole_answer(client):
    options: Any = {"model": "builtin", "messages": MESSAGES, "max_tokens": 8, "n": 2, "seed": 1}
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [c.message.content for c in whole.choices]


def test_a_stop_string_cuts_the_text(client):
    whole = client.completions.create(**COMPLETION, max_tokens=40).choices[0].text
    stop = whole[10:16]
    assert stop
    cut = client.completions.create(**COMPLETION, max_tokens=40, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    stream = client.completions.create(**COMPLETION, max_tokens=40, stop=stop, stream=True)
    chunks = [c.choices[0] for c in stream]
    assert "".join(c.text for c in chunks) == cut.text
    assert chunks[-1].finish_reason == "stop"


def test_extensions(client):
    answer = client.completions.create(
        **COMPLETION,
        max_tokens=5,
        extra_body={"ignore_eos": True, "min_tokens": 5, "top_k": 1, "return_token_ids": True},
    )
    assert answer.usage.completion_tokens == 5
    extra = answer.choices[0].model_extra
    assert len(extra["token_ids"]) == 5
    assert len(extra["prompt_token_ids"]) == answer.usage.prompt_tokens
    again = client.completions.create(
        model="builtin",
        prompt=extra["prompt_token_ids"],
        max_tokens=5,
        temperature=0,
        extra_body={"stop_token_ids": extra["token_ids"][1:2]},
    )
    assert again.choices[0].finish_reason == "stop"
    assert again.usage.completion_tokens <= 2


def test_many_streams_at_once(real):
    def one(seed: int, out: dict[int, str]) -> None:
        body = {"model": "org/other", "prompt": "class ", "max_tokens": 30, "seed": seed}
        body |= {"stream": True}
        with real.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            events = lines_of(answer)
        assert {event["model"] for event in events} == {"org/other"}
        out[seed] = "".join(event["choices"][0]["text"] for event in events)

    together: dict[int, str] = {}
    threads = [threading.Thread(target=one, args=(seed, together)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alone: dict[int, str] = {}
    one(4, alone)
    assert len(together) == 6
    assert together[4] == alone[4]


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_everything(real, engine, stream):
    body = {**COMPLETION, "max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 8}
    before = real.service.metrics.finished["cancelled"]
    with real.ask(body) as raw:
        eventually(lambda: real.service.metrics.running == 8)
        if stream:
            assert raw.recv(64).startswith(b"HTTP/1.1 200")
    eventually(lambda: engine[0].scheduler.idle, seconds=2)
    eventually(lambda: real.service.num_open == 0)
    assert real.service.metrics.finished["cancelled"] == before + 8


def test_the_engine_is_idle_and_whole_at_the_end(real, engine):
    eventually(lambda: engine[0].scheduler.idle and real.service.num_open == 0)
    engine[0].scheduler.check()
    assert (real.service.metrics.running, real.service.metrics.waiting) == (0, 0)
