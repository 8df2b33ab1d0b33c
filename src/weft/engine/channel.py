"""The messages between rank 0 and the other ranks, and the pair of sockets that they go over.

Decoding a message runs no code.
"""

from __future__ import annotations

import contextlib
import select
import socket
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.core import errors
from weft.core.errors import WeftError
from weft.core.plan import StepPlan, StepResult
from weft.core.resolved import ResolvedConfig

T = TypeVar("T")
LENGTH_BYTES = 8
TAKEN_BYTES = 2**20  # at a time, while a message is being sent


class Channel:
    """One end. Messages are dataclasses of plain values, as ``msgspec`` encodes them."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._early = bytearray()  # has come while a message was being sent

    def send(self, message: object) -> None:
        """Send a message. Raises OSError if the other side has closed its end.

        Both sides may send at once: who has to wait for the other one takes what that sends.
        """
        import msgspec  # few engines need it

        data = msgspec.msgpack.encode(message, enc_hook=_encode_error)
        left = memoryview(len(data).to_bytes(LENGTH_BYTES, "little") + data)
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._take()

    def _take(self) -> None:
        """Wait until something can be sent, or take what has come."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        ((_, events),) = poll.poll()
        if events & select.POLLIN:
            some = self._socket.recv(TAKEN_BYTES)
            if not some:
                raise BrokenPipeError("the other side has closed its end")
            self._early += some

    def receive(self, kind: type[T]) -> T | None:
        """Wait for a message; None if the other side has closed its end."""
        try:
            size = self._read(LENGTH_BYTES)
            data = self._read(int.from_bytes(size, "little"))
        except ConnectionError:
            return None
        if len(size) < LENGTH_BYTES or len(data) < int.from_bytes(size, "little"):
            return None
        import msgspec

        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_error)

    def has_more(self) -> bool:
        """Whether a message has come, or the end."""
        if self._early:
            return True
        readable, _, _ = select.select([self._socket], [], [], 0)
        return bool(readable)

    def _read(self, count: int) -> bytes:
        """So many bytes, or fewer at the end."""
        found = self._early[:count]
        del self._early[:count]
        while len(found) < count and (some := self._socket.recv(count - len(found))):
            found += some
        return bytes(found)

    def end(self) -> None:
        """Send nothing more, receive only what has come; ends waits of another thread."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _encode_error(value: object) -> object:
    """What is no plain value in a message: the errors of a result."""
    if isinstance(value, WeftError):
        return [type(value).__name__, value.message]
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decode_error(kind: type, value: Any) -> object:
    if not issubclass(kind, WeftError):
        raise TypeError(f"{kind.__name__} cannot be received")
    name, message = value
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, WeftError):
        return found(message)
    return WeftError(message)


@dataclass(frozen=True)
class Task:
    """What a rank has to know; the first message to it.

    Attributes:
        settings: those of the engine, with what rank 0 has decided.
        meeting_point: see ``collectives.Group``.
    """

    settings: dict[str, Any]
    resolved: ResolvedConfig
    rank: int
    meeting_point: str


@dataclass(frozen=True)
class Report:
    """That a rank is as far as it should be, or the name of an error and its message.

    Attributes:
        result: of a step, from the rank of the last stage of a pipeline that tells it.
    """

    error: str = ""
    message: str = ""
    result: StepResult | None = None


@dataclass(frozen=True)
class RankTokens:
    """The tokens of a step by sequence, drafts that were taken and piggybacked rows included."""

    step_id: int
    tokens: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, result: StepResult) -> RankTokens:
        """Of every sequence whose token means something."""
        found = (*zip(result.sequence_ids, result.tokens, strict=True), *result.piggybacked_results)
        tokens = {
            i: (token, *(more for more, _ in result.accepted.get(i, ())))
            for i, token in found
            if i not in result.faults and i not in result.embeddings
        }
        return cls(result.step_id, tokens)


@dataclass(frozen=True)
class Step:
    """A plan, and what rank 0 got from earlier ones since the last message."""

    plan: StepPlan
    collected: tuple[RankTokens, ...]
