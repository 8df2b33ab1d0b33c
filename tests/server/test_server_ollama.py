"""Ollama's API over HTTP: its own client before a real engine, and one whose steps are decided."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import jsonschema
import ollama
import pytest
from scripted import ScriptedClient
from serving import serving
from test_server_structured import MESSAGES, PARAMETERS

from weft.core.errors import EngineBusyError
from weft.core.types import FinishReason
from weft.text import ChatTemplate

HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


@pytest.fixture
def asking(scripted):
    return ollama.Client(host=scripted.url, timeout=30)


@pytest.fixture(scope="module")
def client(real):
    return ollama.Client(host=real.url, timeout=60)


def ids_of(running: Any, text: str) -> list[int]:
    encode = running.service.builder.tokenizer.encode
    return encode(text, add_special_tokens=False, parse_special=True)


def shown(running: Any, request: Any) -> str:
    return running.service.builder.tokenizer.decode(request.prompt, skip_special_tokens=False)


def answered(running: Any, text: str, ask: Any, finish: str = "stop") -> Any:
    """The request that ``ask`` makes, and what it returns for this text of the model."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask)
        request = running.client.submitted.get(timeout=10)
        for token in ids_of(running, text):
            running.client.send(request, token)
        running.client.send(request, finish=finish)
        return request, future.result(10)


# -- chats and prompts --------------------------------------------------------------------------


def test_a_whole_chat(scripted, asking):
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7, "stop": ["x"]}
    request, answer = answered(
        scripted,
        "Hello you",
        lambda: asking.chat("builtin:latest", HI, options={**options, "num_predict": 50}),
    )
    assert answer.model == "builtin:latest"
    assert (answer.message.role, answer.message.content) == ("assistant", "Hello you")
    assert (answer.message.thinking, answer.message.tool_calls) == (None, None)
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count == len(request.prompt)
    assert answer.eval_count == len(ids_of(scripted, "Hello you"))
    assert min(answer.total_duration, answer.prompt_eval_duration, answer.eval_duration) > 0
    assert answer.total_duration >= answer.eval_duration
    assert datetime.fromisoformat(answer.created_at).tzinfo == UTC
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.5)
    assert (sampling.min_p, sampling.seed, sampling.stop) == (0.1, 7, ("x",))
    assert sampling.max_tokens == 50


def test_a_stream_is_lines_of_json_and_the_default(scripted):
    with scripted.http() as http:
        body = {"model": "builtin", "messages": HI, "options": {"stop": " stop"}}
        request, answer = answered(
            scripted, "Hello you", lambda: http.post("/api/chat", json=body), "length"
        )
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Hello you"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["message"] == {"role": "assistant", "content": ""}
    assert lines[-1]["done_reason"] == "length"
    assert lines[-1]["prompt_eval_count"] == len(request.prompt)
    assert "eval_count" not in lines[0]


def test_the_client_reads_streams_and_a_stop_string_ends_one(scripted, asking):
    with ThreadPoolExecutor(1) as pool:
        stream = asking.chat("builtin", HI, stream=True, options={"stop": [" stop"]})
        future = pool.submit(list, stream)
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, *ids_of(scripted, "Hello"))
        scripted.client.send(request, *ids_of(scripted, " stop more"))
        assert scripted.client.cancelled.get(timeout=10) == (request.id, FinishReason.STOP)
        scripted.client.send(request, finish="stop")
        parts = future.result(10)
    assert "".join(part.message.content for part in parts) == "Hello"
    assert parts[-1].done_reason == "stop"


def test_a_prompt_goes_through_the_template_unless_it_is_raw(scripted, asking):
    request, answer = answered(
        scripted, "Paris", lambda: asking.generate("builtin", "Where?", system="Be kind.")
    )
    assert (answer.response, answer.thinking, answer.done_reason) == ("Paris", None, "stop")
    assert answer.context is None
    assert shown(scripted, request).endswith(
        "<|system|>Be kind.<|end|><|user|>Where?<|end|><|assistant|>"
    )
    bos = scripted.service.builder.tokenizer.special_tokens["bos_token"]
    for prompt in ("<|user|>Where?<|end|>", f"{bos}<|user|>Where?<|end|>"):
        request, answer = answered(
            scripted, "Paris", lambda p=prompt: asking.generate("builtin", p, raw=True)
        )
        assert answer.response == "Paris"
        assert list(request.prompt) == ids_of(scripted, f"{bos}<|user|>Where?<|end|>")
        assert request.sampling.max_tokens is None


