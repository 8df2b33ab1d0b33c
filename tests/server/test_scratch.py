"""The folder in memory that all request planes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from live import eventually
from weft.core.config import EngineConfig
from weft.engine import machine
from weft.server.options import ServerOptions
from weft.server.scratch import MEMORY, PREFIX, scratch_folder
from weft.supervise import num_frontends, shared_store

HOLDER = """
import sys
from weft.server.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_goes_with_its_holder():
    with scratch_folder() as folder:
        assert folder.parent == MEMORY
        assert folder.name.startswith(PREFIX)
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
        with scratch_folder() as other:
            assert folder.exists()
            assert other != folder
        assert (folder / "file").exists()
    assert not folder.exists()


def test_a_folder_goes_when_its_holder_is_killed():
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        folder = holder.stdout.readline().strip()
        assert os.path.exists(folder)
        holder.kill()
    eventually(lambda: not os.path.exists(folder))


def test_a_file_that_is_named_is_taken():
    named = ServerOptions(responses_db="/some/file", usage_db="/some/other")
    with shared_store(named) as options:
        assert options is named
    with shared_store(ServerOptions(max_responses_bytes=2**60)) as options:
        assert options.responses_db is not None
        assert options.responses_db.startswith(str(MEMORY / PREFIX))
        assert options.max_responses_bytes < 2**60
        assert Path(options.usage_db or "").parent == Path(options.responses_db).parent
    with shared_store(ServerOptions(usage_db="/some/file")) as options:
        assert (options.usage_db, options.responses_db is None) == ("/some/file", False)


def test_a_second_request_plane_where_there_are_cores(monkeypatch):
    for cores, seed, given, wanted in (
        (3, None, None, 1),
        (4, None, None, 2),
        (64, None, None, 2),
        (64, 5, None, 1),
        (64, None, 1, 1),
        (1, 5, 3, 3),
    ):
        monkeypatch.setattr(machine, "usable_cores", lambda cores=cores: cores)
        config = EngineConfig(base_seed=seed)
        assert num_frontends(config.base_seed, ServerOptions(frontends=given)) == wanted
