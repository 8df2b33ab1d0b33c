"""Background responses: without a connection, resumed, cancelled, and taken up by another plane."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI, RateLimitError
from scripted import ScriptedClient
from serving import Running, serving

from live import eventually
from typed import unknown_fields
from weft.core.errors import EngineBusyError
from weft.core.plan import Update
from weft.core.types import FinishReason, Request
from weft.server import background, service
from weft.server.response_store import ResponseStore, Stored, StoreError
from weft.server.run_store import RunStore

PATH = "/v1/responses"
HELLO = {"model": "builtin", "input": "hi", "background": True}


def client_of(running: Any, key: str = "x") -> OpenAI:
    return OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


def text_of(running: Running, *tokens: int) -> str:
    return running.service.builder.tokenizer.decode(list(tokens))


def status_of(asking: OpenAI, number: str) -> str | None:
    return asking.responses.retrieve(number).status


def events_of(running: Running, number: str, after: int = -1, **headers: str) -> list[Any]:
    """The events after a number, until the stream ends."""
    query = {"stream": "true"} if after < 0 else {"stream": "true", "starting_after": str(after)}
    with running.http() as http:
        answer = http.get(f"{PATH}/{number}", params=query, headers=headers)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return read_events(answer.text)


def read_events(text: str) -> list[Any]:
    lines = text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    ids = [int(line[4:]) for line in lines if line.startswith("id: ")]
    assert ids == [event["sequence_number"] for event in events]
    return events


def wait_for_text(running: Running, number: str, text: str) -> list[Any]:
    """Follow a response until it has said something; the events so far."""
    events: list[Any] = []
    with running.http() as http, http.stream("GET", f"{PATH}/{number}?stream=true") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if said(events) == text:
                    return events
    raise AssertionError("the stream has ended")


def said(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))


def test_a_response_is_made_without_a_connection(scripted):
    with client_of(scripted) as asking:
        response = asking.responses.create(**HELLO)
        assert unknown_fields(response) == []
        assert (response.status, response.background, response.output) == ("queued", True, [])
        assert asking.responses.retrieve(response.id) == response
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, 700)
        eventually(lambda: status_of(asking, response.id) == "in_progress")
        with pytest.raises(BadRequestError, match="not complete"):
            asking.responses.create(**HELLO, previous_response_id=response.id)
        scripted.client.send(request, 701, finish="stop")
        eventually(lambda: status_of(asking, response.id) == "completed")
        whole = asking.responses.retrieve(response.id)
        assert unknown_fields(whole) == []
        assert whole.output_text == text_of(scripted, 700, 701)
        assert whole.usage is not None
        assert whole.usage.output_tokens == 2
        [item] = asking.responses.input_items.list(response.id)
        assert item.content[0].text == "hi"
        asking.responses.create(**HELLO, previous_response_id=response.id)
        prompt = scripted.client.submitted.get(timeout=10).prompt
        assert whole.output_text in scripted.service.builder.tokenizer.decode(prompt)


def test_a_stream_that_was_left_is_resumed(scripted):
    """Nothing is cancelled, and the client gets exactly what it has missed."""
    with ThreadPoolExecutor(1) as pool, scripted.http() as http:

        def begin() -> list[Any]:
            """Read up to the first text, and leave."""
            got = []
            with http.stream("POST", PATH, json={**HELLO, "stream": True}) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        got.append(json.loads(line[6:]))
                        if "delta" in got[-1]:
                            return got
            raise AssertionError("the stream has ended")

        future = pool.submit(begin)
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, 700)
        seen = future.result(10)
        assert [event["type"] for event in seen[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        number = seen[0]["response"]["id"]
        rest = pool.submit(events_of, scripted, number, seen[-1]["sequence_number"])
        scripted.client.send(request, 701)
        wait_for_text(scripted, number, text_of(scripted, 700, 701))
        scripted.client.send(request, 702, finish="stop")
        whole = events_of(scripted, number)
        assert seen + rest.result(10) == whole
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert said(whole) == text_of(scripted, 700, 701, 702)
        for last in range(len(whole) + 1):
            assert events_of(scripted, number, last) == whole[last + 1 :]
        assert events_of(scripted, number, 1, **{"Last-Event-ID": "4"}) == whole[5:]
    assert scripted.client.cancelled.empty()


def test_characters_come_in_parts(scripted):
    """Tokens that make no text yet are kept all the same."""
    builder = scripted.service.builder
    parts = builder.tokenizer.encode("a \N{SLIGHTLY SMILING FACE}", add_special_tokens=False)
    assert len(parts) > 4
    with client_of(scripted) as asking:
        response = asking.responses.create(**HELLO)
        request = scripted.client.submitted.get(timeout=10)
        for token in parts:
            scripted.client.send(request, token)
            time.sleep(2 * background.KEEP_EVERY_S)  # so that each one is kept by itself
        scripted.client.send(request, finish="stop")
        eventually(lambda: status_of(asking, response.id) in ("completed", "failed"))
        whole = asking.responses.retrieve(response.id)
        assert whole.output_text == "a \N{SLIGHTLY SMILING FACE}"
        assert said(events_of(scripted, response.id)) == whole.output_text


def test_the_client_library_resumes(scripted):
    with client_of(scripted) as asking:
        response = asking.responses.create(**HELLO)
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, 700, 701, finish="stop")
        events = list(asking.responses.retrieve(response.id, stream=True))
        assert [unknown_fields(event) for event in events] == [[]] * len(events)
        some = asking.responses.retrieve(response.id, stream=True, starting_after=3)
        assert list(some) == events[4:]
        assert events[-1].response == asking.responses.retrieve(response.id)


def test_a_response_can_be_cancelled(scripted):
    with client_of(scripted) as asking:
        response = asking.responses.create(**HELLO)
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, 700)
        wait_for_text(scripted, response.id, text_of(scripted, 700))
        cancelled = asking.responses.cancel(response.id)
        assert unknown_fields(cancelled) == []
        assert cancelled.status == "cancelled"
        assert cancelled.output_text == text_of(scripted, 700)
        assert scripted.client.cancelled.get(timeout=10) == (request.id, FinishReason.CANCELLED)
        assert asking.responses.cancel(response.id) == cancelled
        assert events_of(scripted, response.id)[-1]["type"] == "response.cancelled"
        eventually(lambda: scripted.service.num_open == 0)


def test_a_response_that_is_deleted_is_not_made_any_more(scripted):
    with client_of(scripted) as asking, scripted.http() as http:
        response = asking.responses.create(**HELLO)
        request = scripted.client.submitted.get(timeout=10)
        with http.stream("GET", f"{PATH}/{response.id}?stream=true") as following:
            lines = following.iter_lines()
            next(lines)
            asking.responses.delete(response.id)
            assert scripted.client.cancelled.get(timeout=10) == (request.id, FinishReason.CANCELLED)
            assert len([line for line in lines if line.startswith("data: ")]) == 2
        with pytest.raises(NotFoundError):
            asking.responses.retrieve(response.id)
        eventually(lambda: scripted.service.num_open == 0)


def test_errors_and_deadlines_fail_a_response(scripted):
    with client_of(scripted) as asking:
        broken, late = (
            asking.responses.create(**HELLO),
            asking.responses.create(**HELLO, extra_body={"timeout": 0.1}),
        )
        request = scripted.client.submitted.get(timeout=10)
        error = EngineBusyError("No, after all.")
        end = Update(request.id, None, finish=FinishReason.ERROR, error=error)
        scripted.client.sinks[request.id]([end])
        for response, code in ((broken, "rate_limit_exceeded"), (late, "server_error")):
            eventually(lambda number=response.id: status_of(asking, number) == "failed")
            failed = asking.responses.retrieve(response.id)
            assert failed.error is not None
            assert failed.error.code == code
            last = events_of(scripted, response.id)[-1]
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")


class BusyClient(ScriptedClient):
    """Takes nothing at first."""

    left = 3

    def submit(self, requests: Any, sink: Any) -> None:
        self.left -= 1
        if self.left >= 0:
            raise EngineBusyError("Full.")
        super().submit(requests, sink)


def test_a_response_waits_for_a_busy_engine(text, monkeypatch):
    monkeypatch.setattr(background, "RETRY_S", 0.01)
    with serving(BusyClient([700]), text) as running, client_of(running) as asking:
        response = asking.responses.create(**HELLO)
        assert response.status == "queued"
        eventually(lambda: status_of(asking, response.id) == "completed")


def test_the_deadline_runs_while_the_engine_is_busy(text):
    client = BusyClient()
    client.left = 10**9
    with serving(client, text) as running, client_of(running) as asking:
        response = asking.responses.create(**HELLO, extra_body={"timeout": 0.3})
        eventually(lambda: status_of(asking, response.id) == "failed")
        failed = asking.responses.retrieve(response.id)
        assert failed.error is not None
        assert "time that this request had is over" in failed.error.message
        eventually(lambda: running.service.num_open == 0)


def test_a_deadline_is_not_checked_twice(text, tmp_path, monkeypatch):
    """What is left of one that was right may be outside of what a request may ask for."""
    with shared(tmp_path, text, ScriptedClient()) as one, client_of(one) as asking:
        response = asking.responses.create(**HELLO, extra_body={"timeout": 300})
        one.client.submitted.get(timeout=10)
    monkeypatch.setattr(service, "LEAST_TIMEOUT_S", 0.5)
    options = {"max_request_timeout_s": 0.2}
    with shared(tmp_path, text, ScriptedClient([700]), **options) as one, client_of(one) as asking:
        eventually(lambda: status_of(asking, response.id) not in ("queued", "in_progress"))
        assert status_of(asking, response.id) == "completed"


class Failing:
    """Lets a method of the store fail while ``on`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.on = threading.Event()
        self.count = 0
        work = getattr(RunStore, name)

        async def call(*given: Any, **more: Any) -> Any:
            if self.on.is_set():
                self.count += 1
                raise StoreError("database is locked")
            return await work(*given, **more)

        monkeypatch.setattr(RunStore, name, call)


def test_a_stream_outlasts_a_store_that_fails_for_a_while(scripted, monkeypatch):
    reads = Failing(monkeypatch, "events")
    with client_of(scripted) as asking, ThreadPoolExecutor(1) as pool:
        response = asking.responses.create(**HELLO)
        request = scripted.client.submitted.get(timeout=10)
        reads.on.set()
        following = pool.submit(events_of, scripted, response.id)
        eventually(lambda: reads.count > 1)
        reads.on.clear()
        scripted.client.send(request, 700)
        wait_for_text(scripted, response.id, text_of(scripted, 700))
        reads.on.set()
        eventually(lambda: reads.count > 3)
        reads.on.clear()
        scripted.client.send(request, 701, finish="stop")
        assert said(following.result(30)) == text_of(scripted, 700, 701)


def test_a_store_that_keeps_failing_ends_a_stream(scripted, monkeypatch):
    """Quietly where it has begun, so that the client comes back; else with an error."""
    reads = Failing(monkeypatch, "events")
    with client_of(scripted) as asking, scripted.http() as http:
        response = asking.responses.create(**HELLO)
        path = f"{PATH}/{response.id}?stream=true"
        with http.stream("GET", path) as following:
            lines = following.iter_lines()
            next(lines)
            monkeypatch.setattr(background, "PATIENCE_S", 0.2)
            reads.on.set()
            assert len([line for line in lines if line.startswith("data: ")]) == 2
        answer = http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


def test_nothing_is_followed_that_was_just_deleted(scripted, monkeypatch):
    """The answer is 404, not a stream that ends at once."""
    load = ResponseStore.load

    async def delete(store: ResponseStore, owner: bytes, number: str) -> Stored:
        stored = await load(store, owner, number)
        await store.delete(owner, number)
        return stored

    with client_of(scripted) as asking:
        response = asking.responses.create(**HELLO)
        monkeypatch.setattr(ResponseStore, "load", delete)
        with pytest.raises(NotFoundError):
            asking.responses.retrieve(response.id, stream=True)


@pytest.mark.parametrize("name", ["append", "finish"])
def test_a_store_that_fails_for_a_while_fails_no_response(scripted, monkeypatch, name):
    """What could not be kept is computed once more."""
    monkeypatch.setattr(background, "STORE_PAUSE_S", 0.1)
    failing = Failing(monkeypatch, name)
    with client_of(scripted) as asking:
        response = asking.responses.create(**HELLO)
        failing.on.set()
        finish = {"append": None, "finish": "stop"}[name]
        scripted.client.send(scripted.client.submitted.get(timeout=10), 700, finish=finish)
        eventually(lambda: failing.count > 0)
        failing.on.clear()
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, 700, 701, finish="stop")
        eventually(lambda: status_of(asking, response.id) == "completed")
        whole = asking.responses.retrieve(response.id)
        assert whole.output_text == text_of(scripted, 700, 701)
        assert said(events_of(scripted, response.id)) == whole.output_text


def test_a_store_that_cannot_be_looked_at_fills_no_log(text, monkeypatch, caplog):
    monkeypatch.setattr(background, "LOOK_EVERY_S", 0.01)
    look = Failing(monkeypatch, "look")
    look.on.set()
    with serving(ScriptedClient(), text):
        eventually(lambda: look.count > 30)
    lines = [record for record in caplog.records if "looked after" in record.message]
    assert 1 <= len(lines) <= 3  # one a server: those of other tests may be there


@pytest.fixture
def keyed(text) -> Iterator[Running]:
    """A server with two keys, which takes three responses, and one of each key."""
    limits = {"max_background_responses": 2, "max_requests_per_key": 1}
    keys = ("mine", "yours", "theirs")
    with serving(ScriptedClient(), text, api_key=keys, drain_timeout_s=0.5, **limits) as running:
        yield running


def test_background_responses_are_bounded(keyed):
    with (
        client_of(keyed, "mine") as mine,
        client_of(keyed, "yours") as yours,
        client_of(keyed, "theirs") as theirs,
    ):
        first = mine.responses.create(**HELLO)
        with pytest.raises(RateLimitError, match="key"):
            mine.responses.create(**HELLO)
        yours.responses.create(**HELLO)
        with pytest.raises(RateLimitError, match="server"):
            theirs.responses.create(**HELLO)
        mine.responses.cancel(first.id)
        theirs.responses.create(**HELLO)


def test_one_key_cannot_reach_another_s(keyed):
    with client_of(keyed, "mine") as mine, client_of(keyed, "yours") as yours:
        response = mine.responses.create(**HELLO)
        for look in (
            lambda: yours.responses.retrieve(response.id, stream=True),
            lambda: yours.responses.cancel(response.id),
            lambda: yours.responses.delete(response.id),
        ):
            with pytest.raises(NotFoundError):
                look()
        assert status_of(mine, response.id) == "queued"


def test_what_is_kept_of_one_response_is_bounded(text):
    with (
        serving(ScriptedClient(), text, max_responses_bytes=40_000) as running,
        client_of(running) as asking,
    ):
        response = asking.responses.create(**HELLO)
        request = running.client.submitted.get(timeout=10)
        count = 0
        while status_of(asking, response.id) != "failed":
            running.client.send(request, 700 + count % 1000)
            count += 1
            assert count < 5000
        failed = asking.responses.retrieve(response.id)
        assert failed.error is not None
        assert "5000 bytes" in failed.error.message


# -- several planes: two servers that share a file stand for two request planes of one ------------


def shared(path: Any, text: Any, client: ScriptedClient, **options: Any) -> Any:
    """A request plane that leaves what is open at once when it is told to end."""
    options = {"drain_timeout_s": 0.0, "frontends": 2, **options}
    return serving(client, text, responses_db=str(path / "responses.db"), **options)


def test_any_plane_answers_for_a_response(text, tmp_path):
    with (
        shared(tmp_path, text, ScriptedClient()) as one,
        shared(tmp_path, text, ScriptedClient()) as other,
        ThreadPoolExecutor(1) as pool,
        client_of(one) as asking_one,
        client_of(other) as asking_other,
    ):
        response = asking_one.responses.create(**HELLO)
        request = one.client.submitted.get(timeout=10)
        following = pool.submit(events_of, other, response.id)
        one.client.send(request, 700)
        wait_for_text(other, response.id, text_of(one, 700))
        cancelled = asking_other.responses.cancel(response.id)
        assert cancelled.status == "cancelled"
        assert one.client.cancelled.get(timeout=10) == (request.id, FinishReason.CANCELLED)
        assert following.result(10) == events_of(one, response.id)
        assert other.client.submitted.empty()


def plain(request: Request) -> tuple[Any, ...]:
    """What the engine computes from."""
    return request.prompt, request.sampling, request.service_class, request.cache_salt


@pytest.mark.parametrize("told", [0, 2])
def test_another_plane_goes_on(text, tmp_path, told):
    """It gives the engine what was kept as output; the client sees one stream."""
    body = {**HELLO, "max_output_tokens": 9, "temperature": 1.0, "cache_salt": "salt"}
    keys = {"api_key": ("mine",)}
    with (
        shared(tmp_path, text, ScriptedClient(), **keys) as other,
        httpx.Client(headers={"authorization": "Bearer mine"}) as http,
    ):
        with shared(tmp_path, text, ScriptedClient(), **keys) as one:
            number = http.post(f"{one.url}{PATH}", json=body).json()["id"]
            first = one.client.submitted.get(timeout=10)
            tokens = list(range(700, 700 + told))
            for token in tokens:
                one.client.send(first, token)

            def kept() -> str:
                query = {"stream": "true"}
                with http.stream("GET", f"{other.url}{PATH}/{number}", params=query) as answer:
                    events = []
                    for line in answer.iter_lines():
                        if line.startswith("data: "):
                            events.append(json.loads(line[6:]))
                        if said(events) == text_of(one, *tokens):
                            return said(events)
                raise AssertionError("the stream has ended")

            assert kept() == text_of(one, *tokens)
        second = other.client.submitted.get(timeout=10)
        assert plain(second) == plain(first)
        assert second.sampling.seed is not None
        assert second.output == tuple(tokens)
        other.client.send(second, 710, 711, finish="stop")
        answer = http.get(f"{other.url}{PATH}/{number}", params={"stream": "true"})
        events = read_events(answer.text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert said(events) == text_of(other, *tokens, 710, 711)
        assert events[-1]["response"]["status"] == "completed"
        assert events[-1]["response"]["usage"]["output_tokens"] == told + 2
        assert http.get(f"{other.url}{PATH}/{number}").json() == events[-1]["response"]


def test_the_next_start_goes_on(text, tmp_path):
    with shared(tmp_path, text, ScriptedClient()) as one, client_of(one) as asking:
        response = asking.responses.create(**HELLO)
        one.client.send(one.client.submitted.get(timeout=10), 700)
        wait_for_text(one, response.id, text_of(one, 700))
    with shared(tmp_path, text, ScriptedClient()) as one, client_of(one) as asking:
        request = one.client.submitted.get(timeout=10)
        assert request.output == (700,)
        one.client.send(request, 701, finish="stop")
        eventually(lambda: status_of(asking, response.id) == "completed")
        assert asking.responses.retrieve(response.id).output_text == text_of(one, 700, 701)
