"""``/openapi.json``: it has every route, is valid, and real answers are as it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate
from scripted import ScriptedClient
from serving import Running, serving

import description
from weft.api.endpoints import ENDPOINTS
from weft.api.rules import rules_of
from weft.server.app import create_app
from weft.server.openapi import named_operations
from weft.server.operations import OPERATIONS, bodies_of
from weft.server.options import ServerOptions
from weft.server.several_app import ORDERS

SAID = [{"role": "user", "content": "x"}]
CHAT = {"model": "builtin", "messages": SAID, "max_tokens": 4}
TEXT = {"model": "builtin", "prompt": "x", "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
MESSAGE = {"model": "builtin", "messages": SAID, "max_tokens": 4}
OLLAMA = {"model": "builtin", "stream": False, "options": {"num_predict": 4}}


@pytest.fixture(scope="module")
def told(real: Running) -> dict[str, Any]:
    with real.http() as http:
        answer = http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    document: dict[str, Any] = answer.raise_for_status().json()
    return document


@pytest.fixture(scope="module")
def http(real: Running) -> Iterator[httpx.Client]:
    with real.http() as http:
        yield http


@pytest.fixture(scope="module")
def check(told: dict[str, Any]) -> Callable[[Any, dict[str, Any]], None]:
    """Checks an object against a schema; one with fields that no schema has does not pass."""
    schemas = {name: closed(schema) for name, schema in told["components"]["schemas"].items()}

    def check(instance: Any, schema: dict[str, Any]) -> None:
        whole = {"components": {"schemas": schemas}, **schema}
        jsonschema.Draft202012Validator(whole).validate(instance)

    return check


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"additionalProperties": False, **schema} if "properties" in schema else schema


def operation(told: dict[str, Any], name: str) -> dict[str, Any]:
    method, path = name.split(" ")
    found: dict[str, Any] = told["paths"][path][method.lower()]
    return found


def given(told: dict[str, Any], name: str, status: str = "200") -> dict[str, Any]:
    content = operation(told, name)["responses"][status]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def taken(told: dict[str, Any], name: str) -> dict[str, Any]:
    content = operation(told, name)["requestBody"]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def test_it_is_valid(told):
    validate(told)
    assert told["openapi"].startswith("3.1")


def test_it_has_every_route_and_no_other(told, text):
    """A route without a row in ``weft.server.operations`` fails here, and a row without a route."""
    routes = create_app(ScriptedClient(), *text, ServerOptions()).routes
    answered = list(named_operations(routes))
    assert len(answered) == len(set(answered))
    assert {*answered, *(f"POST {path}" for path in ORDERS)} == set(OPERATIONS)
    shown = {f"{m.upper()} {path}" for path, row in told["paths"].items() for m in row}
    assert shown == set(answered)
    ids = [row["operationId"] for methods in told["paths"].values() for row in methods.values()]
    assert len(ids) == len(set(ids))


def test_it_is_the_same_with_keys_and_names_the_prefix(text):
    options: dict[str, Any] = {"api_key": ("key",), "root_path": "/llm"}
    with serving(ScriptedClient([700]), text, **options) as running, running.http() as http:
        document = http.get("/openapi.json").raise_for_status().json()
        assert http.get("/version").status_code == 401
    assert document["servers"] == [{"url": "/llm"}]
    open_paths = {
        path
        for path, row in document["paths"].items()
        if any(one.get("security") == [] for one in row.values())
    }
    page = {"/", "/ui", "/page/{name}"}
    assert open_paths == {"/health", "/ready", "/openapi.json"} | page


@pytest.mark.parametrize("path", ENDPOINTS)
def test_bodies_are_those_that_requests_are_decoded_by(told, path):
    name = f"POST {path}"
    for kind in bodies_of(name, OPERATIONS[name]):
        schema = told["components"]["schemas"][kind.__name__]
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        ruled = {field for field, shown in schema["properties"].items() if "x-weft" in shown}
        assert ruled == set(rules_of(kind))


@pytest.mark.parametrize(
    ("path", "body", "fine"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "temperature": 0.5}, True),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, True),
        ("/v1/chat/completions", {**CHAT, "temperature": 3}, False),
        ("/v1/chat/completions", {**CHAT, "messages": []}, False),
        ("/v1/chat/completions", {**CHAT, "n": 0}, False),
        ("/v1/chat/completions", {**CHAT, "tool": 1}, False),
        ("/v1/chat/completions", {"messages": SAID}, False),
        ("/v1/completions", {**TEXT, "prompt": [5, 6], "logit_bias": {"5": 1}}, True),
        ("/v1/completions", {**TEXT, "stop_token_ids": [-1]}, False),
        ("/v1/completions", {**TEXT, "response_format": {"type": "xml"}}, False),
        ("/v1/responses", {"model": "builtin", "input": "x", "max_output_tokens": 4}, True),
        ("/v1/responses", {"model": "builtin", "input": "x", "top_p": 2}, False),
        ("/v1/messages", MESSAGE, True),
        ("/v1/messages", {**MESSAGE, "messages": [{"role": "tool", "content": "x"}]}, False),
        ("/v1/embeddings", {"model": "builtin", "input": ["x"]}, True),
        ("/v1/embeddings", {"model": "builtin", "input": ["x"], "encoding_format": "x"}, False),
        ("/tokenize", {"prompt": "x"}, True),
        ("/tokenize", {"text": "x"}, False),
        ("/api/generate", {**OLLAMA, "prompt": "x"}, True),
    ],
)
def test_the_schema_and_the_server_agree_about_bodies(told, http, check, path, body, fine):
    assert (http.post(path, json=body).status_code == 200) == fine
    if fine:
        check(body, taken(told, f"POST {path}"))
        return
    with pytest.raises(jsonschema.ValidationError):
        check(body, taken(told, f"POST {path}"))


ANSWERED: list[tuple[str, dict[str, Any] | None]] = [
    ("POST /v1/chat/completions", CHAT),
    ("POST /v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("POST /v1/chat/completions", {**CHAT, "return_token_ids": True, "prompt_logprobs": 1}),
    ("POST /v1/chat/completions", {**CHAT, "service_tier": "flex"}),
    (
        "POST /v1/chat/completions",
        {**CHAT, "max_tokens": 100, "tools": [TOOL], "tool_choice": "required"},
    ),
    ("POST /v1/completions", TEXT),
    ("POST /v1/completions", {**TEXT, "prompt": ["x", "y"], "logprobs": 2, "echo": True}),
    ("POST /v1/completions", {**TEXT, "return_token_ids": True, "prompt_logprobs": 1}),
    ("POST /invocations", CHAT),
    ("POST /v1/responses", {"model": "builtin", "input": "x", "max_output_tokens": 16}),
    ("POST /v1/responses/input_tokens", {"model": "builtin", "input": "x"}),
    ("POST /v1/messages", MESSAGE),
    ("POST /v1/messages/count_tokens", {"model": "builtin", "messages": SAID}),
    ("POST /v1/embeddings", {"model": "builtin", "input": ["x", "y"]}),
    ("POST /v1/embeddings", {"model": "builtin", "input": "x", "encoding_format": "base64"}),
    ("POST /v1/rerank", {"query": "x", "documents": ["y", "z"]}),
    ("POST /rerank", {"query": "x", "documents": ["y", "z"], "return_documents": False}),
    ("POST /v1/score", {"text_1": "x", "text_2": ["y", "z"]}),
    ("POST /tokenize", {"prompt": "x", "return_token_strs": True}),
    ("POST /tokenize", {"messages": SAID}),
    ("POST /detokenize", {"tokens": [5, 6]}),
    ("POST /api/chat", {**OLLAMA, "messages": SAID}),
    ("POST /api/chat", {**OLLAMA, "messages": SAID, "logprobs": True}),
    ("POST /api/generate", {**OLLAMA, "prompt": "x"}),
    ("POST /api/generate", {**OLLAMA, "prompt": ""}),
    ("POST /api/embed", {"model": "builtin", "input": "x"}),
    ("POST /api/embeddings", {"model": "builtin", "prompt": "x"}),
    ("POST /api/show", {"model": "builtin"}),
    ("POST /api/pull", {"model": "builtin"}),
    ("GET /api/tags", None),
    ("GET /api/ps", None),
    ("GET /api/version", None),
    ("GET /v1/models", None),
    ("GET /v1/models/builtin", None),
    ("GET /v1/files", None),
    ("GET /v1/batches", None),
    ("GET /v1/messages/batches", None),
    ("GET /v1/targets", None),
    ("GET /v1/usage", None),
    ("GET /health", None),
    ("GET /ready", None),
    ("GET /version", None),
    ("GET /server_info", None),
]


@pytest.fixture(scope="module")
def scoring(engine: Any, text: Any) -> Iterator[httpx.Client]:
    """The packaged model as one that scores pairs by their vectors."""
    from dataclasses import replace

    tokenizer, template, card = text
    pooling = replace(card.pooling, scoring="similarity")
    shown = (tokenizer, template, replace(card, pooling=pooling))
    with serving(engine[1].inbox, shown) as running, running.http() as http:
        yield http


@pytest.mark.parametrize(("name", "body"), ANSWERED)
def test_answers_are_as_it_says(told, http, scoring, check, name, body):
    method, path = name.split(" ")
    asked = scoring if "rank" in path or "score" in path else http
    answer = asked.request(method, path, json=body).raise_for_status().json()
    check(answer, given(told, name.replace("/builtin", "/{name}")))


def test_a_body_of_text_embeddings_inference_gets_a_list(told, scoring, check):
    body = {"query": "x", "texts": ["y", "z"], "return_text": True}
    check(body, taken(told, "POST /rerank"))
    answer = scoring.post("/rerank", json=body).raise_for_status().json()
    check(answer, given(told, "POST /rerank"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "return_token_ids": True}),
        ("/v1/completions", {**TEXT, "stream_options": {"continuous_usage_stats": True}}),
        ("/api/chat", {**OLLAMA, "messages": SAID}),
        ("/api/generate", {**OLLAMA, "prompt": "x"}),
    ],
)
def test_events_of_streams_are_as_it_says(told, http, check, path, body):
    content = operation(told, f"POST {path}")["responses"]["200"]["content"]
    answer = http.post(path, json={**body, "stream": True}).raise_for_status()
    streamed = content[answer.headers["content-type"]]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert len(events) > 2
    for event in events:
        check(event, streamed["x-weft-event"])


def test_files_batches_and_what_is_removed(told, http, check):
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": TEXT}
    form = {"purpose": "batch"}
    sent = http.post("/v1/files", data=form, files={"file": ("a.jsonl", json.dumps(line))})
    file = sent.raise_for_status().json()
    check(file, given(told, "POST /v1/files"))
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    check(body, taken(told, "POST /v1/batches"))
    batch = http.post("/v1/batches", json=body).raise_for_status().json()
    check(batch, given(told, "POST /v1/batches"))
    one = f"/v1/batches/{batch['id']}"
    check(http.post(f"{one}/cancel").json(), given(told, "POST /v1/batches/{batch_id}/cancel"))
    check(http.get("/v1/batches").json(), given(told, "GET /v1/batches"))
    check(http.get("/v1/files").json(), given(told, "GET /v1/files"))
    params = {"requests": [{"custom_id": "1", "params": MESSAGE}]}
    check(params, taken(told, "POST /v1/messages/batches"))
    queued = http.post("/v1/messages/batches", json=params).raise_for_status().json()
    check(queued, given(told, "POST /v1/messages/batches"))
    unread = http.post("/v1/files", data=form, files={"file": ("b.jsonl", "{}")}).json()
    gone = http.delete(f"/v1/files/{unread['id']}").raise_for_status().json()
    check(gone, given(told, "DELETE /v1/files/{file_id}"))


def test_stored_responses(told, http, check):
    made = http.post("/v1/responses", json={"model": "builtin", "input": "x"}).json()
    one = f"/v1/responses/{made['id']}"
    check(http.get(one).json(), given(told, "GET /v1/responses/{response_id}"))
    items = http.get(f"{one}/input_items").json()
    check(items, given(told, "GET /v1/responses/{response_id}/input_items"))
    check(http.delete(one).json(), given(told, "DELETE /v1/responses/{response_id}"))


@pytest.mark.parametrize(
    "name",
    [
        "POST /v1/completions",
        "POST /v1/messages",
        "POST /v1/messages/batches",
        "POST /api/chat",
        "POST /api/copy",
        "GET /v1/models/{name}",
        "GET /v1/files/{file_id}",
    ],
)
def test_errors_have_the_form_that_it_says(told, http, check, name):
    method, path = name.split(" ")
    path = path.partition("{")[0] + ("missing" if "{" in path else "")
    answer = http.request(method, path, json={"x": 1} if method == "POST" else None)
    assert answer.status_code >= 400
    check(answer.json(), given(told, name, "default"))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("ChatCompletion", "CreateChatCompletionResponse"),
        ("ChatChunk", "CreateChatCompletionStreamResponse"),
        ("Completion", "CreateCompletionResponse"),
        ("EmbeddingList", "CreateEmbeddingResponse"),
        ("ModelList", "ListModelsResponse"),
        ("ModelEntry", "Model"),
        ("Batch", "Batch"),
        ("DeletedFile", "DeleteFileResponse"),
    ],
)
def test_what_openai_s_description_requires_is_there(told, ours, theirs):
    description.need()
    required = description.description()["components"]["schemas"][theirs]["required"]
    schema = told["components"]["schemas"][ours]
    assert set(required) <= set(schema["properties"])
    assert set(required) <= set(schema["required"])


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
)
def test_every_parameter_of_openai_s_description_is_in_it(told, path):
    """Whatever weft does with it: each is honoured, ignored or refused by name."""
    description.need()
    whole = description.description()
    content = whole["paths"][path.removeprefix("/v1")]["post"]["requestBody"]["content"]
    theirs = set(properties(content["application/json"]["schema"], whole))
    assert len(theirs) > 4
    schema = told["components"]["schemas"][taken(told, f"POST {path}")["$ref"].rsplit("/")[-1]]
    assert theirs <= set(schema["properties"])


def properties(schema: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    """Names of the properties of a schema that is made of others."""
    if "$ref" in schema:
        found = whole["components"]["schemas"][schema["$ref"].rsplit("/")[-1]]
        yield from properties(found, whole)
    yield from schema.get("properties", ())
    for part in schema.get("allOf", ()):
        yield from properties(part, whole)
