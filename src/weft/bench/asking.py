"""One streamed completion of a benchmark: its request, its timings and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from weft.bench.client import BrokenError, LoadClient, error_message
from weft.bench.prompts import Prompt
from weft.bench.stats import Outcome


class _Reading:
    """Notes into an outcome what the events of a stream say."""

    def __init__(self, outcome: Outcome, clock: Callable[[float], float]) -> None:
        self.outcome = outcome
        self.done = False
        self._clock = clock

    def sending(self, now: float) -> None:
        self.outcome.sent_s = self._clock(now)

    def event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            value = orjson.loads(data)
            self._value(value, now)
        except (ValueError, TypeError, AttributeError, KeyError):
            self._fail("an event that is no chunk", data[:80].decode(errors="replace"))

    def _value(self, value: dict[str, Any], now: float) -> None:
        if (error := value.get("error")) is not None:
            self._fail(f"error event: {error.get('code') or error.get('type')}", str(error))
            return
        if any(_text(choice) for choice in value.get("choices") or ()):
            self.outcome.event_s.append(self._clock(now))
        if (usage := value.get("usage")) is not None:
            self.outcome.input_tokens = usage["prompt_tokens"]
            self.outcome.output_tokens = usage["completion_tokens"]

    def _fail(self, failure: str, detail: str) -> None:
        if self.outcome.failure is None:
            self.outcome.failure, self.outcome.detail = failure, detail

    def end(self) -> None:
        """Judge a stream that ended without an HTTP error."""
        outcome = self.outcome
        if not self.done:
            self._fail("stream without [DONE]", "")
        if not outcome.event_s:
            self._fail("no text", "")
        outcome.output_tokens = outcome.output_tokens or len(outcome.event_s)


def _text(choice: dict[str, Any]) -> bool:
    """Whether a choice of a chunk has any output for a client."""
    if (delta := choice.get("delta")) is None:
        return bool(choice.get("text"))
    parts = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
    return any(delta.get(part) for part in parts)


async def ask(
    client: LoadClient,
    body: dict[str, Any],
    prompt: Prompt,
    outcome: Outcome,
    clock: Callable[[float], float],
) -> Outcome:
    """Send one request and record the outcome; a failure is recorded, never raised.

    Args:
        body: what all requests share; the endpoint follows from ``messages`` being there.
        clock: turns a time of ``time.perf_counter`` into one of the run.
    """
    reading = _Reading(outcome, clock)
    asked = {**body, "max_tokens": outcome.asked_tokens}
    if "messages" in body:
        path, asked["messages"] = "/chat/completions", [{"role": "user", "content": prompt}]
    else:
        path, asked["prompt"] = "/completions", prompt
    try:
        answer = await client.request("POST", path, asked, reading.event, reading.sending)
        if answer.status == 200:
            reading.end()
        else:
            outcome.failure = f"http {answer.status}"
            outcome.detail = error_message(answer)
    except TimeoutError:
        outcome.failure = "timeout"
    except BrokenError as error:
        outcome.failure = str(error)
    return outcome
