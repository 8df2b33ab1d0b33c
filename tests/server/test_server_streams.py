"""Streams before an engine whose every step the test decides."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest
from scripted import ScriptedClient
from serving import Asking, serving

from live import eventually
from weft.core.types import FinishReason
from weft.server.service import INLINE_BYTES

BODY = {"model": "builtin", "prompt": "x", "max_tokens": 100}
CHAT = {"model": "builtin", "messages": [{"role": "user", "content": "x"}]}


def test_what_is_ready_at_once_is_one_chunk(scripted):
    with Asking(scripted, {**BODY, "stream": True}) as asking:
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, 700, 701, 702)
        asking.wait_for(1)
        scripted.client.send(request, 703, finish="length")
    assert len(asking.events) == 4  # text, text, end, [DONE]
    assert json.loads(asking.events[2])["choices"][0]["finish_reason"] == "length"


def test_updates_from_the_loop_s_own_thread(text):
    with serving(ScriptedClient([700, 701]), text) as running, running.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT).json()
    assert answer["usage"]["completion_tokens"] == 2


def test_a_reader_that_does_not_read_is_waited_for(scripted):
    """The transport pushes back; the engine is not held up, and nothing is lost."""
    data = json.dumps(
        {**BODY, "stream": True, "max_tokens": 200, "return_token_ids": True}
    ).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = scripted.url.removeprefix("http://").split(":")
    raw.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    raw.sendall(f"{head}Connection: close\r\n\r\n".encode() + data)
    request = scripted.client.submitted.get(timeout=10)
    for _ in range(40):
        scripted.client.send(request, *range(4096))
    scripted.client.send(request, finish="length")
    time.sleep(0.5)
    assert scripted.service.num_open == 1  # the answer cannot have been written
    raw.settimeout(10)
    received = b""
    while part := raw.recv(65536):
        received += part
    raw.close()
    lines = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    ids = [t for line in lines for t in json.loads(line[6:])["choices"][0].get("token_ids", [])]
    assert ids == [*range(4096)] * 40


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(scripted, stream):
    with scripted.ask({**BODY, "stream": stream}):
        request = scripted.client.submitted.get(timeout=10)
        assert scripted.client.cancelled.empty()
    assert scripted.client.cancelled.get(timeout=2) == (request.id, FinishReason.CANCELLED)
    eventually(lambda: scripted.service.num_open == 0)
    scripted.client.send(request, 700, finish="cancelled")  # news of the dead harm nobody


def test_a_stop_string_ends_the_sequence_in_the_engine(scripted):
    word = scripted.service.builder.tokenizer.encode(" the", add_special_tokens=False)[0]
    with Asking(scripted, {**BODY, "stream": True, "stop": " the the"}) as asking:
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, 700, word)
        asking.wait_for(1)
        scripted.client.send(request, word, 701)
        assert scripted.client.cancelled.get(timeout=10) == (request.id, FinishReason.STOP)
        scripted.client.send(request, 702, finish="stop")
    chunks = [json.loads(event)["choices"][0] for event in asking.events[:-1]]
    assert "the" not in "".join(chunk["text"] for chunk in chunks)
    assert scripted.client.cancelled.empty()


def test_long_prompts_do_not_hold_the_others_up(scripted):
    threads = []
    work = scripted.service.builder.tokenizer.encode

    def note(*args: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name)
        return work(*args, **named)

    scripted.service.builder.tokenizer.encode = note
    try:
        with scripted.http() as http:
            http.post("/tokenize", json={"prompt": "x"})
            padding = b" " * INLINE_BYTES
            http.post("/tokenize", content=b'{"prompt": "word"}' + padding)
    finally:
        del scripted.service.builder.tokenizer.encode
    assert not threads[0].startswith("weft-text")
    assert threads[1].startswith("weft-text")
