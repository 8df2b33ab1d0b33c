"""Parses tool calls from an assistant's text, in any form, as it arrives.

What is not a call in the model's form stays content, markers included: nothing is lost. Once the
arguments of a call have begun it is given out and cannot be taken back; where such a call breaks
off, its arguments stay incomplete and the text after it is content. Where the turn itself was cut
short, what has begun is taken for a call: it is given out if its name is complete, and nothing of
its form is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from weft.text.argumentcalls import BareCall, PythonCall, TaggedCall
from weft.text.assistant import Content, Event, Stepwise, split_at
from weft.text.callbodies import CallReader, NamedCall, ObjectCall, Schemas, match
from weft.text.forms import MARK, CallForm

# The first marker of a text.
MARKER = re.compile(rf"{MARK}?(?:<[^<>\s]+>|\[[^\[\]\s]+\]|<+[^\s<]+|[^\s<]+)")
_READERS = {"tagged": TaggedCall, "python": PythonCall, "bare": BareCall}


@dataclass(frozen=True, slots=True)
class _Way:
    """One way in which calls may begin: in the form's section, or without it."""

    form: CallForm
    opening: str
    section: bool

    @property
    def marked(self) -> bool:
        return not self.form.unmarked


class CallParser(Stepwise):
    """Reads text, and the calls that markers open.

    Args:
        form: of the calls; None where there are none, so that all is content.
        tools: parameters of the functions that may be called, by name. Calls of others are read
            as well, but for those without a marker.
        unmarked: calls without a marker may begin the turn.
    """

    def __init__(
        self, form: CallForm | None, tools: Schemas | None = None, *, unmarked: bool = True
    ) -> None:
        forms = () if form is None else (form, *form.others)
        self._ways = [way for one in forms for way in _ways(one)]
        self._markers = tuple(dict.fromkeys(_markers(self._ways)))
        self._tools = tools or {}
        self._skipped = ""  # the marker that becomes content if no call follows
        self._tried = ""  # text that is content if no call comes of it
        self._left: list[_Way] = []  # ways that have not been tried with it
        self._way: _Way | None = None
        self._reader: CallReader | None = None
        self._count = 0
        bare = unmarked and any(not way.marked for way in self._ways)
        super().__init__(self._unmarked if bare else self._in_text)

    def flush(self, *, cut: bool = False) -> list[Event]:
        """Return what is held back when the turn has ended.

        It is content, as no call came of it; where the turn was ``cut``, only what may be no call.
        """
        reader = self._reader
        events = [] if reader is None else reader.finish(cut=cut)
        held = "" if reader is not None and reader.started else self._tried + self._buffer
        begun = self._count > 0 or (
            self._step != self._in_text and self._way is not None and self._way.marked
        )
        self._buffer = self._tried = ""
        self._reader = None
        return events if events or not held or (cut and begun) else [Content(held)]

    def _in_text(self, events: list[Event]) -> bool:
        before, marker, rest = split_at(self._buffer, self._markers)
        if before:
            events.append(Content(before))
        self._buffer = marker + rest if marker else rest
        if not marker:
            return False
        self._skipped = marker
        found = marker.lstrip()
        self._try([way for way in self._ways if way.marked and way.opening.startswith(found)])
        return True

    def _unmarked(self, _: list[Event]) -> bool:
        """Where a call needs no marker: at the start, and after another one."""
        self._skipped = ""
        self._try([way for way in self._ways if not way.marked])
        return True

    def _try(self, ways: list[_Way]) -> None:
        self._left = ways
        self._way = ways[0]
        self._step = self._opened

    def _opened(self, events: list[Event]) -> bool:
        """At the text that opens calls in one of the ways that are left."""
        way = self._left[0]
        self._way = way
        end = match(self._buffer, way.opening)
        if end is None:
            return False
        if end < 0:
            return self._next_way(events)
        self._tried, self._buffer = self._buffer[:end], self._buffer[end:]
        return self._begin_or_wait(way)

    def _begin_or_wait(self, way: _Way) -> bool:
        self._step = self._in_section if way.section else self._begin
        return True

    def _next_way(self, events: list[Event]) -> bool:
        """Go back to where calls were to begin, for another way or as text."""
        self._buffer = self._tried + self._buffer
        self._tried = ""
        self._left = self._left[1:]
        if self._left:
            self._step = self._opened
            return True
        if self._skipped:
            events.append(Content(self._skipped))
            self._buffer = self._buffer[len(self._skipped) :]
        self._step = self._in_text
        return True

    def _begin(self, _: list[Event]) -> bool:
        assert self._way is not None
        self._reader = _reader(self._way, self._count, self._tools)
        self._step = self._in_call
        return True

    def _in_call(self, events: list[Event]) -> bool:
        reader = self._reader
        assert reader is not None
        if not reader.started:
            self._tried += self._buffer
        found, rest = reader.feed(self._buffer)
        self._buffer = ""
        events += found
        if reader.failed and not reader.started:
            self._reader = None
            return self._give_up(events)
        if reader.started:
            self._tried = ""
        if not reader.done and not reader.failed:
            return False
        self._reader = None
        self._buffer = rest
        self._count += 1
        self._left = []
        self._step = self._in_text if reader.failed else self._closed
        return True

    def _give_up(self, events: list[Event]) -> bool:
        if self._left:
            return self._next_way(events)
        self._buffer = self._tried + self._buffer
        self._tried = ""
        self._step = self._in_text
        return True

    def _closed(self, _: list[Event]) -> bool:
        """After a call, before the text that closes it, which may be missing."""
        assert self._way is not None
        end = match(self._buffer, self._way.form.call[1])
        if end is None:
            return False
        self._buffer = self._buffer[max(end, 0) :]
        self._step = self._in_section if self._way.section else self._between
        return True

    def _in_section(self, events: list[Event]) -> bool:
        """In a section, before a call or its end."""
        assert self._way is not None
        form, first = self._way.form, bool(self._left)
        text = self._buffer if first else self._buffer.lstrip(" \t\r\n,")
        end = match(text, form.section[1])
        if end is not None and end >= 0 and not first:
            self._buffer = text[end:]
            self._step = self._between
            return True
        start = match(text, form.call[0])
        if start is None or (end is None and not first):
            return False
        if start < 0 or (end is not None and end >= 0):
            return self._give_up(events)
        self._tried += self._buffer[: len(self._buffer) - len(text) + start]
        self._buffer = text[start:]
        self._step = self._begin
        return True

    def _between(self, _: list[Event]) -> bool:
        """After a call and its end."""
        assert self._way is not None
        if self._way.marked or self._way.section:
            return self._skip_space(self._in_text)
        text = self._buffer.lstrip(" \t\r\n;")
        if not text:
            return False
        self._step = self._in_text
        if match(text, self._way.form.name[0][:1]) != -1:
            self._buffer = text
            self._step = self._unmarked
        return True


def _ways(form: CallForm) -> Iterator[_Way]:
    if form.section[0]:
        yield _Way(form, form.section[0], True)
    if form.call[0] or not form.section[0]:
        yield _Way(form, form.call[0], False)
    if form.body == "tagged" and form.call[0] and form.name[0]:
        yield _Way(form, "", False)


def _markers(ways: list[_Way]) -> Iterator[str]:
    for way in ways:
        found = MARKER.match(way.opening) if way.marked else None
        if found:
            yield found[0]


def _reader(way: _Way, index: int, tools: Schemas) -> CallReader:
    form = way.form
    if form.body == "object":
        return ObjectCall(form, index, tools.keys() if form.unmarked else None)
    if form.body == "json":
        return NamedCall(form, index)
    return _READERS[form.body](form, index, tools, known=form.unmarked)
