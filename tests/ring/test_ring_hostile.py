"""Planes and callers that do what none should: they cost themselves a link, and nobody else."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import psutil
import pytest
from test_ring_agent import agent
from test_ring_processes import PATIENCE_S, Collector, endless, engine, threaded

from live import eventually, free_port
from places import KEY, key_file
from weft.core import gate
from weft.core.addresses import parse_address
from weft.core.errors import RingLinkError
from weft.core.gate import MOST_ENTERING
from weft.core.sealed import SealedSocket, answer, close_socket
from weft.ring import _native
from weft.ring import agent as agent_module
from weft.ring.agent import RingAgent
from weft.ring.client import RingClient
from weft.ring.codec import SAMPLING
from weft.ring.facts import fetch_facts
from weft.ring.facts_desk import MOST_ASKING
from weft.ring.link import (
    CLOCK,
    RULES,
    LinkFrame,
    RingAccess,
    open_link,
    pack_json,
    wanted_ring,
)
from weft.ring.port import RemotePort
from weft.ring.segment import RingFds, create_ring
from weft.server.counts import Board, create_board
from weft.server.process import meet_ring


@contextlib.contextmanager
def agent_here(
    folder: Path,
    *rings: RingFds,
    card: str | None = "{}",
    listen: tuple[str, int] = ("127.0.0.1", 0),
) -> Iterator[tuple[RingAgent, RingAccess]]:
    """An agent in this process, so that a test can break its parts."""
    listener = socket.create_server(listen)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    signs, sign = os.pipe()
    os.set_blocking(sign, False)
    running = RingAgent(listener, rings, KEY.encode(), PATIENCE_S, sign)
    if card is not None:
        running.desk.tell(card, {})
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        yield running, RingAccess(address, str(key_file(folder)), PATIENCE_S, "plane")
        assert thread.is_alive()
    finally:
        running.end()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        os.close(signs)
        os.close(sign)


def serves(access: RingAccess, plane: str = "another") -> None:
    """Who comes gets a ring."""
    link, welcome = open_link(replace(access, plane=plane), wanted_ring(plane))
    assert welcome["slots"] == 64
    link.close()


# -- one plane's failure -----------------------------------------------------------------------


def test_any_failure_of_one_link_costs_that_link_only(ring, tmp_path, monkeypatch, caplog):
    other = create_ring(64, 1 << 20)
    with agent_here(tmp_path, ring, other) as (_, access):
        good, _ = open_link(replace(access, plane="good"), wanted_ring("good"))
        with monkeypatch.context() as broken:
            broken.setattr(agent_module, "unpack_clocks", lambda *_: 1 / 0)
            bad, _ = open_link(access, wanted_ring("bad"))
            bad.send_frame(LinkFrame.PING, CLOCK.pack(5))
            with pytest.raises(RingLinkError, match="closed the link"):
                list(iter(bad.receive_frame, None))
        assert any("ZeroDivisionError" in line for line in caplog.messages)
        good.send_frame(LinkFrame.PING, CLOCK.pack(5))
        kinds = (good.receive_frame()[0] for _ in range(1000))
        assert LinkFrame.PONG in kinds
        good.close()
    other.close()


def test_any_failure_at_a_request_plane_is_a_lost_link(ring, tmp_path, monkeypatch, caplog):
    """It connects again, and what was open goes on."""
    collector = Collector()
    with (
        agent(tmp_path, ring) as running,
        engine(ring, step_s=0.002),
        threaded(running.access()) as client,
    ):
        client.submit([endless(1)], collector)
        collector.wait_for(lambda updates: len(updates.get(1, [])) > 3)
        failures = iter([ZeroDivisionError("of the test")])

        def fail_once(self: RemotePort, *clocks: int) -> None:
            for failure in failures:
                raise failure
            set_clock(self, *clocks)

        set_clock = RemotePort._set_clock
        monkeypatch.setattr(RemotePort, "_set_clock", fail_once)
        collector.ends(1)
        assert len(collector.updates[1]) == 500
    assert any("ZeroDivisionError" in line for line in caplog.messages)


def test_one_that_sends_fast_and_reads_nothing_starves_nobody(ring, tmp_path):
    other = create_ring(64, 1 << 20)
    collector = Collector()
    with (
        agent(tmp_path, ring, other) as running,
        engine(ring, other),
        threaded(running.access("good")) as client,
    ):
        before = psutil.Process(running.process.pid).memory_info().rss
        link, _ = open_link(running.access("fast"), wanted_ring("fast"))
        link.set_timeout(PATIENCE_S)
        ending = threading.Event()

        def flood() -> None:
            with contextlib.suppress(OSError):
                while not ending.is_set():
                    link._socket.sendall(
                        b"".join(link.seal(LinkFrame.PING, bytes(8)) for _ in range(2000))
                    )

        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        slowest_s, end = 0.0, time.monotonic() + 2
        for number in count(1):
            began = time.monotonic()
            client.submit([endless(number)], collector)
            collector.ends(number)
            slowest_s = max(slowest_s, time.monotonic() - began)
            if time.monotonic() > end:
                break
        taken = psutil.Process(running.process.pid).memory_info().rss - before
        ending.set()
        link.close()
        thread.join(PATIENCE_S)
    other.close()
    assert slowest_s < 4
    assert taken < 64 * 2**20  # 10 MB a second before


def send_all(link: SealedSocket, blocks: Iterable[bytes]) -> None:
    """Raises RingLinkError if the other side takes nothing for as long as the link's time-out."""
    for block in blocks:
        data = bytearray(block)
        while data:
            link.send_some(data)


