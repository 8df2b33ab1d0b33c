"""Mutated bodies to every route of the application: an answer or a typed error, and soon.

Behind the application stands an engine that is always busy, so that a request which has been
accepted is known by its 429. Whatever else is wrong with a body is a 4xx in the API's own form.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis.strategies import DrawFn, composite, integers, sampled_from
from mutate import broken_bytes, broken_values

import weft
from depth import searching
from weft.api import ModelCard
from weft.core.errors import EngineBusyError
from weft.core.pooling import Pooling
from weft.server.app import create_app
from weft.server.files import PATH as FILES
from weft.server.ollama import PATH, STORE_PATHS
from weft.server.options import ServerOptions
from weft.text import ChatTemplate, Tokenizer

FOLDER = Path(weft.__file__).parent / "builtin"
MOST_CPU_S = 1.0
FUNCTION = {
    "name": "look_up",
    "description": "Looks something up.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string"}, "count": {"type": "integer", "minimum": 0}},
        "required": ["word", "count"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
CHATS = [
    {
        "model": "builtin",
        "messages": [
            {"role": "user", "content": "What is a list?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "found"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "parallel_tool_calls": False,
    },
    {
        "model": "builtin",
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": FUNCTION["parameters"]},
        },
    },
    {
        "model": "builtin",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is a list?"}], "name": "x"},
            {"role": "assistant", "content": "A list is"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    {
        "model": "builtin",
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1.5},
        "stop": ["\n"],
        "n": 2,
        "seed": 1,
        "temperature": 0.5,
        "chat_template_kwargs": {"a": 1},
        "max_completion_tokens": 8,
    },
]
MESSAGES = {
    "model": "builtin",
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "What is a list?"},
        {"role": "assistant", "content": [{"type": "text", "text": "A list is"}]},
        {"role": "user", "content": "Go on."},
    ],
    "thinking": {"type": "disabled"},
}
RESPONSE = {
    "model": "builtin",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "What is a list?"},
    ],
    "metadata": {"a": "b"},
    "truncation": "disabled",
    "reasoning": None,
}
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}}
GROUP = {"type": "namespace", "name": "ns", "description": "Files.", "tools": [READ]}
FOUND = {"call_id": "s", "execution": "client"}
SEARCHED = {
    "model": "builtin",
    "tools": [GROUP, {"type": "tool_search", "execution": "client", "parameters": {}}],
    "tool_choice": {"type": "function", "name": "read", "namespace": "ns"},
    "input": [
        {"role": "user", "content": "hi"},
        {"type": "tool_search_call", **FOUND, "arguments": {"query": "x"}},
        {"type": "tool_search_output", **FOUND, "tools": [GROUP]},
        {"type": "additional_tools", "role": "developer", "tools": [{**READ, "name": "a"}]},
    ],
}
CHANGED = {"type": "tool_reference", "name": "look_up"}
TEXT = {"format": {"type": "text"}}
TOOL = {"name": "look_up", "input_schema": FUNCTION["parameters"]}
OLLAMA_CALL = {"function": {"name": "look_up", "arguments": {"word": "a"}}}
OPTIONS = {"num_predict": 5, "num_ctx": 64, "stop": ["x"], "seed": -1, "repeat_last_n": -1}
RERANKS = [
    {"model": "builtin", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    {"model": "builtin", "query": "a", "documents": ["b"], "return_documents": False},
]
SCORES = [
    {"model": "builtin", "text_1": "a", "text_2": ["b", "c"]},
    {"model": "builtin", "text_1": ["a", "b"], "text_2": ["c", "d"], "user": "me"},
]
BODIES: dict[str, list[Any]] = {
    "/v1/chat/completions": CHATS,
    "/v1/completions": [
        {
            "model": "builtin",
            "prompt": ["def f", "class"],
            "max_tokens": 4,
            "n": 2,
            "logprobs": 2,
            "echo": True,
            "logit_bias": {"5": -3},
            "stop": ["\n", "x"],
            "stop_token_ids": [7],
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 3,
            "user": "me",
            "stream": True,
        },
        {"model": "builtin", "prompt": [[1, 2, 3], [4]], "max_tokens": 1, "cache_salt": "x"},
    ],
    "/v1/embeddings": [
        {"model": "builtin", "input": ["a", "b c"], "encoding_format": "base64", "dimensions": 8},
        {"model": "builtin", "input": [[1, 2], [3]], "user": "me"},
    ],
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), RERANKS),
    **dict.fromkeys(("/v1/score", "/score"), SCORES),
    "/v1/responses": [
        RESPONSE | {"stream": True, "max_output_tokens": 5, "temperature": 0.5, "store": False},
        {"model": "builtin", "input": "hi", "previous_response_id": None, "text": TEXT},
        RESPONSE | {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        SEARCHED,
    ],
    "/v1/responses/input_tokens": [RESPONSE],
    "/v1/responses/{response_id}/cancel": [{}],
    "/v1/messages": [
        MESSAGES | {"max_tokens": 5, "stop_sequences": ["x"], "top_k": 3, "stream": True},
        MESSAGES | {"max_tokens": 5, "temperature": 0.5, "metadata": {"user_id": "me"}},
        MESSAGES | {"max_tokens": 5, "tools": [TOOL], "tool_choice": {"type": "any"}},
        {
            "model": "builtin",
            "max_tokens": 5,
            "tools": [TOOL],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "system",
                    "clear_at": "never",
                    "content": [
                        {"type": "tool_removal", "tool": CHANGED},
                        {"type": "tool_addition", "tool": CHANGED},
                    ],
                },
            ],
        },
    ],
    "/v1/messages/count_tokens": [MESSAGES],
    "/tokenize": [
        {"model": "builtin", "prompt": "def f(): pass", "return_token_strs": True},
        {"messages": CHATS[0]["messages"], "add_generation_prompt": False},
    ],
    "/detokenize": [{"model": "builtin", "tokens": [1, 2, 3]}],
    "/invocations": [
        CHATS[1],
        {"model": "builtin", "prompt": "x"},
        {"model": "builtin", "input": "x"},
    ],
    "/api/chat": [
        {
            "model": "builtin:latest",
            "messages": [
                {"role": "user", "content": "hi", "images": []},
                {"role": "assistant", "content": "", "tool_calls": [OLLAMA_CALL]},
                {"role": "tool", "tool_name": "look_up", "content": "found"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "options": OPTIONS,
            "think": False,
        },
        {"model": "builtin", "messages": CHATS[1]["messages"], "format": FUNCTION["parameters"]},
        {"model": "builtin", "messages": [], "keep_alive": "0s", "stream": False},
    ],
    "/api/generate": [
        {
            "model": "builtin",
            "prompt": "hi",
            "system": "Be kind.",
            "options": OPTIONS,
            "suffix": "",
        },
        {"model": "builtin", "prompt": "hi", "raw": True, "format": "json", "logprobs": True},
        {"model": "builtin", "keep_alive": 0},
    ],
    "/api/embed": [{"model": "builtin", "input": ["a", "b"], "dimensions": 8, "options": OPTIONS}],
    "/api/embeddings": [{"model": "builtin", "prompt": "a", "keep_alive": -1}],
    "/api/show": [{"model": "builtin", "verbose": True}],
    "/v1/batches": [
        {
            "input_file_id": "file-none",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        }
    ],
    "/v1/messages/batches": [
        {
            "requests": [
                {"custom_id": "a", "params": MESSAGES | {"max_tokens": 5}},
                {"custom_id": "b", "params": MESSAGES | {"max_tokens": 5, "tools": [TOOL]}},
            ]
        }
    ],
    "/api/pull": [{"name": "builtin", "stream": False, "insecure": False}],
}
BODILESS = {PATH + path for path in STORE_PATHS}  # they refuse whatever comes
BODILESS |= {"/v1/batches/{batch_id}/cancel", "/v1/messages/batches/{batch_id}/cancel"}
FORM_TYPE = "multipart/form-data; boundary=b"
FORM = (
    b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n"
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"Content-Type: application/jsonl\r\n\r\n{}\n\r\n--b--\r\n"
)


class BusyEngine:
    """Takes nothing."""

    def submit(self, *_: Any) -> None:
        raise EngineBusyError("The engine of this test is always busy.")

    def cancel(self, *_: Any) -> None: ...


class App:
    """The application, spoken to without a network."""

    def __init__(self) -> None:
        card = ModelCard(
            served_names=("builtin",),
            vocab_size=4096,
            max_model_len=256,
            eos_token_ids=(1, 6),
            sampling_defaults={},
            created=1,
            hidden_size=64,
            pooling=Pooling(generates=True, embeds=True, scoring="similarity"),
        )
        text = Tokenizer.load(FOLDER), ChatTemplate.load(FOLDER), card
        self.app = create_app(BusyEngine(), *text, ServerOptions())
        self._loop = asyncio.new_event_loop()
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://localhost"
        )

    def post(self, path: str, data: bytes, media: str = "application/json") -> httpx.Response:
        """The answer; an exception that no handler expects is raised here."""
        sent = self._http.post(path, content=data, headers={"content-type": media})
        return self._loop.run_until_complete(sent)

    def close(self) -> None:
        self._loop.run_until_complete(self._http.aclose())
        self._loop.close()


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    made = App()
    yield made
    made.close()


def post_routes(app: App) -> set[str]:
    return {route.path for route in app.app.routes if "POST" in route.methods}


def check(app: App, path: str, data: bytes, media: str = "application/json") -> None:
    started = time.process_time()
    answer = app.post(path, data, media)
    assert time.process_time() - started < MOST_CPU_S
    if answer.status_code == 200:
        return
    assert 400 <= answer.status_code < 500
    error = json.loads(answer.content)["error"]
    assert path.startswith(f"{PATH}/") or error["type"]
    message = error if path.startswith(f"{PATH}/") else error["message"]
    assert 0 < len(message) < 2000
    assert "Traceback" not in message


FUZZ = searching(150, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_are_valid_before_they_are_changed(app, path):
    for body in BODIES[path]:
        answer = app.post(path, json.dumps(body).encode())
        known = answer.status_code != 404 or path == "/v1/batches"  # whose file there is not
        assert (answer.status_code in (200, 404, 429) and known) or "{" in path, answer.text


@pytest.mark.parametrize("path", BODIES)
def test_changed_bytes(app, path):
    @FUZZ
    @given(data=broken_bytes(BODIES[path]))
    def one(data: bytes) -> None:
        check(app, path, data)

    one()


@pytest.mark.parametrize("path", BODIES)
def test_changed_values(app, path):
    @FUZZ
    @given(data=broken_values(BODIES[path]))
    def one(data: bytes) -> None:
        check(app, path, data)

    one()


def test_changed_forms(app):
    assert app.post(FILES, FORM, FORM_TYPE).status_code == 200

    @FUZZ
    @given(data=broken_forms())
    def one(data: bytes) -> None:
        check(app, FILES, data, FORM_TYPE)

    one()


@composite
def broken_forms(draw: DrawFn) -> bytes:
    """A form with pieces taken out, doubled, or replaced by others."""
    data = FORM
    for _ in range(draw(integers(1, 3))):
        begin = draw(integers(0, len(data)))
        end = draw(integers(begin, min(len(data), begin + 40)))
        piece = draw(sampled_from([b"", data[begin:end] * 2, b"\r\n--b", b"--", b"\0", b"\xff"]))
        data = data[:begin] + piece + data[end:]
    return data


def test_long_parts_of_bodies_are_taken(app):
    text = "a list " * 20_000
    item = {"role": "user", "content": [{"type": "input_text", "text": text}]}
    block = {"role": "user", "content": [{"type": "text", "text": text}]}
    response = {"model": "builtin", "input": [item]}
    message = {"model": "builtin", "max_tokens": 1, "messages": [block]}
    for path, body in (("/v1/responses", response), ("/v1/messages", message)):
        answer = app.post(path, json.dumps(body).encode())
        assert answer.status_code == 400
        assert "context" in answer.text  # far too long, and nothing else is wrong


def test_every_route_that_takes_a_body_is_fuzzed(app):
    rest = BODILESS | {FILES}
    missing = post_routes(app) - BODIES.keys() - rest
    assert not missing, "BODIES has no valid bodies to change"
    assert post_routes(app) == set(BODIES) | rest
    for path in BODILESS:
        check(app, path, b"")
