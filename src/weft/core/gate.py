"""Lets callers in at a listening socket: a thread of its own greets each of them.

Few of them may be on their way at once. Who comes when all places are taken gets that of another
one: the oldest of the host that holds most of them. So silent callers keep nobody out.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from weft.core.addresses import format_address
from weft.core.sealed import close_socket

MOST_ENTERING = 64  # at once
RETRY_S = 0.5  # after an error of accept, which would come again at once
EVERY_S = 30.0  # between two log lines about the same

logger = logging.getLogger("weft")

# Takes the socket, the caller's address, and what to call once the caller has entered.
Greet: TypeAlias = Callable[[socket.socket, str, Callable[[], None]], None]


class CountedLine:
    """A warning about what others can cause as often as they like; for any thread.

    Args:
        message: has ``%d`` for how often it has happened since the last line, then the details.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._count = 0
        self._said_s = -EVERY_S
        self._lock = threading.Lock()

    def tell(self, *details: object) -> None:
        """It has happened once more; that is logged unless the last line is too recent."""
        with self._lock:
            self._count += 1
            if time.monotonic() - self._said_s < EVERY_S:
                return
            count, self._count, self._said_s = self._count, 0, time.monotonic()
        logger.warning(self._message, count, *details)


class Gate:
    """Greets who connects, until it is closed.

    Other processes may share the listening socket: it is closed here, and not shut down.

    Args:
        greet: does the handshake, and whatever follows; the socket is its own from then on.
    """

    def __init__(self, listener: socket.socket, greet: Greet) -> None:
        self._listener, self._greet = listener, greet
        self._entering: dict[socket.socket, str] = {}  # their hosts; the oldest first
        self._lock = threading.Lock()
        self._closed, self._closing = socket.socketpair()
        self._full = CountedLine(
            f"{MOST_ENTERING} callers have proved nothing yet and more come; the oldest were "
            "turned away: %d."
        )
        self._failed = CountedLine(
            "Accepting connections failed %d times (%s); those that come wait for %s s."
        )
        listener.setblocking(False)

    def serve(self) -> None:
        """Accept callers until ``close``; errors of the system are logged and pass."""
        poll, closed = select.poll(), select.poll()
        closed.register(self._closed, select.POLLIN)
        for source in (self._listener, self._closed):
            poll.register(source, select.POLLIN)
        try:
            while not any(fd == self._closed.fileno() for fd, _ in poll.poll()):
                try:
                    self._accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    continue  # another process has it, or the caller has left
                except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                    self._failed.tell(getattr(error, "strerror", None) or error, RETRY_S)
                    closed.poll(1000 * RETRY_S)
        finally:
            self._listener.close()

    def close(self) -> None:
        """Accept no more; who has come is still greeted. For signal handlers and other threads."""
        self._closing.close()

    def _accept(self) -> None:
        link, peer = self._listener.accept()
        try:
            link.setblocking(True)
            self._make_room()
            with self._lock:
                self._entering[link] = _host(peer)
            words = (link, format_address(peer))
            threading.Thread(target=self._receive, args=words, daemon=True).start()
        except BaseException:
            self._entered(link)
            close_socket(link)
            raise

    def _receive(self, link: socket.socket, peer: str) -> None:
        try:
            self._greet(link, peer, lambda: self._entered(link))
        except Exception:
            logger.exception("The link to %s is given up.", peer)
            close_socket(link)
        finally:
            self._entered(link)

    def _entered(self, link: socket.socket) -> None:
        with self._lock:
            self._entering.pop(link, None)

    def _make_room(self) -> None:
        """Turn one away if there are too many."""
        with self._lock:
            if len(self._entering) < MOST_ENTERING:
                return
            (host, _), *_ = Counter(self._entering.values()).most_common(1)
            oldest = next(link for link, its_host in self._entering.items() if its_host == host)
            del self._entering[oldest]
            with contextlib.suppress(OSError):  # it has ended; else its thread closes it
                oldest.shutdown(socket.SHUT_RDWR)
        self._full.tell()


def _host(peer: Any) -> str:
    return str(peer[0]) if isinstance(peer, tuple) else str(peer)
