"""Embeddings over HTTP before an engine whose every step the test decides."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from openai import OpenAI

from live import eventually
from typed import unknown_fields
from weft.api.embeddings import WAVE
from weft.core.types import FinishReason

PATH = "/v1/embeddings"


def test_the_openai_client_in_both_formats(scripted):
    """The client asks for base64 unless told otherwise, and takes either."""
    client = scripted.client
    size = scripted.service.builder.card.hidden_size
    count = WAVE + 3
    for options in ({}, {"encoding_format": "float"}):
        with OpenAI(base_url=f"{scripted.url}/v1", api_key="x") as asking:
            inputs = ["a b"] * count
            with ThreadPoolExecutor(1) as pool:
                future = pool.submit(
                    asking.embeddings.create, model="builtin", input=inputs, **options
                )
                for number in range(count):
                    request = client.submitted.get(timeout=10)
                    vector = np.zeros(size, "<f4")
                    vector[number] = 5
                    client.embed(request, vector.tobytes())
                answer = future.result(10)
        assert unknown_fields(answer) == []
        for number, row in enumerate(answer.data):
            assert row.index == number
            assert np.flatnonzero(row.embedding).tolist() == [number]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > 2 * count


def test_a_client_that_leaves_ends_all_waves(scripted):
    client = scripted.client
    with scripted.ask({"model": "builtin", "input": ["a"] * (WAVE + 1)}, PATH):
        eventually(lambda: client.submitted.qsize() == WAVE)
    cancelled = {client.cancelled.get(timeout=10) for _ in range(WAVE)}
    assert {reason for _, reason in cancelled} == {FinishReason.CANCELLED}
    eventually(lambda: scripted.service.num_open == 0)
    assert client.submitted.qsize() == WAVE


def test_errors_have_openai_s_form(scripted):
    with scripted.http() as http:
        answer = http.post(PATH, json={"model": "builtin", "input": []})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input"
        assert http.get(PATH).status_code == 405
        assert 'reason="invalid_parameter"' in http.get("/metrics").text
