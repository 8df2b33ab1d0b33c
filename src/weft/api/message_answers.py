"""Answers of Anthropic's ``/v1/messages``: the whole message, its events, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import orjson

from weft.api.errors import describe_error
from weft.api.jobs import Job
from weft.api.turn import Change, Closed, Grown, Opened, Part, Turn, arguments_object
from weft.core.errors import WeftError
from weft.core.plan import Update
from weft.text import Tokenizer

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _MessageAnswer:
    """The message of one job, while it is made and when it is whole."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._turn = Turn(job, tokenizer)

    @property
    def done(self) -> bool:
        return self._turn.done


class MessageCollector(_MessageAnswer):
    """Gathers the updates of a job until its message is whole."""

    def push(self, updates: Seq[Update]) -> list[int]:
        """Take updates in; return ids that a stop string has ended. Raises as `Turn.push`."""
        return self._turn.push(updates)[1]

    def body(self) -> bytes:
        """The message as JSON, once ``done``."""
        turn = self._turn
        message = {
            **_head(self._job),
            "content": [_block(part) for part in turn.parts],
            **_stop(turn),
            "usage": {**_usage(self._job, turn), "service_tier": _tier(self._job)},
        }
        return orjson.dumps(message)


class MessageWriter(_MessageAnswer):
    """Writes the events of one message."""

    _started = False

    def push(self, updates: Seq[Update]) -> tuple[bytes, list[int]]:
        """Take updates in; return events, and ids that a stop string has ended.

        Raises as `Turn.push`.
        """
        changes, halted = self._turn.push(updates)
        return self._start() + b"".join(map(_events, changes)), halted

    def last(self) -> bytes:
        """The events after the last part."""
        usage = _usage(self._job, self._turn)
        delta = _event("message_delta", delta=_stop(self._turn), usage=usage)
        return delta + _event("message_stop")

    def failed(self, error: WeftError) -> bytes:
        """The event that ends a message which cannot be completed."""
        return _event("error", error=error_of(*describe_error(error)))

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        message = {
            **_head(self._job),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": self._job.prompt_tokens,
                "output_tokens": 0,
                "service_tier": _tier(self._job),
            },
        }
        return _event("message_start", message=message) + _event("ping")


def error_of(status: int, body: Mapping[str, Any]) -> dict[str, str]:
    """Anthropic's ``error`` for an answer of OpenAI's form."""
    default = "invalid_request_error" if status < 500 else "api_error"
    return {"type": _ERROR_TYPES.get(status, default), "message": body["error"]["message"]}


def _tier(job: Job) -> str:
    """The tier that was used; Anthropic's answers know three."""
    tier = job.service_tier
    return tier if tier in ("priority", "batch") else "standard"


def _head(job: Job) -> dict[str, Any]:
    return {"id": job.id, "type": "message", "role": "assistant", "model": job.model}


def _stop(turn: Turn) -> dict[str, Any]:
    reason = "max_tokens" if turn.finish_reason == "length" else "end_turn"
    if turn.stop_string is not None:
        reason = "stop_sequence"
    elif turn.has_calls and reason == "end_turn":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": turn.stop_string}


def _usage(job: Job, turn: Turn) -> dict[str, Any]:
    """Tokens counted; those from the prefix cache are no input tokens here."""
    return {
        "input_tokens": job.prompt_tokens - turn.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": turn.cached_tokens,
        "output_tokens": turn.output_tokens,
    }


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {**_call(part), "input": arguments_object(part.text)}


def _call(part: Part) -> dict[str, Any]:
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def _events(change: Change) -> bytes:
    part = change.part
    if isinstance(change, Opened):
        return _event("content_block_start", index=part.index, content_block=_empty(part))
    if isinstance(change, Closed):
        return _event("content_block_stop", index=part.index)
    return _event("content_block_delta", index=part.index, delta=_delta(change))


def _empty(part: Part) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": ""}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return _call(part)


def _delta(change: Grown) -> dict[str, Any]:
    if change.part.kind == "text":
        return {"type": "text_delta", "text": change.text}
    if change.part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": change.text}
    return {"type": "input_json_delta", "partial_json": change.text}


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **content}))
