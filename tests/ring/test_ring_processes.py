"""A client here, an engine in another process: same tokens, deaths noticed, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

import pytest
from modelled import VOCAB, ScoringExecutor, scheduler

from live import eventually
from weft.core.errors import EngineDeadError, ParameterError
from weft.core.plan import Update
from weft.core.types import FinishReason, Request, SamplingParams
from weft.engine.local import EngineThread
from weft.ring import _native
from weft.ring.client import RingClient
from weft.ring.segment import ARENA_PER_MEMORY, RingFds, create_ring

CHILD = Path(__file__).parent / "engine_child.py"
PATIENCE_S = 60.0


def start_engine(
    *rings: RingFds, depth: int = 0, step_s: float = 0.0, poison: int = -1
) -> subprocess.Popen[str]:
    command = [sys.executable, str(CHILD), str(depth), str(step_s), str(poison), *map(str, rings)]
    inherited = [fd for ring in rings for fd in ring.pass_fds]
    process = subprocess.Popen(command, pass_fds=inherited, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@contextmanager
def engine(*rings: RingFds, **options):
    process = start_engine(*rings, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def threaded(fds: RingFds, process: subprocess.Popen[str] | None = None):
    client = RingClient(fds)
    if process is not None:
        client.watch_engine(os.pidfd_open(process.pid))
    client.run_in_thread()
    try:
        yield client
    finally:
        client.close()


class Collector:
    """A sink that can be waited for."""

    def __init__(self) -> None:
        self.updates: dict[int, list[Update]] = {}
        self._changed = threading.Condition()

    def __call__(self, updates) -> None:
        with self._changed:
            for update in updates:
                self.updates.setdefault(update.sequence_id, []).append(update)
            self._changed.notify_all()

    def wait_for(self, ready, patience_s: float = PATIENCE_S) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: ready(self.updates), patience_s)

    def ends(self, count: int, patience_s: float = PATIENCE_S) -> None:
        def ended(updates) -> bool:
            return sum(own[-1].finish is not None for own in updates.values()) == count

        self.wait_for(ended, patience_s)


def random_requests(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 5, 40]),
            min_tokens=rng.choice([0, 1]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), 20)),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.choice([None, None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, None, 2]),
            seed=number,
        )
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 150)))
        eos = tuple(rng.sample(range(VOCAB), 30))
        name = rng.choice(["priority", "interactive", "batch"])
        requests.append(Request(number, prompt, params, eos, name))
    requests.append(Request(count, (1,) * 600, SamplingParams(max_tokens=5)))  # too long
    requests.append(Request(count + 1, (1, 2), SamplingParams(max_tokens=5), (), "unknown"))
    return requests


def in_process(requests: list[Request], depth: int) -> dict[int, list[Update]]:
    collector = Collector()
    thread = EngineThread(scheduler(), ScoringExecutor(depth=depth))
    thread.inbox.submit(requests, collector)
    collector.ends(len(requests))
    thread.close()
    return collector.updates


def comparable(updates: list[Update]) -> list[tuple]:
    """Errors compare by what they say. The log probabilities of a prompt may come in other pieces,
    and through the ring they come before the first token, not after it.
    """
    said, scores = [], []
    for update in updates:
        error = update.error
        told = None if error is None else (type(error), error.message, error.param)
        if update.prompt_logprobs is None:
            timeless = update._replace(error=None, scheduled_ns=0, prefilled_ns=0)
            said.append(("update", timeless, told))
        else:
            start = update.prompt_logprobs.start
            for i, entry in enumerate(update.prompt_logprobs.entries):
                scores.append(("prompt", start + i, entry))
    return scores + said


@pytest.mark.parametrize("depth", [0, 1])
def test_the_ring_gives_what_the_process_gives(ring, depth):
    requests = random_requests(depth, 40)
    expected = in_process(requests, depth)
    collector = Collector()
    with engine(ring, depth=depth) as process, threaded(ring, process) as client:
        client.submit(requests[:25], collector)
        client.submit(requests[25:], collector)
        collector.ends(len(requests))
        assert client._ring.free_slots == 64
        assert client._ring.free_memory == 1 << 20
        assert client._ring.free_bytes == ARENA_PER_MEMORY * (1 << 20)
        assert client.info().pid == process.pid
    refused = [u for own in expected.values() for u in own if isinstance(u.error, ParameterError)]
    assert len(refused) == 2
    for number, updates in expected.items():
        assert comparable(collector.updates[number]) == comparable(updates)


def test_on_an_event_loop_with_two_rings(ring):
    other = create_ring(64, 1 << 20)
    requests = random_requests(5, 20)
    expected = in_process(requests, 1)

    async def ask(client: RingClient, request: Request) -> list[Update]:
        queue: asyncio.Queue[Update] = asyncio.Queue()
        client.submit([request], lambda updates: [queue.put_nowait(u) for u in updates] and None)
        got = [await asyncio.wait_for(queue.get(), PATIENCE_S)]
        while got[-1].finish is None:
            got.append(await asyncio.wait_for(queue.get(), PATIENCE_S))
        return got

    async def main() -> None:
        clients = [RingClient(ring), RingClient(other)]
        for client in clients:
            client.attach(asyncio.get_running_loop())
        asked = [ask(clients[i % 2], request) for i, request in enumerate(requests)]
        for request, got in zip(requests, await asyncio.gather(*asked), strict=True):
            updates = expected[request.id]
            tokens = [u.token for u in got if u.token is not None]
            assert tokens == [u.token for u in updates if u.token is not None]
            assert got[-1].finish == updates[-1].finish
        for client in clients:
            client.close()

    with engine(ring, other, depth=1):
        asyncio.run(main())
    other.close()


def endless(number: int) -> Request:
    return Request(number, (1, 2, number), SamplingParams(max_tokens=500, ignore_eos=True))


def test_cancel_ends_a_running_request_at_once(ring):
    collector = Collector()
    with engine(ring, step_s=0.005) as process, threaded(ring, process) as client:
        client.submit([endless(1), endless(2)], collector)
        collector.wait_for(lambda updates: all(len(updates.get(i, [])) > 3 for i in (1, 2)))
        client.cancel(1)
        collector.wait_for(lambda updates: updates[1][-1].finish is FinishReason.CANCELLED)
        said = len(collector.updates[2])
        collector.wait_for(lambda updates: len(updates[2]) > said)
        assert collector.updates[2][-1].finish is None


def test_the_death_of_the_engine_ends_every_request_with_an_error(ring):
    collector = Collector()
    with engine(ring, step_s=0.005) as process, threaded(ring, process) as client:
        client.submit([endless(i) for i in range(20)], collector)  # some run, some wait
        collector.wait_for(lambda updates: 0 in updates)
        process.kill()
        died = time.monotonic()
        collector.ends(20)
        assert time.monotonic() - died < 5
        assert all(isinstance(own[-1].error, EngineDeadError) for own in collector.updates.values())
        with pytest.raises(EngineDeadError) as refused:
            client.submit([endless(99)], collector)
        assert refused.value.http_status == 503
        process.wait()
        with engine(ring) as successor:
            client.watch_engine(os.pidfd_open(successor.pid))
            client.submit([endless(100)], collector)
            collector.wait_for(lambda updates: 100 in updates and updates[100][-1].finish)
            assert len(collector.updates[100]) == 500
            give_up = time.monotonic() + PATIENCE_S
            while client._ring.free_slots < 64 and time.monotonic() < give_up:
                time.sleep(0.01)
            assert client._ring.free_memory == 1 << 20
            assert client._ring.free_bytes == ARENA_PER_MEMORY * (1 << 20)


def test_a_graceful_stop_answers_everybody(ring):
    collector = Collector()
    with engine(ring, depth=1, step_s=0.005) as process, threaded(ring) as client:
        client.submit([endless(i) for i in range(20)], collector)
        collector.wait_for(lambda updates: 0 in updates)
        process.send_signal(signal.SIGTERM)
        collector.ends(20)
        assert process.wait(PATIENCE_S) == 0


def test_the_death_of_a_request_plane_frees_its_slots_and_disturbs_no_other(ring):
    other = create_ring(64, 1 << 20)
    collector = Collector()
    with engine(ring, other, step_s=0.002) as process, threaded(other, process) as client:
        client.submit([endless(1)], collector)
        pid = os.fork()
        if pid == 0:  # a request plane that submits and is killed
            own = RingClient(ring)
            own.submit([endless(i) for i in range(30)], lambda _: None)
            time.sleep(PATIENCE_S)
            os._exit(1)
        give_up = time.monotonic() + PATIENCE_S
        collector.wait_for(lambda updates: len(updates.get(1, [])) > 20)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        successor = RingClient(ring)
        while successor._ring.free_slots < 64 and time.monotonic() < give_up:
            successor.poll()
            time.sleep(0.01)
        assert successor._ring.free_slots == 64
        assert successor._ring.free_memory == 1 << 20
        assert successor._ring.free_bytes == ARENA_PER_MEMORY * (1 << 20)
        again = Collector()
        successor.run_in_thread()
        successor.submit([endless(7)], again)
        again.ends(1)
        collector.ends(1)
        assert len(collector.updates[1]) == len(again.updates[7]) == 500
        successor.close()
    other.close()


def test_killed_without_successor_the_slots_become_empty(ring):
    with engine(ring, step_s=0.002):
        pid = os.fork()
        if pid == 0:
            RingClient(ring).submit([endless(i) for i in range(30)], lambda _: None)
            os._exit(0)
        os.waitpid(pid, 0)
        give_up = time.monotonic() + PATIENCE_S
        while any(states(ring)) and time.monotonic() < give_up:
            time.sleep(0.02)
        assert not any(states(ring))


def states(ring: RingFds) -> list[int | None]:
    """The state of every slot, read from the memory without attaching."""
    return _native.Page(ring.memory).states()


SUPERVISED = """
import os, subprocess, sys, time
from weft.core.types import Request, SamplingParams
from weft.ring.client import RingClient
from weft.ring.segment import create_ring
ring = create_ring(64, 1 << 20)
command = [sys.executable, sys.argv[1], "0", "0.005", "-1", str(ring)]
engine = subprocess.Popen(command, pass_fds=ring.pass_fds, stdout=subprocess.PIPE)
engine.stdout.readline()
client = RingClient(ring)
client.run_in_thread()
params = SamplingParams(max_tokens=500)
client.submit([Request(i, (1, 2, i), params) for i in range(20)], lambda _: None)
print(engine.pid, flush=True)
time.sleep(600)
"""


def named_memory(pids: Iterable[int]) -> list[str]:
    """Shared memory with a name that these processes have mapped, or made the old way."""
    mapped = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    made = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    ours = {str(pid) for pid in pids}
    return [line for line in mapped if "/dev/shm/" in line] + [
        line for line in made if line.split()[4] in ours
    ]


@pytest.mark.parametrize("victims", ["engine", "client", "both"])
def test_nothing_is_left_behind_after_sigkill(victims):
    client = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, str(CHILD)], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    pids = {"engine": int(client.stdout.readline()), "client": client.pid}
    inode = ring_inode(client.pid)
    assert holders(inode) == set(pids.values())
    assert not named_memory(pids.values())  # so that no name can be left
    killed = [pids[victim] for victim in pids if victims in (victim, "both")]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not holders(inode) & set(killed), PATIENCE_S)
    for pid in set(pids.values()) - set(killed):
        os.kill(pid, signal.SIGKILL)
    client.wait()
    client.stdout.close()
    eventually(lambda: not holders(inode), PATIENCE_S)


def ring_inode(pid: int) -> int:
    """The inode of the ring's memory, which a process holds open."""
    folder = Path(f"/proc/{pid}/fd")
    (fd,) = [fd for fd in folder.iterdir() if "memfd:weft-ring" in os.readlink(fd)]
    return fd.stat().st_ino


def holders(inode: int) -> set[int]:
    """Processes that map memory with this inode."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text().splitlines():
                fields = line.split()
                if fields[4] == str(inode) and "memfd:weft-ring" in line:
                    found.add(int(maps.parent.name))
    return found


def test_clients_and_inboxes_close_their_descriptors(ring):
    def open_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    with engine(ring) as process:
        before = open_fds()
        for _ in range(3):
            with threaded(ring, process) as client:
                collector = Collector()
                client.submit([endless(1)], collector)
                collector.ends(1)
        assert open_fds() == before
