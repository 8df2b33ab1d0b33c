"""An assistant's turn as events: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.text.forms import MARK
from weft.text.stop import overlap


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins; its arguments follow.

    Attributes:
        index: number of the call in this turn, from 0.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the JSON text of the arguments of call ``index``."""

    index: int
    text: str


PIECE_CHARS = 4096  # of text that are read at once: each step copies what is left

Event = Content | Reasoning | ToolCall | ToolArguments
Step = Callable[[list[Event]], bool]  # takes from a buffer; whether to go on with what is left


class TurnParser(Protocol):
    """Text of a turn in, events out, however the text is cut into pieces."""

    def push(self, text: str) -> list[Event]: ...
    def flush(self, *, cut: bool = False) -> list[Event]: ...


class Stepwise:
    """Text that is read by one step after the other, however it is cut into pieces.

    Args:
        forced: the turn is calls and nothing else, so that no other text of it is shown.
    """

    def __init__(self, start: Step, *, forced: bool = False) -> None:
        self._buffer = ""
        self._step = start
        self._forced = forced

    def push(self, text: str) -> list[Event]:
        """Append text; return what is certain now."""
        events: list[Event] = []
        for at in range(0, len(text), PIECE_CHARS):
            self._buffer += text[at : at + PIECE_CHARS]
            while self._buffer and self._step(events):
                pass
        return self._shown(events)

    def _shown(self, events: list[Event]) -> list[Event]:
        if not self._forced:
            return events
        return [event for event in events if not isinstance(event, Content)]

    def _skip_space(self, then: Step) -> bool:
        """Drop white space, however much comes, before a step."""
        self._buffer = self._buffer.lstrip()
        self._step = then if self._buffer else self._step
        return True


class AssistantParser(Stepwise):
    """Takes reasoning out of the start of a turn, then calls out of the rest.

    White space beside a marker belongs to the marker and is dropped, as does ``MARK`` before it.
    Text that may be the start of a marker is held back until that is known. A call within open
    reasoning ends it; what only looks like the start of one stays reasoning.

    Args:
        reasoning: the markers around it; None where nothing is marked.
        calls: reads what follows the reasoning.
        thought: reads what is within the reasoning.
        opened: the prompt has ended with the opening marker, so that the turn starts inside.
        forced: the turn is calls and nothing else, so that no other text of it is shown.
    """

    def __init__(
        self,
        reasoning: tuple[str, str] | None,
        calls: TurnParser,
        thought: TurnParser,
        *,
        opened: bool = False,
        forced: bool = False,
    ) -> None:
        self._open, self._close = reasoning or ("", "")
        self._calls = calls
        self._thought = thought
        start = self._after_open if opened else self._before
        super().__init__(self._outside if reasoning is None else start, forced=forced)

    def flush(self, *, cut: bool = False) -> list[Event]:
        """Return the rest when the turn has ended, or was ``cut`` before its end."""
        cut = cut or self._forced
        events: list[Event] = []
        if self._step == self._inside:
            self._think(self._buffer, events)
            if self._step == self._inside:
                events += map(_as_reasoning, self._thought.flush(cut=cut))
        elif self._step == self._before:
            events += self._calls.push(self._buffer)
        return self._shown(events + self._calls.flush(cut=cut))

    def _before(self, _: list[Event]) -> bool:
        text = self._buffer.lstrip().removeprefix(MARK)
        if text.startswith(self._open):
            self._buffer = text[len(self._open) :]
            self._step = self._after_open
        elif self._open.startswith(text):
            return False
        else:
            self._step = self._outside
        return True

    def _after_open(self, _: list[Event]) -> bool:
        return self._skip_space(self._inside)

    def _inside(self, events: list[Event]) -> bool:
        at = self._buffer.find(self._close)
        end = len(self._buffer) - overlap(self._buffer, self._close) if at < 0 else at
        text = self._buffer[:end]
        if text.endswith(MARK):
            text = text[:-1]
            end -= at < 0
        self._buffer = self._buffer[end:]
        self._think(text, events)
        if self._step == self._outside:
            return True
        if at < 0:
            return False
        for event in self._thought.flush():
            if isinstance(event, Content) and (rest := event.text.rstrip()):
                events.append(Reasoning(rest))
        self._buffer = self._buffer[len(self._close) :]
        self._step = self._after_close
        return True

    def _think(self, text: str, events: list[Event]) -> None:
        """Read reasoning, up to the call that ends it."""
        for event in self._thought.push(text):
            if isinstance(event, ToolCall) and self._step == self._inside:
                self._calls = self._thought
                self._step = self._outside
            events.append(_as_reasoning(event) if self._step == self._inside else event)

    def _after_close(self, _: list[Event]) -> bool:
        return self._skip_space(self._outside)

    def _outside(self, events: list[Event]) -> bool:
        events += self._calls.push(self._buffer)
        self._buffer = ""
        return False


def _as_reasoning(event: Event) -> Event:
    return Reasoning(event.text) if isinstance(event, Content) else event


def split_at(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Split text at the first marker: the text before, the marker, the text after.

    The marker includes the white space before it. Without one it is empty, and what follows is the
    end of the text that may still become one.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        before = text[:at].rstrip()
        end = at + len(marker)
        return before, text[len(before) : end], text[end:]
    keep = max((overlap(text, marker) for marker in markers), default=0)
    before = text[: len(text) - keep].rstrip()
    return before, "", text[len(before) :]
