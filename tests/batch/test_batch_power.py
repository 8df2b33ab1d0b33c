"""A loss of power at any moment of a server with files and batches: nothing that was told is lost.

Real processes work on files and batches while ``powerlog.c`` notes what they do to the disk. From
images of the disk at random moments batches are then brought to their end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from answering import Answering, planned_by, read
from powerloss import Disk, read_log, snapshot, variables

from depth import DEEP
from live import eventually, serving
from served_batches import OPTIONS, batch_processes, create_of, line, listed, upload, wait
from weft.batch import process
from weft.batch.folder import StoreLimits
from weft.batch.pool import Pool
from weft.batch.process import BatchWork
from weft.batch.records import UNFINISHED, BatchRecord
from weft.batch.session import Desk
from weft.batch.store import BatchStore

LIMITS = StoreLimits(reserve_bytes=0)
IMAGES = 400 if DEEP else 60
SERVED = 4 if DEEP else 1  # of images on which a real server starts
AGAIN = 100 if DEEP else 20  # of images of that server's disk
SHORT, LONG = 60, 400  # lines
END_S = 60.0
EXPIRE = """
import sys, time
from pathlib import Path
from weft.batch.folder import StoreLimits
from weft.batch.store import BatchStore
store = BatchStore(Path(sys.argv[1]), StoreLimits(reserve_bytes=0))
store.update(sys.argv[2], expires_at=int(time.time()))
store.close()
"""


@dataclass
class Promise:
    """What a client was told.

    Attributes:
        what: "file", "gone", "batch", or the status of a batch.
        since: size of the log when the answer came.
        until: the same when a client asked for the contrary.
        bytes: of a file, or of the files of a batch's results.
    """

    what: str
    name: str
    since: int
    bytes: tuple[bytes, ...] = ()
    until: float = float("inf")


@dataclass
class Told:
    """A client, which notes what it is told."""

    client: openai.OpenAI
    log: Path
    promises: list[Promise] = field(default_factory=list)

    def note(self, what: str, name: str, *data: bytes) -> None:
        self.promises.append(Promise(what, name, self.log.stat().st_size, data))

    def upload(self, lines: list[Any]) -> str:
        data = "".join(f"{json.dumps(item)}\n" for item in lines).encode()
        file_id = upload(self.client, lines)
        self.note("file", file_id, data)
        return file_id

    def delete(self, file_id: str) -> None:
        for promise in self.promises:
            if promise.name == file_id:
                promise.until = self.log.stat().st_size
        self.client.files.delete(file_id)
        self.note("gone", file_id)

    def create(self, file_id: str) -> str:
        batch_id = create_of(self.client, file_id)
        self.note("batch", batch_id)
        return batch_id

    def wait(self, batch_id: str) -> None:
        batch = wait(self.client, batch_id)
        found = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id]
        self.note(batch.status, batch_id, *(self.client.files.content(f).content for f in found))


@dataclass(frozen=True)
class Logged:
    """What a server did, and what its clients were told meanwhile."""

    root: Path
    log: Path
    promises: list[Promise]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    folder = tmp_path_factory.mktemp("power")
    root, log = folder / "disk", folder / "log"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(root, log).items():
            patch.setenv(name, value)
        data = root / "state" / "weft"
        with serving(folder, "--data-dir", str(data), *OPTIONS, modelled=True) as server:
            told = Told(server.client(), log)
            work(told, data, lambda: [child.kill() for child in batch_processes(server)])
            assert len(listed(told.client)) > 4
    return Logged(root, log, told.promises)


def work(told: Told, data: Path, kill: Callable[[], Any]) -> None:
    """Files and batches of all kinds: completed, cancelled, expired, killed at, deleted."""
    client = told.client
    short = told.upload([line(i) for i in range(SHORT)])
    wrong = {**line(1), "body": {"model": "other", "prompt": "x"}}
    some = told.upload([line(0), {**wrong, "custom_id": "wrong"}])
    long = told.upload([line(i, max_tokens=90) for i in range(LONG)])
    done = [told.create(short), told.create(some)]
    cancelled = told.create(long)
    eventually(lambda: client.batches.retrieve(cancelled).request_counts.completed > 0, 60)
    client.batches.cancel(cancelled)
    told.delete(told.upload([line(0)]))
    for batch_id in (*done, cancelled):
        told.wait(batch_id)
    killed, expired = told.create(short), told.create(long)
    eventually(lambda: client.batches.retrieve(expired).request_counts.completed > 0, 60)
    kill()
    told.wait(killed)
    subprocess.run([sys.executable, "-c", EXPIRE, str(data), expired], check=True)
    told.wait(expired)
    told.delete(short)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.01)


def bring_to_end(store: BatchStore, data: Path) -> None:
    """Have somebody answer all batches of a folder, as the batch process does."""
    records = store.unfinished()
    if not records:
        return

    async def until_over(thread: Executor, planner: Executor) -> None:
        orders = planned_by(planner, 32)
        work = store, thread, Pool(32), lambda _, __: Answering(), orders, 1000
        desk = Desk(*work, salted=False, promotion="none")
        working = asyncio.create_task(BatchWork(desk, records[0].served).run())
        with closing(BatchStore(data, LIMITS)) as other:
            end = time.monotonic() + END_S
            while any(other.reload(record.id).status in UNFINISHED for record in records):
                assert time.monotonic() < end, [other.reload(record.id) for record in records]
                await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as planner:
        asyncio.run(until_over(thread, planner))


def check(data: Path, promises: list[Promise], moment: int) -> None:
    """Everything promised is there, all batches have ended, and nothing else is on the disk."""
    with closing(BatchStore(data, LIMITS)) as store:
        store.sweep()
        [owner] = {row[0] for row in store._base.execute("SELECT owner FROM files")} or {b""}
        files = {record.id: record for record in store.list_files(owner).records}
        batches = {record.id: record for record in store.list_batches(owner, limit=100).records}
        path = store.files_folder.path
        assert {name: path(name).stat().st_size for name in os.listdir(path(""))} == {
            name: record.bytes for name, record in files.items()
        }
        for batch in batches.values():
            check_once(store, batch)
        for promise in promises:
            if not promise.since <= moment <= promise.until:
                continue
            if promise.what == "file":
                assert path(promise.name).read_bytes() == promise.bytes[0]
                assert promise.name in files
            elif promise.what == "gone":
                assert promise.name not in files
            elif promise.what == "batch":
                assert promise.name in batches
            else:
                record = batches[promise.name]
                assert record.status == promise.what
                found = [n for n in (record.output_file_id, record.error_file_id) if n]
                assert tuple(path(name).read_bytes() for name in found) == promise.bytes


def check_once(store: BatchStore, batch: BatchRecord) -> None:
    """A batch has ended with one line for each of its input, in files that have their rows."""
    assert batch.status in ("completed", "cancelled", "expired"), batch
    found = []
    names = ((batch.output_file_id, batch.completed), (batch.error_file_id, batch.failed))
    for name, count in names:
        lines = read(store.files_folder.path(name)) if name else []
        assert len(lines) == count, batch
        found += [item["custom_id"] for item in lines]
    assert set(Counter(found).values()) <= {1}
    assert len(found) == batch.total


def moments(log: Path, disk: Disk, count: int) -> Iterator[tuple[int, int, Disk]]:
    """Random moments in their order: a number, the size of the log, and the disk at that time."""
    acts = list(read_log(log))
    draw = random.Random(1)
    chosen = Counter(draw.choices(range(1, len(acts) + 1), k=count))
    number = 0
    for place, act in enumerate(acts, 1):
        disk.do(act)
        for _ in range(chosen[place]):
            number += 1
            yield number, act.end, disk


def go_on(image: Path, promises: list[Promise], moment: int) -> None:
    """Bring all batches of an image to their end, and check it."""
    data = image / "state" / "weft"
    try:
        with closing(BatchStore(data, LIMITS)) as store:
            bring_to_end(store, data)
        check(data, promises, moment)
    except BaseException:
        print(f"image {image}, {moment} bytes of the log")
        raise


def test_power_may_go_at_any_moment(logged, tmp_path):
    for number, moment, disk in moments(logged.log, Disk(logged.root), IMAGES):
        image = tmp_path / f"{number}"
        disk.write(image, None if number % 5 == 0 else random.Random(number))
        go_on(image, logged.promises, moment)


def test_a_server_goes_on_where_power_went_and_power_may_go_again(logged, tmp_path, monkeypatch):
    for number, moment, disk in moments(logged.log, Disk(logged.root), SERVED):
        image, log = tmp_path / f"{number}", tmp_path / f"log{number}"
        disk.write(image, random.Random(number))
        again = Disk(image, snapshot(image))
        data = ("--data-dir", str(image / "state" / "weft"))
        with monkeypatch.context() as patch:
            for name, value in variables(image, log).items():
                patch.setenv(name, value)
            with serving(tmp_path, *data, *OPTIONS, modelled=True) as server:
                client = server.client()
                for batch in client.batches.list(limit=100):
                    wait(client, batch.id)
        check(image / "state" / "weft", logged.promises, moment)
        for second, _, later in moments(log, again, AGAIN):
            target = tmp_path / f"{number}-{second}"
            later.write(target, random.Random(second))
            go_on(target, logged.promises, moment)


WORK = """
import os, sys
os.chdir(sys.argv[1])
folder = os.open(".", os.O_RDONLY)
def begin(name, data):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    os.write(fd, data)
    return fd
