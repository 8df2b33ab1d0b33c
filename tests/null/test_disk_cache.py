"""Blocks of prefixes on disk: whole or missing, within the limit, and never another's."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.core.errors import ConfigError, InvariantError
from weft.core.types import Request, SamplingParams
from weft.kv import disk_cache
from weft.kv.block_files import PARTIAL_S, BlockFiles, Key
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.disk_cache import DiskCache, Fetch
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits

ME, OTHER = b"m" * 16, b"o" * 16
SIZE = 1000
FILE = 4096  # with its head, on a disk
WAIT_S = 20.0


def key(number: int, group: int = 0) -> Key:
    return group, number.to_bytes(16)


def content(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(SIZE))


def make_files(folder: Path, limit: int = 10**9, identity: bytes = ME) -> BlockFiles:
    files = BlockFiles(folder, limit, identity)
    files.scan()
    return files


def paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_was_written_is_read_by_a_later_process(tmp_path):
    files = make_files(tmp_path)
    for number in range(5):
        files.write(key(number, number % 2), content(number))
    later = make_files(tmp_path)
    assert len(later) == 5
    assert later.nbytes == files.nbytes == 5 * FILE
    for number in range(5):
        assert key(number, number % 2) in later
        assert later.read(key(number, number % 2), SIZE) == content(number)
        assert later.read(key(number, 1 - number % 2), SIZE) is None, "of another group"
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths(tmp_path))
    assert (tmp_path / ME.hex()).stat().st_mode & 0o077 == 0


@searching(300)
@given(st.data())
def test_no_damaged_file_is_read(tmp_path_factory, data):
    """Cut, lengthened or with any byte changed: missing, and gone."""
    folder = tmp_path_factory.mktemp("damaged")
    files = make_files(folder)
    files.write(key(1), content(1))
    [path] = paths(folder)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(("cut", "longer", "changed")))
    if kind == "cut":
        path.write_bytes(whole[:at])
    elif kind == "longer":
        path.write_bytes(whole + bytes(at + 1))
    else:
        changed = bytearray(whole)
        changed[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(changed)
    assert files.read(key(1), SIZE) is None
    assert key(1) not in files
    assert not paths(folder)
    assert files.nbytes == 0


def test_a_file_under_the_name_of_another_is_missing(tmp_path):
    files, foreign = make_files(tmp_path), make_files(tmp_path, identity=OTHER)
    files.write(key(1), content(1))
    [mine] = paths(tmp_path)
    for identity, group, number in ((OTHER, 0, 1), (ME, 1, 1), (ME, 0, 2)):
        owner = foreign if identity == OTHER else files
        owner.write(key(number, group), content(1))
        [theirs] = [path for path in paths(tmp_path) if path != mine]
        theirs.replace(mine)
        assert files.read(key(1), SIZE) is None
        files.write(key(1), content(1))
    assert files.read(key(1), SIZE) == content(1)
    assert files.read(key(1), SIZE - 1) is None, "another size of blocks"


def test_the_folder_stays_within_its_limit_and_keeps_what_was_used_last(tmp_path):
    files = make_files(tmp_path, limit=4 * FILE)
    for number in range(4):
        files.write(key(number), content(number))
        os.utime(paths(tmp_path)[-1], (number, number))
    assert files.read(key(0), SIZE) is not None
    for number in (4, 5):
        files.write(key(number), content(number))
    assert [number for number in range(6) if key(number) in files] == [0, 3, 4, 5]
    assert len(paths(tmp_path)) == 4
    assert files.nbytes <= 4 * FILE
    files.write(key(9), memoryview(bytes(4 * FILE)))
    assert key(9) not in files, "larger than all room"
    assert len(make_files(tmp_path, limit=2 * FILE)) == 2
    assert len(paths(tmp_path)) == 2


def test_other_models_count_and_make_way(tmp_path):
    other = make_files(tmp_path, limit=3 * FILE, identity=OTHER)
    other.write(key(1), content(1))
    files = make_files(tmp_path, limit=3 * FILE)
    assert (len(files), files.nbytes) == (0, other.nbytes)
    for number in range(3):
        files.write(key(number), content(number))
    assert len(files) == 3
    assert other.read(key(1), SIZE) is None


def test_leftovers_are_removed_when_nobody_writes_them_any_more(tmp_path):
    files = make_files(tmp_path)
    files.write(key(1), content(1))
    path = paths(tmp_path)[0]
    old, new = path.with_suffix(".1.partial"), path.with_suffix(".2.partial")
    for path in (old, new):
        path.write_bytes(b"x")
    past = time.time() - PARTIAL_S - 10
    os.utime(old, (past, past))
    files.scan()
    assert [path.exists() for path in (old, new)] == [False, True]
    assert len(files) == 1


def test_two_writers_of_one_process_number_do_not_meet(tmp_path, monkeypatch):
    """In containers that share a folder, engines often have the same number."""
    mine, theirs, replace = make_files(tmp_path), make_files(tmp_path), Path.replace

    def while_they_write(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        theirs.write(key(1), content(1))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", while_they_write)
    mine.write(key(1), content(1))
    assert mine.read(key(1), SIZE) == theirs.read(key(1), SIZE) == content(1)
    assert len(paths(tmp_path)) == 1


def test_two_engines_of_one_process_number_start_at_the_same_moment(tmp_path, monkeypatch):
    touch, others = Path.touch, []

    def while_they_start(path: Path, **given: Any) -> None:
        touch(path, **given)
        if not others:
            others.append(path)
            make_files(tmp_path)

    monkeypatch.setattr(Path, "touch", while_they_start)
    make_files(tmp_path)
    assert others
    assert paths(tmp_path) == []


def test_files_of_others_are_never_touched(tmp_path):
    """Whatever lies in the folder: no name of another form is counted, or removed."""
    past = time.time() - PARTIAL_S - 10
    block = f"{16 * 'ab'}-0"
    theirs = [
        tmp_path / "project" / "ui" / "main.kv",
        tmp_path / "project" / "ui" / "thesis.partial",
        tmp_path / OTHER.hex() / "ui" / f"{block}.kv",
        tmp_path / OTHER.hex() / "ab" / "notes.kv",
        tmp_path / OTHER.hex() / "ab" / f"{block}.partial",
        tmp_path / OTHER.hex() / "ab" / f"{block}.kv.backup",
        tmp_path / "project" / "ab" / f"{block}.kv",
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(FILE))
        os.utime(path, (past, past))
    files = make_files(tmp_path, limit=FILE)
    assert files.nbytes == 0
    for number in range(3):
        files.write(key(number), content(number))
    assert make_files(tmp_path, limit=FILE).nbytes == FILE
    assert all(path.exists() for path in theirs)


def test_what_is_no_regular_file_is_missing(tmp_path):
    """A pipe would be read for ever, a link leads anywhere."""
    files = make_files(tmp_path)
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to("/dev/zero"))):
        files.write(key(number), content(number))
        [path] = [p for p in paths(tmp_path) if p.name.startswith(key(number)[1].hex())]
        path.unlink()
        make(path)
        assert files.read(key(number), SIZE) is None


def test_a_file_whose_time_cannot_be_changed_is_read(tmp_path, monkeypatch):
    files = make_files(tmp_path)
    files.write(key(1), content(1))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert files.read(key(1), SIZE) == content(1)
    assert key(1) in files


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    files = make_files(tmp_path / "disk")
    files.write(key(1), content(1))
    shutil.rmtree(tmp_path / "disk")
    assert files.read(key(1), SIZE) is None
    files.write(key(2), content(2))
    assert files.read(key(2), SIZE) == content(2)
    shutil.rmtree(tmp_path / "disk")
    files.scan()
    assert files.nbytes == 0


def test_nothing_is_removed_for_a_block_that_cannot_be_written(tmp_path):
    files = make_files(tmp_path, limit=FILE)
    files.write(key(1), content(1))
    folder = paths(tmp_path)[0].parents[1]
    (folder / key(1 << 120)[1].hex()[:2]).touch()  # where a folder is to be
    with pytest.raises(OSError, match="File exists"):
        files.write(key(1 << 120), content(2))
    assert files.read(key(1), SIZE) == content(1)


def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"kv_disk .* cannot be written: Not a directory") as info:
        BlockFiles(tmp_path / "file", 10**9, ME)
    assert info.value.param == "kv_disk"


# -- threads --------------------------------------------------------------------------------------


class Site:
    """A running cache over a folder, and when something arrives in it."""

    def __init__(self, folder: Path, **more: int) -> None:
        self.arrived = threading.Event()
        self.cache = DiskCache(BlockFiles(folder, 10**9, ME), [SIZE], **more)
        self.cache.start(self.arrived.set)
        self.until(lambda: not self.cache.starting)

    def until(self, holds) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end
            time.sleep(0.001)

    def save(self, *numbers: int) -> None:
        for number in numbers:
            assert self.cache.reserve(key(number))
            self.cache.save(key(number), content(number))

    def fetch(self, *numbers: int) -> Fetch:
        fetch = self.cache.fetch([key(number) for number in numbers])
        self.until(lambda: fetch.done)
        return fetch


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    site.cache.close(WAIT_S)


def test_a_block_is_saved_once_and_comes_back(site, tmp_path):
    site.save(1, 2, 3)
    assert not site.cache.reserve(key(1)), "it is there, or will be"
    site.until(lambda: site.cache.totals.saved == 3)
    site.arrived.clear()
    fetch = site.fetch(1, 2)
    assert site.arrived.wait(WAIT_S)
    assert [site.cache.staged(key(number)) for number in (1, 2, 3)] == [True, True, False]
    assert site.cache.claim([key(1), key(2)])
    site.cache.release(fetch)
    assert site.cache.take(key(1)) == content(1)
    assert site.cache.take(key(2)) == content(2)
    assert not site.cache.staged(key(1)), "it lies in a block of the KV now"
    with pytest.raises(InvariantError, match="not claimed"):
        site.cache.take(key(1))
    site.cache.close(WAIT_S)
    again = Site(tmp_path)
    assert all(again.cache.has(key(number)) for number in (1, 2, 3))
    assert not again.cache.has(key(4))
    again.cache.close(WAIT_S)


def test_two_sequences_may_claim_one_block(site):
    site.save(1)
    fetch = site.fetch(1)
    assert site.cache.claim([key(1)])
    assert site.cache.claim([key(1)])
    site.cache.release(fetch)
    assert site.cache.take(key(1)) == site.cache.take(key(1)) == content(1)
    assert not site.cache.claim([key(1)])


def test_what_is_released_takes_no_memory_but_what_is_claimed_stays(site):
    site.save(1, 2)
    fetch = site.fetch(1, 2)
    assert site.cache.claim([key(2)])
    site.cache.release(fetch)
    assert not site.cache.staged(key(1))
    assert site.cache.take(key(2)) == content(2)
    assert site.cache.room == disk_cache.STAGED_BYTES
    late = site.cache.fetch([key(1)])
    site.cache.release(late)
    site.until(lambda: late.done)
    assert not site.cache.staged(key(1)), "nobody waits for it"


def test_what_two_fetches_ask_for_stays_until_both_are_released(site):
    site.save(1, 2)
    first, second = site.fetch(1, 2), site.fetch(2)
    assert site.cache.room == disk_cache.STAGED_BYTES - 2 * SIZE
    site.cache.release(first)
    assert [site.cache.staged(key(number)) for number in (1, 2)] == [False, True]
    site.cache.release(second)
    assert not site.cache.staged(key(2))
    assert site.cache.room == disk_cache.STAGED_BYTES


def test_memory_is_counted_when_blocks_are_asked_for(tmp_path):
    """Before any of them is read: many sequences may ask within one step."""
    files = make_files(tmp_path)
    cache = DiskCache(files, [SIZE], staged_bytes=10 * SIZE)  # whose threads do not run
    fetches = [cache.fetch([key(number), key(number + 1)]) for number in range(0, 8, 2)]
    assert cache.room == 2 * SIZE
    assert cache.read_s(2 * SIZE) == pytest.approx(10 * SIZE / cache.bytes_s)
    cache.fetch([key(0)])
    assert cache.room == 2 * SIZE
    for fetch in fetches:
        cache.release(fetch)
    assert cache.room == 9 * SIZE


def test_a_fetch_that_hangs_is_waited_for_no_longer(site, monkeypatch):
    """A disk that answers no more, as one of a network."""
    site.save(1)
    site.until(lambda: site.cache.totals.saved == 1)
    answers = threading.Event()
    read = site.cache.files.read

    def hang(*given: object) -> object:
        assert answers.wait(WAIT_S)
        return read(*given)

    monkeypatch.setattr(site.cache.files, "read", hang)
    monkeypatch.setattr(disk_cache, "LATE_S", 0.05)
    fetch = site.cache.fetch([key(1)])
    site.until(lambda: not fetch.pending)
    assert not fetch.done
    site.cache.release(fetch)
    answers.set()
    site.until(lambda: fetch.done)
    assert not site.cache.staged(key(1))
    assert site.cache.room == disk_cache.STAGED_BYTES


def test_an_error_while_reading_ends_one_fetch_alone(site, monkeypatch, caplog):
    site.save(1)
    site.until(lambda: site.cache.totals.saved == 1)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(site.cache.files, "read", fail)
        site.fetch(1)
    assert not site.cache.staged(key(1))
    assert "Prefixes on disk could not be read." in caplog.text
    site.fetch(1)
    assert site.cache.staged(key(1))


def test_a_folder_that_cannot_be_listed_counts_as_empty(tmp_path, monkeypatch, caplog):
    def refuse(_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(BlockFiles, "scan", refuse)
    site = Site(tmp_path)
    assert "The prefixes on disk cannot be listed: Permission denied." in caplog.text
    site.save(1)
    site.fetch(1)
    assert site.cache.staged(key(1))
    site.cache.close(WAIT_S)


def test_a_folder_that_takes_long_to_list_is_waited_for_no_longer(tmp_path, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(BlockFiles, "scan", lambda _: goes_on.wait(WAIT_S))
    monkeypatch.setattr(disk_cache, "SCAN_S", 0.05)
    site = Site(tmp_path)
    assert not site.cache._scanned.is_set()
    assert not site.cache.reserve(key(1)), "it may be there"
    goes_on.set()
    site.until(site.cache._scanned.is_set)
    site.cache.close(WAIT_S)


def test_a_fetch_ends_at_the_first_block_that_is_not_whole(site, tmp_path):
    site.save(1, 2, 3)
    site.until(lambda: site.cache.totals.saved == 3)
    path = next(path for path in paths(tmp_path) if path.name.startswith(key(2)[1].hex()))
    path.write_bytes(path.read_bytes()[:-1])
    site.fetch(1, 2, 3)
    assert [site.cache.staged(key(number)) for number in (1, 2, 3)] == [True, False, False]
    assert site.cache.totals.missing == 1
    assert not site.cache.has(key(2))


def test_what_waits_to_be_written_is_bounded(tmp_path):
    site = Site(tmp_path, writing_bytes=3 * SIZE)
    for number in range(3):
        assert site.cache.reserve(key(number))
    assert site.cache.full
    assert not site.cache.reserve(key(3))
    assert site.cache.totals.lost == 1
    for number in range(3):
        site.cache.save(key(number), content(number))
    site.until(lambda: not site.cache.full)
    site.save(3)
    site.cache.close(WAIT_S)
    assert len(paths(tmp_path)) == 4


def test_a_full_disk_is_said_once_and_tried_again_later(tmp_path, monkeypatch, caplog):
    site = Site(tmp_path)
    site.save(1)
    site.until(lambda: site.cache.totals.saved == 1)

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(site.cache.files, "write", no_room)
        site.save(2, 3)
        site.until(lambda: site.cache.totals.lost >= 2 and not site.cache._reserved)
    [line] = [text for text in caplog.messages if "Prefixes" in text]
    assert "No space left on device" in line
    assert site.cache.paused
    assert not site.cache.reserve(key(4))
    site.fetch(1)
    assert site.cache.staged(key(1)), "what is there is used"
    monkeypatch.setattr(site.cache, "_paused_until", 0.0)
    site.save(2)
    site.cache.close(WAIT_S)
    assert len(paths(tmp_path)) == 2


def test_the_rate_of_the_disk_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "MEASURED_BYTES", 2 * SIZE)
    site = Site(tmp_path)
    site.save(1, 2, 3)
    site.until(lambda: site.cache.totals.saved == 3)
    site.fetch(1)
    assert site.cache.bytes_s == disk_cache.RATE_BYTES_S, "too little to tell"
    site.fetch(2, 3)
    measured = site.cache.bytes_s
    assert 0 < measured < disk_cache.RATE_BYTES_S
    site.cache._measured_at -= 10 * disk_cache.RATE_HALF_LIFE_S
    later = site.cache.bytes_s
    assert measured < later < disk_cache.RATE_BYTES_S, "it may have been busy"
    assert later > 0.99 * disk_cache.RATE_BYTES_S
    site.cache.close(WAIT_S)


def test_blocks_of_windows_never_exceed_the_memory_to_read_ahead(tmp_path):
    """They do not become fewer with the tokens that are read."""
    groups = (GroupSpec("full", 4, 64), GroupSpec("sliding", 4, 64, window=16))
    sizes, long = (100, 1000), tuple(range(90))
    files, hashes = make_files(tmp_path), KVCache(groups)
    hashes.register(1, b"")
    for group, size in enumerate(sizes):
        for block_hash in hashes.block_hashes(1, group, long, 20):
            files.write((group, block_hash), memoryview(bytes(size)))
    for staged_bytes in (0, 900, 1000, 4500, 6000, 10_000):
        disk = DiskCache(files, sizes, staged_bytes=staged_bytes)  # whose threads do not run
        scheduler = fcfs(KVCache(groups, disk=disk), Limits(4, 64, 200))
        scheduler.add(Request(1, long, SamplingParams(max_tokens=1)))
        first = scheduler.plan(0.0)
        assert (first is None) == (disk.room < staged_bytes), "it waits for what is read"
        assert disk.room >= 0
        scheduler.add(Request(2, tuple(range(50, 80)), SamplingParams(max_tokens=1)))
        second = scheduler.plan(0.0)
        assert second is not None