def test_who_does_not_take_the_answers_is_not_heard(ring, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module, "MOST_UNREAD", 4096)
    with agent_here(tmp_path, ring) as (running, access):
        link, _ = open_link(access, wanted_ring("session"))
        link.set_timeout(1.0)
        pings = (
            b"".join(link.seal(LinkFrame.PING, bytes(8)) for _ in range(2000)) for _ in count()
        )
        with pytest.raises(RingLinkError, match="silent"):
            send_all(link, pings)
        (plane,) = running._planes
        assert len(plane._outgoing) < 2**19  # the answers to what one read has brought
        link.close()


# -- at the gate -------------------------------------------------------------------------------


def test_silent_callers_keep_nobody_out(ring, tmp_path):
    with agent(tmp_path, ring) as running, contextlib.ExitStack() as stack:
        address = parse_address(running.address)
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(200)]
        for _ in range(3):
            serves(running.access())
        running.said("have proved nothing yet and more come")
        assert running.log.read_text().count("have proved nothing yet") == 1
        idle[0].settimeout(PATIENCE_S)
        assert idle[0].recv(1) == b""  # the oldest one has left
        began = time.monotonic()
        idle[-1].settimeout(PATIENCE_S)
        assert idle[-1].recv(1) == b""
        assert time.monotonic() - began < 5  # until its HELLO it has less time than for all of it


def test_those_who_wait_for_facts_keep_no_plane_out(ring, tmp_path):
    with agent_here(tmp_path, ring, card=None) as (running, access):
        asking = [open_link(access, {"facts": True})[0] for _ in range(MOST_ASKING)]
        with pytest.raises(RingLinkError, match="ask it for its model at present"):
            fetch_facts(access, with_files=False)
        running.desk.tell("{}", {})
        serves(access)
        for link in asking:
            link.close()
        eventually(lambda: fetched(access), PATIENCE_S)


def fetched(access: RingAccess) -> bool:
    with contextlib.suppress(RingLinkError):
        link, welcome = open_link(access, {"facts": True})
        link.close()
        return welcome == {}
    return False


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_an_error_of_accept_passes(ring, tmp_path, monkeypatch, caplog, what):
    monkeypatch.setattr(gate, "RETRY_S", 0.05)
    with agent_here(tmp_path, ring) as (_, access):
        serves(access, "first")
        if what == "threads":
            failing = iter([RuntimeError("can't start new thread")] * 2)
            start = threading.Thread.start

            def fail(self: threading.Thread) -> None:
                for failure in failing:
                    raise failure
                start(self)

            monkeypatch.setattr(gate.threading.Thread, "start", fail)
            for _ in range(2):
                with pytest.raises(RingLinkError):
                    serves(access, "another")
        else:
            own = resource.getrlimit(resource.RLIMIT_NOFILE)
            with socket.socket() as caller:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, own[1]))
                try:
                    caller.connect(parse_address(access.address))
                    time.sleep(0.3)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, own)
        serves(access, "first")
    assert any("Accepting connections failed" in line for line in caplog.messages)


def test_the_oldest_of_the_host_with_most_callers_leaves():
    """So a distant one with one link stays."""
    release = threading.Event()

    def greet(link: socket.socket, *_: object) -> None:
        release.wait(PATIENCE_S)
        link.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        own = gate.Gate(listener, greet)
        thread = threading.Thread(target=own.serve, daemon=True)
        thread.start()
        with contextlib.ExitStack() as stack:

            def connect(source: str) -> socket.socket:
                link = socket.create_connection(address, source_address=(source, 0))
                link.settimeout(PATIENCE_S)
                return stack.enter_context(link)

            lone = connect("127.0.0.2")
            many = [connect("127.0.0.1") for _ in range(MOST_ENTERING)]
            assert many[0].recv(1) == b""
            lone.settimeout(0.1)
            with pytest.raises(TimeoutError):
                lone.recv(1)
            release.set()
        own.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


