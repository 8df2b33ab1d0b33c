"""Ports: how a request plane meets its ring, in memory that it shares with the engine or remotely.

Both kinds have a descriptor that is readable when ``drain`` is to be called. A remote port sends
what the request plane has written, applies what the agent at the engine sends, keeps the link up,
and connects again when it was lost. Within the agent's patience everything that was open goes on;
after that there is another ring, and what was open ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from weft.core.errors import (
    ConfigError,
    EngineDeadError,
    ModelChangedError,
    RingLinkError,
    RingRefusedError,
    WeftError,
)
from weft.core.sealed import SealedSocket
from weft.ring import _native
from weft.ring.codec import SAMPLING
from weft.ring.link import (
    CLOCK,
    CLOCKS,
    LinkFrame,
    RemoteRing,
    RingAccess,
    open_link,
    unpack_clocks,
    wanted_ring,
)
from weft.ring.segment import RingFds, attached

logger = logging.getLogger("weft")

PING_S = 0.5
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 2.0  # between two attempts to connect
REFUSED_S = 5.0  # the same after a refusal
END_S = 1.0  # for the other side to hear that the ring is given up


class RingPort(Protocol):
    """What a ``RingClient`` needs of its ring beside its memory.

    Attributes:
        ring: the native client; a remote port may come to have another one.
        failure: why no request can be open; None while they can.
        refusal: why no new one is taken; None while they are.
        ahead_ns: the engine's monotonic clock minus the one here.
    """

    ring: _native.Client
    failure: WeftError | None
    refusal: WeftError | None
    ahead_ns: int

    def fileno(self) -> int:
        """A descriptor that is readable when ``drain`` is to be called."""

    def drain(self) -> None:
        """Take in what has come. Changes ``ring``, ``failure`` and ``refusal``."""

    def push(self) -> None:
        """Send what the native client has written."""

    def close(self) -> None:
        """Give the ring up."""


class LocalPort:
    """The ring is in memory that the engine maps, too."""

    failure: WeftError | None = None
    refusal: WeftError | None = None
    ahead_ns = 0

    def __init__(self, fds: RingFds) -> None:
        self._wake = fds.wake
        with attached():
            self.ring = _native.Client(fds.memory, SAMPLING)

    def fileno(self) -> int:
        return self._wake

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def push(self) -> None:
        pass

    def close(self) -> None:
        pass


class RemotePort:
    """The ring is on another machine. All but ``fileno`` is to be called under one lock.

    Raises:
        RingLinkError: the first attempt to connect has failed.
        RingRefusedError: the agent refuses.
        ModelChangedError: the engine has other facts than the access names. Later it is ``failure``
            from then on.
    """

    ring: _native.Client

    def __init__(self, access: RingAccess) -> None:
        self.failure: WeftError | None = None
        self.refusal: WeftError | None = None
        self.ahead_ns = 0
        self._access = access
        self._session = secrets.token_hex(16)
        self._ring_id = ""  # of the ring that has come whole
        self._link: SealedSocket | None = None
        self._outgoing = bytearray()
        self._writing = False  # whether the epoll waits for room in the socket
        self._round_trip_ns = 0
        self._found: tuple[SealedSocket, RemoteRing | None, Mapping[str, Any]] | None = None
        self._final: ModelChangedError | None = None  # why it connects no more
        self._closing = threading.Event()
        self._heard_s = self._lost_s = time.monotonic()
        link, ring, welcome = self._open()
        assert ring is not None, "none is held yet"
        self._hold(ring, welcome)
        self._changed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signals = threading.Lock()  # of the descriptor and of ``_closing``
        self._epoll = select.epoll()
        self._epoll.register(self._changed, select.EPOLLIN)
        self._adopt(link, welcome)
        self.push()
        threading.Thread(target=self._beat, name="weft-ring-beat", daemon=True).start()

    def fileno(self) -> int:
        return self._epoll.fileno()

    # -- for the request plane ---------------------------------------------------------------------

    def push(self, *, said_again: bool = False) -> None:
        parts = self._remote.take()
        if self._link is None:
            return
        for part in parts:
            self._outgoing += self._link.seal(LinkFrame.RING, part)
        if said_again:
            self._outgoing += self._link.seal(LinkFrame.READY)
        self._flush()

    def drain(self) -> None:
        for descriptor, events in self._epoll.poll(0):
            try:
                self._on_event(descriptor, events)
            except Exception as error:  # costs the link, and no more
                logger.exception("What the engine at %s sends is no use.", self._access.address)
                if self._link is not None:
                    self._lose(f"{type(error).__name__}: {error}.")

    def _on_event(self, descriptor: int, events: int) -> None:
        if descriptor == self._changed:
            os.eventfd_read(self._changed)
            self._take_found()
            self._tick()
        elif self._link is not None and descriptor == self._link.fileno():
            if events & ~select.EPOLLOUT:
                self._receive()
            self._flush()

    def close(self) -> None:
        with self._signals:
            if self._closing.is_set():
                return
            self._closing.set()
            os.close(self._changed)
        self._remote.take()  # the end ends all of it
        if self._link is not None:
            self._outgoing += self._link.seal(LinkFrame.END)
            until_s = time.monotonic() + END_S
            with contextlib.suppress(RingLinkError):
                while self._outgoing and (left_s := until_s - time.monotonic()) > 0:
                    self._link.set_timeout(left_s)
                    self._link.send_some(self._outgoing)
            self._link.finish(until_s - time.monotonic())
            self._link = None
        self._epoll.close()

    def _signal(self) -> bool:
        """Have ``drain`` called; False if the port is closed."""
        with self._signals:
            if not self._closing.is_set():
                os.eventfd_write(self._changed, 1)
            return not self._closing.is_set()

    def _beat(self) -> None:
        while not self._closing.wait(PING_S):
            self._signal()

    # -- the link while it is up -------------------------------------------------------------------

    def _receive(self) -> None:
        assert self._link is not None
        try:
            for kind, body in self._link.receive_some():
                self._heard_s = time.monotonic()
                self._apply(kind, body)
        except (RingLinkError, ValueError) as error:
            message = error.message if isinstance(error, RingLinkError) else f"{error}."
            self._lose(message)

    def _apply(self, kind: int, body: memoryview) -> None:
        if kind == LinkFrame.RING:
            self._remote.apply(body.tobytes())
        elif kind == LinkFrame.PONG:
            self._set_clock(*unpack_clocks(CLOCKS, body))
        elif kind == LinkFrame.LEAVE:
            self.refusal = EngineDeadError("The engine is about to end; try again later.")
        elif kind == LinkFrame.END:
            self._session, self._ring_id = secrets.token_hex(16), ""  # nothing of it is left
            raise RingLinkError("The engine has ended.")
        else:
            raise RingLinkError(f"An engine sends no frame of kind {kind} here.")

    def _set_clock(self, mine_ns: int, theirs_ns: int) -> None:
        """Take the clock over from the quickest answer, which can be off by half its way."""
        now_ns = time.monotonic_ns()
        round_trip_ns = now_ns - mine_ns
        if not self._round_trip_ns or round_trip_ns <= self._round_trip_ns:
            self._round_trip_ns = round_trip_ns
            self.ahead_ns = theirs_ns - (mine_ns + now_ns) // 2

    def _flush(self) -> None:
        if self._link is None:
            return
        try:
            while self._outgoing and self._link.send_some(self._outgoing):
                pass
        except RingLinkError as error:
            self._lose(error.message)
            return
        if bool(self._outgoing) != self._writing:
            self._writing = bool(self._outgoing)
            wanted = select.EPOLLIN | (select.EPOLLOUT if self._writing else 0)
            self._epoll.modify(self._link.fileno(), wanted)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._link is not None:
            if now_s - self._heard_s > self._access.timeout_s:
                self._lose("The link is broken: the other side is silent.")
                return
            self._outgoing += self._link.seal(LinkFrame.PING, CLOCK.pack(time.monotonic_ns()))
            self._flush()
        elif self.failure is None and now_s - self._lost_s > self._access.timeout_s:
            self.failure = RingLinkError("The engine cannot be reached; try again later.")

    # -- lost and found ----------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        assert self._link is not None
        logger.warning("The link to the engine at %s is lost. %s", self._access.address, why)
        with contextlib.suppress(OSError):  # it is not registered yet, if it failed at once
            self._epoll.unregister(self._link.fileno())
        self._link.close()
        self._link = None
        self._outgoing.clear()
        self._lost_s = time.monotonic()
        self._remote.link_down()
        threading.Thread(target=self._connect, name="weft-ring-link", daemon=True).start()

    def _open(self) -> tuple[SealedSocket, RemoteRing | None, Mapping[str, Any]]:
        """Open a link: with a ring, unless the session goes on with the one it has."""
        held = self._ring_id
        link, welcome = open_link(self._access, wanted_ring(self._session, held))
        try:
            goes_on = bool(held) and welcome.get("ring_id") == held
            return link, None if goes_on else RemoteRing.receive(link, welcome), welcome
        except BaseException:
            link.close()
            raise

    def _connect(self) -> None:
        """Connect again, however long that takes. Runs on a thread of its own."""
        delay_s, said = FIRST_DELAY_S, ""
        while not self._closing.wait(delay_s):
            try:
                found = self._open()
                break
            except ModelChangedError as error:
                self._final = error
                self._signal()
                return
            except Exception as error:  # nobody else would connect again
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
                if isinstance(error, RingRefusedError):
                    delay_s = REFUSED_S
                trace = None if isinstance(error, (RingLinkError, ConfigError)) else error
                message = f"{error}." if trace else str(error)
                if message != said:
                    said = message
                    logger.warning(
                        "The engine at %s: %s", self._access.address, said, exc_info=trace
                    )
        else:
            return
        self._found = found
        if not self._signal():
            found[0].close()

    def _take_found(self) -> None:
        found, self._found = self._found, None
        if self._final is not None and self.failure is not self._final:
            logger.warning("The engine at %s: %s", self._access.address, self._final.message)
            self.failure = self.refusal = self._final
        if found is None:
            return
        link, ring, welcome = found
        logger.warning(
            "The link to the engine at %s is up again%s.",
            self._access.address,
            "" if ring is None else "; what was open has ended",
        )
        if ring is not None:
            self._hold(ring, welcome)
        self._adopt(link, welcome)
        if ring is None:
            self._remote.link_up()
        self.push(said_again=ring is None)

    def _hold(self, ring: RemoteRing, welcome: Mapping[str, Any]) -> None:
        self.ring = self._remote = ring
        self._ring_id = welcome["ring_id"]

    def _adopt(self, link: SealedSocket, welcome: Mapping[str, Any]) -> None:
        link.set_timeout(0)
        self._link = link
        self._heard_s = time.monotonic()
        self._round_trip_ns = 0  # the engine may have another clock now
        clock_ns: Any = welcome.get("clock_ns")
        known = type(clock_ns) is int and abs(clock_ns) < 2**63
        self.ahead_ns = clock_ns - time.monotonic_ns() if known else 0
        self.failure = self.refusal = None
        self._writing = False
        self._epoll.register(link.fileno(), select.EPOLLIN)


def open_port(ring: RingFds | RingAccess) -> LocalPort | RemotePort:
    """Meet a ring. Raises as the two kinds of port, and ParameterError if memory is no ring."""
    return RemotePort(ring) if isinstance(ring, RingAccess) else LocalPort(ring)
