"""Files of packed weights: what comes back, what is refused, who writes and what has to go."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed import cache as cache  # fixtures
from packed import file_of, find, key_of, rewrite, same, some_weights
from packed import model as model

from live import eventually
from weft.core.cache_folder import cache_folder
from weft.models.packed_cache import PackedCache, PackedKey, clear, identity_of, kept_files

MIB = 2**20


def test_weights_come_back_byte_for_byte(cache, model):
    weights, key = some_weights(), key_of(model)
    assert find(cache, key) is None
    assert cache.keep(key, weights)
    assert same(find(cache, key), weights)
    assert same(find(cache, key, verify=True), weights)
    path = file_of(cache, key)
    assert path.name.startswith("my-model-bfloat16-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in cache.folder.iterdir()] == [path.name]
    found = find(cache, key)
    assert not found["norm"].flags.writeable
    path.unlink()
    assert same(found, weights)  # what is mapped stays


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PackedCache(1).folder == cache_folder() / "packed" == tmp_path / "weft" / "packed"


@pytest.mark.parametrize("setting", ["dtype", "layout", "quantize", "shard"])
def test_other_settings_are_another_file(cache, model, setting):
    cache.keep(key_of(model), some_weights())
    assert find(cache, key_of(model, **{setting: "another"})) is None


def replace(file: Path) -> None:
    before = file.stat()
    copy = file.with_name("copy")
    copy.write_bytes(bytes(999) + b"1")
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(file)


@pytest.mark.parametrize(
    "change",
    [
        rewrite,
        replace,
        lambda file: os.truncate(file, 999),
        lambda file: file.rename(file.with_name("other.safetensors")),
        lambda file: file.with_name("config.json").write_text('{"a": 1}'),
    ],
)
def test_a_changed_checkpoint_is_another_one(cache, model, change):
    cache.keep(key_of(model), some_weights())
    change(model / "model.safetensors")
    (file,) = model.glob("*.safetensors")
    identity = identity_of([file], [model / "config.json"])
    assert find(cache, PackedKey(model, identity, {"dtype": "bfloat16"})) is None


def test_a_change_right_after_a_look_is_seen(model):
    """Also within the granularity of the file system's clock."""
    file = model / "model.safetensors"
    for _ in range(20):
        file.write_bytes(bytes(1000))
        before = identity_of([file], [])
        rewrite(file)
        assert identity_of([file], []) != before


def damaged_header(data: bytearray) -> None:
    data[200] ^= 1


def forged(change: object) -> object:
    """A change of the header whose digest is right again."""

    def apply(data: bytearray) -> None:
        magic, version, size, _ = struct.unpack_from("<8sIQ32s", data)
        start = struct.calcsize("<8sIQ32s")
        header = json.loads(data[start : start + size])
        change(header)
        text = json.dumps(header).encode()
        assert len(text) <= 4096 - start
        digest = blake2b(text, digest_size=32).digest()
        beginning = struct.pack("<8sIQ32s", magic, version, len(text), digest) + text
        data[: len(beginning)] = beginning

    return apply


def section(header: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in header["sections"] if entry["name"] == name)


def sections(**changes: object) -> object:
    return forged(lambda header: section(header, "layers.0.qkv").update(changes))


