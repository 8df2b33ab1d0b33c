"""The engine's side of a place: a link that sends KV and jobs, takes results, and reconnects."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.attend.channel import Transport, connect
from weft.attend.frames import (
    CHUNK_BYTES,
    Frame,
    FrameKind,
    KVBlocks,
    Part,
    pack_jobs,
    pack_kv,
    pack_slots,
    unpack_ready,
    unpack_refusal,
    unpack_results,
)
from weft.attend.geometry import Geometry
from weft.attend.session import PING_S
from weft.core.addresses import parse_address
from weft.core.errors import InvariantError, PlaceError, PlaceRefusedError
from weft.core.plan import PlaceStatus
from weft.core.process import Backoff
from weft.core.sealed import HANDSHAKE_S
from weft.kernels.cpu.courier import MailCourier
from weft.kernels.cpu.host import HostMailbox

logger = logging.getLogger("weft")

BUSY_BYTES = 64 * 2**20  # waiting to be sent: no more sequences are to come
MOST_BYTES = 4 * BUSY_BYTES  # what comes all the same beyond that is refused
CLOSE_S = 2.0
LONGEST_DELAY_S = 30.0  # between two attempts to connect


@dataclass(frozen=True, slots=True)
class PlaceAccess:
    """How a place is reached.

    Attributes:
        address: HOST:PORT.
        key: that both sides know; empty for none.
        timeout_s: silence after which the place is given up.
    """

    address: str
    key: bytes
    timeout_s: float


def over_tcp(access: PlaceAccess) -> Transport:
    """Connect to a place by a socket; errors are those of ``channel.connect``."""
    timeout_s = min(access.timeout_s, HANDSHAKE_S)
    transport = connect(parse_address(access.address), access.key, timeout_s)
    transport.set_timeout(access.timeout_s)
    return transport


class PlaceLink:
    """See the module docstring; its threads never hold up the one that computes steps.

    A session begins when the place is connected, and ends with the link; all KV at the place ends
    with it. Jobs are sent once ``activate`` says that rows of earlier sessions are given up.

    Attributes:
        access: how the place is reached.
        sent_bytes: of frames, with those of earlier sessions.
    """

    def __init__(
        self,
        access: PlaceAccess,
        number: int,
        geometry: Geometry,
        mailbox: HostMailbox,
        open_transport: Callable[[PlaceAccess], Transport] = over_tcp,
    ) -> None:
        """Make the link; ``start`` connects it.

        Args:
            number: of the place in the mailbox, from 1 on.
            open_transport: connects; raises PlaceError where that fails.

        Raises:
            ConfigError: the address is malformed.
        """
        self.access = access
        self.sent_bytes = 0
        parse_address(access.address, "attend")
        self._open_transport = open_transport
        self._geometry, self._courier = geometry, MailCourier(mailbox, number)
        self._most_jobs = max(1, CHUNK_BYTES // self._courier.row_bytes)
        self._lock = threading.Lock()  # of the courier and of all that follows
        self._sessions = self._active = 0
        self._blocks: tuple[int, ...] = ()  # none without a session
        self._waiting: deque[tuple[FrameKind, tuple[Part, ...]]] = deque()
        self._waiting_bytes = 0
        self._broken: PlaceError | None = None
        self._closing = threading.Event()
        self._transport: Transport | None = None
        self._thread = threading.Thread(target=self._keep, name="weft-place", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    # -- for the thread that computes steps --------------------------------------------------------

    def status(self) -> PlaceStatus:
        """The session and what it offers."""
        with self._lock:
            busy = self._waiting_bytes > BUSY_BYTES
            return PlaceStatus(self._sessions, self._blocks, busy)

    def activate(self, session: int) -> None:
        """Send jobs of this session from now on; those of earlier ones are all aborted."""
        with self._lock:
            self._active = session
        self._courier.wake()

    def write(self, session: int, contents: Iterable[KVBlocks]) -> bool:
        """Have blocks written before later jobs; False if the session is over or too far behind."""
        frames = [(FrameKind.KV, pack_kv(content)) for content in contents]
        size = sum(len(part) for _, parts in frames for part in parts)
        with self._lock:
            fits = self._waiting_bytes + size <= MOST_BYTES or not self._waiting_bytes
            if session != self._sessions or not self._blocks or not fits:
                return False
            self._waiting += frames
            self._waiting_bytes += size
        self._courier.wake()
        return True

    def free(self, slots: NDArray[np.int32]) -> None:
        """Drop the tokens of slots, whose jobs are aborted. All are empty then."""
        with self._lock:
            self._courier.forget(slots)
            if self._blocks:
                self._waiting.append((FrameKind.FREE, pack_slots(slots)))
        self._courier.wake()

    @property
    def jobs(self) -> int:
        """Jobs that were answered."""
        return self._courier.jobs

    @property
    def round_trip_ns(self) -> int:
        """Sum over them of the time between submission and result."""
        return self._courier.round_trip_ns

    def close(self) -> None:
        """End the link. May be called twice."""
        self._closing.set()
        self._break(PlaceError("The engine ends."))
        self._courier.wake()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)  # it may be connecting, which ends with the process

    # -- the link's own threads --------------------------------------------------------------------

    def _keep(self) -> None:
        """Connect, serve, and connect again, until the engine closes."""
        backoff = Backoff(f"place {self.access.address}", proven=True, longest_s=LONGEST_DELAY_S)
        said = ""
        while not self._closing.is_set():
            began, error = time.monotonic(), None
            try:
                self._serve_session()
            except PlaceError as caught:
                error = caught
            except MemoryError:
                error = PlaceError("There is no memory for what is sent to it.")
            except RuntimeError as caught:  # of a thread that cannot be started
                error = PlaceError(f"A thread for its results cannot be started: {caught}.")
            if self._closing.is_set():
                return
            assert error is not None, "a session ends by an error"
            lived_s = time.monotonic() - began if self._ended_session() else 0.0
            delay_s = backoff.delay_s(lived_s, error.message)
            if error.message != said:
                said = error.message
                logger.warning(
                    "Place %s does not attend: %s It is tried again.", self.access.address, said
                )
            self._closing.wait(max(delay_s, 0.1))

    def _serve_session(self) -> None:
        """One session, from its handshake to its end, which is an error."""
        transport = self._open_transport(self.access)
        receiver = threading.Thread(
            target=self._receive, args=(transport,), name="weft-place-results", daemon=True
        )
        try:
            transport.send(FrameKind.OPEN, self._geometry.encode())
            ready = _unrefused(transport.receive())
            if ready.kind is not FrameKind.READY:
                raise PlaceError(f"A place does not begin with {ready.kind.name}.")
            self._begin(transport, unpack_ready(ready.body, len(self._geometry.groups)))
            receiver.start()
            self._send(transport)
        except PlaceError as error:
            raise self._broken or error from None
        finally:
            transport.close()
            if receiver.ident is not None:
                receiver.join()

    def _begin(self, transport: Transport, blocks: tuple[int, ...]) -> None:
        with self._lock:
            self._sessions += 1
            self._transport, self._blocks, self._broken = transport, blocks, None
        logger.info("Place %s attends, with KV blocks %s.", self.access.address, blocks)
        if self._closing.is_set():
            transport.close()

    def _ended_session(self) -> bool:
        """Give up what the place was to do; whether there was a session."""
        with self._lock:
            was = bool(self._blocks)
            self._blocks, self._transport = (), None
            self._waiting.clear()
            self._waiting_bytes = 0
            self._courier.give_up()
            return was

    def _send(self, transport: Transport) -> None:
        """Send what waits, until the link breaks."""
        sent_at = time.monotonic()
        while True:
            frames = self._next()
            if self._broken is not None:
                raise self._broken
            for kind, parts in frames:
                transport.send(kind, *parts)
                self._count_sent(kind, sum(len(part) for part in parts))
            if frames:
                sent_at = time.monotonic()
                continue
            if time.monotonic() - sent_at > PING_S:
                transport.send(FrameKind.PING)
                sent_at = time.monotonic()
            self._courier.wait(PING_S / 4)

    def _count_sent(self, kind: FrameKind, size: int) -> None:
        self.sent_bytes += size
        if kind is FrameKind.KV:
            with self._lock:
                self._waiting_bytes -= size

    def _next(self) -> list[tuple[FrameKind, tuple[Part, ...]]]:
        """Take what is to be sent next.

        Jobs are claimed together with all that waits: so a job comes after the KV of its row, and
        before what frees its slot.
        """
        with self._lock:
            jobs = None
            if self._active == self._sessions:
                jobs = self._courier.claim(self._most_jobs)
            frames = list(self._waiting)
            self._waiting.clear()
        return frames if jobs is None else [*frames, (FrameKind.JOB, pack_jobs(jobs))]

    def _receive(self, transport: Transport) -> None:
        try:
            while True:
                frame = _unrefused(transport.receive())
                if frame.kind is FrameKind.RESULT:
                    layer, slots, orders, out = unpack_results(frame.body)
                    with self._lock:
                        self._courier.finish(layer, slots, orders, out)
                elif frame.kind is not FrameKind.PING:
                    raise PlaceError(f"A place sends no {frame.kind.name}.")
        except PlaceError as error:
            self._break(error)
        except InvariantError as error:
            self._break(PlaceError(f"It broke the protocol: {error.message}"))
        except MemoryError:
            self._break(PlaceError("There is no memory for its results."))
        self._courier.wake()

    def _break(self, error: PlaceError) -> None:
        with self._lock:
            if self._broken is None:
                self._broken = error
            transport = self._transport
        if transport is not None:
            transport.close()


def _unrefused(frame: Frame) -> Frame:
    if frame.kind is not FrameKind.REFUSE:
        return frame
    why, final = unpack_refusal(frame.body)
    raise (PlaceRefusedError if final else PlaceError)(f"It refuses: {why}")
