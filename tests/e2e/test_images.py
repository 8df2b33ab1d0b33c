"""Images in chats of a real server, whose answers are those of transformers."""

from __future__ import annotations

import base64
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import seen
from live import SMALL, Server, serving

FRAME = ["--dtype", "float32", "--max-num-batched-tokens", "40", "--self-profile-s", "0"]


@pytest.fixture(scope="module")
def model():
    return seen.model()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    return seen.save(model, tmp_path_factory.mktemp("m") / "gemma3")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory) -> Iterator[Server]:
    options = ["--model", str(folder), "--served-model-name", "seeing"]
    with serving(tmp_path_factory.mktemp("log"), *SMALL, *FRAME, *options) as made:
        yield made


def message(*parts: str | int) -> dict:
    """A user's message of texts and pictures."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": seen.url(seen.encoded(seen.picture(part)))}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def wanted(model, parts: tuple[str | int, ...], count: int) -> list[int]:
    """The reference's likeliest tokens after a message."""
    each = f"\n\n<start_of_image>{'<image_soft_token>' * seen.TOKENS}<end_of_image>\n\n"
    text = "".join(part if isinstance(part, str) else each for part in parts)
    words = f"<bos><start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n"
    ids = seen.tokenizer().encode(words, add_special_tokens=False).ids
    images = [seen.picture(part) for part in parts if isinstance(part, int)]
    found: list[int] = []
    while len(found) < count:
        found.append(int(seen.reference_logits(model, ids + found, images)[-1].argmax()))
    return found


def ask(server: Server, *parts: str | int, count: int = 8, **fields) -> httpx.Response:
    body = {
        "model": "seeing",
        "messages": [message(*parts)],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def ids_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("parts", [("What?", 0), (1, "and", 2, "or?"), ("no picture",)])
def test_answers_are_those_of_the_reference(server, model, parts):
    assert ids_of(ask(server, *parts)) == wanted(model, parts, 8)


def test_a_streamed_answer_by_the_official_client(server, model):
    parts = ("See:", 3)
    stream = server.client().chat.completions.create(
        model="seeing",
        messages=[message(*parts)],
        max_tokens=8,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    expected = seen.tokenizer().decode(wanted(model, parts, 8))
    assert text == expected


def test_another_picture_in_the_same_text_is_not_taken_from_the_cache(server, model):
    first = ask(server, 4, "Which one is it?").json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    again = ask(server, 4, "Which one is it?")
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert ids_of(again) == first["choices"][0]["token_ids"]
    other = ask(server, 5, "Which one is it?")
    assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    assert ids_of(other) == wanted(model, (5, "Which one is it?"), 8)


def test_the_model_says_that_it_reads_images(server):
    (entry,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert entry["input_modalities"] == ["text", "image"]


def test_refusals(server):
    broken = seen.encoded(seen.picture(0, (200, 200)))[:-300]
    parts = [{"type": "image_url", "image_url": {"url": seen.url(broken)}}]
    body = {"model": "seeing", "messages": [{"role": "user", "content": parts}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_image")
    assert error["param"] == "messages[0].content[0].image_url.url"
    parts[0]["image_url"]["url"] = "https://example.com/x.png"
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "fetches no images" in answer.json()["error"]["message"]


def test_the_other_apis(server, model):
    """Anthropic's, Ollama's and OpenAI's newer one: the same prompts, so the same first token."""
    data = base64.b64encode(seen.encoded(seen.picture(6))).decode()
    expected = seen.tokenizer().decode(wanted(model, (6, "Hm?"), 6))
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Hm?"}]
    body = {
        "model": "seeing",
        "max_tokens": 6,
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert expected.startswith(answer.json()["content"][0]["text"])
    said = {"role": "user", "content": "Hm?", "images": [data]}
    options = {"temperature": 0, "num_predict": 6}
    body = {"model": "seeing", "messages": [said], "stream": False, "options": options}
    answer = httpx.post(f"{server.url}/api/chat", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert expected.startswith(answer.json()["message"]["content"])
    content = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"},
        {"type": "input_text", "text": "Hm?"},
    ]
    body = {
        "model": "seeing",
        "max_output_tokens": 16,
        "temperature": 0,
        "input": [{"role": "user", "content": content}],
    }
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    longer = seen.tokenizer().decode(wanted(model, (6, "Hm?"), 16))
    assert longer.startswith(answer.json()["output"][0]["content"][0]["text"])


def test_an_engine_that_dies_amid_an_answer(server, model):
    """The next one encodes the picture again, from the request that outlived the first."""
    parts = ("Look at this for long:", 7)
    killed = server.children()["weft-engine"]
    stream = server.client().chat.completions.create(
        model="seeing",
        messages=[message(*parts)],
        max_tokens=300,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, used = "", None
    for chunk in stream:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            if not text:
                killed.send_signal(signal.SIGKILL)
            text += piece
        used = chunk.usage or used
    assert used.completion_tokens == 300
    assert server.children()["weft-engine"].pid != killed.pid
    expected = seen.tokenizer().decode(wanted(model, parts, 12))
    assert text.startswith(expected[:8])
