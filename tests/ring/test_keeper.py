"""The keeper and the deaths of engines: a real ring, and processes that stand in."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from groups import MIB, Tree
from weft.core.errors import (
    EngineDeadError,
    EngineOutOfMemoryError,
    InvariantError,
    OutOfMemoryError,
    WeftError,
)
from weft.core.memory import MemoryKills
from weft.core.process import start_child
from weft.engine.keeper import MOST_FAILURES, EngineKeeper
from weft.engine.kv_file import create_kv_file, make_fit
from weft.engine.links import EngineLinks
from weft.engine.remote import EngineProcess
from weft.engine.reserve import Reserve
from weft.ring.client import RingClient
from weft.ring.segment import create_ring

POINT = "/sys/fs/cgroup"
SERVED = SimpleNamespace(checkpoint="")


class Ready(EngineProcess):
    """Takes over at once, whenever it is asked."""

    def wait_until_ready(self) -> SimpleNamespace:  # type: ignore[override]
        """Nothing to wait for."""
        return SERVED


def stand_in(kind: type[EngineProcess], tree: Tree) -> EngineProcess:
    """An engine that does nothing, until it is told to stop or killed."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    return kind(process, process.stdin, io.StringIO(), kills=MemoryKills(tree.root))


def count(tree: Tree, kills: int) -> None:
    tree.group(POINT, max=600 * MIB, current=MIB, events=f"oom 9\noom_kill {kills}")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.mount("cgroup2", POINT)
    tree.member("0::/")
    count(tree, 0)
    return tree


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_a_death_is_put_down_to_memory_by_the_counter(tree, caplog, memory, asked):
    """A standby that nobody asked for is then not kept any more."""
    first, second = stand_in(Ready, tree), stand_in(Ready, tree)
    ring = create_ring()
    client = RingClient(ring)
    keeper = EngineKeeper({}, EngineLinks([ring]), standby=asked or None, watchdog_s=600)
    reserve = keeper._reserve
    reserve._forking = False  # there is no third one
    keeper._active, reserve._spare, reserve.standby = first, second, True

    async def one_death() -> None:
        keeping = asyncio.create_task(keeper.run())
        count(tree, int(memory))
        first.process.kill()
        while keeper._active is first:
            await asyncio.sleep(0.01)
        keeping.cancel()

    asyncio.run(one_death())
    keeper.stop()
    assert (client.memory_kills, client.out_of_memory) == (int(memory), memory)
    assert reserve.standby == (asked or not memory)
    (line,) = [text for text in caplog.messages if "SIGKILL" in text]
    assert ("600.00 MiB of memory" in line and "lower kv_memory" in line) == memory
    client.close()
    ring.close()


class Short(Ready):
    """Finds too little free memory when it takes over, until the list of errors is used up."""

    errors: ClassVar[list[WeftError]] = []

    def wait_until_ready(self) -> SimpleNamespace:  # type: ignore[override]
        """The engine's error, as long as there is one."""
        if self.errors:
            raise self.errors.pop(0)
        return SERVED


def too_little(free: str) -> WeftError:
    return OutOfMemoryError(f"The weights need 9.00 GiB, but only {free} are free.")


def killed() -> WeftError:
    return EngineOutOfMemoryError("The engine ended while it was starting (signal SIGKILL).")


