"""The link between a request plane and the engine's ring on another machine: its frames and start.

    OPEN     plane -> agent   who it is and what it wants, as JSON; answered by WELCOME or REFUSE
    WELCOME  agent -> plane   sizes of the ring, or the facts of the model, as JSON
    REFUSE   agent -> plane   why the link ends, as JSON
    RING     either way       changes of the ring's memory (changes.hpp), to be applied in order
    READY    either way       the ring has come whole; all is said again that a lost link may not
                              have brought, and the agent may tell what is new
    PING     plane -> agent   the plane's clock; answered by PONG with both clocks
    PONG     agent -> plane
    LEAVE    agent -> plane   the engine is about to end: no new requests
    END      either way       the sender gives the ring up, and not only this link
    FILE     either way       the name of a file of the model; its content

The agent (``weft.ring.agent``) runs where the engine is. A session is a request plane from its
start to its end; it may have several links, one after the other. WELCOME names the ring, and OPEN
the one that the plane has got whole: if they are the same the plane goes on with it and says all
again, else the ring follows.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from weft.core.addresses import parse_address
from weft.core.errors import ModelChangedError, RingLinkError, RingRefusedError, short
from weft.core.sealed import HANDSHAKE_S, LinkRules, SealedSocket, call, read_key
from weft.ring import _native
from weft.ring.codec import SAMPLING
from weft.ring.layout import SIZES
from weft.ring.segment import MOST_ARENA, RingFds

RULES = LinkRules(
    label="weft ring",
    number=2,
    caller="request plane",
    answerer="engine",
    frame_bytes=4 * 2**20,
    broken=RingLinkError,
    refused=RingRefusedError,
)
SNAPSHOT_BYTES = 2**20  # beside what grows with the slots
CLOCK = struct.Struct("<q")
CLOCKS = struct.Struct("<qq")


class LinkFrame(IntEnum):
    """The kind of a frame."""

    OPEN = 1
    WELCOME = 2
    REFUSE = 3
    RING = 4
    READY = 5
    PING = 6
    PONG = 7
    LEAVE = 8
    END = 9
    FILE = 10


@dataclass(frozen=True, slots=True)
class RingAccess:
    """How a request plane reaches a ring on another machine; crosses to processes as text.

    Attributes:
        address: HOST:PORT of the agent.
        key_file: with the key that both sides know; None for none.
        timeout_s: silence after which a link is given up.
        plane: a name of the request plane that its successor has, too.
        model: digest of the facts that the request plane works with; empty if it knows none.
    """

    address: str
    key_file: str | None
    timeout_s: float
    plane: str
    model: str = ""

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """For ``subprocess.Popen(pass_fds=...)``, as ``RingFds`` has it: none."""
        return ()

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def parse_ring(text: str) -> RingFds | RingAccess:
    """Read what ``str`` wrote of a ring, as a child process finds it among its arguments."""
    return RingAccess(**json.loads(text)) if text.startswith("{") else RingFds.parse(text)


def open_link(access: RingAccess, wanted: dict[str, Any]) -> tuple[SealedSocket, dict[str, Any]]:
    """Connect to an agent and say what is wanted; returns the link and its answer.

    Raises:
        RingLinkError: it cannot be reached, or broke the protocol.
        RingRefusedError: it refuses.
        ModelChangedError: it has other facts than the access names.
        ConfigError: address or key file cannot be used.
    """
    key = read_key(access.key_file)
    timeout_s = min(access.timeout_s, HANDSHAKE_S)
    link = SealedSocket(*_called(access.address, key, timeout_s))
    try:
        link.set_timeout(access.timeout_s)
        link.send_frame(LinkFrame.OPEN, pack_json({**_introduced(access), **wanted}))
        return link, unpack_json(expect(link, LinkFrame.WELCOME))
    except BaseException:
        link.close()
        raise


def _introduced(access: RingAccess) -> dict[str, Any]:
    """What a request plane says of itself."""
    return {"plane": access.plane, "model": access.model}


def _called(address: str, key: bytes, timeout_s: float) -> tuple[Any, LinkRules, bytes, bytes]:
    socket, sending, receiving = call(RULES, parse_address(address, "ring"), key, timeout_s)
    return socket, RULES, sending, receiving


def expect(link: SealedSocket, kind: LinkFrame) -> memoryview:
    """The body of the next frame, which has to be of this kind. Raises as ``open_link``."""
    number, body = link.receive_frame()
    if number == LinkFrame.REFUSE:
        given = unpack_json(body)
        error = RingRefusedError if given.get("final") is True else RingLinkError
        if given.get("changed") is True:
            error = ModelChangedError
        raise error(f"The engine refuses: {short(str(given.get('message')), 500)}")
    if number != kind:
        raise RingLinkError(f"The engine sent a frame of kind {number} instead of {kind.name}.")
    return body


def wanted_ring(session: str, held: str = "") -> dict[str, Any]:
    """What a request plane says that wants a ring; ``held`` is the one that it has, if any."""
    return {"session": session, "ring": SIZES["version"], "sampling": SAMPLING, "ring_id": held}


class RemoteRing(_native.RemoteClient):
    """The copy of a ring that a request plane works on; its memory has no name."""

    @classmethod
    def receive(cls, link: SealedSocket, welcome: dict[str, Any]) -> RemoteRing:
        """Take in a ring as it is now. Raises RingLinkError if it is none."""
        ring_id = welcome.get("ring_id")
        if not (isinstance(ring_id, str) and ring_id):
            raise RingLinkError("The engine does not say which ring it gives.")
        sizes: list[Any] = [welcome.get(name) for name in ("slots", "arena_bytes", "memory_bytes")]
        mosts = (SIZES["max_slots"], MOST_ARENA, MOST_ARENA)
        if not all(type(n) is int and 0 < n <= most for n, most in zip(sizes, mosts, strict=True)):
            raise RingLinkError("The engine names no sizes of its ring, or none that a ring has.")
        left = SNAPSHOT_BYTES + 2 * _native.offsets(sizes[0])["arena"]
        parts = []
        while True:
            number, body = link.receive_frame()
            if number == LinkFrame.READY:
                break
            if number != LinkFrame.RING:
                raise RingLinkError(f"The engine sent a frame of kind {number} amid its ring.")
            parts.append(body.tobytes())
            left -= len(body)
            if left < 0:
                raise RingLinkError("The engine sent more than a ring of its sizes holds.")
        try:
            memory = _native.create(sizes[0], sizes[1], SAMPLING, sizes[2])
            try:
                return cls(memory, SAMPLING, parts)
            finally:
                os.close(memory)
        except ValueError as error:
            raise RingLinkError(f"The engine's ring is malformed: {error}.") from None
        except (OSError, MemoryError) as error:
            raise RingLinkError(f"There is no memory for a copy of the ring: {error}.") from None


def unpack_clocks(form: struct.Struct, body: memoryview) -> tuple[int, ...]:
    """Read the body of PING or PONG. Raises RingLinkError if it is malformed."""
    if len(body) != form.size:
        raise RingLinkError("A frame does not hold the clocks that it should.")
    return form.unpack(body)


def pack_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def unpack_json(body: memoryview) -> dict[str, Any]:
    """Read a JSON object. Raises RingLinkError if it is none."""
    try:
        value = json.loads(bytes(body))
        if not isinstance(value, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        raise RingLinkError(f"A frame is malformed: {short(error)}.") from None
    return value
