"""Reads turns of gpt-oss: messages on the channels analysis, commentary and final.

A message is ``<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>TEXT`` up to ``<|end|>``,
``<|call|>``, ``<|return|>`` or the end of the turn (github.com/openai/harmony). Markers are tokens,
so text that spells one is text.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from weft.text.assistant import Content, Event, Reasoning, Stepwise, ToolArguments, ToolCall
from weft.text.callbodies import NAME, new_call_id
from weft.text.forms import MARK, CallForm
from weft.text.stop import overlap

ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")  # of a message
MARKERS = (*ENDS, "<|message|>", "<|constrain|>")
MAX_HEADER_CHARS = 512
_BETWEEN = "\n\n"  # two messages of one kind
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(rf"to=(?:functions\.)?({NAME})")


class HarmonyParser(Stepwise):
    """The messages of one turn as events.

    A call is a message to a function whose text is an object; any other message to somebody is
    content, as are texts without a header.

    Args:
        form: of the calls; None where none are looked for.
        tokens: markers that are tokens, so that ``MARK`` stands before them.
        thinks: whether the channel analysis is reasoning; else it is content.
        forced: the turn is calls and nothing else, so that no other text of it is shown.
    """

    def __init__(
        self,
        form: CallForm | None,
        tokens: Collection[str] = (),
        *,
        thinks: bool = True,
        forced: bool = False,
    ) -> None:
        super().__init__(self._between, forced=forced)
        self._form, self._tokens = form, tokens
        self._thinks = thinks
        self._header = ""
        self._kind: type[Content] | type[Reasoning] = Content
        self._name = ""  # of the function that the message is for
        self._fresh = True  # nothing of the message has been given out
        self._count = 0
        self._said: set[type] = set()

    def flush(self, *, cut: bool = False) -> list[Event]:
        """Return the rest when the turn has ended, or was ``cut`` before its end."""
        events: list[Event] = []
        rest, self._buffer = self._header + self._buffer, ""
        if self._step == self._in_message:
            if rest.strip() or not self._fresh:
                self._say(rest, events)
            self._end(events, cut=cut)
        elif not cut:
            self._say(rest, events)
        self._header = ""
        self._step = self._between
        return self._shown(events)

    def _find(self, tags: tuple[str, ...]) -> tuple[int, str]:
        """The first of some markers in the buffer and where it is; else where sure text ends."""
        marked = [f"{MARK if tag in self._tokens else ''}{tag}" for tag in tags]
        found = [(at, tag) for tag in marked if (at := self._buffer.find(tag)) >= 0]
        if found:
            return min(found)
        return len(self._buffer) - max(overlap(self._buffer, tag) for tag in marked), ""

    def _between(self, _: list[Event]) -> bool:
        text = self._buffer = self._buffer.lstrip()
        at, tag = self._find(MARKERS)
        if at == 0 and not tag:
            return False
        self._kind, self._name, self._fresh = Content, "", True
        if at > 0:
            self._step = self._in_message
        elif tag.endswith(("<|start|>", "<|channel|>")):
            self._step = self._in_header
        else:
            self._buffer = text[len(tag) :]
        return True

    def _in_header(self, events: list[Event]) -> bool:
        at, tag = self._find(("<|message|>",))
        self._header += self._buffer[:at]
        self._buffer = self._buffer[at + len(tag) :]
        if len(self._header) <= MAX_HEADER_CHARS and not tag:
            return False
        header, self._header = self._header, ""
        self._step = self._in_message
        if len(header) > MAX_HEADER_CHARS:
            self._buffer = tag + self._buffer
            self._say(header, events)
            return True
        header = header.replace(MARK, "")
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if self._thinks and channel is not None and channel[1] == "analysis":
            self._kind = Reasoning
        if recipient is not None and self._form is not None:
            self._name = recipient[1]
        return True

    def _in_message(self, events: list[Event]) -> bool:
        at, tag = self._find(ENDS)
        text = self._buffer[:at].rstrip()
        self._buffer = self._buffer[at if tag else len(text) :]
        self._say(text, events)
        if not tag:
            return False
        self._end(events)
        if not tag.endswith(("<|start|>", "<|channel|>")):
            self._buffer = self._buffer[len(tag) :]
        self._step = self._between
        return True

    def _say(self, text: str, events: list[Event]) -> None:
        """More text of a message; the first decides whether it is a call."""
        text = (text.lstrip() if self._fresh else text).replace(MARK, "")
        if not text:
            return
        if self._fresh:
            self._fresh = False
            if self._name and text[0] != "{":
                self._name, self._kind = "", Content
            if self._name:
                self._call(events)
            else:
                text = f"{_BETWEEN if self._kind in self._said else ''}{text}"
                self._said.add(self._kind)
        events.append(ToolArguments(self._count, text) if self._name else self._kind(text))

    def _end(self, events: list[Event], *, cut: bool = False) -> None:
        if self._name and self._fresh:
            self._call(events)
            events += [] if cut else [ToolArguments(self._count, "{}")]
        self._count += bool(self._name)
        self._name = ""

    def _call(self, events: list[Event]) -> None:
        assert self._form is not None
        events.append(ToolCall(self._count, new_call_id(self._form), self._name))