kept = begin("kept", b"abc")
os.fsync(kept)
os.fsync(folder)
os.fsync(begin("without a name", b"x"))
os.pwrite(kept, b"BC", 1)
os.ftruncate(kept, 2)
os.rename("kept", "moved")
os.mkdir("new")
begin("new/inner", b"y")
os.kill(os.getpid(), 9)
"""


def test_what_is_not_synchronised_may_be_lost(tmp_path):
    root, log = tmp_path / "disk", tmp_path / "log"
    root.mkdir()
    environment = {**os.environ, **variables(root, log)}
    done = subprocess.run([sys.executable, "-c", WORK, str(root)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    disk = Disk(root)
    for act in read_log(log):
        disk.do(act)
    disk.write(tmp_path / "sure", None)
    assert contents(tmp_path / "sure") == {"kept": b"abc"}
    seen = []
    for number in range(300):
        disk.write(tmp_path / f"{number}", random.Random(number))
        seen.append(contents(tmp_path / f"{number}"))
    assert contents(root) in seen
    kept = {found.get("kept", found.get("moved")) for found in seen}
    assert kept == {b"abc", b"aBC", b"ab", b"aB"}
    assert {"kept", "moved"} not in [found.keys() & {"kept", "moved"} for found in seen]
    assert {found.get("new/inner") for found in seen} == {None, b"", b"y"}


def contents(folder: Path) -> dict[str, bytes]:
    """Files below a folder by their paths."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
