"""Splits a JSON object with one long list into the items of the list; holds one item at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from weft.api.errors import InvalidJSONError
from weft.core.errors import ParameterError, WeftError

MAX_REST_BYTES = 64 * 1024  # of all that is not the list
LOOKED_BACK_BYTES = 1024  # for the name before the list

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TO_BRACE = re.compile(rb'(?:[^"{}]++|%b)*+' % _STRING, re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^"{}\[]++|%b)*+' % _STRING, re.DOTALL)
_BLANK = re.compile(rb"[ \t\r\n]*+")


class ItemTooLargeError(WeftError):
    """An item of the list is too long."""

    http_status = 413
    code = "request_too_large"


class ListSplitter:
    """Finds where the items begin and end; whoever takes them decodes them.

    Args:
        field: of the object, which has a list of objects.
        most: bytes of an item.

    Attributes:
        count: items so far.
    """

    def __init__(self, field: str, most: int) -> None:
        self.count = 0
        self._field = field
        self._most = most
        self._name = re.compile(rb'"%b"[ \t\r\n]*:[ \t\r\n]*\Z' % re.escape(field.encode()))
        self._held = bytearray()
        self._at = 0  # all before is known
        self._depth = 0  # of objects
        self._rest = b""  # what is not the list
        self._seen = False
        self._due: Literal["first", "item", "comma"] = "first"
        self._state = self._outside

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take a piece of the body; yields the items that end in it.

        Raises:
            InvalidJSONError: there is something else between items than commas.
            ItemTooLargeError: an item is too long.
            ParameterError: an item is no object, the list is given twice, or there is too much
                beside it.
        """
        self._held += data
        while (item := self._state()) is not None:
            if item:
                self.count += 1
                yield item

    def finish(self) -> bytes:
        """The body with an empty list. Raises InvalidJSONError if it ends within the list."""
        if self._state != self._outside:
            raise InvalidJSONError("The body of the request is not valid JSON (it ends too early).")
        return self._rest + bytes(self._held)

    # A state takes what it can of the bytes held. It returns an item, b"" if there may be more to
    # take, and None if more bytes are needed.

    def _outside(self) -> bytes | None:
        """Before the list, or behind it."""
        while (mark := self._next(_TO_BRACKET)) is not None:
            if mark == b"[" and self._depth == 1 and self._is_named():
                if self._seen:
                    raise ParameterError(f"'{self._field}' is given twice.", param=self._field)
                self._seen, self._state = True, self._between
                self._keep()
                return b""
        self._check_rest(len(self._held))
        return None

    def _is_named(self) -> bool:
        end = self._at - 1
        start = max(0, end - LOOKED_BACK_BYTES)
        return self._name.search(self._held, start, end) is not None

    def _between(self) -> bytes | None:
        """Before an item, before a comma, or before the end."""
        self._take(_end_of(_BLANK, self._held, 0))
        if not self._held:
            return None
        mark = bytes(self._held[:1])
        if mark == b"]" and self._due != "item":
            self._at, self._state = 1, self._outside
            self._keep()
        elif mark == b"," and self._due == "comma":
            self._take(1)
            self._due = "item"
        elif self._due == "comma" or mark in b"],":
            raise InvalidJSONError(
                f"The body of the request is not valid JSON (after {self._field}[{self.count}])."
            )
        elif mark != b"{":
            name = f"{self._field}[{self.count}]"
            raise ParameterError(f"'{name}' is wrong: expected object.", param=name)
        else:
            self._depth, self._state = 0, self._within
        return b""

    def _within(self) -> bytes | None:
        """Within an item."""
        while self._next(_TO_BRACE) is not None:
            if not self._depth:
                self._check_item(self._at)
                self._due, self._depth, self._state = "comma", 1, self._between
                return self._take(self._at)
        self._check_item(len(self._held))
        return None

    def _next(self, to_mark: re.Pattern[bytes]) -> bytes | None:
        """Go behind the next mark that is in no string; None if more bytes are needed."""
        self._at = _end_of(to_mark, self._held, self._at)
        mark = bytes(self._held[self._at : self._at + 1])
        if mark in (b"", b'"'):  # a string that does not end here
            return None
        self._at += 1
        self._depth += (mark == b"{") - (mark == b"}")
        return mark

    def _take(self, size: int) -> bytes:
        taken = bytes(self._held[:size])
        del self._held[:size]
        self._at = 0
        return taken

    def _keep(self) -> None:
        """What is known is no item."""
        self._check_rest(self._at)
        self._rest += self._take(self._at)

    def _check_rest(self, more: int) -> None:
        if len(self._rest) + more > MAX_REST_BYTES:
            raise ParameterError(
                f"The body of the request has more than {MAX_REST_BYTES} bytes beside "
                f"'{self._field}'."
            )

    def _check_item(self, size: int) -> None:
        if size > self._most:
            raise ItemTooLargeError(
                f"{self._field}[{self.count}] has more than {self._most} bytes, which is the most.",
                param=f"{self._field}[{self.count}]",
            )


def _end_of(pattern: re.Pattern[bytes], held: bytearray, at: int) -> int:
    match = pattern.match(held, at)
    assert match is not None, "it matches nothing, too"
    return match.end()
