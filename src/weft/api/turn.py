"""The parts of a model's turn (text, reasoning, tool calls) that open, grow and close."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from weft.api.choices import Assembly, ChoiceDelta
from weft.api.jobs import Job
from weft.core.plan import Update
from weft.core.types import TokenLogprob
from weft.text import Tokenizer
from weft.text.assistant import Event, Reasoning, ToolArguments, ToolCall

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True, eq=False)
class Part:
    """One part of a turn.

    Attributes:
        index: its place in the turn, from 0.
        texts: pieces of its text; of a call, of the JSON text of its arguments.
        logprobs: of the tokens of a text, where the job asks for them.
        scored: how many of these came with each piece.
        call_id, name: of a call.
    """

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A part begins, empty."""

    part: Part


@dataclass(frozen=True, slots=True)
class Grown:
    """A part has more text."""

    part: Part
    text: str
    logprobs: Seq[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """A part is complete."""

    part: Part


Change = Opened | Grown | Closed


class Turn:
    """The only choice of a job.

    Args:
        call_ids: ids that its first calls have already.

    Attributes:
        parts: all parts so far; the last one may be open.
        finish_reason: ``stop`` or ``length`` once the turn has ended.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, call_ids: Iterable[str] = ()) -> None:
        self.parts: list[Part] = []
        self._call_ids = iter(call_ids)
        self.finish_reason: str | None = None
        self._assembly = Assembly(job, tokenizer)
        self._tokenizer = tokenizer
        self._open: Part | None = None
        self._unplaced: list[TokenLogprob] = []

    @property
    def done(self) -> bool:
        """Whether the engine has ended the sequence."""
        return self._assembly.open == 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the turn."""
        return self._assembly.choices[0].stop_string

    @property
    def output_tokens(self) -> int:
        return self._assembly.completion_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that lay in the prefix cache before; known once ``done``."""
        return self._assembly.cached_tokens

    @property
    def has_calls(self) -> bool:
        return any(part.kind == "call" for part in self.parts)

    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its markers left out."""
        texts = [part.text for part in self.parts if part.kind == "reasoning"]
        return sum(
            len(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts if text
        )

    def push(self, updates: Seq[Update]) -> tuple[list[Change], list[int]]:
        """Take updates in; return what they change, and the ids that a stop string has ended.

        Raises as `Assembly.push`.
        """
        deltas, halted = self._assembly.push(updates)
        changes: list[Change] = []
        for delta in deltas:
            changes += self._take(delta)
        return changes, halted

    def _take(self, delta: ChoiceDelta) -> list[Change]:
        self._unplaced += delta.logprobs
        changes = [change for event in delta.events for change in self._changes(event)]
        if delta.finish_reason is None:
            return changes
        self.finish_reason = delta.finish_reason
        return changes + self._close()

    def _changes(self, event: Event) -> list[Change]:
        if isinstance(event, ToolCall):
            call_id = next(self._call_ids, event.id)
            return self._close() + self._start("call", call_id, event.name)
        if isinstance(event, ToolArguments):
            return self._grow(event.text)
        kind: Kind = "reasoning" if isinstance(event, Reasoning) else "text"
        before: list[Change] = []
        if self._open is None or self._open.kind != kind:
            before = self._close() + self._start(kind)
        return before + self._grow(event.text)

    def _start(self, kind: Kind, call_id: str = "", name: str = "") -> list[Change]:
        self._open = Part(kind, len(self.parts), call_id, name)
        self.parts.append(self._open)
        return [Opened(self._open)]

    def _grow(self, text: str) -> list[Change]:
        """Append to the open part; log probabilities go with text, others are nowhere shown."""
        part = self._open
        assert part is not None
        logprobs, self._unplaced = self._unplaced, []
        part.texts.append(text)
        if part.kind != "text":
            part.scored.append(0)
            return [Grown(part, text)]
        part.logprobs += logprobs
        part.scored.append(len(logprobs))
        return [Grown(part, text, logprobs)]

    def _close(self) -> list[Change]:
        part, self._open = self._open, None
        return [] if part is None else [Closed(part)]


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call; the text itself where the end of the turn cut it short."""
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"partial_json": text}
