"""Length-prefixed JSON values over a socket, between a process and its renderer."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")
_AT_ONCE = 64 * 1024


def send(link: socket.socket, value: Any) -> None:
    """Send one value. Raises OSError, and ValueError for what JSON cannot say."""
    data = json.dumps(value).encode()
    link.sendall(_LENGTH.pack(len(data)) + data)


def receive(link: socket.socket) -> tuple[Any, int] | None:
    """Return the next value and the bytes that it came in; None at the end. Raises OSError."""
    head = _read(link, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    data = _read(link, size)
    return None if data is None else (json.loads(data), size)


def _read(link: socket.socket, size: int) -> bytes | bytearray | None:
    """Exactly so many bytes; None if the other side has closed before."""
    first = link.recv(min(size, _AT_ONCE))
    if len(first) == size:
        return first
    data = bytearray(size)
    data[: len(first)] = first
    view, done = memoryview(data), len(first)
    while done < size:
        count = link.recv_into(view[done:])
        if count == 0:
            return None
        done += count
    return data
