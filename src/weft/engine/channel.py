"""The messages between rank 0 and the other ranks, and the pair of sockets that they go over.

Decoding a message runs no code.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.core.plan import StepPlan, StepResult
from weft.core.resolved import ResolvedConfig

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
    """That a rank is as far as it should be, or the name of an error and its message."""

    error: str = ""
    message: str = ""


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
