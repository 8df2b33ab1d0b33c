"""Texts in shared memory that one process writes and others read, each with number and checksum.

    place: head | text
    head:  number: 8 bytes | length: 4 bytes | CRC-32 of the text: 4 bytes

A text that does not fit its checksum is being written, or its writer has died; it counts as not
there.
"""

from __future__ import annotations

import mmap
import struct
import zlib

_HEAD = struct.Struct("<QII")
HEAD_BYTES = _HEAD.size


class CheckedTexts:
    """Places of equal size in a mapping.

    Args:
        start: of the first place.
        place_bytes: of each, with its head.
    """

    def __init__(self, memory: mmap.mmap, start: int, place_bytes: int) -> None:
        self._map = memory
        self._start = start
        self._place_bytes = place_bytes

    def number(self, place: int) -> int:
        """Of the text that was written last; 0 if there has been none."""
        number: int = _HEAD.unpack_from(self._map, self._start + place * self._place_bytes)[0]
        return number

    def fits(self, text: bytes) -> bool:
        """Whether a place has room for a text."""
        return HEAD_BYTES + len(text) <= self._place_bytes

    def write(self, place: int, number: int, text: bytes) -> None:
        """Write a text that fits, under a number from 1."""
        at = self._start + place * self._place_bytes
        self._map[at + HEAD_BYTES : at + HEAD_BYTES + len(text)] = text
        head = _HEAD.pack(number, len(text), zlib.crc32(text))
        self._map[at : at + HEAD_BYTES] = head  # pack_into would show zeros first

    def read(self, place: int) -> bytes | None:
        """The text; None if there is none, or it is being written."""
        at = self._start + place * self._place_bytes
        number, length, checksum = _HEAD.unpack_from(self._map, at)
        begin = at + HEAD_BYTES
        text = self._map[begin : begin + min(length, self._place_bytes - HEAD_BYTES)]
        return text if number and zlib.crc32(text) == checksum else None
