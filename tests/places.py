"""A remote place for tests: ``weft attend`` in a process of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from live import eventually

KEY = "a key of the tests, long enough"
WITHIN_S = 60.0


class RunningPlace:
    """The process of a place.

    Attributes:
        address: where engines connect.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        self.pid = process.pid
        eventually(lambda: self._found() or process.poll() is not None, WITHIN_S)
        found = self._found()
        assert found, log.read_text()
        self.address = found[1]

    def _found(self) -> re.Match[str] | None:
        return re.search(r"attending at (\S+) with", self.log.read_text())

    def kill(self) -> None:
        """End it as a machine ends that loses its power."""
        self.process.kill()
        self.process.wait()


def key_file(folder: Path, key: str = KEY) -> Path:
    """A file with a key."""
    path = folder / "key"
    path.write_text(key + "\n")
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def attending(
    folder: Path,
    *given: str,
    listen: str = "127.0.0.1:0",
    kv_memory: str = "16MiB",
    within: Sequence[str] = (),
    code: str = "",
) -> Iterator[RunningPlace]:
    """Run a place until the block ends.

    Args:
        within: a command that runs the place's in its own process.
        code: what its process runs first of all.
    """
    log = folder / f"place-{len(list(folder.glob('place-*')))}.txt"
    start = f"{code}\nfrom weft.cli import main\nmain()"
    command = [*within, sys.executable, "-c", start, "attend", "--listen", listen]
    command += ["--kv-memory", kv_memory, "--threads", "1", "--log-level", "info", *given]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stderr=errors, text=True)
    try:
        yield RunningPlace(process, log)
    except BaseException:
        print(log.read_text(), file=sys.stderr)  # for whoever asks why a test has failed
        raise
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(process.pid).resume()
        process.kill()
        process.wait()