# -- an engine that lies -----------------------------------------------------------------------


class LyingEngine:
    """Welcomes request planes with a ring; the second time as the test wants.

    Attributes:
        callers: how many have come.
    """

    def __init__(self, **second: object) -> None:
        self.callers = 0
        self._second = second
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._memory = _native.create(4, 1 << 20, SAMPLING, 1 << 20)
        self._agent = _native.Agent(self._memory, SAMPLING)
        self._agent.attach()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def access(self) -> RingAccess:
        return RingAccess(f"127.0.0.1:{self._listener.getsockname()[1]}", None, 2.0, "plane")

    def close(self) -> None:
        close_socket(self._listener)
        os.close(self._memory)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                raw, _ = self._listener.accept()
                with contextlib.suppress(RingLinkError):
                    self._welcome(SealedSocket(raw, RULES, *answer(RULES, raw, b"")))

    def _welcome(self, link: SealedSocket) -> None:
        link.set_timeout(PATIENCE_S)
        link.receive_frame()
        self.callers += 1
        told = {"slots": 4, "arena_bytes": 1 << 20, "memory_bytes": 1 << 20}
        told |= {"ring_id": f"ring {self.callers}", "clock_ns": 0}
        second = self._second if self.callers == 2 else {}
        parts = self._agent.snapshot() * (200_000 if second.pop("endless", False) else 1)
        link.send_frame(LinkFrame.WELCOME, pack_json({**told, **second}))
        for part in parts:
            link.send_frame(LinkFrame.RING, part)
        link.send_frame(LinkFrame.READY)
        if self.callers == 1:
            link.finish(0.0)


@pytest.mark.parametrize(
    "second",
    [
        {"slots": 2**70},
        {"slots": 65536},
        {"slots": -1},
        {"arena_bytes": 2**60, "memory_bytes": 2**60},
        {"memory_bytes": 2**44},
        {"ring_id": None},
        {"slots": None},
        {"endless": True},
    ],
    ids=str,
)
def test_a_ring_that_is_none_costs_the_link(caplog, second):
    lying = LyingEngine(**second)
    with threaded(lying.access) as client:
        eventually(lambda: lying.callers >= 3, PATIENCE_S)
        eventually(lambda: client._port.failure is None, PATIENCE_S)
    lying.close()
    assert any("The engine" in line and "ring" in line for line in caplog.messages)


def test_a_clock_that_is_none_is_not_followed():
    lying = LyingEngine(clock_ns=10**400)
    with threaded(lying.access) as client:
        assert client._port.ahead_ns < 0
        eventually(lambda: client._port.ahead_ns == 0, PATIENCE_S)
        assert lying.callers == 2
    lying.close()


@pytest.mark.parametrize("error", [OSError(24, "too many"), MemoryError(), ZeroDivisionError()])
def test_any_error_while_it_connects_again_passes(monkeypatch, error):
    lying = LyingEngine()
    create, failing = _native.create, iter([error])

    def fail_once(*sizes: int) -> int:
        for failure in failing:
            raise failure
        return create(*sizes)

    with threaded(lying.access) as client:
        monkeypatch.setattr(_native, "create", fail_once)
        eventually(lambda: lying.callers >= 3, PATIENCE_S)
        eventually(lambda: client._port.failure is None, PATIENCE_S)
    lying.close()


def test_a_request_plane_that_waits_for_its_engine_gives_signs_of_life(ring, tmp_path, caplog):
    address = f"127.0.0.1:{free_port()}"
    access = RingAccess(address, str(key_file(tmp_path)), PATIENCE_S, "plane")
    board = Board(create_board(1), 0)
    met: list[RingClient] = []
    thread = threading.Thread(target=lambda: met.append(meet_ring(access, board, 0.01)))
    thread.start()
    eventually(lambda: board.signed_ns() > 0, PATIENCE_S)
    board.sign(0)
    eventually(lambda: board.signed_ns() > 0, PATIENCE_S)
    assert not met
    with agent_here(tmp_path, ring, listen=parse_address(address)):
        thread.join(PATIENCE_S)
        (client,) = met
        assert client.model_change is None
        client.close()
    assert sum("Waiting for the engine" in line for line in caplog.messages) == 1
