"""Carries frames over TCP between an engine and a place: a sealed link (``weft.core.sealed``)."""

from __future__ import annotations

import socket
from typing import Protocol

from weft.attend.frames import FRAME_BYTES, Frame, FrameKind, Part
from weft.core.errors import PlaceError, PlaceRefusedError
from weft.core.sealed import LinkRules, SealedSocket, answer, call

RULES = LinkRules(
    label="weft attend",
    number=1,
    caller="engine",
    answerer="place",
    frame_bytes=FRAME_BYTES,
    broken=PlaceError,
    refused=PlaceRefusedError,
)


class Transport(Protocol):
    """Carries frames in order. One thread sends, another one receives; any may close.

    All but ``close`` raise PlaceError when the link breaks or the other side breaks the protocol.
    One-sided transports write KV and JOB into the other side's memory in ``send``.
    """

    def send(self, kind: FrameKind, *parts: Part) -> None:
        """Send a frame whose body is these parts."""

    def receive(self) -> Frame:
        """Wait for the next frame, as long as the other side may be silent."""

    def close(self) -> None:
        """End the link; whoever waits raises PlaceError. May be called twice."""


class SocketTransport(SealedSocket):
    """A ``Transport`` over a connected socket, after a handshake."""

    def send(self, kind: FrameKind, *parts: Part) -> None:
        """See ``Transport``."""
        self.send_frame(kind, *parts)

    def receive(self) -> Frame:
        """See ``Transport``."""
        number, body = self.receive_frame()
        try:
            return Frame(FrameKind(number), body)
        except ValueError:
            raise PlaceError(f"There is no frame of kind {number}.") from None


def connect(address: tuple[str, int], key: bytes, timeout_s: float) -> SocketTransport:
    """Connect to a place and do the engine's part of the handshake.

    Raises:
        PlaceError: it cannot be reached, or is no place.
        PlaceRefusedError: key or version differ.
    """
    link, sending, receiving = call(RULES, address, key, timeout_s)
    return SocketTransport(link, RULES, sending, receiving)


def accept(link: socket.socket, key: bytes) -> SocketTransport:
    """Do the place's part of the handshake with whoever has connected, within ``HANDSHAKE_S``.

    Raises:
        PlaceError: it is no engine, or too slow.
        PlaceRefusedError: key or version differ.
    """
    return SocketTransport(link, RULES, *answer(RULES, link, key))
