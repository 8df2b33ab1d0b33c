"""An assistant's turn as events: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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


Event = Content | Reasoning | ToolCall | ToolArguments
Step = Callable[[list[Event]], bool]  # takes from a buffer; whether to go on with what is left


class TurnParser(Protocol):
    """Text of a turn in, events out, however the text is cut into pieces."""

    def push(self, text: str) -> list[Event]: ...
    def flush(self, *, cut: bool = False) -> list[Event]: ...


class AssistantParser:
    """Takes reasoning out of a turn, then calls out of the rest; without parts all is content.

    White space beside a marker belongs to the marker and is dropped. Text that may be the start of
    a marker is held back until that is known.

    Args:
        forced: the turn is calls and nothing else, so that no other text of it is shown.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: TurnParser | None = None,
        *,
        forced: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._forced = forced

    def push(self, text: str) -> list[Event]:
        """Append text; return what is certain now."""
        if self._reasoning is not None:
            return self._pass_on(self._reasoning.push(text))
        return self._pass_on([Content(text)] if text else [])

    def flush(self, *, cut: bool = False) -> list[Event]:
        """Return the rest when the turn has ended, or was ``cut`` before its end."""
        events = self._pass_on(self._reasoning.flush()) if self._reasoning is not None else []
        if self._calls is None:
            return events
        return events + self._shown(self._calls.flush(cut=cut or self._forced))

    def _pass_on(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        out: list[Event] = []
        for event in events:
            out += self._calls.push(event.text) if isinstance(event, Content) else [event]
        return self._shown(out)

    def _shown(self, events: list[Event]) -> list[Event]:
        if not self._forced:
            return events
        return [event for event in events if not isinstance(event, Content)]


class Stepwise:
    """Text that is read by one step after the other, however it is cut into pieces."""

    def __init__(self, start: Step) -> None:
        self._buffer = ""
        self._step = start

    def push(self, text: str) -> list[Event]:
        """Append text; return what is certain now."""
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._step(events):
            pass
        return events

    def _skip_space(self, then: Step) -> bool:
        """Drop white space, however much comes, before a step."""
        self._buffer = self._buffer.lstrip()
        self._step = then if self._buffer else self._step
        return True


class ReasoningParser(Stepwise):
    """Reasoning at the start of a turn, between two markers.

    Args:
        opened: the prompt has ended with the opening marker, so that the turn starts inside.
    """

    def __init__(self, markers: tuple[str, str], *, opened: bool = False) -> None:
        self._open, self._close = markers
        super().__init__(self._after_open if opened else self._before)

    def flush(self) -> list[Event]:
        """Return the text held back: it was no marker."""
        held, self._buffer = self._buffer, ""
        if not held:
            return []
        inside = self._step in (self._after_open, self._inside)
        return [Reasoning(held) if inside else Content(held)]

    def _before(self, _: list[Event]) -> bool:
        text = self._buffer.lstrip()
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
        before, marker, self._buffer = split_at(self._buffer, (self._close,))
        if before:
            events.append(Reasoning(before))
        if marker:
            self._step = self._after_close
        return bool(marker)

    def _after_close(self, _: list[Event]) -> bool:
        return self._skip_space(self._outside)

    def _outside(self, events: list[Event]) -> bool:
        events.append(Content(self._buffer))
        self._buffer = ""
        return False


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
    keep = max(overlap(text, marker) for marker in markers)
    before = text[: len(text) - keep].rstrip()
    return before, "", text[len(before) :]
