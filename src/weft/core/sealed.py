"""Sealed links: frames over TCP between two programs that have proved that they share a key.

Handshake, C being the one that calls and A the one that answers, HELLO having the protocol, weft's
version and 32 random bytes:

    C -> A  HELLO      A -> C  HELLO      C -> A  HMAC(key, caller HELLO_C HELLO_A)
    A -> C  1, HMAC(key, answerer HELLO_C HELLO_A), or 0 if the caller's proof is wrong

Each direction then has a key of its own, derived from both HELLOs, and every frame ends with an
HMAC-SHA-256 over its number, head and body: none can be forged, changed, repeated, left out or
taken from another session. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from weft import __version__
from weft.core.addresses import leads_to_loopback, parse_address
from weft.core.errors import ConfigError, WeftError

HANDSHAKE_S = 10.0
HELLO_S = 2.0  # until the first words of a caller, who has nothing to wait for
BACKLOG = 64
NONCE_BYTES = PROOF_BYTES = 32
MAGIC_BYTES = 12
HELLO = struct.Struct(f"<{MAGIC_BYTES}sH32s{NONCE_BYTES}s")
HEAD = struct.Struct("<IB")
SHORTEST_KEY, LONGEST_KEY = 16, 4096
RECEIVED_BYTES = SENT_BYTES = 2**18  # that a socket gives or takes at once, where nobody waits
Part: TypeAlias = bytes | memoryview

logger = logging.getLogger("weft")


@dataclass(frozen=True, slots=True)
class LinkRules:
    """What two sides of a kind of link agree on.

    Attributes:
        label: what tells it from other kinds, also in the keys of frames.
        number: of the protocol; any change of frames or handshake changes it.
        caller, answerer: what the two sides are.
        frame_bytes: of a body at most.
        broken: the error if the link breaks or the other side breaks the protocol.
        refused: the error if key or version differ.
    """

    label: str
    number: int
    caller: str
    answerer: str
    frame_bytes: int
    broken: type[WeftError]
    refused: type[WeftError]

    @property
    def magic(self) -> bytes:
        return self.label.replace(" ", "-").encode()[: MAGIC_BYTES - 1].ljust(MAGIC_BYTES, b"\n")

    def hello(self) -> bytes:
        """The first words of a side."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return HELLO.pack(self.magic, self.number, __version__.encode()[:32], nonce)

    def check_hello(self, hello: bytes, theirs: str, mine: str) -> None:
        """Raises the errors of the link if the other side is none, or has another version."""
        magic, number, version, _ = HELLO.unpack(hello)
        if magic != self.magic:
            raise self.broken(f"The other side is no {theirs} of weft.")
        version = version.rstrip(b"\0").decode(errors="replace")
        if (number, version) != (self.number, __version__):
            raise self.refused(
                f"The {theirs} has weft {version} with protocol {number}, the {mine} {__version__} "
                f"with protocol {self.number}; install the same version on both."
            )

    def proof(self, key: bytes, role: str, hellos: bytes) -> bytes:
        label = f"{self.label} proof of the {role}".encode()
        return hmac.digest(key, label + hellos, "sha256")

    def seal_key(self, key: bytes, receiver: str, hellos: bytes) -> bytes:
        return hmac.digest(key, f"{self.label} frames to {receiver}".encode() + hellos, "sha256")


def read_key(path: str | None) -> bytes:
    """Return the key in a file without white space around it; no key without a file.

    A file that everybody can read is used, with a warning.

    Raises:
        ConfigError: the file cannot be read, or is too short or too long for a key.
    """
    if path is None:
        return b""
    try:
        with Path(path).open("rb") as file:
            _check_readers(path, os.fstat(file.fileno()).st_mode)
            key = file.read(LONGEST_KEY + 1).strip()
    except OSError as error:
        raise ConfigError(f"The key file '{path}' cannot be read: {error.strerror}.") from None
    if not SHORTEST_KEY <= len(key) <= LONGEST_KEY:
        raise ConfigError(
            f"The key file '{path}' has {len(key)} bytes; a key has {SHORTEST_KEY} to "
            f"{LONGEST_KEY}, such as those of: openssl rand -hex 32."
        )
    return key


@functools.cache  # says it once
def _check_readers(path: str, mode: int) -> None:
    if mode & stat.S_IROTH:
        logger.warning(
            "Everybody on this machine can read the key file '%s'; chmod 600 keeps it to you.", path
        )


