"""Answers of ``/v1/responses``: the response object, and the events of its stream."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import orjson
from msgspec import Raw, Struct

from weft.api.decoding import decode_body, kind_of
from weft.api.jobs import Job, ShownCall, now
from weft.api.logprobs import TokenTexts, chat_logprobs
from weft.api.response_body import ResponseBody
from weft.api.response_events import Cuts, ResponseEvents, shown_error
from weft.api.response_tools import FunctionTool
from weft.api.turn import Change, Closed, Opened, Part, Turn, arguments_object
from weft.core.errors import WeftError
from weft.core.plan import Update
from weft.core.types import TokenLogprob
from weft.text import Tokenizer

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}


class ResponseCancelledError(WeftError):
    """The client has cancelled a background response."""

    http_status = 409
    code = "response_cancelled"


class ResponseAnswer:
    """The response of one job, while it is made and when it is whole.

    Args:
        call_ids: ids that the first calls have already, where another process has begun.

    Attributes:
        id: of the response.
    """

    def __init__(
        self,
        job: Job,
        body: ResponseBody,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        call_ids: Iterable[str] = (),
    ) -> None:
        self.id = job.id
        self._job = job
        self._turn = Turn(job, tokenizer, call_ids)
        self._texts = texts
        self._echoed = _echoed(body, job)
        self._completed_at: int | None = None

    @property
    def done(self) -> bool:
        return self._turn.done

    def output(self) -> list[dict[str, Any]]:
        """The items made so far."""
        return [self._item(part) for part in self._turn.parts]

    def cuts(self) -> Cuts:
        """The pieces in which the text of each item came."""
        return [
            [(len(text), scored) for text, scored in zip(part.texts, part.scored, strict=True)]
            for part in self._turn.parts
        ]

    def call_ids(self) -> list[str]:
        """Ids of the calls made so far."""
        return [part.call_id for part in self._turn.parts if part.kind == "call"]

    def state(self, status: str, error: WeftError | None = None) -> dict[str, Any]:
        """The response while, or because, it is not complete."""
        shown = None if error is None or status == "cancelled" else shown_error(error)
        return self._response(status, shown)

    def body(self) -> bytes:
        """The response as JSON, once ``done``."""
        return orjson.dumps(self._response())

    def _finished(self) -> str:
        return "incomplete" if self._turn.finish_reason == "length" else "completed"

    def _response(self, status: str | None = None, error: Any = None) -> dict[str, Any]:
        """The response object; ``status`` is given while, or because, it is not complete."""
        whole = status is None
        status = status or self._finished()
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        if whole and self._completed_at is None:
            self._completed_at = now()
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self._job.created,
            "completed_at": self._completed_at if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": reason,
            "output": [] if status in ("queued", "in_progress") else self.output(),
            **self._echoed,
        }
        if status in ("failed", "cancelled") and response["output"]:
            response["output"][-1]["status"] = "incomplete"
        return {**response, "usage": self._usage()} if whole else response

    def _usage(self) -> dict[str, Any]:
        turn, prompt = self._turn, self._job.prompt_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": turn.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": turn.output_tokens,
            "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens()},
            "total_tokens": prompt + turn.output_tokens,
        }

    def _head(self, part: Part) -> dict[str, Any]:
        """Id and type of the output item of a part."""
        kind: str = "message" if part.kind == "text" else part.kind
        if part.kind == "call":
            kind = self._shown(part).kind
        number = f"{_PREFIXES[kind]}_{self.id.partition('_')[2]}{part.index:04x}"
        return {"id": number, "type": kind}

    def _shown(self, part: Part) -> ShownCall:
        """How the answer shows a call."""
        shown = self._job.shown_calls.get(part.name)
        if shown is not None:
            return shown
        custom = part.name in self._job.custom_tools
        return ShownCall("custom_tool_call" if custom else "function_call", part.name)

    def _item(self, part: Part, status: str | None = None) -> dict[str, Any]:
        """The output item of a part; an item in progress is empty."""
        empty = status == "in_progress"
        if status is None:
            last = part is self._turn.parts[-1]
            status = self._finished() if last else "completed"
        head = {**self._head(part), "status": status}
        if part.kind == "call":
            return {**head, "call_id": part.call_id, **self._call(part, empty)}
        content = [] if empty else [self._part(part)]
        if part.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def _call(self, part: Part, empty: bool) -> dict[str, Any]:
        shown = self._shown(part)
        if shown.kind == "tool_search_call":
            arguments = {} if empty else arguments_object(part.text)
            return {"execution": "client", "arguments": arguments}
        named = {"name": shown.name}
        if shown.namespace is not None:
            named["namespace"] = shown.namespace
        given = "input" if shown.kind == "custom_tool_call" else "arguments"
        return {**named, given: "" if empty else part.text}

    def _part(self, part: Part) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": part.text}
        logprobs = self._logprobs(part.logprobs)
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, logprobs: Seq[TokenLogprob]) -> list[dict[str, Any]]:
        if not self._job.logprobs:
            return []
        entries: list[dict[str, Any]] = chat_logprobs(logprobs, self._texts)["content"]
        return entries


class ResponseCollector(ResponseAnswer):
    """Gathers the updates of a job until its response is whole."""

    def push(self, updates: Seq[Update]) -> list[int]:
        """Take updates in; return ids that a stop string has ended. Raises as `Turn.push`."""
        return self._turn.push(updates)[1]


class ResponseWriter(ResponseAnswer):
    """Writes the events of one response."""

    def __init__(
        self,
        job: Job,
        body: ResponseBody,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        call_ids: Iterable[str] = (),
    ) -> None:
        super().__init__(job, body, tokenizer, texts, call_ids)
        self._events = ResponseEvents()
        self._begun = False

    @property
    def count(self) -> int:
        """Events so far."""
        return self._events.count

    def queued(self) -> bytes:
        """The events of a background response before the engine has begun it."""
        waiting = self.state("queued")
        return self._events.about("created", waiting) + self._events.about("queued", waiting)

    def push(self, updates: Seq[Update]) -> tuple[bytes, list[int]]:
        """Take updates in; return events, and ids that a stop string has ended.

        Raises as `Turn.push`.
        """
        changes, halted = self._turn.push(updates)
        return self._start() + b"".join(map(self._event, changes)), halted

    def last(self) -> bytes:
        """The event that has the whole response."""
        return self._events.about(self._finished(), self._response())

    def failed(self, error: WeftError) -> bytes:
        """The event that ends a response which cannot be completed."""
        return self._events.about("failed", self.state("failed", error))

    def ended(self, error: WeftError | None) -> tuple[bytes, bytes]:
        """The last event and the response itself: complete, or ended by an error."""
        if error is None:
            return self.last(), self.body()
        status = "cancelled" if isinstance(error, ResponseCancelledError) else "failed"
        response = self.state(status, error)
        return self._events.about(status, response), orjson.dumps(response)

    def _start(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        going_on = self.state("in_progress")
        created = b"" if self.count else self._events.about("created", going_on)
        return created + self._events.about("in_progress", going_on)

    def _event(self, change: Change) -> bytes:
        part = change.part
        if isinstance(change, Opened):
            return self._events.opened(part.index, self._item(part, "in_progress"))
        if isinstance(change, Closed):
            return self._events.closed(part.index, self._item(part))
        logprobs = self._logprobs(change.logprobs)
        return self._events.grown(part.index, self._head(part), change.text, logprobs)


def _echoed(body: ResponseBody, job: Job) -> dict[str, Any]:
    """Request fields that a response repeats, with the defaults of unset ones."""
    sampling = job.requests[0].sampling
    reasoning = body.reasoning
    given = body.text.format if body.text is not None else None
    response = {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": job.model,
        "parallel_tool_calls": _parallel(body),
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "service_tier": job.service_tier or "default",
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"} if given is None else _shown(given)},
        "tool_choice": _choice(body),
        "tools": [_shown_tool(raw) for raw in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
    }
    names = ("prompt_cache_key", "safety_identifier", "user")
    return response | {n: value for n in names if (value := getattr(body, n)) is not None}


def _parallel(body: ResponseBody) -> bool:
    return bytes(body.parallel_tool_calls) != b"false"


def _choice(body: ResponseBody) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return _shown(choice)


def _shown_tool(raw: Raw) -> Any:
    """A tool as it was given; a function has all that clients look for."""
    if kind_of(raw, "tools") != "function":
        return orjson.Fragment(bytes(raw))
    return {"parameters": None, "strict": None, **_shown(decode_body(FunctionTool, raw, "tools"))}


def _shown(value: Struct) -> dict[str, Any]:
    """The fields of an object that were given; parts that were kept as JSON go out as they came."""
    shown = {}
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if isinstance(field, Raw):
            if bytes(field) != b"null":
                shown[name] = orjson.Fragment(bytes(field))
        elif field is not None:
            shown[name] = _fragments(field)
    return shown


def _fragments(value: Any) -> Any:
    if isinstance(value, list):
        return [orjson.Fragment(msgspec.json.encode(item)) for item in value]
    return value
