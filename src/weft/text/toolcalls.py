"""Parses tool calls from an assistant's text, in each family's format, as it arrives.

What is not a call in the family's form stays content, markers included: nothing is lost. Once the
arguments of a call have begun it is given out and cannot be taken back; where such a call breaks
off, its arguments stay incomplete and the text after it is content. Where the turn itself was cut
short, what has begun is taken for a call: it is given out if its name is complete, and nothing of
its form is content.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection

from weft.text.assistant import Content, Event, Step, Stepwise, ToolArguments, ToolCall, split_at

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_CLOSER = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)  # of an object that no marker says to be a call
_PUNCTUATION: dict[str, dict[str, str]] = {
    "open": {"{": "key or end"},
    "key or end": {'"': "key", "}": "end"},
    "next key": {'"': "key"},
    "colon": {":": "value"},
    "next": {",": "next key", "}": "end"},
}
_MISTRAL_HEAD = re.compile(r"([\w.-]{1,128})(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")
_MISTRAL_HEAD_CHARS = 512
_ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """An id of a call that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def new_mistral_id() -> str:
    """Nine letters and digits: the templates of Mistral's models refuse any other id."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class _Value:
    """Finds the end of one JSON value while it arrives; what is inside is not judged."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def feed(self, text: str, at: int) -> int:
        """Read from ``at``; return where the value ends, or the end of the text."""
        while at < len(text) and not self.done and not self.failed:
            if self._in_string:
                at = self._string(text, at)
            elif self._scalar or (not self._closers and text[at] not in '"{['):
                self._scalar = True
                end = _SCALAR_END.search(text, at)
                self.done = end is not None
                at = end.start() if end else len(text)
            else:
                at = self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _STRING.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._closers
        return found.end()

    def _structure(self, text: str, at: int) -> int:
        found = _STRUCTURE.search(text, at)
        if found is None:
            return len(text)
        char = found[0]
        if char == '"':
            self._in_string = True
        elif char in _CLOSER:
            self._closers.append(_CLOSER[char])
        elif char != self._closers.pop():
            self.failed = True
            return found.start()
        else:
            self.done = not self._closers
        return found.end()


class _Call:
    """One call, written as a JSON object with a name and arguments, or as bare arguments.

    Attributes:
        raw: all text of it, as long as it has not ``started``.
        started: whether the call was given out.
        done, failed: the text that follows is no part of it; where it failed before it started,
            ``raw`` is no call either.
    """

    def __init__(
        self, index: int, call_id: str, names: Collection[str] | None, name: str | None = None
    ) -> None:
        """Expect an object with one of ``names``, or only the arguments of ``name``."""
        self.raw = ""
        self.started = self.done = self.failed = False
        self._index, self._id, self._names, self._name = index, call_id, names, name
        self._alone = name is not None
        self._state = "value" if self._alone else "open"
        self._key = "arguments" if self._alone else ""
        self._value: _Value | None = None
        self._streams = False
        self._read = ""  # of the key or value, unless it streams
        self._arguments: str | None = None  # not yet given out

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Read more; return the events, and the text that is no part of the call."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            if self._value is None and text[at].isspace():
                at += 1
            elif self._state in _PUNCTUATION:
                at = self._punctuation(text, at)
            else:
                at = self._string_or_value(text, at)
        if not self.started:
            self.raw += text[:at]
        return self._give_out(), text[at:]

    def cut(self) -> list[Event]:
        """Emit the call so far, if its name is complete."""
        self._arguments = self._arguments or ""
        return self._give_out()

    def _give_out(self) -> list[Event]:
        if self._name is None or self._arguments is None:
            return []
        events: list[Event] = []
        if not self.started:
            self.started = True
            events.append(ToolCall(self._index, self._id, self._name))
        if self._arguments:
            events.append(ToolArguments(self._index, self._arguments))
        self._arguments = ""
        return events

    def _punctuation(self, text: str, at: int) -> int:
        state = _PUNCTUATION[self._state].get(text[at])
        if state is None:
            self.failed = True
            return at
        self._state = state
        if state == "end":
            self.done = True
            self.failed = self._name is None
            if self._arguments is None:
                self._arguments = "{}"
        return at if state == "key" else at + 1

    def _string_or_value(self, text: str, at: int) -> int:
        if self._value is None:
            self._value, self._read = _Value(), ""
            wanted = self._state == "value" and self._key in _ARGUMENTS
            if wanted and self._arguments is not None:
                self.failed = True  # a second set of arguments
                return at
            self._streams = wanted and text[at] == "{"
        end = self._value.feed(text, at)
        if self._streams:
            self._arguments = (self._arguments or "") + text[at:end]
        else:
            self._read += text[at:end]
        self.failed = self._value.failed
        if self._value.done:
            self._value = None
            self._take()
        return end

    def _take(self) -> None:
        """Use a key or value that is complete."""
        state, self._state = self._state, "next"
        if state == "key":
            self._key, self._state = _string(self._read) or "", "colon"
            self.failed = self._names is not None and self._key not in _KEYS
        elif self._key == "name":
            name = _string(self._read)
            self.failed = not name or (self._names is not None and name not in self._names)
            self._name = None if self.failed else name
        elif self._key in _ARGUMENTS and not self._streams:
            # Some models write the object as a string, or null for none.
            self._arguments = "{}" if self._read == "null" else _string(self._read)
            self.failed = self._arguments is None
        self.done = self._alone or self.done


