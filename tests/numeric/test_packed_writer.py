"""Writing packed weights in the background: what is kept, what is given up, what the log says."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from packed import cache as cache  # fixtures
from packed import find, key_of, rewrite, same, some_weights
from packed import model as model

from weft.models import packed_writer
from weft.models.packed_cache import PackedCache
from weft.models.packed_writer import PackedWriter


def write(cache: PackedCache, model: Path) -> None:
    writer = PackedWriter(cache, key_of(model), some_weights(), lambda: key_of(model))
    writer.start()
    assert writer.join(60)


def test_weights_are_written_beside_the_caller(cache, model, caplog):
    caplog.set_level(logging.INFO)
    write(cache, model)
    assert same(find(cache, key_of(model)), some_weights())
    assert "The packed weights are kept" in caplog.text
    write(cache, model)  # nothing to do


@pytest.mark.parametrize("change", [rewrite, Path.unlink])
def test_weights_of_a_checkpoint_that_has_changed_are_not_kept(cache, model, change, caplog):
    key = key_of(model)
    change(model / "model.safetensors")
    writer = PackedWriter(cache, key, some_weights(), lambda: key_of(model))
    writer.start()
    assert writer.join(60)
    assert not cache.folder.exists()
    assert "has changed; its weights are not kept" in caplog.text


def test_a_writer_that_is_stopped_leaves_nothing(cache, model, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    write_all = os.pwritev

    def slow(*arguments: object) -> int:
        entered.set()
        assert go_on.wait(60)
        return write_all(*arguments)

    monkeypatch.setattr(os, "pwritev", slow)
    writer = PackedWriter(cache, key_of(model), some_weights(), lambda: key_of(model))
    writer.start()
    assert entered.wait(60)
    threading.Timer(0.2, go_on.set).start()
    writer.stop()
    assert writer.join(60)
    writer.stop()
    assert not list(cache.folder.iterdir())


def test_a_writer_that_never_started_can_be_stopped(cache, model):
    PackedWriter(cache, key_of(model), some_weights(), lambda: key_of(model)).stop()


def test_a_folder_that_cannot_be_made_is_one_line(model, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    write(PackedCache(2**30, tmp_path / "file" / "packed"), model)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cannot be kept" in record.getMessage()
    assert "Not a directory" in record.getMessage()


ON_DISK = """
import logging, sys
from pathlib import Path
logging.basicConfig(format="%(message)s")
sys.path.insert(0, sys.argv[1])
from test_packed_writer import PackedCache, write
write(PackedCache(2**30, Path(sys.argv[3])), Path(sys.argv[2]))
"""
MOUNTED = 'mount -t tmpfs -o "$0" tmpfs "$1" && shift && exec "$@"'


@pytest.mark.parametrize(
    ("options", "why"),
    [("size=1m", "No space left on device"), ("ro", "Read-only file system")],
)
def test_a_disk_without_room_is_one_line(model, tmp_path, options, why):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNTED, options, str(disk)]
    if subprocess.run([*mounted, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount a disk")
    program = [
        sys.executable,
        "-c",
        ON_DISK,
        str(Path(__file__).parent),
        str(model),
        str(disk / "c"),
    ]
    done = subprocess.run([*mounted, *program], check=True, capture_output=True, text=True)
    assert done.stderr.count("\n") == 1
    assert why in done.stderr


@pytest.mark.parametrize("busy", [False, True])
def test_a_writer_makes_way_for_an_engine_that_computes(cache, model, monkeypatch, busy):
    waits: list[float] = []

    class Recorded(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    monkeypatch.setattr(packed_writer, "BUSY_S", 3600.0)
    writer = PackedWriter(cache, key_of(model), some_weights(), lambda: key_of(model))
    writer._stop = Recorded()
    if busy:
        writer.make_way()
    writer.start()
    assert writer.join(60)
    assert same(find(cache, key_of(model)), some_weights())
    assert waits
    assert all((wait > 0) == busy for wait in waits)
