"""Custom tools, which take text: shown to models as functions with one string.

The model calls such a function with ``{"input": "<text>"}``; the answer shows the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from weft.text.assistant import Event, ToolArguments, ToolCall

CUSTOM_INPUT = "input"
PARAMETERS = (
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],'
    b'"additionalProperties":false}'
)


def custom_input(arguments: str) -> str:
    """The text that a call hands to a custom tool; the arguments as they are without one."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


class CustomCalls:
    """Turns the arguments of calls of custom tools into their texts, each as one event.

    Args:
        names: of the custom tools.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._index: int | None = None  # of the call whose arguments are coming
        self._parts: list[str] = []

    def push(self, events: Sequence[Event], *, end: bool) -> list[Event]:
        """The events with texts for arguments, which wait until their call is complete."""
        out: list[Event] = []
        for event in events:
            if isinstance(event, ToolArguments) and event.index == self._index:
                self._parts.append(event.text)
                continue
            out += self._complete()
            out.append(event)
            if isinstance(event, ToolCall) and event.name in self._names:
                self._index = event.index
        return out + self._complete() if end else out

    def _complete(self) -> list[Event]:
        if self._index is None:
            return []
        index, self._index = self._index, None
        text, self._parts = custom_input("".join(self._parts)), []
        return [ToolArguments(index, text)]
