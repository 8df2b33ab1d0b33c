"""Links that are lost at the wrong moment: what an agent tells, and which ring goes on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from test_ring_agent import RunningAgent, agent
from test_ring_processes import PATIENCE_S, Collector, endless, engine, states, threaded

from live import eventually
from weft.core.addresses import parse_address
from weft.core.errors import RingLinkError
from weft.core.sealed import SealedSocket
from weft.ring import _native
from weft.ring.codec import SAMPLING
from weft.ring.link import CLOCK, LinkFrame, RemoteRing, open_link, wanted_ring

PROMPT = list(range(100, 400))
QUIET_S = 0.5  # many times what an agent needs to tell what it wants to tell


class Plane:
    """A request plane whose links are lost when a test wants them to be."""

    def __init__(self, running: RunningAgent) -> None:
        self._running, self.held = running, ""
        self.link = self._open()
        self.ring = RemoteRing.receive(self.link, self.welcome)
        self.held = self.welcome["ring_id"]

    def _open(self) -> SealedSocket:
        link, self.welcome = open_link(self._running.access(), wanted_ring("session", self.held))
        return link

    def lose(self) -> None:
        self.link.close()
        self.ring.link_down()

    def go_on(self) -> None:
        """Have a new link to the same ring; nothing is said on it yet."""
        self.link = self._open()
        assert self.welcome["ring_id"] == self.held
        self.ring.link_up()

    def submit(self, number: int, prompt: list[int]) -> None:
        given = [[], [], [], b"", b"", b"", [], b"", [], 16]
        self.ring.submit([self.ring.prepare(number, prompt, bytes(64), *given)])

    def send(self) -> None:
        for part in self.ring.take():
            self.link.send_frame(LinkFrame.RING, part)

    def frames(self, patience_s: float) -> Iterator[tuple[int, bytes]]:
        """What comes, until nothing has come for a while."""
        while select.select([self.link], [], [], patience_s)[0]:
            for kind, body in self.link.receive_some():
                yield kind, body.tobytes()

    def poll(self, patience_s: float = QUIET_S) -> list:
        """Take in what comes, until there is news or nothing has come for a while."""
        for kind, body in self.frames(patience_s):
            assert kind == LinkFrame.RING
            self.ring.apply(body)
            if news := self.ring.poll():
                return news
        return []


def claimed(own: _native.Engine) -> tuple:
    """The one request that has come."""
    found: list[tuple] = []

    def look() -> bool:
        found.extend(own.receive()[0])
        return bool(found)

    eventually(look, PATIENCE_S)
    (request,) = found
    return request


def test_a_link_that_is_lost_twice_mixes_no_outputs_with_prompts(ring, tmp_path):
    with agent(tmp_path, ring) as running:
        own = _native.Engine([(ring.memory, ring.wake)], SAMPLING)
        plane = Plane(running)
        plane.send()
        plane.submit(1, [1, 2, 3])
        plane.send()
        number = claimed(own)[0]
        for _ in range(10):
            own.publish([(number, 666)])
        own.finish(number, 2, None, 0, 0, "", "", "")
        own.flush(0)
        own.flush(1)
        assert len(plane.poll(PATIENCE_S)[0][1]) == 10
        plane.lose()  # and with it that the slot is free
        plane.submit(2, PROMPT)  # has its slot and its memory
        plane.go_on()
        told = list(plane.frames(QUIET_S))
        assert told == [], "the agent tells what it cannot know to be wanted"
        plane.link.send_frame(LinkFrame.PING, CLOCK.pack(5))  # the link is up
        assert next(plane.frames(PATIENCE_S))[0] == LinkFrame.PONG
        plane.lose()  # before all was said again
        plane.go_on()
        plane.send()
        request = claimed(own)
        assert any(list(field) == PROMPT for field in request if isinstance(field, list | tuple))
        own.publish([(request[0], 7)])
        own.flush(1)
        assert list(plane.frames(QUIET_S)) == []
        plane.link.send_frame(LinkFrame.READY)
        ((_, tokens, *_),) = plane.poll(PATIENCE_S)
        assert list(tokens) == [7]
        plane.link.send_frame(LinkFrame.READY)
        running.said("sends no frame of kind 5")


def test_a_ring_that_did_not_come_whole_does_not_go_on(ring, tmp_path):
    def opened(held: str) -> tuple[SealedSocket, dict]:
        return open_link(running.access(), wanted_ring("session", held))

    with agent(tmp_path, ring) as running:
        link, first = opened("")
        link.close()  # the ring was on its way
        link, second = opened("")
        assert second["ring_id"] != first["ring_id"]
        RemoteRing.receive(link, second)
        link.close()
        link, third = opened(first["ring_id"])  # one of another agent, or of a session before
        assert third["ring_id"] not in (first["ring_id"], second["ring_id"])
        RemoteRing.receive(link, third)
        link.close()
        link, fourth = opened(third["ring_id"])
        assert fourth["ring_id"] == third["ring_id"]
        link.send_frame(LinkFrame.READY)
        kind, _ = link.receive_frame()
        assert kind == LinkFrame.RING  # what is new, and no READY
        link.close()


@pytest.mark.parametrize("held", [None, 5, ["x"]])
def test_who_does_not_say_which_ring_it_has_gets_none(ring, tmp_path, held):
    with agent(tmp_path, ring) as running:
        with pytest.raises(RingLinkError):
            open_link(running.access(), {**wanted_ring("session"), "ring_id": held})
        running.said("It says not which ring it has.")


@pytest.mark.parametrize("named", [None, "", 7])
def test_an_engine_that_does_not_name_its_ring_gives_none(named):
    left, right = socket.socketpair()
    with left, right, pytest.raises(RingLinkError, match="does not say which ring"):
        RemoteRing.receive(left, {"ring_id": named, "slots": 4, "arena_bytes": 1 << 20})


class CuttingProxy:
    """Carries links to wherever an agent listens now, and some of them only so far."""

    def __init__(self) -> None:
        self.target = ""
        self.limits: list[int] = []  # bytes that come back over the next links
        self.links = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(parse_address(self.target))
                except OSError:
                    near.close()
                    continue
                self.links += 1
                most = self.limits.pop(0) if self.limits else 2**40
                for way in ((near, far, 2**40), (far, near, most)):
                    threading.Thread(target=self._carry, args=way, daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket, left: int) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(512)) and left > 0:
                target.sendall(data[:left])
                left -= len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_an_agent_that_dies_and_a_link_that_breaks_while_its_successor_sends_the_ring(
    ring, tmp_path
):
    proxy = CuttingProxy()
    collector, again = Collector(), Collector()
    (tmp_path / "successor").mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(proxy.close)
        stack.enter_context(engine(ring, step_s=0.005))
        with agent(tmp_path, ring) as running:
            proxy.target = running.address
            access = replace(running.access(timeout_s=5.0), address=proxy.address)
            client = stack.enter_context(threaded(access))
            client.submit([endless(i) for i in range(20)], collector)
            collector.wait_for(lambda updates: 0 in updates)
            os.kill(running.process.pid, signal.SIGKILL)
            running.process.wait()
            proxy.limits = [4000]  # amid the ring: the slots of 20 requests have more
            links = proxy.links
        successor = stack.enter_context(agent(tmp_path / "successor", ring))
        proxy.target = successor.address
        collector.ends(20)
        assert proxy.links >= links + 2
        errors = {own[-1].error.message for own in collector.updates.values()}
        assert errors == {"The engine was lost; try again."}
        eventually(lambda: client._ring.free_slots == 64, PATIENCE_S)
        client.submit([endless(100)], again)
        again.ends(1)
        assert len(again.updates[100]) == 500
        eventually(lambda: not any(states(ring)), PATIENCE_S)


def test_streams_go_on_over_links_that_break_at_every_frame(ring, tmp_path):
    """Links are cut at other places each time: amid what is said again, and amid what is told."""
    proxy, collector = CuttingProxy(), Collector()
    with agent(tmp_path, ring) as running, engine(ring, step_s=0.002):
        proxy.target = running.address
        with threaded(replace(running.access(), address=proxy.address)) as client:
            proxy.limits = list(range(400, 12_000, 800))
            client.submit([endless(i) for i in range(8)], collector)
            collector.wait_for(lambda updates: 0 in updates)
            client._port._link._socket.shutdown(socket.SHUT_RDWR)
            collector.ends(8)
            assert not proxy.limits
            for own in collector.updates.values():
                assert len(own) == 500
                assert own[-1].error is None
            eventually(lambda: client._ring.free_slots == 64, PATIENCE_S)
    proxy.close()