DAMAGE = {
    "empty": (lambda data: data.clear(), "was not finished"),
    "foreign": (lambda data: data.__setitem__(slice(0, 8), b"PK345678"), "not a file of packed"),
    "newer": (lambda data: data.__setitem__(8, 9), "its version is 9"),
    "torn": (lambda data: data.__delitem__(slice(3000, None)), "bytes, not"),
    "torn header": (lambda data: data.__delitem__(slice(100, None)), "its header has"),
    "longer": (lambda data: data.extend(bytes(4096)), "bytes, not"),
    "endless header": (
        lambda data: struct.pack_into("<Q", data, 12, 2**63),
        "more than any model's",
    ),
    "damaged header": (damaged_header, "its header is damaged"),
    "no object": (forged(lambda header: header.pop("sections")), "cannot be read"),
    "other key": (
        forged(lambda header: header["about"]["settings"].update(dtype="float32")),
        "it is of other weights",
    ),
    "offset": (sections(offset=4096), "out of place"),
    "negative": (sections(nbytes=-1), "cannot be read"),
    "fraction": (sections(part=0.5), "cannot be read"),
    "unknown form": (sections(form={"shape": [1, 1], "code": "rm"}), "cannot be read"),
    "other shape": (
        forged(lambda header: section(header, "layers.0.qkv")["form"].update(shape=[130, 99])),
        "bytes, not",
    ),
    "other format": (
        forged(lambda header: section(header, "layers.0.qkv")["form"].update(format="int5")),
        "layers.0.qkv",
    ),
    "huge shape": (
        forged(lambda header: section(header, "embed").update(shape=[2**61, 2**61])),
        "'embed'",
    ),
    "object dtype": (
        forged(lambda header: section(header, "embed").update(dtype="object")),
        "'embed'",
    ),
    "repeated": (sections(name="embed"), "twice"),
    "parts": (sections(part=1), "in parts"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_that_the_log_explains(cache, model, damage, caplog):
    key, (change, words) = key_of(model), DAMAGE[damage]
    cache.keep(key, some_weights())
    data = bytearray(file_of(cache, key).read_bytes())
    change(data)
    file_of(cache, key).write_bytes(data)
    assert find(cache, key) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert words in record.getMessage()
    caplog.clear()
    assert cache.keep(key, some_weights())
    assert same(find(cache, key), some_weights())
    assert not caplog.records


def test_changed_numbers_are_found_when_asked_for(cache, model, caplog):
    key = key_of(model)
    cache.keep(key, some_weights())
    path = file_of(cache, key)
    with path.open("r+b") as file:
        file.seek(MIB)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert find(cache, key) is not None
    assert find(cache, key, verify=True) is None
    assert "have changed" in caplog.text


def test_a_file_that_cannot_be_mapped_is_a_miss_and_stays(cache, model, caplog, monkeypatch):
    """Some file systems have no shared maps, and some disks fail."""
    key = key_of(model)
    cache.keep(key, some_weights())

    def mmap(*_: object) -> object:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    with monkeypatch.context() as patch:
        patch.setattr("weft.models.packed_file.mmap.mmap", mmap)
        assert find(cache, key) is None
    assert "it cannot be read (No such device). The weights are packed again." in caplog.text
    assert find(cache, key) is not None


@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_what_others_may_write_is_not_trusted(cache, model, mode, caplog):
    key = key_of(model)
    cache.keep(key, some_weights())
    file_of(cache, key).chmod(mode)
    assert find(cache, key) is None
    assert "other users may write to it" in caplog.text


def test_whoever_writes_has_the_file_alone(cache, model):
    key, weights = key_of(model), some_weights()
    writing, go_on = threading.Event(), threading.Event()

    def between() -> None:
        writing.set()
        assert go_on.wait(60)

    kept: list[bool] = []
    writer = threading.Thread(target=lambda: kept.append(cache.keep(key, weights, between)))
    writer.start()
    assert writing.wait(60)
    assert not cache.keep(key, weights)
    assert find(cache, key) is None  # the file has its name when it is whole
    assert cache.keep(key_of(model, quantize="int4"), weights)  # leaves the other's file alone
    cache.wait(key, 0.0)
    waiting = threading.Thread(target=lambda: cache.wait(key, 60))
    waiting.start()
    go_on.set()
    waiting.join(60)
    writer.join(60)
    assert kept == [True]
    assert same(find(cache, key), weights)
    assert not cache.keep(key, weights)  # it is there


def test_giving_up_leaves_nothing(cache, model):
    class GivenUpError(Exception):
        pass

    def between() -> None:
        raise GivenUpError

    with pytest.raises(GivenUpError):
        cache.keep(key_of(model), some_weights(), between)
    assert not list(cache.folder.iterdir())


WRITER = """
import os, signal, sys
from pathlib import Path
from typing import Any
sys.path.insert(0, sys.argv[2])
from packed import PackedCache, key_of, some_weights
cache = PackedCache(64 << 20, Path(sys.argv[3]))
cache.keep(key_of(Path(sys.argv[1])), some_weights(), lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_writer_that_is_killed_leaves_what_the_next_one_replaces(cache, model):
    key, here = key_of(model), str(Path(__file__).parent)
    command = [sys.executable, "-c", WRITER, str(model), here, str(cache.folder)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (partial,) = cache.folder.iterdir()
    assert partial.name.endswith(".partial")
    assert find(cache, key) is None
    assert kept_files(cache.folder) == []
    cache.wait(key, 60)  # nobody writes
    assert cache.keep(key_of(model, quantize="int8"), some_weights())
    assert not partial.exists()
    assert cache.keep(key, some_weights())
    assert same(find(cache, key), some_weights())


def locks(path: Path) -> bool:
    """Whether nobody else has locked a file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(cache, model, monkeypatch):
    opened, lock = [], fcntl.flock

    def late(file: int, how: int) -> None:
        if not opened:
            opened.append(file)
            clear(cache.folder)
            assert not list(cache.folder.iterdir())
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert cache.keep(key_of(model), some_weights())
    assert opened
    assert same(find(cache, key_of(model)), some_weights())
    assert not list(cache.folder.glob("*.partial"))


@pytest.mark.parametrize("remover", ["clear", "make room"])
def test_what_nobody_finishes_is_removed_under_its_lock(cache, model, monkeypatch, remover):
    cache.folder.mkdir(parents=True)
    left = cache.folder / "left.packed.partial"
    left.write_bytes(b"")
    unlink, locked = Path.unlink, []

    def watched(path: Path, missing_ok: bool = False) -> None:
        if path == left:
            locked.append(not locks(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    if remover == "clear":
        clear(cache.folder)
    else:
        assert cache.keep(key_of(model), some_weights())
    assert not left.exists()
    assert locked == [True]


def test_the_file_of_a_newer_writer_gets_no_name_before_it_is_whole(cache, model):
    """Somebody has removed the first one's, and another process has begun again."""

    def between() -> None:
        for path in cache.folder.glob("*.partial"):
            path.unlink()
            path.write_bytes(b"begun")

    with pytest.raises(FileNotFoundError):
        cache.keep(key_of(model), some_weights(), between)
    (newer,) = cache.folder.iterdir()
    assert newer.name.endswith(".partial")
    assert newer.read_bytes() == b"begun"


def used_at(cache: PackedCache, key: PackedKey, seconds: float) -> None:
    os.utime(file_of(cache, key), (seconds, seconds))


def test_what_was_used_longest_ago_makes_room(cache, model):
    keys = [key_of(model, quantize=str(number)) for number in range(3)]
    cache.keep(keys[0], some_weights())
    small = PackedCache(2 * file_of(cache, keys[0]).stat().st_size, cache.folder)
    cache.keep(keys[1], some_weights())
    used_at(cache, keys[0], 1000)
    used_at(cache, keys[1], 2000)
    assert find(small, keys[0]) is not None  # now the other is the older one
    assert small.keep(keys[2], some_weights())
    found = {file.path.name for file in kept_files(cache.folder)}
    assert found == {keys[0].file_name, keys[2].file_name}


def test_more_than_the_limit_is_not_kept(cache, model, caplog):
    cache.keep(key_of(model), some_weights())
    small = PackedCache(MIB, cache.folder)
    assert not small.keep(key_of(model, quantize="int8"), some_weights())
    assert "packed_cache allows 1.00 MiB" in caplog.text
    assert len(kept_files(cache.folder)) == 1


def test_a_file_that_cannot_grow_is_an_error_and_leaves_nothing(cache, model):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(OSError, match="large") as raised:
            cache.keep(key_of(model), some_weights())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert not list(cache.folder.iterdir())


def test_files_are_listed_and_cleared(cache, model, tmp_path):
    other = tmp_path / "other"
    model.rename(other)
    other_key = key_of(other)
    cache.keep(other_key, some_weights())
    key = PackedKey(model, other_key.checkpoint, {"dtype": "float32"})
    cache.keep(key, some_weights())
    (cache.folder / "torn.packed").write_bytes(b"weftpack")
    (cache.folder / "left.packed.partial").write_bytes(b"")
    found = {file.source: file for file in kept_files(cache.folder)}
    assert found.keys() == {str(model), str(other), None}
    assert found[str(model)].settings == {"dtype": "float32"}
    assert [file.source for file in clear(cache.folder, str(other))] == [str(other)]
    assert find(cache, key) is not None
    assert len(clear(cache.folder)) == 2
    assert not list(cache.folder.iterdir())
    assert clear(tmp_path / "nowhere") == []


def test_a_file_is_read_ahead_as_a_whole(cache, model):
    """One call for all of it would read no more than the system reads ahead at once."""
    numbers = np.arange(6 << 20, dtype=np.float32).reshape(1 << 11, -1)
    key, weights = key_of(model), {"embed": numbers}
    assert cache.keep(key, weights)
    file = file_of(cache, key)
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(file) * mmap.PAGESIZE > numbers.nbytes // 2:
        pytest.skip("this file system keeps its files in memory")
    found = find(cache, key)
    assert found is not None  # and not looked at
    pages = -(-file.stat().st_size // mmap.PAGESIZE)
    eventually(lambda: resident_pages(file) == pages)


def resident_pages(file: Path) -> int:
    """Pages of a file that are in the page cache."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as pages:
        array = np.frombuffer(pages, np.uint8)
        states = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        start, found = array.ctypes.data, states.ctypes.data
        del array
        size = ctypes.c_size_t(len(pages))
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(start), size, ctypes.c_void_p(found))
        return int((states & 1).sum())
