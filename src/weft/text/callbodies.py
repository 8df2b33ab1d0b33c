"""Reads one tool call as it arrives: a JSON object, or a name and then JSON."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from weft.text.assistant import Event, ToolArguments, ToolCall
from weft.text.forms import MARK, CallForm

NAME = r"[A-Za-z_][\w.\-/]{0,127}"
MAX_HEAD_CHARS = 512  # of a call up to its arguments

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_CLOSER = {"{": "}", "[": "]"}
_NOTES = ("type", "id")  # further keys of an object that no marker says to be a call
_PUNCTUATION: dict[str, dict[str, str]] = {
    "open": {"{": "key or end"},
    "key or end": {'"': "key", "}": "end"},
    "next key": {'"': "key"},
    "colon": {":": "value"},
    "next": {",": "next key", "}": "end"},
}
_PIECES = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]|[^\s<\[]+|[<\[]")
_CALL_ID = rf"{MARK}?\[CALL_ID\][\w-]*"  # which some of Mistral's models write
_ID_CHARS = string.ascii_letters + string.digits

Schemas = Mapping[str, Mapping[str, Any]]  # parameters of each function by its name


class CallReader(Protocol):
    """One call, from behind the text that opens it.

    Attributes:
        started: whether the call was given out.
        done, failed: what follows is no part of it.
    """

    started: bool
    done: bool
    failed: bool

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Read more; return the events, and the text that is no part of the call."""

    def finish(self, *, cut: bool) -> list[Event]:
        """The turn has ended, or was ``cut``: the call so far, if its name is complete."""


def new_call_id(form: CallForm, written: str = "") -> str:
    """An id of a call: one that no other call has, or the one that the model has written."""
    if form.ids == "written" and written:
        return written
    if form.ids == "mistral":  # the templates of these models refuse any other id
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def match(text: str, wanted: str) -> int | None:
    """Where ``wanted`` ends at the start of a text, with any white space before its parts.

    -1: the text does not start with it; None: more text has to tell.
    """
    at = 0
    for piece in _PIECES.findall(wanted):
        while at < len(text) and text[at].isspace():
            at += 1
        if not text.startswith(piece, at):
            return None if piece.startswith(text[at : at + len(piece)]) else -1
        at += len(piece)
    return at


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


class ObjectCall:
    """One call, written as a JSON object with a name and arguments, or as bare arguments."""

    def __init__(
        self,
        form: CallForm,
        index: int,
        names: Collection[str] | None,
        name: str | None = None,
        written: str = "",
    ) -> None:
        """Expect an object with one of ``names``, or only the arguments of ``name``."""
        self.started = self.done = self.failed = False
        self._index, self._id = index, new_call_id(form, written)
        self._names, self._name = names, name
        self._name_key, *self._argument_keys = form.keys
        self._alone = name is not None
        self._state = "value" if self._alone else "open"
        self._key = self._argument_keys[0] if self._alone else ""
        self._value: _Value | None = None
        self._streams = False
        self._read = ""  # of the key or value, unless it streams
        self._arguments: str | None = None  # not yet given out

    def feed(self, text: str) -> tuple[list[Event], str]:
        """See `CallReader`."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            if self._value is None and text[at].isspace():
                at += 1
            elif self._state in _PUNCTUATION:
                at = self._punctuation(text, at)
            else:
                at = self._string_or_value(text, at)
        return self._give_out(), text[at:]

    def finish(self, *, cut: bool) -> list[Event]:
        """See `CallReader`."""
        if cut:
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
            wanted = self._state == "value" and self._key in self._argument_keys
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
            known = (self._name_key, *self._argument_keys, *_NOTES)
            self.failed = self._names is not None and self._key not in known
        elif self._key == self._name_key:
            name = _string(self._read)
            self.failed = not name or (self._names is not None and name not in self._names)
            self._name = None if self.failed else name
        elif self._key in self._argument_keys and not self._streams:
            # Some models write the object as a string, or null for none.
            self._arguments = "{}" if self._read == "null" else _string(self._read)
            self.failed = self._arguments is None
        self.done = self._alone or self.done


def _string(text: str) -> str | None:
    """The value of a JSON string, None for any other value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


class NamedCall:
    """One call, written as a name and then JSON: ``name[ARGS]{...}``.

    Of what stands around the name anything may be missing.
    """

    def __init__(self, form: CallForm, index: int) -> None:
        self.started = self.done = self.failed = False
        self._form, self._index = form, index
        self._head = ""
        self._call: ObjectCall | None = None
        number = form.name[1].find("#") + 1
        before, counted, after = map(
            _loosely, (form.name[0], form.name[1][:number], form.name[1][number:])
        )
        self._pattern = re.compile(
            rf"\s*(?P<written>(?:{before})?(?P<name>{NAME}?)(?:{counted})?)"
            rf"(?P<end>(?:{_CALL_ID})?(?:{after})?)\s*"
        )
        close = _PIECES.findall(form.call[1])
        self._stop = re.compile(re.escape(close[-1]) + r"|\{" if close else r"\{")

    def feed(self, text: str) -> tuple[list[Event], str]:
        """See `CallReader`."""
        if self._call is not None:
            return self._arguments(self._call, text)
        seen = len(self._head)
        self._head += text
        stop = self._stop.search(self._head, max(0, seen - 32))
        end = len(self._head) if stop is None else stop.start()
        if end > MAX_HEAD_CHARS:
            self.failed = True
        if stop is None or self.failed:
            return [], ""
        found = self._pattern.fullmatch(self._head, 0, end)
        if found is None:
            self.failed = True
            return [], ""
        written = "".join(found["written"].split())
        self._call = ObjectCall(self._form, self._index, None, found["name"], written)
        rest, self._head = self._head[end:], ""
        if stop[0] == "{":
            return self._arguments(self._call, rest)
        events, _ = self._arguments(self._call, "{}")
        return events, rest

    def _arguments(self, call: ObjectCall, text: str) -> tuple[list[Event], str]:
        events, rest = call.feed(text)
        self.started, self.done, self.failed = call.started, call.done, call.failed
        return events, rest

    def finish(self, *, cut: bool) -> list[Event]:
        """See `CallReader`."""
        if self._call is not None:
            return self._call.finish(cut=cut)
        found = self._pattern.fullmatch(self._head)
        if not cut or found is None or not found["end"]:
            return []
        self.started = True
        written = "".join(found["written"].split())
        return [ToolCall(self._index, new_call_id(self._form, written), found["name"])]


def _loosely(text: str) -> str:
    """An expression for markup with any white space between its parts, and a number for ``#``."""
    pieces = [re.escape(piece).replace(r"\#", r"\d+") for piece in _PIECES.findall(text)]
    return r"\s*".join(["", *pieces, ""])
