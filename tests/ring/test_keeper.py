"""The keeper and the deaths of engines: a real ring, and processes that stand in."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
from pathlib import Path

import pytest

from groups import MIB, Tree
from weft.core.errors import EngineDeadError, EngineOutOfMemoryError
from weft.core.memory import MemoryKills
from weft.engine.keeper import EngineKeeper
from weft.engine.links import EngineLinks
from weft.engine.remote import EngineProcess
from weft.ring.client import RingClient
from weft.ring.segment import create_ring

POINT = "/sys/fs/cgroup"


class Ready(EngineProcess):
    """Takes over at once, whenever it is asked."""

    def wait_until_ready(self) -> None:  # type: ignore[override]
        """Nothing to wait for."""


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
