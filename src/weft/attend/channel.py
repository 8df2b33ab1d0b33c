"""Carries frames over TCP between an engine and a place that have proved that they share a key.

Handshake, E being the engine and P the place, HELLO having the protocol, weft's version and 32
random bytes:

    E -> P  HELLO      P -> E  HELLO      E -> P  HMAC(key, "engine" HELLO_E HELLO_P)
    P -> E  1, HMAC(key, "place" HELLO_E HELLO_P), or 0 if the engine's proof is wrong

Each direction then has a key of its own, derived from both HELLOs, and every frame ends with an
HMAC-SHA-256 over its number, head and body: none can be forged, changed, repeated, left out or
taken from another session. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Protocol

from weft import __version__
from weft.attend.frames import FRAME_BYTES, Frame, FrameKind, Part
from weft.core.errors import ConfigError, PlaceError, PlaceRefusedError

MAGIC = b"weft-attend\n"
PROTOCOL = 1  # any change of frames or handshake
HANDSHAKE_S = 10.0
NONCE_BYTES = PROOF_BYTES = 32
HELLO = struct.Struct(f"<12sH32s{NONCE_BYTES}s")
HEAD = struct.Struct("<IB")
SHORTEST_KEY, LONGEST_KEY = 16, 4096


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


def read_key(path: str | None) -> bytes:
    """Return the key in a file without white space around it; no key without a file.

    Raises:
        ConfigError: the file cannot be read, or is too short or too long for a key.
    """
    if path is None:
        return b""
    try:
        with Path(path).open("rb") as file:
            key = file.read(LONGEST_KEY + 1).strip()
    except OSError as error:
        raise ConfigError(f"The key file '{path}' cannot be read: {error.strerror}.") from None
    if not SHORTEST_KEY <= len(key) <= LONGEST_KEY:
        raise ConfigError(
            f"The key file '{path}' has {len(key)} bytes; a key has {SHORTEST_KEY} to "
            f"{LONGEST_KEY}, such as those of: openssl rand -hex 32."
        )
    return key


class SocketTransport:
    """A ``Transport`` over a connected socket, after a handshake."""

    def __init__(self, link: socket.socket, sending: bytes, receiving: bytes) -> None:
        self._socket = link
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0
        self._closed = threading.Event()

    def set_timeout(self, seconds: float) -> None:
        """How long the other side may be silent, or not take what is sent."""
        self._socket.settimeout(seconds)

    def send(self, kind: FrameKind, *parts: Part) -> None:
        """See ``Transport``."""
        size = sum(len(part) for part in parts)
        if size > FRAME_BYTES:
            raise PlaceError(f"A frame of {size} bytes is too long; one has {FRAME_BYTES} at most.")
        head = HEAD.pack(size, kind)
        mac = self._mac(self._sending, self._sent, head, *parts)
        self._sent += 1
        try:
            self._socket.sendall(b"".join((head, *parts, mac)))
        except OSError as error:
            raise PlaceError(f"The link is broken: {_why(error)}.") from None

    def receive(self) -> Frame:
        """See ``Transport``."""
        head = bytes(_receive(self._socket, HEAD.size))
        size, number = HEAD.unpack(head)
        if size > FRAME_BYTES:
            raise PlaceError(f"A frame of {size} bytes is too long; one has {FRAME_BYTES} at most.")
        rest = memoryview(_receive(self._socket, size + PROOF_BYTES))
        body = rest[:size]
        expected = self._mac(self._receiving, self._received, head, body)
        if not hmac.compare_digest(expected, rest[size:]):
            raise PlaceError("A frame was changed on its way, or is not of this session.")
        self._received += 1
        try:
            return Frame(FrameKind(number), body)
        except ValueError:
            raise PlaceError(f"There is no frame of kind {number}.") from None

    def close(self) -> None:
        """See ``Transport``."""
        if self._closed.is_set():
            return
        self._closed.set()
        close_socket(self._socket)

    @staticmethod
    def _mac(key: bytes, number: int, head: bytes, *parts: Part) -> bytes:
        mac = hmac.new(key, struct.pack("<Q", number) + head, "sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()


def close_socket(link: socket.socket) -> None:
    """Close a socket, and end what other threads wait for on it."""
    with contextlib.suppress(OSError):  # it may not be connected any more
        link.shutdown(socket.SHUT_RDWR)
    link.close()


def connect(address: tuple[str, int], key: bytes, timeout_s: float) -> SocketTransport:
    """Connect to a place and do the engine's part of the handshake.

    Raises:
        PlaceError: it cannot be reached, or is no place.
        PlaceRefusedError: key or version differ.
    """
    try:
        link = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise PlaceError(f"It cannot be reached: {_why(error)}.") from None
    except UnicodeError:
        raise PlaceError(f"It cannot be reached: '{address[0]}' is no name of a host.") from None
    try:
        return _engine_side(link, key, timeout_s)
    except BaseException:
        close_socket(link)
        raise


def _engine_side(link: socket.socket, key: bytes, timeout_s: float) -> SocketTransport:
    end = time.monotonic() + timeout_s
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = _hello()
    _send(link, mine)
    theirs = _read(link, HELLO.size, end)
    _check_hello(theirs, "place", "engine")
    hellos = mine + theirs
    _send(link, _proof(key, b"engine", hellos))
    verdict = _read(link, 1, end)
    good = verdict == b"\x01" and hmac.compare_digest(
        _read(link, PROOF_BYTES, end), _proof(key, b"place", hellos)
    )
    if not good:
        raise PlaceRefusedError("The keys of engine and place differ.")
    return SocketTransport(link, _key(key, b"to place", hellos), _key(key, b"to engine", hellos))


def accept(link: socket.socket, key: bytes) -> SocketTransport:
    """Do the place's part of the handshake with whoever has connected, within ``HANDSHAKE_S``.

    Raises:
        PlaceError: it is no engine, or too slow.
        PlaceRefusedError: key or version differ.
    """
    end = time.monotonic() + HANDSHAKE_S
    link.settimeout(HANDSHAKE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = _hello()
    theirs = _read(link, HELLO.size, end)
    if theirs.startswith(MAGIC):  # an engine of another version reads which one this is
        _send(link, mine)
    _check_hello(theirs, "engine", "place")
    hellos = theirs + mine
    proof = _read(link, PROOF_BYTES, end)
    if not hmac.compare_digest(proof, _proof(key, b"engine", hellos)):
        _send(link, b"\x00")
        raise PlaceRefusedError("The keys of engine and place differ.")
    _send(link, b"\x01" + _proof(key, b"place", hellos))
    return SocketTransport(link, _key(key, b"to engine", hellos), _key(key, b"to place", hellos))


def _hello() -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return HELLO.pack(MAGIC, PROTOCOL, __version__.encode()[:32], nonce)


def _check_hello(hello: bytes, theirs: str, mine: str) -> None:
    magic, protocol, version, _ = HELLO.unpack(hello)
    if magic != MAGIC:
        raise PlaceError(f"The other side is no {theirs} of weft.")
    version = version.rstrip(b"\0").decode(errors="replace")
    if (protocol, version) != (PROTOCOL, __version__):
        raise PlaceRefusedError(
            f"The {theirs} has weft {version} with protocol {protocol}, the {mine} {__version__} "
            f"with protocol {PROTOCOL}; install the same version on both."
        )


def _proof(key: bytes, role: bytes, hellos: bytes) -> bytes:
    return hmac.digest(key, b"weft attend proof of the " + role + hellos, "sha256")


def _key(key: bytes, direction: bytes, hellos: bytes) -> bytes:
    return hmac.digest(key, b"weft attend frames " + direction + hellos, "sha256")


def _send(link: socket.socket, data: bytes) -> None:
    try:
        link.sendall(data)
    except OSError as error:
        raise PlaceError(f"The link is broken: {_why(error)}.") from None


def _read(link: socket.socket, size: int, end: float) -> bytes:
    """Receive so many bytes of a handshake."""
    return bytes(_receive(link, size, end))


def _receive(link: socket.socket, size: int, end: float | None = None) -> bytearray:
    """Receive so many bytes; each must come within the socket's timeout, all of them by ``end``."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        if end is not None:
            link.settimeout(max(0.001, end - time.monotonic()))
        try:
            count = link.recv_into(view[got:])
        except (OSError, ValueError) as error:
            raise PlaceError(f"The link is broken: {_why(error)}.") from None
        if count == 0:
            raise PlaceError("The other side has closed the link.")
        got += count
    return data


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the other side is silent"
    return getattr(error, "strerror", None) or str(error)