@pytest.mark.parametrize(
    ("errors", "kills", "lines"),
    [
        ([too_little(f"{n}.50 MiB") for n in range(10)], 0, ["0.50 MiB"]),
        ([too_little("1.00 B"), too_little("7.00 GiB")] * 5, 0, ["1.00 B"]),
        ([killed() for _ in range(10)], 10, ["SIGKILL"]),
        (
            [*(too_little("0 B") for _ in range(4)), killed(), *(too_little("9 B"),) * 5],
            1,
            ["0 B", "SIGKILL", "9 B"],
        ),
    ],
    ids=["short", "short-in-other-units", "killed", "both"],
)
def test_too_little_memory_for_the_next_engine_ends_no_server(
    tree, caplog, monkeypatch, errors, kills, lines
):
    """It is tried ever more rarely, and each reason is logged once."""
    assert len(errors) > MOST_FAILURES
    monkeypatch.setattr(Short, "errors", errors)
    first = stand_in(Short, tree)
    ring = create_ring()
    client = RingClient(ring)
    keeper = EngineKeeper({}, EngineLinks([ring]), standby=False, watchdog_s=600)
    told: list[tuple[bool, bool]] = []
    delays: list[float] = []
    sleep = asyncio.sleep

    async def take(_patience_s: float | None) -> EngineProcess:
        told.append((client.out_of_memory, client.killed_for_memory))
        return stand_in(Short, tree)

    async def no_sleep(delay_s: float) -> None:
        own = [asyncio.get_running_loop()] == loops  # and not that of an earlier test's thread
        if own:
            delays.append(delay_s)
        await sleep(0 if own else delay_s)

    monkeypatch.setattr(keeper._reserve, "take", take)
    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    keeper._active = first

    loops: list[asyncio.AbstractEventLoop] = []

    async def until_taken_over() -> None:
        loops.append(asyncio.get_running_loop())
        keeping = asyncio.create_task(keeper.run())
        first.process.kill()
        while not any("has taken over" in line for line in caplog.messages):
            assert not keeping.done()
            await sleep(0.01)
        keeping.cancel()

    first_kill = next((n for n, e in enumerate(errors) if e.code == killed().code), len(errors))
    asyncio.run(until_taken_over())
    keeper.stop()
    assert told == [(n > 0, n > first_kill) for n in range(11)]
    assert client.memory_kills == kills
    assert delays == [0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    failed = [line for line in caplog.messages if "tried again" in line]
    assert len(failed) == len(lines)
    assert all(words in line for words, line in zip(lines, failed, strict=True))
    assert len([line for line in caplog.messages if "The engine ended (signal" in line]) == 1
    client.close()
    ring.close()


def test_an_engine_killed_for_memory_while_it_starts_says_so(tree):
    engine = stand_in(EngineProcess, tree)
    count(tree, 1)
    engine.process.kill()
    with pytest.raises(EngineOutOfMemoryError, match=r"SIGKILL.*600\.00 MiB of memory"):
        engine.wait_until_ready()


def test_another_death_is_not_put_down_to_memory(tree):
    engine = stand_in(EngineProcess, tree)
    count(tree, 1)
    engine.process.send_signal(signal.SIGSEGV)
    with pytest.raises(EngineDeadError, match="SIGSEGV") as caught:
        engine.wait_until_ready()
    assert not isinstance(caught.value, EngineOutOfMemoryError)


class Faulty(Ready):
    """Fails when it takes over the first time: told as an error, or by its end."""

    fault: ClassVar[signal.Signals | WeftError | None] = None

    def wait_until_ready(self) -> SimpleNamespace:  # type: ignore[override]
        """Fail once."""
        fault, Faulty.fault = Faulty.fault, None
        if isinstance(fault, signal.Signals):
            self.process.send_signal(fault)
            self.process.wait()
            raise EngineDeadError("The engine ended while it was starting.")
        if fault is not None:
            raise fault
        return SERVED


@pytest.mark.parametrize(
    ("fault", "kept"),
    [
        (None, True),
        (signal.SIGKILL, True),
        (signal.SIGSEGV, False),
        (InvariantError("a block is free twice"), False),
    ],
    ids=["none", "killed", "crashed", "error"],
)
def test_kv_is_dropped_where_an_engine_fails_that_takes_over(tree, monkeypatch, fault, kept):
    """Else the next one would find what made it fail."""
    monkeypatch.setattr(Faulty, "fault", fault)
    engines = [stand_in(Faulty, tree) for _ in range(3)]
    ring, kv = create_ring(), create_kv_file()
    make_fit(kv, b"0123456789abcdef", 2**16)
    os.pwrite(kv, b"full", 5000)
    keeper = EngineKeeper({}, EngineLinks([ring], kv=kv), standby=False, watchdog_s=600)
    first = keeper._active = engines.pop(0)
    last = engines[1 if fault else 0]

    async def take(patience_s: float | None) -> EngineProcess:  # noqa: ARG001
        return engines.pop(0)

    monkeypatch.setattr(keeper._reserve, "take", take)

    async def one_death() -> None:
        keeping = asyncio.create_task(keeper.run())
        first.process.kill()
        while keeper._active is not last:
            await asyncio.sleep(0.01)
        keeping.cancel()

    asyncio.run(one_death())
    keeper.stop()
    for engine in engines:
        engine.stop()
    assert (os.pread(kv, 4, 5000) == b"full") == kept
    ring.close()
    os.close(kv)


def test_a_fork_that_is_cancelled_takes_its_fork_server_along():
    """Else the answer of the one would be read as that of the next."""
    ring = create_ring()
    reserve = Reserve({"device": "cpu"}, EngineLinks([ring]), start_child, forking=True)

    async def cancelled() -> None:
        taking = asyncio.create_task(reserve.take(60.0))
        while reserve._forks is None:
            await asyncio.sleep(0.01)
        server = reserve._forks.process
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert reserve._forks is None
        assert server.poll() is not None

    asyncio.run(cancelled())
    reserve.stop()
    ring.close()
