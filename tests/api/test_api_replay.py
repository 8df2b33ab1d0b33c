"""Replayed responses: from stored ones, and by a process that resumes for a dead one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from weft.api import Builder, TokenTexts, decode_body
from weft.api.response_answers import ResponseCancelledError, ResponseCollector, ResponseWriter
from weft.api.response_body import ResponseBody, response_job
from weft.api.response_events import END, events_after, failure, replay
from weft.api.response_items import read_items
from weft.core.errors import EngineDeadError
from weft.core.plan import Update
from weft.core.types import FinishReason, TokenLogprob
from weft.text.dialect import Dialect

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, "é"]}}\n</tool_call>'
TURN = f"<think>Hm, the tree.</think>I look.{CALL}{CALL}"
SCHEMA = {"type": "object", "properties": {"at": {}}}


@pytest.fixture(scope="module")
def thinking(builder):
    """The packaged model's builder, as if its turns could think."""
    return Builder(
        builder.tokenizer,
        builder.chat_template,
        builder.card,
        dialect=Dialect.named("hermes", "think"),
    )


def updates_of(job: Any, builder: Any, text: str, finish: str = "stop") -> list[Update]:
    """One update a token, each with a log probability, and the end."""
    number = job.requests[0].id
    updates = [
        Update(number, token, TokenLogprob(token, -0.5, 1, ((token, -0.5), (9, -3.0))))
        for token in builder.tokenizer.encode(text, add_special_tokens=False)
    ]
    return [*updates, Update(number, None, finish=FinishReason(finish))]


def events_in(data: bytes) -> list[dict[str, Any]]:
    lines = data.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


class Making:
    """A response in the making."""

    def __init__(self, builder: Any, **fields: Any) -> None:
        tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
        body = {"model": "builtin", "input": "hi", "tools": tools, **fields}
        self.body = decode_body(ResponseBody, json.dumps(body).encode())
        self.job = response_job(self.body, read_items(self.body.input), builder)
        self._given = (builder.tokenizer, TokenTexts(builder.tokenizer))

    def writer(self, *more: Any) -> ResponseWriter:
        return ResponseWriter(self.job, self.body, *self._given, *more)

    def collector(self) -> ResponseCollector:
        return ResponseCollector(self.job, self.body, *self._given)


def parts(updates: list[Update], size: int) -> Iterator[list[Update]]:
    return (updates[at : at + size] for at in range(0, len(updates), size))


SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("turn", [TURN, "Plain, and naïve \N{SLIGHTLY SMILING FACE}.", CALL, ""])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stored_response_is_told_as_it_was_streamed(thinking, size, turn, finish):
    making = Making(thinking, **SCORED)
    writer = making.writer()
    updates = updates_of(making.job, thinking, turn, finish)
    told = b"".join(writer.push(own)[0] for own in parts(updates, size)) + writer.last()
    cuts = json.loads(json.dumps(writer.cuts()))
    assert events_in(replay(writer.body(), cuts)) == events_in(told)


def test_a_response_that_was_not_streamed_is_told_in_whole_parts(thinking, valid):
    making = Making(thinking)
    collector = making.collector()
    collector.push(updates_of(making.job, thinking, TURN))
    events = events_in(replay(collector.body()))
    for event in events:
        valid("ResponseStreamEvent", event)
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert deltas == ["Hm, the tree.", "I look.", '{"at": [1, "é"]}', '{"at": [1, "é"]}']
    assert events[-1]["response"] == json.loads(collector.body())


@pytest.mark.parametrize("size", [1, 3])
def test_a_response_goes_on_in_another_process(thinking, size):
    """Wherever the first one stops, what the second one tells follows."""
    making = Making(thinking, **SCORED)
    whole = list(parts(updates_of(making.job, thinking, TURN), size))
    for cut in range(0, len(whole), 5):
        first = making.writer()
        told = first.queued() + b"".join(first.push(own)[0] for own in whole[:cut])
        second = making.writer(first.call_ids())
        again = second.queued() + b"".join(second.push(own)[0] for own in whole[:cut])
        assert (len(again), second.count) == (len(told), first.count)
        rest = b"".join(second.push(own)[0] for own in whole[cut:])
        expected = b"".join(first.push(own)[0] for own in whole[cut:])
        assert without_ids(rest) == without_ids(expected)


def without_ids(events: bytes) -> list[dict[str, Any]]:
    """Events, but for the ids of calls."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items() if name != "call_id"}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    return [plain(event) for event in events_in(events)]


def test_calls_keep_their_ids(thinking):
    making = Making(thinking)
    updates = updates_of(making.job, thinking, TURN)
    first = making.writer()
    first.push(updates)
    second = making.writer(first.call_ids()[:1])
    second.push(updates)
    assert len(first.call_ids()) == 2
    assert second.call_ids()[0] == first.call_ids()[0]
    assert second.call_ids()[1] != first.call_ids()[1]


def test_a_background_response_waits_first(thinking, valid):
    making = Making(thinking, background=True)
    writer = making.writer()
    updates = updates_of(making.job, thinking, "Well.")
    data = writer.queued() + writer.push(updates)[0] + writer.last()
    events = events_in(data)
    for event in events:
        valid("ResponseStreamEvent", event)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    states = [event["response"]["status"] for event in events if "response" in event]
    assert states == ["queued", "queued", "in_progress", "completed"]
    assert all(event["response"]["background"] for event in events if "response" in event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("error", "status"),
    [(ResponseCancelledError("Enough."), "cancelled"), (EngineDeadError("Gone."), "failed")],
)
def test_what_was_made_stays_when_a_response_ends_early(thinking, valid, error, status):
    making = Making(thinking, background=True)
    writer = making.writer()
    writer.push(updates_of(making.job, thinking, "one two")[:-1])
    event, body = writer.ended(error)
    response = json.loads(body)
    valid("Response", response)
    assert (response["status"], response["output"][0]["status"]) == (status, "incomplete")
    assert (response["error"] is None) == (status == "cancelled")
    assert events_in(event)[0]["response"] == response


def test_a_response_that_nobody_goes_on_with_fails(thinking, valid):
    making = Making(thinking, background=True)
    waiting = orjson.dumps(making.writer().state("queued"))
    event, body = failure(waiting, 7, EngineDeadError("Gone."))
    [shown] = events_in(event)
    valid("ResponseFailedEvent", shown)
    assert (shown["sequence_number"], shown["response"]) == (7, json.loads(body))
    assert shown["response"]["error"] == {"code": "server_error", "message": "Gone."}


@pytest.mark.parametrize("after", range(-1, 9))
def test_events_after_a_number(after):
    events = b"".join(b"id: %d" % number + END for number in range(3, 7))
    wanted = b"".join(b"id: %d" % number + END for number in range(max(3, after + 1), 7))
    assert events_after(events, 3, after) == wanted