def test_streams_of_generate_have_text_where_clients_read_it(scripted, asking):
    _, parts = answered(
        scripted, "Paris it is", lambda: list(asking.generate("builtin", "Where?", stream=True))
    )
    assert "".join(part.response for part in parts) == "Paris it is"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize("given", [-1, -2, 0, 10**6])
@pytest.mark.parametrize("raw", [False, True])
def test_output_may_go_on_to_the_end_of_the_context(scripted, asking, given, raw):
    options = {"num_predict": given}
    request, _ = answered(
        scripted, "x", lambda: asking.generate("builtin", "hi", raw=raw, options=options)
    )
    room = scripted.service.builder.card.max_model_len - len(request.prompt)
    assert request.sampling.max_tokens == (room if given > 0 else None)


def test_nothing_to_say_loads_the_model(asking, scripted):
    for answer in (asking.generate("builtin"), asking.generate("builtin", "", keep_alive="5m")):
        assert (answer.response, answer.done, answer.done_reason) == ("", True, "load")
    for keep in (0, "0", "0s", "0m"):
        assert asking.generate("builtin", keep_alive=keep).done_reason == "unload"
    answer = asking.chat("builtin", [])
    assert (answer.message.content, answer.done_reason) == ("", "load")
    assert scripted.client.submitted.empty()


