"""Files and batches in their folder: limits, owners, pages, and what a kill at any point leaves."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.batch import database
from weft.batch.bell import bell_stamp
from weft.batch.database import reachable, work_within
from weft.batch.errors import (
    BatchNotFoundError,
    BatchNotOverError,
    BatchOverError,
    FileInUseError,
    FileNotThereError,
)
from weft.batch.folder import FileTooLargeError, StorageFullError, StoreLimits
from weft.batch.records import BatchRecord, FileRecord
from weft.batch.store import BatchStore
from weft.core.errors import ConfigError, ParameterError

ALICE, BOB = b"a" * 32, b"b" * 32
DAY_S = 86400
LIMITS = StoreLimits(file_bytes=1000, key_bytes=2500, reserve_bytes=0)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., BatchStore]]:
    stores: list[BatchStore] = []

    def opening(limits: StoreLimits = LIMITS) -> BatchStore:
        stores.append(BatchStore(tmp_path / "data", limits, clock))
        return stores[-1]

    yield opening
    for store in stores:
        store.close()


def keep(
    store: BatchStore, data: bytes = b"{}\n", owner: bytes = ALICE, **given: Any
) -> FileRecord:
    upload = store.begin_upload(owner)
    try:
        upload.write(data)
        chosen = {"purpose": "batch", "filename": "in.jsonl", "expires_after_s": None, **given}
        upload.keep()
        return store.add_file(upload, owner, **chosen)
    except BaseException:
        upload.abandon()
        raise


def create(store: BatchStore, file_id: str, owner: bytes = ALICE, **given: Any) -> BatchRecord:
    chosen = {"window": "24h", "window_s": DAY_S, "model": "m", "served": "s", **given}
    return store.create_batch(owner, "/v1/completions", file_id, **chosen)


def names(store: BatchStore) -> set[str]:
    return set(os.listdir(store.files_folder.path("")))


def test_a_file_is_its_owners_and_comes_back_as_it_was(opened, clock):
    store = opened()
    record = keep(store, b"x" * 10, expires_after_s=3600)
    assert record.to_object() == {
        "id": record.id,
        "object": "file",
        "bytes": 10,
        "created_at": 1_000_000,
        "expires_at": 1_003_600,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    again = opened()
    assert again.file(ALICE, record.id) == record
    assert again.files_folder.path(record.id).read_bytes() == b"x" * 10
    assert again.files_folder.path(record.id).stat().st_mode & 0o077 == 0
    for owner, file_id in ((BOB, record.id), (b"", record.id), (ALICE, "file-none")):
        with pytest.raises(FileNotThereError):
            again.file(owner, file_id)
        with pytest.raises(FileNotThereError):
            again.delete_file(owner, file_id)
    clock.now += 3600
    with pytest.raises(FileNotThereError):
        again.file(ALICE, record.id)
    assert not again.list_files(ALICE).records
    again.sweep()
    assert not names(again)


def test_pages_follow_one_another(opened):
    store = opened(StoreLimits(reserve_bytes=0))
    ids = [keep(store, purpose=("batch", "vision")[i % 2]).id for i in range(7)]
    keep(store, owner=BOB)
    page = store.list_files(ALICE, limit=3)
    assert ([r.id for r in page.records], page.has_more) == (ids[:3:-1], True)
    page = store.list_files(ALICE, limit=4, after=ids[4])
    assert ([r.id for r in page.records], page.has_more) == (ids[3::-1], False)
    page = store.list_files(ALICE, order="asc", purpose="vision", limit=2, after=ids[1])
    assert ([r.id for r in page.records], page.has_more) == ([ids[3], ids[5]], False)
    assert page.to_object()["first_id"] == ids[3]
    with pytest.raises(ParameterError):
        store.list_files(BOB, after=ids[0])
    batches = [create(store, ids[0]).id for _ in range(3)]
    page = store.list_batches(ALICE, limit=2)
    assert ([r.id for r in page.records], page.has_more) == (batches[:0:-1], True)
    page = store.list_batches(ALICE, after=batches[1])
    assert ([r.id for r in page.records], page.has_more) == (batches[:1], False)
    assert not store.list_batches(BOB).records


def test_limits_hold(opened):
    store = opened()
    with pytest.raises(FileTooLargeError):
        keep(store, b"x" * 1001)
    assert not names(store)
    first = keep(store, b"x" * 1000)
    keep(store, b"x" * 1000)
    with pytest.raises(StorageFullError):
        keep(store, b"x" * 501)
    keep(store, b"x" * 500)
    with pytest.raises(StorageFullError):
        store.begin_upload(ALICE)
    keep(store, b"x", owner=BOB)
    store.delete_file(ALICE, first.id)
    keep(store, b"x" * 1000)
    full = opened(StoreLimits(reserve_bytes=2**62))
    with pytest.raises(StorageFullError) as error:
        full.begin_upload(ALICE)
    assert error.value.http_status == 507
    assert len(names(store)) == 4


def test_a_file_in_use_stays(opened, clock):
    store = opened()
    record = keep(store, expires_after_s=3600)
    with pytest.raises(FileNotThereError):
        create(store, record.id, owner=BOB)
    with pytest.raises(ParameterError):
        create(store, keep(store, purpose="vision").id)
    batch = create(store, record.id)
    with pytest.raises(FileInUseError):
        store.delete_file(ALICE, record.id)
    clock.now += 4000
    store.sweep()
    assert store.file(ALICE, record.id).id in names(store)
    store.finish(batch, "completed")
    with pytest.raises(FileNotThereError):
        store.file(ALICE, record.id)
    store.sweep()
    assert record.id not in names(store)


def test_a_batch_ends_once_with_its_files(opened, tmp_path):
    store = opened()
    batch = create(store, keep(store).id, metadata={"a": "b"}, output_expires_s=7200)
    assert work_within(tmp_path / "data", "s") == 0
    with pytest.raises(BatchNotFoundError):
        store.batch(BOB, batch.id)
    store.files_folder.path(batch.output_name).write_bytes(b"{}\n")
    store.files_folder.path(batch.errors_name).write_bytes(b"")
    store.sweep()  # an unfinished batch writes them
    assert {batch.output_name, batch.errors_name} <= names(store)
    store.update(batch.id, before=["validating"], status="in_progress", total=3)
    assert not store.update(batch.id, before=["validating"], status="in_progress")
    store.finish(store.reload(batch.id), "completed", completed=3)
    shown = store.batch(ALICE, batch.id).to_object()
    assert (shown["status"], shown["completed_at"]) == ("completed", 1_000_000)
    assert shown["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert (shown["output_file_id"], shown["error_file_id"]) == (batch.output_name, None)
    assert shown["metadata"] == {"a": "b"}
    output = store.file(ALICE, batch.output_name)
    assert (output.purpose, output.expires_at) == ("batch_output", 1_007_200)
    assert batch.errors_name not in names(store)
    with pytest.raises(BatchOverError):
        store.cancel_batch(ALICE, batch.id)
    assert work_within(tmp_path / "data", "s") is None


def test_cancelling_is_a_flag_that_others_see(opened, tmp_path):
    store, other = opened(), opened()
    batch = create(store, keep(store).id)
    assert other.changed()
    assert not other.changed()
    stamp = bell_stamp(tmp_path / "data")
    with pytest.raises(BatchNotFoundError):
        store.cancel_batch(BOB, batch.id)
    assert store.cancel_batch(ALICE, batch.id).status == "cancelling"
    assert other.changed()
    assert bell_stamp(tmp_path / "data") != stamp
    assert other.unfinished()[0].status == "cancelling"
    other.finish(other.reload(batch.id), "cancelled")
    assert store.cancel_batch(ALICE, batch.id).status == "cancelled"


def messages(store: BatchStore, owner: bytes = ALICE, **given: Any) -> BatchRecord:
    upload = store.begin_upload(owner)
    upload.write(b"x" * 10)
    upload.keep()
    chosen = {"window": "24h", "window_s": DAY_S, "keep_s": 3600, "model": "m", "served": "s"}
    return store.create_message_batch(upload, owner, lines=1, **{**chosen, **given})


def test_a_message_batch_brings_its_requests_and_takes_them_along(opened, clock):
    store = opened()
    batch = messages(store)
    assert batch.total == 1
    assert store.used_bytes(ALICE) == 10
    assert not store.list_files(ALICE).records
    with pytest.raises(FileNotThereError):
        store.file(ALICE, batch.input_file_id)
    with pytest.raises(FileNotThereError):
        create(store, batch.input_file_id)
    with pytest.raises(BatchNotOverError):
        store.delete_batch(ALICE, batch.id)
    store.sweep()
    assert names(store) == {batch.input_file_id}
    store.files_folder.path(batch.output_name).write_bytes(b"{}\n")
    store.finish(store.reload(batch.id), "completed", completed=1)
    assert (names(store), store.used_bytes(ALICE)) == ({batch.output_name}, 0)
    assert not store.list_files(ALICE).records
    with pytest.raises(BatchNotFoundError):
        store.delete_batch(BOB, batch.id)
    store.delete_batch(ALICE, batch.id)
    assert not names(store)
    other = messages(store)
    store.files_folder.path(other.output_name).write_bytes(b"{}\n")
    store.finish(store.reload(other.id), "completed", completed=1)
    clock.now += 3600
    store.sweep()
    assert not names(store)
    full = opened(StoreLimits(file_bytes=1000, key_bytes=9, reserve_bytes=0))
    with pytest.raises(StorageFullError):
        messages(full)


def test_pages_of_message_batches_lead_both_ways(opened):
    store = opened(StoreLimits(reserve_bytes=0))
    ids = [messages(store).id for _ in range(6)]
    plain = create(store, keep(store).id).id
    messages(store, owner=BOB)

    def page(**given: Any) -> tuple[list[str], bool]:
        found = store.list_batches(ALICE, prefix="msgbatch_", **given)
        return [r.id for r in found.records], found.has_more

    assert page(limit=2) == (ids[:3:-1], True)
    assert page(limit=9) == (ids[::-1], False)
    assert page(limit=2, after=ids[4]) == ([ids[3], ids[2]], True)
    assert page(limit=2, before=ids[1]) == ([ids[3], ids[2]], True)
    assert page(limit=4, before=ids[1]) == (ids[:1:-1], False)
    assert [r.id for r in store.list_batches(ALICE).records] == [plain]


def test_a_data_base_of_the_first_version_is_brought_to_this_one(tmp_path):
    old = sqlite3.connect(tmp_path / "weft.db")
    for statement in database._STEPS[0]:
        old.execute(statement)
    old.execute("PRAGMA user_version = 1")
    old.execute(
        "INSERT INTO batches (id, owner, status, created_at, expires_at, endpoint, model, served, "
        "input_file_id, window, metadata, errors, total) VALUES "
        "('batch_1', x'61', 'validating', 1, 2, '/v1/completions', 'm', 's', 'f', '24h', 'null', "
        "'null', 3)"
    )
    old.commit()
    old.close()
    store = BatchStore(tmp_path, LIMITS)
    assert (store.batch(b"a", "batch_1").total, store.batch(b"a", "batch_1").given_up) == (3, 0)
    store.close()
    newer = sqlite3.connect(tmp_path / "weft.db")
    assert newer.execute("PRAGMA user_version").fetchone()[0] == database.VERSION
    newer.execute(f"PRAGMA user_version = {database.VERSION + 1}")
    newer.close()
    with pytest.raises(ConfigError):
        BatchStore(tmp_path, LIMITS)


KILLED = """
import os, signal, sys
from pathlib import Path
from weft.batch import points
from weft.batch.folder import StoreLimits
from weft.batch.store import BatchStore
store = BatchStore(Path(sys.argv[1]), StoreLimits(reserve_bytes=0))
def reached(point):
    if point == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
