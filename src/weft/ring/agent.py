"""The agent of request planes on other machines: stands in for them at the rings of an engine.

    python -m weft.ring.agent --socket FD --card FD --signs FD --parent PID --ring FDS [...]

Settings come as JSON on standard input, the model's facts as a JSON line on the card descriptor
once an engine is ready. A byte is written to the descriptor of signs at least every few seconds.
The engine watches this process as it watches request planes: should it die, what they had open
ends. SIGTERM lets what is open finish; after a second one nothing is waited for.

Further engines have cards, too. When one has another model, or its text files have changed, all
rings are taken back: request planes have to fetch the facts anew.

Each request plane holds one ring. While its link is down the ring waits for it for a while, so that
streams go on over the next link; after that, or when the same plane comes back as another process,
the ring is taken from it: first no link may write to it any more, then the engine may reclaim it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import ConfigError, RingLinkError, RingRefusedError
from weft.core.gate import Gate
from weft.core.logs import log_level, set_up_logs
from weft.core.process import SAME_SIGNAL_S, die_with, raise_file_limit, set_process_title
from weft.core.sealed import HANDSHAKE_S, SealedSocket, answer, close_socket
from weft.ring import _native
from weft.ring.codec import SAMPLING
from weft.ring.facts import text_files
from weft.ring.facts_desk import FactsDesk
from weft.ring.layout import SIZES
from weft.ring.link import CLOCK, CLOCKS, RULES, LinkFrame, pack_json, unpack_clocks, unpack_json
from weft.ring.segment import RingFds

TICK_S = 0.05  # between two looks at the info page, and at what has timed out
MOST_WAITING = 8 * 2**20  # bytes that a link may be behind; more waits in the ring
MOST_UNREAD = 2 * MOST_WAITING  # who is behind by that is not heard, either
END_S = 0.5  # for a request plane to hear that this is the end
SIGN_S = 1.0  # between two signs of life of an agent without request planes

logger = logging.getLogger("weft.agent")


@dataclass(frozen=True, slots=True)
class _Caller:
    """A request plane that has proved that it knows the key, and wants a ring."""

    link: SealedSocket
    peer: str
    plane: str
    session: str
    held: str  # the ring that it has got whole; empty for none
    model: str


class RemotePlane:
    """One ring, and the request plane on another machine that holds it, if any."""

    def __init__(self, fds: RingFds) -> None:
        self.wake = fds.wake
        self.agent = _native.Agent(fds.memory, SAMPLING)
        self.plane = self.session = self.peer = self.ring_id = ""
        self.telling = False  # not before the request plane has said all again
        self.link: SealedSocket | None = None
        self.heard_s = self.lost_s = 0.0
        self.watched = select.EPOLLIN  # what the epoll waits for at the link
        self._outgoing = bytearray()

    @property
    def held(self) -> bool:
        return bool(self.session)

    def goes_on(self, caller: _Caller) -> bool:
        """Whether the caller holds this very ring, which it has got whole."""
        return (self.session, self.ring_id) == (caller.session, caller.held)

    def welcome(self, caller: _Caller) -> None:
        """Give the ring to a request plane; or a new link, if it holds the ring already."""
        resumed = self.goes_on(caller)
        self.telling = not resumed
        self.plane, self.session, self.peer = caller.plane, caller.session, caller.peer
        self.link, self.heard_s = caller.link, time.monotonic()
        self._outgoing.clear()
        self.watched = select.EPOLLIN
        caller.link.set_timeout(0)
        if not resumed:
            self.agent.attach()
            self.ring_id = secrets.token_hex(16)
        slots, arena_bytes, memory_bytes = self.agent.sizes
        self._put(
            LinkFrame.WELCOME,
            pack_json(
                {
                    "ring_id": self.ring_id,
                    "slots": slots,
                    "arena_bytes": arena_bytes,
                    "memory_bytes": memory_bytes,
                    "clock_ns": time.monotonic_ns(),
                }
            ),
        )
        if not resumed:
            for part in self.agent.snapshot():
                self._put(LinkFrame.RING, part)
            self._put(LinkFrame.READY)

    def drop_link(self) -> None:
        """From now on nothing is written to the ring."""
        if self.link is not None:
            self.link.close()
        self.link, self.lost_s = None, time.monotonic()
        self._outgoing.clear()

    def release(self) -> None:
        """Take the ring from its request plane: the engine ends what is open."""
        self.drop_link()
        if self.held:
            self.agent.detach()
        self.plane = self.session = self.ring_id = ""

    def say(self, kind: LinkFrame) -> None:
        """Send a frame without a body, if there is a link. Raises RingLinkError."""
        if self.link is not None:
            self._put(kind)
            self.flush()

    def take_in(self) -> None:
        """Apply what the request plane has sent. Raises RingLinkError, ValueError."""
        assert self.link is not None
        for kind, body in self.link.receive_some():
            self.heard_s = time.monotonic()
            if kind == LinkFrame.RING:
                self.agent.apply(body.tobytes())
            elif kind == LinkFrame.PING:
                (clock_ns,) = unpack_clocks(CLOCK, body)
                self._put(LinkFrame.PONG, CLOCKS.pack(clock_ns, time.monotonic_ns()))
            elif kind == LinkFrame.READY and not self.telling:
                self.agent.forget()
                self.telling = True
            elif kind == LinkFrame.END:
                self.release()
                return
            else:
                raise RingLinkError(f"A request plane sends no frame of kind {kind}.")

    def bring(self, *, whole: bool) -> None:
        """Send what the engine has published since the last call. Raises RingLinkError.

        Until a request plane that goes on has said all again, its words here may be old, and what
        they speak of may lie where it has written something else since.

        Args:
            whole: with its info page.
        """
        while self.telling and self.link is not None and len(self._outgoing) < MOST_WAITING:
            for part in self.agent.collect(whole):
                self._put(LinkFrame.RING, part)
            whole = False
            self.flush()
            if not self.agent.pending and self.agent.sleep():
                return

    def flush(self) -> None:
        """Send as much as the system takes. Raises RingLinkError."""
        while self._outgoing and self.link is not None and self.link.send_some(self._outgoing):
            pass

    @property
    def wanted(self) -> int:
        """What the epoll should wait for: nothing is heard from who does not take the answers."""
        heard = select.EPOLLIN if len(self._outgoing) < MOST_UNREAD else 0
        return heard | (select.EPOLLOUT if self._outgoing else 0)

    def _put(self, kind: LinkFrame, body: bytes = b"") -> None:
        assert self.link is not None
        self._outgoing += self.link.seal(kind, body)


class RingAgent:
    """Serves request planes until it is told to end.

    Args:
        listener: where they connect.
        key: that they have to know; empty for none.
        timeout_s: silence after which a link is given up; as long a ring waits for the next one.
        signs: descriptor that gets a byte as a sign of life.
    """

    def __init__(
        self,
        listener: socket.socket,
        rings: Seq[RingFds],
        key: bytes,
        timeout_s: float,
        signs: int,
    ) -> None:
        self._key, self._timeout_s = key, timeout_s
        self._signs = signs
        self._planes = [RemotePlane(fds) for fds in rings]
        self.desk = FactsDesk(self._on_move)
        self._moved = False  # from one model to another
        self._callers: list[_Caller] = []
        self._lock = threading.Lock()
        self._changed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._gate = Gate(listener, self._greet)
        self._endings = 0
        self._ended_s = 0.0  # when it was asked to end
        self._epoll = select.epoll()
        self._epoll.register(self._changed, select.EPOLLIN)
        self._wakes = {plane.wake for plane in self._planes}
        for plane in self._planes:
            self._epoll.register(plane.wake, select.EPOLLIN)

    def end(self) -> None:
        """End when nothing is open any more; called again, at once. For signal handlers.

        Calls that come together count as one: a service manager sends a signal to every process of
        a group, and the supervisor passes its own on.
        """
        if self._endings and time.monotonic() - self._ended_s < SAME_SIGNAL_S:
            return
        self._endings, self._ended_s = self._endings + 1, time.monotonic()
        os.eventfd_write(self._changed, 1)

    def _on_move(self) -> None:
        self._moved = True
        os.eventfd_write(self._changed, 1)

    def run(self) -> None:
        """Serve until ``end``."""
        threading.Thread(target=self._gate.serve, name="weft-gate", daemon=True).start()
        looked_s, leaving = 0.0, False
        self._sign()
        while self._endings < 2 and not (leaving and all(p.agent.idle for p in self._planes)):
            up = any(plane.held for plane in self._planes)
            events = self._epoll.poll(TICK_S if up or leaving else SIGN_S)
            whole = time.monotonic() - looked_s > TICK_S
            if whole:
                looked_s = time.monotonic()
                self._sign()
            for descriptor, _ in events:
                self._on_event(descriptor)
            if self._moved:
                self._moved = False
                self._take_back()
            for plane in self._planes:
                self._guarded(plane, whole=whole)
            if self._endings and not leaving:
                leaving = True  # callers still hear that this is the end
                self._say_all(LinkFrame.LEAVE)
        self._gate.close()
        self._say_all(LinkFrame.END)
        until_s = time.monotonic() + END_S
        for plane in self._planes:
            if plane.link is not None:
                plane.link.finish(until_s - time.monotonic())
            plane.release()

    def _sign(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody has read the last ones
            os.write(self._signs, b".")

    def _on_event(self, descriptor: int) -> None:
        if descriptor == self._changed:
            os.eventfd_read(self._changed)
            with self._lock:
                callers, self._callers = self._callers, []
            for caller in callers:
                self._admit(caller)
        elif descriptor in self._wakes:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(descriptor)
        else:
            for plane in self._planes:
                if plane.link is not None and plane.link.fileno() == descriptor:
                    with self._kept_apart(plane):
                        plane.take_in()

    @contextlib.contextmanager
    def _kept_apart(self, plane: RemotePlane) -> Iterator[None]:
        """Whatever goes wrong in the block costs this link, and no other one."""
        try:
            yield
        except RingLinkError as error:
            self._lose(plane, error.message)
        except ValueError as error:
            self._lose(plane, f"{error}.")
        except Exception as error:
            logger.exception("What request plane %s sends cannot be handled.", plane.peer)
            self._lose(plane, f"{type(error).__name__}: {error}.")

    def _guarded(self, plane: RemotePlane, *, whole: bool) -> None:
        """Bring news to a request plane, and look for what has timed out."""
        now_s = time.monotonic()
        with self._kept_apart(plane):
            if plane.link is not None:
                plane.flush()
                plane.bring(whole=whole)
            if plane.link is not None and now_s - plane.heard_s > self._timeout_s:
                raise RingLinkError("It is silent.")
            if plane.link is not None and plane.wanted != plane.watched:
                plane.watched = plane.wanted
                self._epoll.modify(plane.link.fileno(), plane.watched)
        if plane.held and plane.link is None and now_s - plane.lost_s > self._timeout_s:
            logger.warning("Request plane %s did not come back; its requests end.", plane.peer)
            plane.release()

    def _lose(self, plane: RemotePlane, why: str) -> None:
        logger.warning("The link to request plane %s is lost: %s", plane.peer, why)
        plane.drop_link()

    def _admit(self, caller: _Caller) -> None:
        """Give a ring to a request plane: its own, that of its predecessor, or a free one."""
        own = next((p for p in self._planes if p.session == caller.session), None)
        before = next((p for p in self._planes if p.held and p.plane == caller.plane), None)
        free = next((p for p in self._planes if not p.held), None)
        chosen = own or before or free
        if caller.model and caller.model != self.desk.digest:
            why = "it serves another model now, or other text files of it."
            _refuse(caller.link, why, final=True, changed=True)
            return
        if chosen is None or self._endings:
            why = "it is about to end" if self._endings else "all its rings are taken"
            message = f"{why}; raise ring_planes." if chosen is None else f"{why}."
            _refuse(caller.link, message, final=False)
            return
        if chosen.goes_on(caller):
            chosen.drop_link()
        else:
            chosen.release()  # of the predecessor, which cannot write any more then
        with self._kept_apart(chosen):
            chosen.welcome(caller)
            self._epoll.register(caller.link.fileno(), select.EPOLLIN)
            logger.info("Request plane %s has a ring.", caller.peer)

    def _take_back(self) -> None:
        """Take the rings from all who work with the facts of another model."""
        for plane in self._planes:
            if plane.held:
                logger.warning("Request plane %s has the facts of another model.", plane.peer)
                with self._kept_apart(plane):
                    plane.say(LinkFrame.END)
                plane.release()

    def _say_all(self, kind: LinkFrame) -> None:
        for plane in self._planes:
            with self._kept_apart(plane):
                plane.say(kind)

    # -- those who connect -------------------------------------------------------------------------

    def _greet(self, raw: socket.socket, peer: str, entered: Callable[[], None]) -> None:
        """The handshake with whoever has connected; a refusal says why."""
        link = None
        try:
            link = SealedSocket(raw, RULES, *answer(RULES, raw, self._key))
            link.set_timeout(min(self._timeout_s, HANDSHAKE_S))
            kind, body = link.receive_frame()
            entered()
            if kind != LinkFrame.OPEN:
                raise RingLinkError(f"The first frame is of kind {kind} and not OPEN.")
            wanted = unpack_json(body)
            if wanted.get("facts") is True:
                link.set_timeout(self._timeout_s)
                self.desk.serve(link)
            else:
                self._queue(link, peer, wanted)
                return
        except RingRefusedError as error:
            logger.warning("Request plane %s: %s", peer, error.message)
            if link is not None:
                _refuse(link, error.message, final=True)
        except RingLinkError as error:
            logger.info("Request plane %s: %s", peer, error.message)
            if link is not None:
                _refuse(link, error.message, final=False)
        close_socket(raw)

    def _queue(self, link: SealedSocket, peer: str, wanted: Mapping[str, Any]) -> None:
        theirs, mine = wanted.get("ring"), SIZES["version"]
        if theirs != mine:
            raise RingRefusedError(
                f"The request plane has version {theirs} of the ring, the engine {mine}; install "
                "the same version on both."
            )
        if wanted.get("sampling") != SAMPLING:
            raise RingRefusedError(
                "The request plane knows other sampling parameters than the engine; install the "
                "same version on both."
            )
        plane, session = wanted.get("plane"), wanted.get("session")
        if not (isinstance(plane, str) and isinstance(session, str) and plane and session):
            raise RingLinkError("It says not who it is.")
        if not isinstance(held := wanted.get("ring_id"), str):
            raise RingLinkError("It says not which ring it has.")
        self.desk.wait_until_known()
        model = str(wanted.get("model"))
        with self._lock:
            self._callers.append(_Caller(link, peer, plane, session, held, model))
        os.eventfd_write(self._changed, 1)


def _refuse(link: SealedSocket, message: str, *, final: bool, changed: bool = False) -> None:
    told = {"message": message, "final": final, "changed": changed}
    with contextlib.suppress(RingLinkError):
        link.send_frame(LinkFrame.REFUSE, pack_json(told))
    link.close()


def main() -> None:
    """Serve until SIGTERM; exit code 0 then."""
    parser = argparse.ArgumentParser()
    for name in ("--socket", "--card", "--signs", "--parent"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--ring", action="append", required=True)
    arguments = parser.parse_args()
    set_process_title("weft-ring-agent")
    raise_file_limit()
    die_with(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when Ctrl-C ends the server
    settings = json.load(sys.stdin)
    set_up_logs("agent", log_level(settings["log_level"]), settings["log_format"])
    agent = RingAgent(
        socket.socket(fileno=arguments.socket),
        [RingFds.parse(text) for text in arguments.ring],
        bytes.fromhex(settings["key"]),
        settings["timeout_s"],
        arguments.signs,
    )
    signal.signal(signal.SIGTERM, lambda *_: agent.end())

    chosen = [settings["tokenizer"], settings["chat_template"]]
    paths = [None if path is None else Path(path) for path in chosen]

    def read_cards() -> None:
        with os.fdopen(arguments.card) as cards:
            for line in cards:
                try:
                    files = text_files(Path(json.loads(line)["folder"]), *paths)
                    agent.desk.tell(line.strip(), files)
                except ConfigError as error:
                    logger.error("%s", error.message)
                    agent.desk.refuse(error)
                except Exception as error:  # else those who ask would wait for ever
                    logger.error("The model's text files cannot be read: %s.", error)
                    os._exit(1)

    threading.Thread(target=read_cards, name="weft-card", daemon=True).start()
    agent.run()


if __name__ == "__main__":
    main()
