"""Reranking over HTTP before an engine whose every step the test decides."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from scripted import ScriptedClient
from serving import Running, serving

from live import eventually
from weft.api.embeddings import WAVE
from weft.core.pooling import Pooling
from weft.core.types import FinishReason

PAIRS = Pooling(generates=False, embeds=False, scoring="head", template="{query}?{document}")


@pytest.fixture
def scoring(text: Any) -> Iterator[Running]:
    """A server of a classifier before a `ScriptedClient`."""
    tokenizer, template, card = text
    card = dataclasses.replace(card, pooling=PAIRS)
    with serving(ScriptedClient(), (tokenizer, template, card), drain_timeout_s=0.5) as running:
        yield running


def ask(running: Running, **body: Any) -> httpx.Response:
    with running.http() as http:
        return http.post("/v1/rerank", json=body)


def test_all_waves_make_one_answer(scoring):
    count = WAVE + 3
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, scoring, query="q", documents=["d"] * count, top_n=2)
        for number in range(count):
            request = scoring.client.submitted.get(timeout=10)
            scoring.client.embed(request, np.array([number / 10], "<f4").tobytes())
        answer = asked.result(10).json()
    assert [row["index"] for row in answer["results"]] == [count - 1, count - 2]


def test_a_client_that_leaves_ends_its_wave(scoring):
    with scoring.ask({"query": "q", "documents": ["d"] * (WAVE + 1)}, "/v1/rerank"):
        eventually(lambda: scoring.client.submitted.qsize() == WAVE)
    cancelled = {scoring.client.cancelled.get(timeout=10) for _ in range(WAVE)}
    assert {reason for _, reason in cancelled} == {FinishReason.CANCELLED}
    eventually(lambda: scoring.service.num_open == 0)
    assert scoring.client.submitted.qsize() == WAVE


@pytest.mark.parametrize("path", ["/v1/rerank", "/invocations"])
def test_a_short_body_that_makes_long_prompts_holds_nobody_up(scoring, path):
    """A query counts for each of its documents, so even short bodies are read aside."""
    tokenizer = scoring.service.builder.tokenizer
    threads, work = [], tokenizer.encode_parsed

    def note(given: str) -> list[int]:
        threads.append(threading.current_thread().name)
        return work(given)

    tokenizer.encode_parsed = note
    try:
        with scoring.http() as http:
            wrong = http.post(path, json={"query": "q", "documents": ["d", "no " * 500]})
    finally:
        del tokenizer.encode_parsed
    assert wrong.status_code == 400
    assert threads
    assert all(name.startswith("weft-text") for name in threads)


def test_errors_have_openai_s_form_and_are_counted(scoring):
    assert ask(scoring, query="q", documents=[]).json() == {
        "error": {
            "message": "The list of documents is empty.",
            "type": "invalid_request_error",
            "param": "documents",
            "code": "invalid_parameter",
        }
    }
    with scoring.http() as http:
        assert http.get("/v1/rerank").status_code == 405
        chat = {"model": "builtin", "messages": [{"role": "user", "content": "a"}]}
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            given = chat | {"max_tokens": 5} if path == "/v1/messages" else chat
            given = {"model": "builtin", "input": "a"} if path == "/v1/responses" else given
            answer = http.post(path, json=given)
            assert answer.status_code == 400
            assert "generates no text" in answer.json()["error"]["message"]
        assert 'reason="unsuitable_model"' in http.get("/metrics").text
