"""Server-sent events of ``/v1/responses``: live ones, and those replayed from a stored response."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import orjson

from weft.api.errors import describe_error
from weft.core.errors import WeftError

END = b"\n\n"  # of an event; JSON has no bare line breaks
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # and where their text is
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}

_SEARCH = "tool_search_call"  # a call whose arguments come whole, at its end

Cuts = Seq[Seq[Seq[int]]]  # of each part, its deltas: (characters, log probabilities)


class ResponseEvents:
    """Writes the events of one response, numbered from ``count``.

    Attributes:
        count: number of the next event.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def about(self, event: str, response: Mapping[str, Any]) -> bytes:
        """An event that shows the whole response: ``created``, ``completed`` and so on."""
        return self._event(event, response=response)

    def opened(self, index: int, item: Mapping[str, Any]) -> bytes:
        """An output item begins, empty."""
        added = self._event("output_item.added", output_index=index, item=_blank(item))
        if item["type"] in _CALLS or item["type"] == _SEARCH:
            return added
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        part: dict[str, Any] = {"type": kind, "text": ""}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        return added + self._event("content_part.added", part=part, **_place(index, item))

    def grown(
        self,
        index: int,
        item: Mapping[str, Any],
        text: str,
        logprobs: Seq[Mapping[str, Any]] = (),
    ) -> bytes:
        """An item, of which only type and id are looked at, has more text."""
        if item["type"] == _SEARCH:
            return b""
        place = _place(index, item)
        if item["type"] in _CALLS:
            name = f"{item['type']}_{_CALLS[item['type']]}"
            return self._event(f"{name}.delta", delta=text, **place)
        if item["type"] == "reasoning":
            return self._event("reasoning_text.delta", delta=text, **place)
        shown = _without_bytes(logprobs)
        return self._event("output_text.delta", delta=text, logprobs=shown, **place)

    def closed(self, index: int, item: Mapping[str, Any]) -> bytes:
        """An item is complete."""
        place = _place(index, item)
        if item["type"] == _SEARCH:
            done = b""
        elif item["type"] == "custom_tool_call":
            done = self._event("custom_tool_call_input.done", input=item["input"], **place)
        elif item["type"] == "function_call":
            whole = {"arguments": item["arguments"], "name": item["name"]}
            done = self._event("function_call_arguments.done", **whole, **place)
        else:
            part = item["content"][0]
            if item["type"] == "reasoning":
                done = self._event("reasoning_text.done", text=part["text"], **place)
            else:
                shown = _without_bytes(part["logprobs"])
                done = self._event("output_text.done", text=part["text"], logprobs=shown, **place)
            done += self._event("content_part.done", part=part, **place)
        return done + self._event("output_item.done", item=item, output_index=index)

    def _event(self, event: str, /, **content: Any) -> bytes:
        kind = f"response.{event}"
        data = orjson.dumps({"type": kind, "sequence_number": self.count, **content})
        lines = b"id: %d\nevent: %b\ndata: %b" % (self.count, kind.encode(), data)
        self.count += 1
        return lines + END


def replay(data: bytes, cuts: Cuts | None = None) -> bytes:
    """The events of a complete response, as they were when it was streamed.

    Args:
        data: the response as JSON.
        cuts: how its text came; None makes one delta of each part.
    """
    response = orjson.loads(data)
    events = ResponseEvents()
    begun = {name: value for name, value in response.items() if name != "usage"}
    begun |= {
        "completed_at": None, "status": "in_progress", "incomplete_details": None, "output": []
    }  # fmt: skip
    told = [events.about("created", begun), events.about("in_progress", begun)]
    for index, item in enumerate(response["output"]):
        told.append(events.opened(index, item))
        text, logprobs = _inside(item)
        for characters, scored in _of_part(cuts, index, len(text), len(logprobs)):
            told.append(events.grown(index, item, text[:characters], logprobs[:scored]))
            text, logprobs = text[characters:], logprobs[scored:]
        told.append(events.closed(index, item))
    told.append(events.about(response["status"], response))
    return b"".join(told)


def failure(data: bytes, number: int, error: WeftError) -> tuple[bytes, bytes]:
    """The last event of a stored response that no process resumes, and the response."""
    response = {**orjson.loads(data), "status": "failed", "error": shown_error(error)}
    return ResponseEvents(number).about("failed", response), orjson.dumps(response)


def shown_error(error: WeftError) -> dict[str, str]:
    """An error as a response shows it."""
    status, body = describe_error(error)
    code = _ERROR_CODES.get(status, "server_error")
    return {"code": code, "message": body["error"]["message"]}


def events_after(events: bytes, first: int, after: int) -> bytes:
    """Those of consecutive events, numbered from ``first``, that come after a number."""
    skipped = after + 1 - first
    if skipped <= 0:
        return events
    return b"".join(event + END for event in events.split(END)[skipped:-1])


def _of_part(cuts: Cuts | None, index: int, characters: int, scored: int) -> Iterable[Seq[int]]:
    if cuts is not None:
        return cuts[index]
    return [(characters, scored)] if characters else []


def _inside(item: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Text and log probabilities of an item."""
    if item["type"] == _SEARCH:
        return "", []
    if item["type"] in _CALLS:
        return item[_CALLS[item["type"]]], []
    part = item["content"][0]
    return part["text"], part.get("logprobs", [])


def _blank(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item that has just begun."""
    if item["type"] == _SEARCH:
        return {**item, "status": "in_progress", "arguments": {}}
    if item["type"] in _CALLS:
        return {**item, "status": "in_progress", _CALLS[item["type"]]: ""}
    return {**item, "status": "in_progress", "content": []}


def _place(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    place = {"item_id": item["id"], "output_index": index}
    return place if item["type"] in _CALLS else {**place, "content_index": 0}


def _without_bytes(logprobs: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Log probabilities as events have them."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]
            ],
        }
        for entry in logprobs
    ]
