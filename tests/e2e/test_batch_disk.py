"""A data folder on a small disk: what does not fit is refused, and batches wait for room."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from live import Server, eventually, serving
from served_batches import OPTIONS, create_of, line, listed, patiently, results, upload, wait

MIB = 2**20
DISK = 8 * MIB
LINES = 400
MOUNTED = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'


def on_small_disk(folder: Path) -> list[str]:
    """The beginning of a command for which a folder is a disk of its own, gone with its processes.

    Skips the test where this process may not mount one.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed")
    folder.mkdir()
    command = [unshare, "--map-root-user", "--mount", "sh", "-c", MOUNTED, str(DISK), str(folder)]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount a disk")
    return command


class Disk:
    """The disk of a server, as only that sees it."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.folder = Path(f"/proc/{server.process.pid}/root{folder}")
        self._filler = self.folder / "filler"

    def free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def fill(self, leave: int = 0) -> None:
        """Leave so many bytes free, about."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while self.free() > leave:
                file.write(bytes(min(4096, self.free() - leave)))

    def clear(self) -> None:
        self._filler.unlink()

    def names(self) -> set[str]:
        return {path.name for path in (self.folder / "files").iterdir()}


@contextlib.contextmanager
def on_disk(tmp_path: Path, *options: str) -> Iterator[tuple[Server, openai.OpenAI, Disk]]:
    folder = tmp_path / "disk"
    within = on_small_disk(folder)
    given = ("--data-dir", str(folder), *OPTIONS, *options)
    with serving(tmp_path, *given, modelled=True, within=within) as server:
        yield server, server.client(), Disk(server, folder)


def long_lines(first: int) -> list[object]:
    return [line(first + i, max_tokens=100) for i in range(LINES)]


def refused_upload(client: openai.OpenAI, size: int) -> None:
    """An upload gets 507 with a sentence, and is gone."""
    before = listed(client)
    with pytest.raises(openai.APIStatusError) as error:
        client.files.create(file=("x.jsonl", b"x" * size), purpose="batch")
    assert error.value.status_code == 507
    assert error.value.body["code"] == "storage_full"
    assert "disk of the server" in error.value.body["message"]
    assert listed(client) == before


def test_a_full_disk_loses_nothing_and_batches_go_on_when_there_is_room(tmp_path):
    with on_disk(tmp_path) as (server, client, disk):
        wanted = results(client, wait(client, create_of(client, upload(client, long_lines(0)))))
        file_id = upload(client, long_lines(0))
        refused_upload(client, 2 * DISK)
        assert disk.names() == set(listed(client))
        batch_id = create_of(client, file_id)
        eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 20, 60)
        disk.fill()
        eventually(lambda: f"Batch {batch_id} waits" in server.errors.read_text(), 60)
        server.children()["weft-frontend"].kill()
        patiently(client.models.list)
        refused_upload(client, 10_000)
        with pytest.raises(openai.ConflictError) as error:
            client.files.delete(file_id)
        assert error.value.body["code"] == "file_in_use"
        assert client.batches.retrieve(batch_id).status == "in_progress"
        assert client.completions.create(model="builtin", prompt="x", max_tokens=2).usage
        disk.clear()
        batch = wait(client, batch_id)
        assert batch.status == "completed"
        assert results(client, batch) == wanted
        assert client.files.delete(file_id).deleted
        assert disk.names() == set(listed(client))


def test_the_reserve_stays_free_and_deleting_makes_room(tmp_path):
    with on_disk(tmp_path, "--disk-reserve-bytes", "4MiB") as (_, client, disk):
        wanted = results(client, wait(client, create_of(client, upload(client, long_lines(0)))))
        unused = client.files.create(file=("x", b"x" * 2 * MIB), purpose="batch")
        file_id = upload(client, long_lines(0))
        disk.fill(leave=4 * MIB - 1)
        refused_upload(client, 10_000)
        batch_id = create_of(client, file_id)
        eventually(lambda: client.batches.retrieve(batch_id).status == "in_progress", 60)
        assert client.batches.retrieve(batch_id).request_counts.completed == 0
        client.files.delete(unused.id)
        batch = wait(client, batch_id)
        assert batch.status == "completed"
        assert results(client, batch) == wanted
        assert disk.free() > 4 * MIB
