"""The bell of a data folder, and who waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from weft.batch.bell import bell_stamp, near_bell, ring_bell

LONG_S = 60.0


def waits_for(folder: Path, change) -> None:
    """Waits near the bell of a folder, and returns once ``change`` has been noticed."""

    async def wait() -> None:
        with near_bell(folder) as changed:
            assert not changed.is_set()
            change()
            await asyncio.wait_for(changed.wait(), LONG_S)

    asyncio.run(wait())


def test_a_bell_is_heard_the_first_time_and_again(tmp_path):
    for _ in range(3):
        before = bell_stamp(tmp_path)
        waits_for(tmp_path, lambda: ring_bell(tmp_path))
        assert bell_stamp(tmp_path) != before


@pytest.mark.parametrize("depth", [1, 3])
def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path, depth):
    folder = tmp_path.joinpath(*"abc"[:depth])
    waits_for(folder, lambda: folder.mkdir(parents=True))
    waits_for(folder, lambda: ring_bell(folder))


def test_reading_or_writing_a_file_beside_the_bell_does_not_wake(tmp_path):
    ring_bell(tmp_path)
    beside = tmp_path / "base"
    beside.write_bytes(b"old")

    async def wait() -> bool:
        with near_bell(tmp_path) as changed:
            bell_stamp(tmp_path)
            with beside.open("ab") as file:
                file.write(b" and new")
            for _ in range(3):  # the kernel queues an event before a call returns
                await asyncio.sleep(0)
            return changed.is_set()

    assert not asyncio.run(wait())