def _string(text: str) -> str | None:
    """The value of a JSON string, None for any other value."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class CallParser(Stepwise):
    """Base of the families' parsers: text, then calls that a marker opens.

    Args:
        names: functions that may be called; only a form without marker looks at them.
    """

    markers: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # further control tokens within calls
    new_id = staticmethod(new_call_id)

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(self._in_text)
        self._names = names
        self._lead = ""  # what stands before a call and becomes content if it is none
        self._count = 0
        self._call: _Call | None = None

    def flush(self, *, cut: bool = False) -> list[Event]:
        """Return what is held back when the turn has ended.

        It is content, as no call came of it; where the turn was ``cut``, only what may be no call.
        """
        call, begun = self._call, self._begun
        events = self._cut_call() if cut else []
        held = "" if call is not None and call.started else self._lead + (call.raw if call else "")
        held += self._buffer
        self._buffer = self._lead = ""
        self._call = None
        return events if events or not held or (cut and begun) else [Content(held)]

    @property
    def _begun(self) -> bool:
        """Whether what is held back belongs to calls: one came before it, or a marker opens it."""
        return self._step != self._rejected and (self._count > 0 or bool(self._lead.strip()))

    def _cut_call(self) -> list[Event]:
        """The call that is not complete, as far as it has come."""
        return [] if self._call is None else self._call.cut()

    def _in_text(self, events: list[Event]) -> bool:
        before, marker, self._buffer = split_at(self._buffer, self.markers)
        if before:
            events.append(Content(before))
        if marker:
            self._lead = marker
            self._step = self._opened
        return bool(marker)

    def _opened(self, _: list[Event]) -> bool:
        """After the marker."""
        return self._begin()

    def _begin(self, name: str | None = None, names: Collection[str] | None = None) -> bool:
        self._call = _Call(self._count, self.new_id(), names, name)
        self._step = self._in_call
        return True

    def _in_call(self, events: list[Event]) -> bool:
        call = self._call
        assert call is not None
        found, self._buffer = call.feed(self._buffer)
        events += found
        if not call.done and not call.failed:
            return False
        self._call = None
        if call.started:
            self._lead = ""
            self._count += 1
        if call.failed:
            return self._no_call(call.raw if not call.started else "")
        self._step = self._closed
        return True

    def _closed(self, _: list[Event]) -> bool:
        """After a call."""
        raise NotImplementedError

    def _no_call(self, raw: str = "") -> bool:
        """Turn a supposed call back into text; its marker is not searched again."""
        self._step = self._rejected
        self._lead += raw
        return True

    def _rejected(self, events: list[Event]) -> bool:
        if self._lead:
            events.append(Content(self._lead))
        self._lead = ""
        self._step = self._in_text
        return True

    def _between(self, _: list[Event]) -> bool:
        """After a call and its end."""
        return self._skip_space(self._in_text)


class HermesParser(CallParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write."""

    markers = ("<tool_call>",)
    inner = ("</tool_call>",)

    def _closed(self, _: list[Event]) -> bool:
        text = self._buffer = self._buffer.lstrip()
        (close,) = self.inner
        if close.startswith(text) and text != close:
            return False
        self._buffer = text.removeprefix(close)
        self._step = self._between
        return True


class Llama3Parser(CallParser):
    """``{"name": ..., "parameters": {...}}`` after ``<|python_tag|>``, or at once and unmarked."""

    markers = ("<|python_tag|>",)

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._step = self._at_start

    def _at_start(self, _: list[Event]) -> bool:
        return self._object_or(self._in_text, r"\s*")

    def _opened(self, _: list[Event]) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        return self._begin() if text.startswith("{") else self._no_call()

    def _closed(self, _: list[Event]) -> bool:
        return self._object_or(self._between, r"[\s;]*")

    def _object_or(self, otherwise: Step, before: str) -> bool:
        """Take an unmarked object for a call; text that is none is read by ``otherwise``."""
        space = re.match(before, self._buffer)
        assert space is not None
        if space.end() == len(self._buffer):
            return False
        if self._buffer[space.end()] != "{":
            self._step = otherwise
            return True
        self._lead, self._buffer = space[0], self._buffer[space.end() :]
        return self._begin(names=self._names)


class MistralParser(CallParser):
    """After ``[TOOL_CALLS]`` a list of objects, or ``name[ARGS]{...}``, as newer models write."""

    markers = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")
    new_id = staticmethod(new_mistral_id)

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._listed = False

    def _opened(self, _: list[Event]) -> bool:
        text = self._buffer.lstrip()
        self._lead += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        self._listed = text.startswith("[")
        if self._listed:
            self._lead += "["
            self._buffer = text[1:]
            self._step = self._in_list
            return True
        at = text.find("{")
        if at < 0:
            return self._no_call() if len(text) > _MISTRAL_HEAD_CHARS else False
        head = _MISTRAL_HEAD.fullmatch(text[:at])
        if at and head is None:
            return self._no_call()
        self._lead, self._buffer = self._lead + text[:at], text[at:]
        return self._begin(head[1] if head else None)

    def _cut_call(self) -> list[Event]:
        head = _MISTRAL_HEAD.fullmatch(self._buffer) if self._step == self._opened else None
        if head is not None and "[" in head[0]:
            return [ToolCall(self._count, self.new_id(), head[1])]
        return super()._cut_call()

    def _in_list(self, _: list[Event]) -> bool:
        text = self._buffer.lstrip(", \t\r\n")
        if not text:
            return False
        if text[0] == "{":
            self._lead += self._buffer[: len(self._buffer) - len(text)]
            self._buffer = text
            return self._begin()
        if text[0] == "]" and not self._lead:
            self._buffer = text[1:]
            self._step = self._between
            return True
        return self._no_call()

    def _closed(self, _: list[Event]) -> bool:
        self._step = self._in_list if self._listed else self._between
        return True
