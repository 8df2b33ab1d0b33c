"""Reads tool calls whose arguments are not JSON, and gives them out as JSON while they arrive."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from weft.text.argumenttypes import TEXT, Kinds, argument_kinds, json_of, literal_json, quoted
from weft.text.assistant import PIECE_CHARS, Event, ToolArguments, ToolCall
from weft.text.callbodies import MAX_HEAD_CHARS, NAME, Schemas, match, new_call_id
from weft.text.forms import MARK, CallForm
from weft.text.stop import overlap

_NOT_TEXT = frozenset(("null", "boolean", "integer", "number", "array", "object"))

_NAME = re.compile(NAME)
_KEYWORD = re.compile(r"[^\W\d]\w{0,127}")
_MAX_KEY_CHARS = 256
_QUOTED_OR_NESTED = re.compile(r"""["'\\()\[\]{},]""")
_SCALAR = re.compile(r"[\s,\]}]")


class ArgumentCall:
    """Base: a name, then arguments; subclasses have the steps that follow the name.

    A step reads from ``_buffer`` and says whether to go on with what is left of it.
    """

    def __init__(self, form: CallForm, index: int, tools: Schemas, *, known: bool) -> None:
        """Expect a call; of one of ``tools`` if it must be ``known``."""
        self.started = self.done = self.failed = False
        self._form, self._index, self._tools, self._known = form, index, tools, known
        self._buffer = ""
        self._name = ""
        self._out: list[str] = []  # of the arguments, not yet given out
        self._step: Callable[[], bool] = self._before_name

    def feed(self, text: str) -> tuple[list[Event], str]:
        """See `CallReader`."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            self._buffer += text[at : at + PIECE_CHARS]
            at += PIECE_CHARS
            while self._buffer and not self.done and not self.failed and self._step():
                pass
        rest = self._buffer + text[at:] if self.done or self.failed else ""
        return self._give_out(), rest

    def finish(self, *, cut: bool) -> list[Event]:
        """See `CallReader`."""
        if not cut:
            self._end()
        elif self._name and not self.started and self._step != self._after_name:
            self.started = True
        return self._give_out()

    def _end(self) -> None:
        """The turn has ended before the call has: use what is held back."""

    def _give_out(self) -> list[Event]:
        if not self.started:
            return []
        events: list[Event] = []
        if self._name:
            events.append(ToolCall(self._index, new_call_id(self._form, self._name), self._name))
            self._name = ""
        text = "".join(self._out)
        self._out = []
        return [*events, ToolArguments(self._index, text)] if text else events

    def _take(self, wanted: str) -> bool | None:
        """Drop ``wanted`` from the start of the buffer if it is there; None: not yet known."""
        end = match(self._buffer, wanted)
        if end is None:
            return None
        if end >= 0:
            self._buffer = self._buffer[end:]
        return end >= 0

    def _fail(self) -> bool:
        self.failed = True
        return False

    def _before_name(self) -> bool:
        found = self._take(self._form.name[0])
        if found is None:
            return False
        self._step = self._in_name
        return found or self._fail()

    def _in_name(self) -> bool:
        text = self._buffer.lstrip()
        found = _NAME.match(text)
        if found is None:
            return self._fail() if text else False
        if found.end() == len(text) and len(text) < MAX_HEAD_CHARS:
            return False
        self._name, self._buffer = found[0], text[found.end() :]
        self._step = self._after_name
        return self._name in self._tools or not self._known or self._fail()

    def _after_name(self) -> bool:
        found = self._take(self._form.name[1])
        if found is None:
            return False
        self._step = self._first
        self._kinds_of = self._tools.get(self._name)
        return found or self._fail()

    def _first(self) -> bool:
        raise NotImplementedError

    def _open_value(self, key: str) -> Kinds | None:
        """Write the key of the next argument; return what its value may be."""
        self._out.append(f"{'{' if self._count == 0 else ', '}{quoted(key)}: ")
        self._count += 1
        self.started = True
        return argument_kinds(self._kinds_of, key)

    def _close_all(self) -> bool:
        self._out.append("{}" if self._count == 0 else "}")
        self.started = self.done = True
        return False

    _count = 0  # of arguments
    _kinds_of: Any = None


class TaggedCall(ArgumentCall):
    """Each argument between markers: ``<parameter=key>value</parameter>``.

    A marker within a value ends it only where markup of the call follows, or where it is a token.
    """

    def __init__(self, form: CallForm, index: int, tools: Schemas, *, known: bool) -> None:
        super().__init__(form, index, tools, known=known)
        self._key = ""
        self._kinds: Kinds | None = None
        self._value: list[str] | None = None  # unless it streams
        self._close = form.value[1].strip()
        self._trims = (form.value[0].startswith("\n"), form.value[1].startswith("\n"))
        ends = (form.arguments[1].strip(), form.call[1].strip())
        self._ends = [end for end in ends if end]
        self._follows = [form.key[0], *self._ends]

    def _first(self) -> bool:
        return self._between()

    def _between(self) -> bool:
        """After the name, or after an argument."""
        undecided = False
        for wanted in (self._form.key[0], *self._ends):
            found = self._take(wanted)
            if found and wanted == self._form.key[0]:
                self._step = self._in_key
                return True
            if found:
                return self._close_all()
            undecided = undecided or found is None
        return False if undecided else self._fail()

    def _in_key(self) -> bool:
        closes = [text for text in (self._form.key[1].strip(), self._form.json_key) if text]
        found = [(at, close) for close in closes if (at := self._buffer.find(close)) >= 0]
        if not found:
            return self._fail() if len(self._buffer) > _MAX_KEY_CHARS else False
        at, close = min(found)
        self._key = self._buffer[:at].strip()
        self._buffer = self._buffer[at + len(close) :]
        if not self._key or "\n" in self._key or len(self._key) > _MAX_KEY_CHARS:
            return self._fail()
        self._json = close == self._form.json_key
        self._step = self._before_value
        return True

    def _before_value(self) -> bool:
        opening = self._form.value[0].strip()
        found = self._take(opening) if opening else True
        if not found:
            return False if found is None else self._fail()
        kinds = self._open_value(self._key)
        if self._form.json_key:  # the markup tells strings
            kinds = (kinds or _NOT_TEXT) - TEXT if self._json else TEXT
        self._kinds = kinds
        self._step = self._start_value
        return True

    def _start_value(self) -> bool:
        if self._trims[0] and self._buffer.startswith("\n"):
            self._buffer = self._buffer[1:]
        self._value = None if self._kinds == TEXT else []
        if self._value is None:
            self._out.append('"')
        self._step = self._in_value
        return True

    def _in_value(self) -> bool:
        at = self._buffer.find(self._close)
        if at < 0:
            keep = overlap(self._buffer, self._close)
            self._add(self._held_end(len(self._buffer) - keep))
            return False
        after = self._buffer[at + len(self._close) :]
        ends = self._ends_value(after)
        if ends is None:
            self._add(self._held_end(at))
            return False
        if not ends:
            self._add(at + len(self._close))
            return True
        self._add(self._held_end(at))
        self._buffer = after
        self._close_value()
        return True

    def _held_end(self, end: int) -> int:
        """Where text ends that belongs to the value whatever comes: before a last line end."""
        return end - 1 if self._trims[1] and self._buffer[:end].endswith("\n") else end

    def _ends_value(self, after: str) -> bool | None:
        """Whether the value has ended where its closing marker stands, by what comes after."""
        if self._close.startswith(MARK):
            return True
        found = [match(after, wanted) for wanted in self._follows]
        if any(end is not None and end >= 0 for end in found):
            return True
        return None if None in found else False

    def _add(self, end: int) -> None:
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._value is None:
            self._out.append(quoted(text)[1:-1])
        else:
            self._value.append(text)

    def _close_value(self) -> None:
        if self._value is None:
            self._out.append('"')
        else:
            self._out.append(json_of("".join(self._value), self._kinds))
        self._step = self._between

    def _end(self) -> None:
        if self._step == self._in_value:
            at = self._buffer.find(self._close)
            if at < 0:
                self._add(len(self._buffer))
            else:
                self._add(self._held_end(at))
                self._close_value()
        if self._step == self._between and self.started:
            self._close_all()
        self._buffer = ""


class PythonCall(ArgumentCall):
    """Keyword arguments with literals: ``name(key="value", other=[1, None])``.

    What is no literal is a string.
    """

    def _first(self) -> bool:
        text = self._buffer.lstrip().removeprefix(",").lstrip() if self._count else None
        text = self._buffer.lstrip() if text is None else text
        if not text:
            return False
        if text[0] == ")":
            self._buffer = text[1:]
            return self._close_all()
        found = _KEYWORD.match(text)
        if found is None:
            return self._fail()
        rest = text[found.end() :].lstrip()
        if not rest:
            return len(text) > _MAX_KEY_CHARS and self._fail()
        if rest[0] != "=":
            return self._fail()
        self._open_value(found[0])
        self._buffer = rest[1:]
        self._value: list[str] = []
        self._nested: list[str] = []
        self._quote = ""
        self._step = self._in_value
        return True

    def _in_value(self) -> bool:
        """Read a literal up to the comma or parenthesis after it."""
        found = _QUOTED_OR_NESTED.search(self._buffer)
        if found is None:
            self._value.append(self._buffer)
            self._buffer = ""
            return False
        char, end = found[0], found.end()
        if char == "\\":
            if end == len(self._buffer):
                return False
            end += 1
        elif char in "\"'":
            self._quote = "" if char == self._quote else self._quote or char
        elif not self._quote and not self._nested and char in ",)":
            return self._close_value(found.start())
        elif not self._quote and char in "([{":
            self._nested.append(char)
        elif not self._quote and char in ")]}" and self._nested:
            self._nested.pop()
        self._value.append(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return True

    def _close_value(self, at: int) -> bool:
        text = "".join(self._value) + self._buffer[:at]
        self._buffer = self._buffer[at:]
        written = literal_json(text)
        self._out.append(quoted(text.strip()) if written is None else written)
        self._step = self._first
        return True


class BareCall(ArgumentCall):
    """JSON with bare keys and strings between quotes of its own: ``name{key:<q>value<q>}``."""

    def _first(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] != "{":
            return self._fail()
        self._buffer = text
        self._nested: list[str] = []
        self._step = self._value_start
        self.started = True
        return True

    def _value_start(self) -> bool:
        text = self._buffer.lstrip()
        opening = self._form.quotes[0]
        if text.startswith(opening):
            self._out.append('"')
            self._buffer, self._step = text[len(opening) :], self._in_string
            return True
        if opening.startswith(text):
            self._buffer = text
            return False
        char = text[0]
        if char in "{[":
            self._out.append(char)
            self._nested.append("}" if char == "{" else "]")
            self._buffer, self._step = text[1:], self._inside
            return True
        end = _SCALAR.search(text)
        if end is None:
            return len(text) > MAX_HEAD_CHARS and self._fail()
        written = literal_json(text[: end.start()])
        if written is None:
            return self._fail()
        self._out.append(written)
        self._buffer, self._step = text[end.start() :], self._after_value
        return True

    def _inside(self) -> bool:
        """After an opening bracket: its end, or the first part."""
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] == self._nested[-1]:
            return self._after_value()
        self._buffer = text
        self._step = self._in_bare_key if self._nested[-1] == "}" else self._value_start
        return True

    def _in_bare_key(self) -> bool:
        opening, closing = self._form.quotes
        text = self._buffer.lstrip()
        at = text.find(":")
        if text.startswith(opening):
            end = text.find(closing, len(opening))
            at = text.find(":", end) if end >= 0 else -1
        if at < 0:
            return self._fail() if len(text) > _MAX_KEY_CHARS else False
        key = text[:at].strip().removeprefix(opening).removesuffix(closing).strip("\"'")
        if not key or at > _MAX_KEY_CHARS:
            return self._fail()
        self._out.append(f"{quoted(key)}: ")
        self._buffer, self._step = text[at + 1 :], self._value_start
        return True

    def _in_string(self) -> bool:
        closing = self._form.quotes[1]
        at = self._buffer.find(closing)
        end = len(self._buffer) - overlap(self._buffer, closing) if at < 0 else at
        self._out.append(quoted(self._buffer[:end])[1:-1])
        if at < 0:
            self._buffer = self._buffer[end:]
            return False
        self._out.append('"')
        self._buffer, self._step = self._buffer[at + len(closing) :], self._after_value
        return True

    def _after_value(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] == self._nested[-1]:
            self._out.append(self._nested.pop())
            self._buffer, self._step = text[1:], self._after_value
            self.done = not self._nested
            return not self.done
        if text[0] != ",":
            return self._fail()
        self._out.append(", ")
        self._buffer = text[1:]
        self._step = self._in_bare_key if self._nested[-1] == "}" else self._value_start
        return True
