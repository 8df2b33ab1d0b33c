"""Responses over HTTP: the `openai` client before an engine whose every step the test decides."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from scripted import ScriptedClient
from serving import serving

from live import eventually
from typed import unknown_fields
from weft.core.types import FinishReason

PATH = "/v1/responses"
HELLO = {"model": "builtin", "input": "hi"}


@pytest.fixture
def answering(text):
    """A server whose engine says the same two tokens to everything."""
    with serving(ScriptedClient([700, 701]), text) as running:
        yield running


def client_of(running: Any, key: str = "x") -> OpenAI:
    return OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


def prompt_of(running: Any, request: Any) -> str:
    return running.service.builder.tokenizer.decode(request.prompt, skip_special_tokens=False)


def test_a_conversation_goes_on(answering):
    said = answering.service.builder.tokenizer.decode([700, 701])
    with client_of(answering) as asking:
        first = asking.responses.create(**HELLO, instructions="Be kind.")
        second = asking.responses.create(
            model="builtin", input="more", previous_response_id=first.id
        )
    assert unknown_fields(first) == unknown_fields(second) == []
    assert first.output_text == said
    prompts = [prompt_of(answering, answering.client.submitted.get()) for _ in range(2)]
    assert "Be kind." in prompts[0]
    assert "Be kind." not in prompts[1]
    assert prompts[1].index("hi") < prompts[1].index(said) < prompts[1].index("more")
    assert second.previous_response_id == first.id


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "000000001" + "0" * 5000])
def test_pages_of_items_are_bounded(answering, limit):
    with client_of(answering) as asking, httpx.Client(base_url=answering.url) as http:
        number = asking.responses.create(**HELLO).id
        answer = http.get(f"{PATH}/{number}/input_items", params={"limit": limit})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def check_not_found(asking: OpenAI, number: str) -> None:
    for look in (
        asking.responses.retrieve,
        asking.responses.delete,
        asking.responses.input_items.list,
        asking.responses.cancel,
        lambda number: asking.responses.create(**HELLO, previous_response_id=number),
    ):
        with pytest.raises(NotFoundError):
            look(number)


def test_what_is_stored_can_be_looked_at_and_deleted(answering):
    with client_of(answering) as asking:
        response = asking.responses.create(**HELLO)
        assert asking.responses.retrieve(response.id) == response
        items = asking.responses.input_items.list(response.id)
        assert unknown_fields(list(items)) == []
        assert [item.content[0].text for item in items] == ["hi"]
        asking.responses.delete(response.id)
        check_not_found(asking, response.id)
        unstored = asking.responses.create(**HELLO, store=False)
        with pytest.raises(NotFoundError):
            asking.responses.retrieve(unstored.id)


def test_pages_of_input_items(answering):
    given = [{"role": "user", "content": str(i)} for i in range(5)]
    with answering.http() as http:
        number = http.post(PATH, json={**HELLO, "input": given}).json()["id"]

        def page(**query: Any) -> tuple[list[str], dict[str, Any]]:
            found = http.get(f"{PATH}/{number}/input_items", params=query).json()
            return [item["content"][0]["text"] for item in found["data"]], found

        assert page()[0] == ["4", "3", "2", "1", "0"]
        texts, found = page(order="asc", limit=2)
        assert (texts, found["has_more"]) == (["0", "1"], True)
        texts, found = page(order="asc", limit=3, after=found["last_id"])
        assert (texts, found["has_more"]) == (["2", "3", "4"], False)
        assert page(order="asc", after=found["last_id"])[0] == []
        for wrong in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
            answer = http.get(f"{PATH}/{number}/input_items", params=wrong)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(wrong))


def test_the_client_puts_a_stream_together(answering):
    with client_of(answering) as asking, asking.responses.stream(**HELLO) as stream:
        events = list(stream)
        response = stream.get_final_response()
        # The client adds fields of its own to the last event.
        assert [unknown_fields(event) for event in events[:-1]] == [[]] * (len(events) - 1)
        assert response.output_text == answering.service.builder.tokenizer.decode([700, 701])
        assert events[0].response.id == response.id
        assert asking.responses.retrieve(response.id).output_text == response.output_text


def test_a_client_that_leaves_frees_everything_and_nothing_is_stored(scripted):
    with ThreadPoolExecutor(1) as pool, scripted.http() as http:

        def read() -> str:
            with http.stream("POST", PATH, json={**HELLO, "stream": True}) as answer:
                line = next(line for line in answer.iter_lines() if line.startswith("data: "))
            return json.loads(line[6:])["response"]["id"]

        future = pool.submit(read)
        request = scripted.client.submitted.get(timeout=10)
        scripted.client.send(request, 700)
        number = future.result(10)
        cancelled = scripted.client.cancelled.get(timeout=10)
        assert cancelled == (request.id, FinishReason.CANCELLED)
        eventually(lambda: scripted.service.num_open == 0)
        assert http.get(f"{PATH}/{number}").status_code == 404


def events_of(http: httpx.Client, number: str, headers: Any = None, **query: Any) -> list[Any]:
    """The events of a stream of a stored response; each bears its number as its id."""
    query = {"stream": "true", **query}
    answer = http.get(f"{PATH}/{number}", params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return read_events(answer.text)


def read_events(text: str) -> list[Any]:
    lines = text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    ids = [int(line[4:]) for line in lines if line.startswith("id: ")]
    assert ids == [event["sequence_number"] for event in events]
    return events


def test_a_stored_stream_is_told_again(scripted):
    """With its events and numbers, from the one after which the client has none."""
    with ThreadPoolExecutor(1) as pool, scripted.http() as http:
        future = pool.submit(http.post, PATH, json={**HELLO, "stream": True})
        request = scripted.client.submitted.get(timeout=10)
        for token in range(700, 706):
            scripted.client.send(request, token)
            time.sleep(0.01)  # so that there may be several deltas
        scripted.client.send(request, finish="stop")
        events = read_events(future.result(10).text)
        number = events[0]["response"]["id"]
        assert events_of(http, number) == events
        assert events_of(http, number, starting_after=3) == events[4:]
        assert events_of(http, number, {"Last-Event-ID": "5"}, starting_after=3) == events[6:]
        assert events_of(http, number, {"Last-Event-ID": str(len(events))}) == []
        for query, headers in (
            ({"stream": "true", "starting_after": "x"}, {}),
            ({"stream": "true", "starting_after": "-2"}, {}),
            ({"stream": "true"}, {"Last-Event-ID": "9" * 5000}),
            ({"starting_after": "3"}, {}),
            ({"stream": "maybe"}, {}),
        ):
            assert http.get(f"{PATH}/{number}", params=query, headers=headers).status_code == 400


def test_what_was_not_streamed_is_told_in_one_piece(answering):
    with client_of(answering) as asking:
        response = asking.responses.create(**HELLO)
        events = list(asking.responses.retrieve(response.id, stream=True))
    assert [unknown_fields(event) for event in events] == [[]] * len(events)
    [delta] = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert delta == response.output_text
    assert events[-1].response == response


def test_what_cannot_be_done_is_said(answering):
    with client_of(answering) as asking:
        with pytest.raises(BadRequestError, match="stored"):
            asking.responses.create(**HELLO, background=True, store=False)
        response = asking.responses.create(**HELLO)
        with pytest.raises(BadRequestError, match="background"):
            asking.responses.cancel(response.id)
        retrieved = asking.responses.retrieve(response.id, include=["message.output_text.logprobs"])
        assert retrieved == response
        with pytest.raises(BadRequestError, match="secrets"):
            asking.responses.retrieve(response.id, include=["secrets"])  # type: ignore[list-item]


def test_tokens_are_counted_with_the_conversation_before(answering):
    with client_of(answering) as asking:
        first = asking.responses.create(**HELLO)
        more = {"model": "builtin", "input": "more", "previous_response_id": first.id}
        count = asking.responses.input_tokens.count(**more)
        assert unknown_fields(count) == []
        assert count.input_tokens == asking.responses.create(**more).usage.input_tokens


def test_one_key_cannot_find_what_is_another_s(text):
    keys = ("mine", "yours")
    with (
        serving(ScriptedClient([700]), text, api_key=keys) as running,
        client_of(running, "mine") as mine,
        client_of(running, "yours") as yours,
    ):
        response = mine.responses.create(**HELLO)
        assert mine.responses.retrieve(response.id).id == response.id
        check_not_found(yours, response.id)
        mine.responses.delete(response.id)


def test_responses_outlive_the_server(text, tmp_path):
    path = str(tmp_path / "responses.db")
    with (
        serving(ScriptedClient([700]), text, responses_db=path) as running,
        client_of(running) as asking,
    ):
        first = asking.responses.create(**HELLO)
    with (
        serving(ScriptedClient([700]), text, responses_db=path) as running,
        client_of(running) as asking,
    ):
        assert asking.responses.retrieve(first.id) == first
        asking.responses.create(model="builtin", input="more", previous_response_id=first.id)
        assert "hi" in prompt_of(running, running.client.submitted.get())


def test_several_request_planes_share_a_file_or_store_nothing(text, tmp_path):
    """Each of the two servers stands for one request plane of the same server."""
    with (
        serving(ScriptedClient([700]), text, frontends=2) as alone,
        client_of(alone) as asking,
    ):
        response = asking.responses.create(**HELLO)
        with pytest.raises(NotFoundError):
            asking.responses.retrieve(response.id)
        for wish in ({"store": True}, {"previous_response_id": response.id}, {"background": True}):
            with pytest.raises(BadRequestError, match="--responses-db"):
                asking.responses.create(**HELLO, **wish)
    shared = {"frontends": 2, "responses_db": str(tmp_path / "responses.db")}
    with (
        serving(ScriptedClient([700]), text, **shared) as one,
        serving(ScriptedClient([700]), text, **shared) as other,
        client_of(one) as asking_one,
        client_of(other) as asking_other,
    ):
        response = asking_one.responses.create(**HELLO)
        assert asking_other.responses.retrieve(response.id) == response
        more = asking_other.responses.create(**HELLO, previous_response_id=response.id)
        asking_one.responses.delete(more.id)
        with pytest.raises(NotFoundError):
            asking_other.responses.retrieve(more.id)


def test_errors_name_the_parameter(answering):
    def error(answer: httpx.Response, status: int, param: str | None) -> None:
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["param"] == param

    with answering.http() as http:
        error(http.post(PATH, json={"model": "builtin"}), 400, "input")
        error(http.post(PATH, content=b"["), 400, None)
        gone = {**HELLO, "previous_response_id": "resp_none"}
        error(http.post(PATH, json=gone), 404, "previous_response_id")
        error(http.get(f"{PATH}/resp_none"), 404, "response_id")
        error(http.put(f"{PATH}/resp_none"), 405, None)
        deep = b'{"input":' + b"[" * 5000 + b"]" * 5000 + b"}"
        assert http.post(PATH, content=deep).status_code == 400