def test_log_probabilities(client):
    answer = client.chat("builtin", HI, logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert len(answer.logprobs) == answer.eval_count
    assert len(answer.logprobs[0].top_logprobs) == 2
    assert answer.logprobs[0].logprob <= 0
    raw = client.generate("builtin", "x", raw=True, logprobs=True, options={"num_predict": 3})
    assert len(raw.logprobs) == raw.eval_count


# -- tools, schemas, thinking -------------------------------------------------------------------


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: where.
    """
    return f"rain in {city}"


def test_a_round_of_tools(scripted, asking):
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    request, answer = answered(
        scripted, call * 2, lambda: asking.chat("builtin", messages, tools=[get_weather])
    )
    assert "get_weather" in shown(scripted, request)
    [first, second] = answer.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("get_weather", {"city": "Rome"})
    assert first == second
    assert (answer.message.content, answer.done_reason) == ("", "stop")

    messages.append(answer.message)
    for number in "12":
        result = {"role": "tool", "tool_name": "get_weather", "content": f"rain {number}"}
        messages.append(result)
    request, answer = answered(scripted, "Wet.", lambda: asking.chat("builtin", messages))
    assert answer.message.content == "Wet."
    prompt = shown(scripted, request)
    assert prompt.count('{"name": "get_weather", "arguments": {"city": "Rome"}}') == 2
    assert prompt.index("rain 1") < prompt.index("rain 2")


def test_streamed_calls_come_in_one_piece(scripted, asking):
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    with scripted.http() as http:
        body = {"model": "builtin", "messages": HI, "tools": [WEATHER]}
        _, answer = answered(scripted, call * 2, lambda: http.post("/api/chat", json=body))
    lines = [json.loads(line)["message"] for line in answer.text.splitlines()]
    calls = [call for line in lines for call in line.get("tool_calls", ())]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Rome"}] * 2
    _, parts = answered(
        scripted, call, lambda: list(asking.chat("builtin", HI, tools=[WEATHER], stream=True))
    )
    assert sum(len(part.message.tool_calls or ()) for part in parts) == 1


def test_a_call_that_is_cut_short(scripted, asking):
    cut = '<tool_call>\n{"name": "get_weather", "arguments": {"ci'
    _, answer = answered(
        scripted, cut, lambda: asking.chat("builtin", HI, tools=[WEATHER]), "length"
    )
    [call] = answer.message.tool_calls
    assert call.function.arguments == {"partial_json": '{"ci'}
    assert answer.done_reason == "length"


def test_formats_hold_the_answer(client):
    options = {"num_predict": 200, "seed": 4}
    whole = client.chat("builtin", MESSAGES, format=PARAMETERS, options=options)
    jsonschema.validate(json.loads(whole.message.content), PARAMETERS)
    streamed = client.chat("builtin", MESSAGES, format=PARAMETERS, options=options, stream=True)
    assert "".join(part.message.content for part in streamed) == whole.message.content
    prompt = MESSAGES[0]["content"]
    for raw in (False, True):
        plain = client.generate("builtin", prompt, format=PARAMETERS, raw=raw, options=options)
        jsonschema.validate(json.loads(plain.response), PARAMETERS)
    free = client.generate("builtin", "x", format="", options={"num_predict": 2})
    assert free.eval_count == 2


@pytest.fixture
def thinking(text):
    """A server whose template may be asked to think."""
    source = (
        "{{ messages[0]['content'] }}{% if enable_thinking is not false %}<think>\n{% endif %}"
        "{# </think> #}"
    )
    tokenizer, _, card = text
    with serving(ScriptedClient(), (tokenizer, ChatTemplate({"default": source}), card)) as running:
        yield running


def test_thinking_is_apart_from_the_answer(thinking):
    asking = ollama.Client(host=thinking.url, timeout=30)
    assert "thinking" in asking.show("builtin").capabilities
    thought = "Hm.\n</think>\n\nYes"
    for think in (None, True, "high"):
        request, answer = answered(
            thinking, thought, lambda t=think: asking.chat("builtin", HI, think=t)
        )
        assert shown(thinking, request).endswith("<think>\n")
        assert (answer.message.thinking, answer.message.content) == ("Hm.", "Yes")
    _, parts = answered(
        thinking, thought, lambda: list(asking.generate("builtin", "hi", think=True, stream=True))
    )
    assert "".join(part.thinking or "" for part in parts) == "Hm."
    assert "".join(part.response for part in parts) == "Yes"
    request, answer = answered(thinking, "Yes", lambda: asking.chat("builtin", HI, think=False))
    assert shown(thinking, request) == "hi"
    assert (answer.message.thinking, answer.message.content) == (None, "Yes")


# -- models, embeddings -------------------------------------------------------------------------


def test_what_is_told_of_the_models(asking, scripted):
    card = scripted.service.builder.card
    listed = asking.list().models
    assert [model.model for model in listed] == ["builtin:latest", "org/other:latest"]
    assert listed[0].modified_at == datetime.fromtimestamp(card.created, UTC)
    assert len(listed[0].digest) == 64
    assert listed[0].details.family == "llama"
    assert listed[0].details.parameter_size == "5.5M"
    assert listed[0].details.quantization_level == "F32"
    assert listed[0].size == card.weights.num_bytes
    for name in (listed[0].model, "builtin"):
        facts = asking.show(name)
        architecture = facts.modelinfo["general.architecture"]
        assert facts.modelinfo[f"{architecture}.context_length"] == card.max_model_len
        assert facts.modelinfo["general.basename"] == "builtin"
        assert facts.capabilities == ["completion", "tools"]
        assert "<|assistant|>" in facts.template
        assert facts.details == listed[0].details
    [running, _] = asking.ps().models
    assert (running.model, running.digest) == (listed[0].model, listed[0].digest)
    assert running.context_length == card.max_model_len
    assert running.expires_at > datetime.now(UTC)
    assert asking.pull("builtin").status == "success"
    with scripted.http() as http:
        version = http.get("/api/version").json()["version"]
        assert [int(part) for part in version.split(".")] >= [0, 6, 4]
        assert http.head("/").status_code == http.get("/").status_code == 200
        assert http.post("/api/show", json={"name": "builtin"}).status_code == 200
        # Names that the list gave are used on other routes as well.
        found = http.post("/tokenize", json={"model": listed[0].model, "prompt": "x"})
        assert found.status_code == 200


def test_vectors(client, real):
    limit = real.service.builder.card.max_model_len
    two = client.embed("builtin", ["a list", "a tuple"], dimensions=4)
    assert [len(vector) for vector in two.embeddings] == [4, 4]
    assert two.prompt_eval_count > 0
    one = client.embed("builtin", "a list")
    assert sum(x * x for x in one.embeddings[0]) == pytest.approx(1, abs=1e-4)
    assert client.embeddings("builtin", "a list").embedding == pytest.approx(one.embeddings[0])
    assert (
        client.embed("builtin", "").embeddings == client.embeddings("builtin", "").embedding == []
    )
    long = client.embed("builtin", "a " * 2 * limit)
    assert long.prompt_eval_count == limit - 1
    with pytest.raises(ollama.ResponseError, match="context is"):
        client.embed("builtin", "a " * 2 * limit, truncate=False)


# -- errors -------------------------------------------------------------------------------------


def test_errors_have_ollama_s_form(asking, scripted):
    def refused(ask: Any, status: int, match: str) -> None:
        with pytest.raises(ollama.ResponseError, match=match) as caught:
            ask()
        assert caught.value.status_code == status
        assert "{" not in caught.value.error

    refused(lambda: asking.chat("nope", HI), 404, "'nope' was not found")
    refused(lambda: asking.generate("nope"), 404, "not found")
    refused(lambda: asking.show("nope"), 404, "not found")
    refused(lambda: asking.pull("nope"), 404, "not found")
    refused(lambda: asking.chat("builtin", HI, think=True), 400, "does not support thinking")
    refused(lambda: asking.chat("builtin", HI, format={"type": "nothing"}), 400, "'format'")
    refused(lambda: asking.chat("builtin", HI, options={"temperature": -1}), 400, "temperature")
    refused(lambda: asking.delete("builtin"), 400, "no store of models")
    refused(lambda: asking.copy("builtin", "other"), 400, "no store of models")
    refused(lambda: asking.create("other", from_="builtin"), 400, "no store of models")
    long = [{"role": "user", "content": "a " * 4096}]
    refused(lambda: asking.chat("builtin", long), 400, "context is")
    with scripted.http() as http:
        for method, path, status in (("GET", "/api/nope", 404), ("GET", "/api/chat", 405)):
            answer = http.request(method, path)
            assert answer.status_code == status
            assert list(answer.json()) == ["error"]
            assert isinstance(answer.json()["error"], str)
        assert http.get("/apis").json()["error"]["code"] == "not_found"
    assert scripted.client.submitted.empty()


def test_what_is_ignored_is_named_and_strict_servers_refuse_it(scripted, text):
    message = {**HI[0], "own": {"id": 1}}
    body = {"model": "builtin", "messages": [message], "keep_alive": "5m", "stream": False}
    body |= {"options": {"num_ctx": 4096, "num_gpu": None, "repeat_last_n": 64}, "truncate": True}
    with scripted.http() as http:
        _, answer = answered(scripted, "x", lambda: http.post("/api/chat", json=body))
        named = "messages[].own, keep_alive, truncate, options.num_ctx, options.repeat_last_n"
        assert sorted(answer.headers["x-weft-ignored"].split(", ")) == sorted(named.split(", "))
        load = http.post("/api/generate", json={"model": "builtin", "keep_alive": "5m"})
        assert load.headers["x-weft-ignored"] == "keep_alive"
        plain = {
            "model": "builtin",
            "messages": HI,
            "keep_alive": -1,
            "options": {"num_predict": 5},
        }
        _, answer = answered(scripted, "x", lambda: http.post("/api/chat", json=plain))
        assert "x-weft-ignored" not in answer.headers
    with serving(ScriptedClient(), text, strict=True) as running, running.http() as http:
        refused = http.post("/api/chat", json=body)
        assert (refused.status_code, list(refused.json())) == (400, ["error"])


def test_an_error_within_a_stream(scripted, asking):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(list, asking.chat("builtin", HI, stream=True))
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, *ids_of(scripted, "Hello"))
        scripted.client.send(request, finish="cancelled")
        with pytest.raises(ollama.ResponseError, match="was cancelled"):
            future.result(10)


def test_keys_and_a_busy_engine(text):
    class Busy(ScriptedClient):
        def submit(self, *_: Any) -> None:
            raise EngineBusyError("The engine is busy.")

    with serving(Busy(), text, api_key=("secret",)) as running:
        with running.http() as http:
            for path in ("/api/version", "/api/tags", "/api/nope"):
                answer = http.get(path)
                assert answer.status_code == 401
            assert "API key" in http.get("/api/tags").json()["error"]
        bearer = {"authorization": "Bearer secret"}
        asking = ollama.Client(host=running.url, headers=bearer, timeout=30)
        assert asking.list().models
        with pytest.raises(ollama.ResponseError, match="busy") as caught:
            asking.chat("builtin", HI, stream=False)
        assert caught.value.status_code == EngineBusyError.http_status