def upload():
    upload = store.begin_upload(b"k")
    upload.write(b"{}\\n")
    upload.keep()
    return store.add_file(upload, b"k", "batch", "x", None)
first = upload()
points.reached = reached
if sys.argv[2] == "file forgotten":
    store.delete_file(b"k", first.id)
elif sys.argv[2] == "batch forgotten":
    given = store.begin_upload(b"k")
    given.keep()
    batch = store.create_message_batch(
        given, b"k", lines=1, window="1h", window_s=1, keep_s=60, model="m", served="s")
    store.files_folder.path(batch.output_name).write_bytes(b"{}\\n")
    store.finish(batch, "completed")
    store.delete_batch(b"k", batch.id)
elif sys.argv[2].startswith("batch"):
    batch = store.create_batch(
        b"k", "/v1/completions", first.id, window="1h", window_s=1, model="m", served="s")
    store.files_folder.path(batch.output_name).write_bytes(b"{}\\n")
    store.finish(batch, "completed")
else:
    upload()
"""


@pytest.mark.parametrize(
    ("point", "files", "batches"),
    [
        ("upload written", 1, 0),
        ("upload renamed", 1, 0),
        ("upload committed", 2, 0),
        ("file forgotten", 0, 0),
        ("batch created", 1, 1),
        ("batch finished", 2, 1),
        ("batch forgotten", 1, 0),
    ],
)
def test_a_kill_at_any_commit_point_leaves_all_or_nothing(tmp_path, point, files, batches):
    command = [sys.executable, "-c", KILLED, str(tmp_path), point]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    store = BatchStore(tmp_path, StoreLimits(reserve_bytes=0))
    records = store.list_files(b"k").records
    assert len(records) == files
    assert len(store.list_batches(b"k").records) == batches
    assert names(store) == {record.id for record in records}, "orphans are swept at the start"
    store.close()


def test_uploads_in_progress_are_no_orphans(opened):
    store, other = opened(), opened()
    upload = store.begin_upload(ALICE)
    upload.write(b"{}\n")
    other.sweep()
    assert len(names(store)) == 1
    upload.keep()
    other.sweep()
    assert names(store) == {upload.id}
    upload.close()
    other.sweep()
    assert not names(store)


def test_what_is_none_of_ours_is_refused(tmp_path):
    (tmp_path / "weft.db").write_bytes(b"something else" * 100)
    with pytest.raises(ConfigError):
        BatchStore(tmp_path, LIMITS)
    with pytest.raises(ConfigError):
        BatchStore(Path("/proc/nowhere"), LIMITS)


def test_a_full_disk_is_told_as_such(tmp_path):
    base = sqlite3.connect(tmp_path / "small.db")
    base.execute("PRAGMA max_page_count = 2")
    with pytest.raises(StorageFullError), reachable():
        base.executescript("".join(f"CREATE TABLE t{number} (x);" for number in range(2000)))
    base.close()