class SealedSocket:
    """A connected socket after a handshake. One thread sends, another one receives; any may close.

    All but ``close`` raise the error of the link when it breaks, or when the other side breaks the
    protocol.
    """

    def __init__(
        self, link: socket.socket, rules: LinkRules, sending: bytes, receiving: bytes
    ) -> None:
        self._socket, self._rules = link, rules
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0
        self._buffer = bytearray()  # of frames that have not come whole
        self._closed = threading.Event()

    def set_timeout(self, seconds: float) -> None:
        """How long the other side may be silent, or not take what is sent; 0: nobody waits."""
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        return self._socket.fileno()

    def seal(self, kind: int, *parts: Part) -> bytes:
        """A frame whose body is these parts; to be sent in the order in which they are made."""
        size = sum(len(part) for part in parts)
        self._check_size(size)
        head = HEAD.pack(size, kind)
        mac = self._mac(self._sending, self._sent, head, *parts)
        self._sent += 1
        return b"".join((head, *parts, mac))

    def send_frame(self, kind: int, *parts: Part) -> None:
        """Send a frame, and wait until the system has taken it."""
        frame = self.seal(kind, *parts)
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise self._broken(error) from None

    def receive_frame(self) -> tuple[int, memoryview]:
        """Wait for the next frame, as long as the other side may be silent: its kind and body."""
        head = bytes(receive_bytes(self._socket, HEAD.size, self._rules.broken))
        size, kind = self._read_head(head)
        rest = memoryview(receive_bytes(self._socket, size + PROOF_BYTES, self._rules.broken))
        return kind, self._open(head, rest)

    def send_some(self, outgoing: bytearray) -> bool:
        """Send what the system takes at once of sealed frames, and remove it; whether it took any.

        A socket with a timeout waits until the system takes some.
        """
        try:
            sent = self._socket.send(outgoing[:SENT_BYTES])
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise self._broken(error) from None
        del outgoing[:sent]
        return True

    def receive_some(self) -> Iterator[tuple[int, memoryview]]:
        """The frames that are there, for a socket on which nobody waits: kind and body of each.

        One call takes in ``RECEIVED_BYTES`` at most, so that a fast sender keeps nobody else
        waiting; while more is there the descriptor stays readable.
        """
        try:
            data = self._socket.recv(RECEIVED_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise self._broken(error) from None
        if not data:
            raise self._rules.broken("The other side has closed the link.")
        self._buffer += data
        whole, at = self._buffer, 0
        with memoryview(whole) as view:
            if self._end_of_frame(view, 0) is None:
                return
        self._buffer = bytearray()
        view = memoryview(whole)  # the bodies refer to it as long as they are used
        while (end := self._end_of_frame(view, at)) is not None:
            head = bytes(view[at : at + HEAD.size])
            body = self._open(head, view[at + HEAD.size : end])
            at = end
            yield head[-1], body
        self._buffer += view[at:]

    def _end_of_frame(self, view: memoryview, at: int) -> int | None:
        """Where the frame ends that begins there; None if it has not come whole."""
        if len(view) - at < HEAD.size:
            return None
        size, _ = self._read_head(bytes(view[at : at + HEAD.size]))
        end = at + HEAD.size + size + PROOF_BYTES
        return end if end <= len(view) else None

    def finish(self, seconds: float) -> None:
        """End the link when the other side has what was sent, and has ended it, or time is up."""
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while (left_s := end - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                if not self._socket.recv(RECEIVED_BYTES):
                    break
        self.close()

    def close(self) -> None:
        """End the link; whoever waits gets an error. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        close_socket(self._socket)

    def _read_head(self, head: bytes) -> tuple[int, int]:
        size, kind = HEAD.unpack(head)
        self._check_size(size)
        return size, kind

    def _check_size(self, size: int) -> None:
        if size > (most := self._rules.frame_bytes):
            raise self._rules.broken(
                f"A frame of {size} bytes is too long; one has {most} at most."
            )

    def _open(self, head: bytes, rest: memoryview) -> memoryview:
        """The body of a frame that is whole and unchanged."""
        body = rest[:-PROOF_BYTES]
        expected = self._mac(self._receiving, self._received, head, body)
        if not hmac.compare_digest(expected, rest[-PROOF_BYTES:]):
            raise self._rules.broken("A frame was changed on its way, or is not of this session.")
        self._received += 1
        return body

    def _broken(self, error: Exception) -> WeftError:
        return self._rules.broken(f"The link is broken: {why(error)}.")

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


def call(
    rules: LinkRules, address: tuple[str, int], key: bytes, timeout_s: float
) -> tuple[socket.socket, bytes, bytes]:
    """Connect and do the caller's part of the handshake: the arguments of a ``SealedSocket``.

    Raises:
        WeftError: of the rules: it cannot be reached, or key or version differ.
    """
    try:
        link = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise rules.broken(f"It cannot be reached: {why(error)}.") from None
    except UnicodeError:
        raise rules.broken(f"It cannot be reached: '{address[0]}' is no name of a host.") from None
    try:
        return link, *_caller_side(rules, link, key, timeout_s)
    except BaseException:
        close_socket(link)
        raise


def _caller_side(
    rules: LinkRules, link: socket.socket, key: bytes, timeout_s: float
) -> tuple[bytes, bytes]:
    end = time.monotonic() + timeout_s
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = rules.hello()
    _send(rules, link, mine)
    theirs = bytes(receive_bytes(link, HELLO.size, rules.broken, end))
    rules.check_hello(theirs, rules.answerer, rules.caller)
    hellos = mine + theirs
    _send(rules, link, rules.proof(key, rules.caller, hellos))
    verdict = receive_bytes(link, 1, rules.broken, end)
    good = verdict == b"\x01" and hmac.compare_digest(
        receive_bytes(link, PROOF_BYTES, rules.broken, end),
        rules.proof(key, rules.answerer, hellos),
    )
    if not good:
        raise rules.refused(f"The keys of {rules.caller} and {rules.answerer} differ.")
    return rules.seal_key(key, rules.answerer, hellos), rules.seal_key(key, rules.caller, hellos)


def answer(rules: LinkRules, link: socket.socket, key: bytes) -> tuple[bytes, bytes]:
    """Do the answerer's part with whoever has connected, within ``HANDSHAKE_S``.

    The caller's HELLO must come within ``HELLO_S``.

    Returns the keys of sending and of receiving.

    Raises:
        WeftError: of the rules: it is no caller, or too slow, or key or version differ.
    """
    end = time.monotonic() + HANDSHAKE_S
    link.settimeout(HANDSHAKE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = rules.hello()
    theirs = bytes(receive_bytes(link, HELLO.size, rules.broken, time.monotonic() + HELLO_S))
    if theirs.startswith(rules.magic):  # a caller of another version reads which one this is
        _send(rules, link, mine)
    rules.check_hello(theirs, rules.caller, rules.answerer)
    hellos = theirs + mine
    proof = receive_bytes(link, PROOF_BYTES, rules.broken, end)
    if not hmac.compare_digest(proof, rules.proof(key, rules.caller, hellos)):
        _send(rules, link, b"\x00")
        raise rules.refused(f"The keys of {rules.caller} and {rules.answerer} differ.")
    _send(rules, link, b"\x01" + rules.proof(key, rules.answerer, hellos))
    return rules.seal_key(key, rules.caller, hellos), rules.seal_key(key, rules.answerer, hellos)


def listen_with_key(
    address: str, key: bytes, *, callers: str, param: str, key_param: str
) -> socket.socket:
    """Return a socket that listens for callers of a kind.

    Args:
        callers: what they are, as in "engines".
        param, key_param: the settings of address and key.

    Raises:
        ConfigError: the address cannot be had, or others than this machine reach it without a key.
    """
    host, port = parse_address(address, param)
    if not key and not leads_to_loopback(host):
        raise ConfigError(
            f"Other machines can reach {host}, so {callers} must prove that they know a key; name "
            f"one with --{key_param.replace('_', '-')}, or listen on 127.0.0.1.",
            param=key_param,
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {address}: {error.strerror or error}.", param=param
        ) from None


def _send(rules: LinkRules, link: socket.socket, data: bytes) -> None:
    try:
        link.sendall(data)
    except OSError as error:
        raise rules.broken(f"The link is broken: {why(error)}.") from None


def receive_bytes(
    link: socket.socket, size: int, broken: type[WeftError], end: float | None = None
) -> bytearray:
    """Receive so many bytes; each must come within the socket's timeout, all of them by ``end``."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        if end is not None:
            link.settimeout(max(0.001, end - time.monotonic()))
        try:
            count = link.recv_into(view[got:])
        except (OSError, ValueError) as error:
            raise broken(f"The link is broken: {why(error)}.") from None
        if count == 0:
            raise broken("The other side has closed the link.")
        got += count
    return data


def why(error: Exception) -> str:
    """What went wrong with a socket."""
    if isinstance(error, TimeoutError):
        return "the other side is silent"
    return getattr(error, "strerror", None) or str(error)
