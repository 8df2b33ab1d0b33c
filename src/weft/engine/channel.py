"""Typed messages between two processes over a pair of sockets; decoding one runs no code."""

from __future__ import annotations

import socket
from typing import TypeVar

T = TypeVar("T")
LENGTH_BYTES = 8


class Channel:
    """One end. Messages are dataclasses of plain values, as ``msgspec`` encodes them."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = end.makefile("rb")

    def send(self, message: object) -> None:
        """Send a message. Raises OSError if the other side has closed its end."""
        import msgspec  # few engines need it

        data = msgspec.msgpack.encode(message)
        self._socket.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)

    def receive(self, kind: type[T]) -> T | None:
        """Wait for a message; None if the other side has closed its end."""
        try:
            size = self._reader.read(LENGTH_BYTES)
            data = self._reader.read(int.from_bytes(size, "little"))
        except ConnectionError:
            return None
        if len(size) < LENGTH_BYTES or len(data) < int.from_bytes(size, "little"):
            return None
        import msgspec

        return msgspec.msgpack.decode(data, type=kind)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()
