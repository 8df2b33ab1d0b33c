"""Answers of Ollama's API: one object, or a stream of JSON lines, and errors."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import orjson

from weft.api.errors import describe_error
from weft.api.jobs import Job
from weft.api.logprobs import TokenTexts, chat_logprobs
from weft.api.turn import Change, Closed, Grown, Part, Turn, arguments_object
from weft.core.errors import WeftError
from weft.core.plan import Update
from weft.core.types import TokenLogprob
from weft.text import Tokenizer

Said = Callable[[str, str], dict[str, Any]]  # text and thinking -> the fields that bear them


def chat_said(text: str, thinking: str = "") -> dict[str, Any]:
    """The output in the form of ``/api/chat``: a message."""
    message = {"role": "assistant", "content": text}
    return {"message": {**message, "thinking": thinking} if thinking else message}


def generate_said(text: str, thinking: str = "") -> dict[str, Any]:
    """The output in the form of ``/api/generate``."""
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


class _OllamaAnswer:
    """The answer of one job, while it is made and when it is whole."""

    def __init__(self, job: Job, tokenizer: Tokenizer, texts: TokenTexts, said: Said) -> None:
        self._job = job
        self._turn = Turn(job, tokenizer)
        self._texts = texts
        self._said = said
        self._start_ns = time.monotonic_ns()
        self._first_ns: int | None = None

    @property
    def done(self) -> bool:
        return self._turn.done

    def _take(self, updates: Seq[Update]) -> tuple[list[Change], list[int]]:
        taken = self._turn.push(updates)
        if self._first_ns is None and self._turn.output_tokens:
            self._first_ns = time.monotonic_ns()
        return taken

    def _object(
        self,
        text: str = "",
        thinking: str = "",
        calls: Seq[Part] = (),
        logprobs: Seq[TokenLogprob] = (),
    ) -> dict[str, Any]:
        """Fields of every object; only answers of ``/api/chat`` have calls."""
        said = self._said(text, thinking)
        if calls:
            said["message"]["tool_calls"] = list(map(self._call, calls))
        head = {"model": self._job.model, "created_at": timestamp()}
        made = {**head, **said, "done": False}
        if logprobs:
            made["logprobs"] = chat_logprobs(logprobs, self._texts)["content"]
        return made

    def _call(self, part: Part) -> dict[str, Any]:
        index = sum(before.kind == "call" for before in self._turn.parts[: part.index])
        arguments = arguments_object(part.text)
        function = {"index": index, "name": part.name, "arguments": arguments}
        return {"id": part.call_id, "function": function}

    def _end(self) -> dict[str, Any]:
        """The reason of the end, counts and times; times are in nanoseconds and never 0."""
        now = time.monotonic_ns()
        first = self._first_ns or now
        return {
            "done": True,
            "done_reason": self._turn.finish_reason or "stop",
            "total_duration": max(now - self._start_ns, 1),
            "load_duration": 0,
            "prompt_eval_count": self._job.prompt_tokens,
            "prompt_eval_duration": max(first - self._start_ns, 1),
            "eval_count": self._turn.output_tokens,
            "eval_duration": max(now - first, 1),
        }


class OllamaCollector(_OllamaAnswer):
    """Gathers the updates of a job until its answer is whole."""

    def push(self, updates: Seq[Update]) -> list[int]:
        """Take updates in; return ids that a stop string has ended. Raises as `Turn.push`."""
        return self._take(updates)[1]

    def body(self) -> bytes:
        """The answer as JSON, once ``done``."""
        parts = self._turn.parts
        text, thinking = (
            "".join(part.text for part in parts if part.kind == kind)
            for kind in ("text", "reasoning")
        )
        calls = [part for part in parts if part.kind == "call"]
        logprobs = [entry for part in parts for entry in part.logprobs]
        return orjson.dumps({**self._object(text, thinking, calls, logprobs), **self._end()})


class OllamaWriter(_OllamaAnswer):
    """Writes an answer as lines of JSON. A call comes in one piece, when it is complete."""

    def push(self, updates: Seq[Update]) -> tuple[bytes, list[int]]:
        """Take updates in; return lines, and ids that a stop string has ended.

        Raises as `Turn.push`.
        """
        changes, halted = self._take(updates)
        return b"".join(map(self._line, changes)), halted

    def last(self) -> bytes:
        """The line after the last part."""
        return _json_line({**self._object(), **self._end()})

    def failed(self, error: WeftError) -> bytes:
        """The line that ends an answer which cannot be completed."""
        return _json_line(error_of(describe_error(error)[1]))

    def _line(self, change: Change) -> bytes:
        kind = change.part.kind
        if isinstance(change, Closed) and kind == "call":
            return _json_line(self._object(calls=(change.part,)))
        if not isinstance(change, Grown) or kind == "call":
            return b""
        if kind == "reasoning":
            return _json_line(self._object(thinking=change.text))
        return _json_line(self._object(change.text, logprobs=change.logprobs))


def loaded(model: str, said: Said, *, unload: bool) -> dict[str, Any]:
    """The answer to a request that only loads or unloads the model, which is always loaded."""
    return {
        "model": model,
        "created_at": timestamp(),
        **said("", ""),
        "done": True,
        "done_reason": "unload" if unload else "load",
    }


def error_of(body: Mapping[str, Any]) -> dict[str, str]:
    """Ollama's body for an error of OpenAI's form."""
    return {"error": body["error"]["message"]}


def timestamp(seconds: float | None = None) -> str:
    """Unix time, or now, as RFC 3339 has it."""
    at = datetime.datetime.fromtimestamp(time.time() if seconds is None else seconds, datetime.UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _json_line(content: dict[str, Any]) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)
