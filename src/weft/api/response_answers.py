"""Answers of ``/v1/responses``: the response object, and the events of a stream of it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import orjson
from msgspec import Raw, Struct

from weft.api.decoding import decode_body, kind_of
from weft.api.errors import describe_error
from weft.api.jobs import Job, now
from weft.api.logprobs import TokenTexts, chat_logprobs
from weft.api.response_body import FunctionTool, ResponseBody
from weft.api.turn import Change, Closed, Grown, Opened, Part, Turn
from weft.core.errors import WeftError
from weft.core.plan import Update
from weft.core.types import TokenLogprob
from weft.text import Tokenizer

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


class ResponseAnswer:
    """The response of one job, while it is made and when it is whole.

    Attributes:
        id: of the response.
    """

    def __init__(
        self, job: Job, body: ResponseBody, tokenizer: Tokenizer, texts: TokenTexts
    ) -> None:
        self.id = job.id
        self._job = job
        self._turn = Turn(job, tokenizer)
        self._texts = texts
        self._echoed = _echoed(body, job)
        self._completed_at: int | None = None

    @property
    def done(self) -> bool:
        return self._turn.done

    def output(self) -> list[dict[str, Any]]:
        """The items made so far."""
        return [self._item(part) for part in self._turn.parts]

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
            "output": [] if status == "in_progress" else self.output(),
            **self._echoed,
        }
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

    def _item_id(self, part: Part) -> str:
        prefix = "ctc" if part.name in self._job.custom_tools else _PREFIXES[part.kind]
        return f"{prefix}_{self.id.partition('_')[2]}{part.index:04x}"

    def _item(self, part: Part, status: str | None = None) -> dict[str, Any]:
        """The output item of a part; an item that is in progress has nothing in it."""
        empty = status == "in_progress"
        if status is None:
            last = part is self._turn.parts[-1]
            status = self._finished() if last else "completed"
        head = {"id": self._item_id(part), "status": status}
        if part.name in self._job.custom_tools:
            return {
                **head,
                "type": "custom_tool_call",
                "call_id": part.call_id,
                "name": part.name,
                "input": "" if empty else part.text,
            }
        if part.kind == "call":
            return {
                **head,
                "type": "function_call",
                "call_id": part.call_id,
                "name": part.name,
                "arguments": "" if empty else part.text,
            }
        content = [] if empty else [self._part(part)]
        if part.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _part(self, part: Part, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else part.text
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if empty else self._logprobs(part.logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

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

    _count = 0

    def push(self, updates: Seq[Update]) -> tuple[bytes, list[int]]:
        """Take updates in; return events, and ids that a stop string has ended.

        Raises as `Turn.push`.
        """
        changes, halted = self._turn.push(updates)
        return self._start() + b"".join(map(self._events, changes)), halted

    def last(self) -> bytes:
        """The event that has the whole response."""
        return self._event(self._finished(), response=self._response())

    def failed(self, error: WeftError) -> bytes:
        """The event that ends a response which cannot be completed."""
        status, body = describe_error(error)
        code = _ERROR_CODES.get(status, "server_error")
        shown = {"code": code, "message": body["error"]["message"]}
        return self._event("failed", response=self._response("failed", shown))

    def _start(self) -> bytes:
        if self._count:
            return b""
        created = self._event("created", response=self._response("in_progress"))
        return created + self._event("in_progress", response=self._response("in_progress"))

    def _events(self, change: Change) -> bytes:
        part = change.part
        at = {"output_index": part.index}
        inner = {"item_id": self._item_id(part), **at}
        if part.kind != "call":
            inner["content_index"] = 0
        if isinstance(change, Opened):
            return self._opened(part, at, inner)
        if isinstance(change, Closed):
            return self._closed(part, at, inner)
        return self._grown(change, inner)

    def _opened(self, part: Part, at: Mapping[str, Any], inner: Mapping[str, Any]) -> bytes:
        added = self._event("output_item.added", item=self._item(part, "in_progress"), **at)
        if part.kind == "call":
            return added
        return added + self._event("content_part.added", part=self._part(part, True), **inner)

    def _grown(self, change: Grown, inner: Mapping[str, Any]) -> bytes:
        kind = change.part.kind
        if change.part.name in self._job.custom_tools:
            return self._event("custom_tool_call_input.delta", delta=change.text, **inner)
        if kind == "call":
            return self._event("function_call_arguments.delta", delta=change.text, **inner)
        if kind == "reasoning":
            return self._event("reasoning_text.delta", delta=change.text, **inner)
        logprobs = _without_bytes(self._logprobs(change.logprobs))
        return self._event("output_text.delta", delta=change.text, logprobs=logprobs, **inner)

    def _closed(self, part: Part, at: Mapping[str, Any], inner: Mapping[str, Any]) -> bytes:
        if part.name in self._job.custom_tools:
            done = self._event("custom_tool_call_input.done", input=part.text, **inner)
        elif part.kind == "call":
            whole = {"arguments": part.text, "name": part.name}
            done = self._event("function_call_arguments.done", **whole, **inner)
        elif part.kind == "reasoning":
            done = self._event("reasoning_text.done", text=part.text, **inner)
        else:
            logprobs = _without_bytes(self._logprobs(part.logprobs))
            done = self._event("output_text.done", text=part.text, logprobs=logprobs, **inner)
        if part.kind != "call":
            done += self._event("content_part.done", part=self._part(part), **inner)
        return done + self._event("output_item.done", item=self._item(part), **at)

    def _event(self, event: str, /, **content: Any) -> bytes:
        kind = f"response.{event}"
        data = orjson.dumps({"type": kind, "sequence_number": self._count, **content})
        self._count += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


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


def _echoed(body: ResponseBody, job: Job) -> dict[str, Any]:
    """What a response repeats of its request, with the values that hold where it is silent."""
    sampling = job.requests[0].sampling
    reasoning = body.reasoning
    given = body.text.format if body.text is not None else None
    response = {
        "background": False,
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
