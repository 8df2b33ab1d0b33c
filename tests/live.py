"""Real commands and a real ``weft serve`` for tests: started, waited for, ended, nothing left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil

WEFT = [sys.executable, "-m", "weft.cli"]
SMALL = ["--threads", "1", "--kv-memory", "32MiB", "--max-num-seqs", "16", "--no-standby"]
SMALL += ["--self-profile-s", "0"]  # no test waits for an engine that measures itself
START_S = 60.0

# Run by every Python process that has its folder on the path; concerns those of one module only. A
# server's first ones are forked, and import the module: the code runs right before that.
IN_MODULE = """
import sys

class Early:
    def __init__(self):
        self.done = False
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and not self.done:
            self.done = True
            exec({code!r}, {{"sys": sys, "module": {module!r}}})

if {module!r} in sys.orig_argv:
    exec({code!r}, {{"sys": sys, "module": {module!r}}})
elif "serve" in sys.orig_argv:
    sys.meta_path.insert(0, Early())
"""
MODELLED = f"""
sys.path.append({str(Path(__file__).parent)!r})
import modelled_build
from weft.engine.forkserver import IMPORTED
stood_for = [*IMPORTED, "weft.engine.describe", "weft.exec.overlap"]
sys.modules |= dict.fromkeys(stood_for, modelled_build)
"""


@dataclass
class Server:
    """A running server and what it writes to standard error."""

    process: subprocess.Popen[str]
    url: str
    errors: Path

    def children(self) -> dict[str, psutil.Process]:
        """By title; of two the ancestor: a fork bears its title until it execs."""
        found = reversed(psutil.Process(self.process.pid).children(recursive=True))
        return {words[0].split()[0]: child for child in found if (words := command_of(child))}

    def metrics(self, *names: str, headers: dict[str, str] | None = None) -> list[float]:
        """Values of the metrics whose names begin so; any request plane may answer."""
        page = httpx.get(f"{self.url}/metrics", headers=headers, timeout=START_S).text
        lines = [line for line in page.splitlines() if line.startswith(names)]
        return [float(line.rsplit(" ", 1)[1]) for line in lines]

    def idle(self) -> bool:
        """Whether no sequence runs or waits and no block is held."""
        values = self.metrics("weft:num_requests", "weft:kv_cache_usage")
        return len(values) >= 3 and not any(values)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)


def run(
    *arguments: str, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of weft to its end."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(
        [*WEFT, *arguments], capture_output=True, text=True, timeout=timeout, check=False,
        env=environment,
    )  # fmt: skip


STARTING = ("weft: downloading ", "weft: loading ", "weft: packing ")  # lines of a start


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int | None = None) -> None:
    """The command failed with one sentence that has all the words, and without a trace.

    What a start had done until then may be told before it.
    """
    assert done.returncode in ((1, 2) if code is None else (code,)), done.stderr
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.strip()]
    lines = [line for line in told if not line.startswith(STARTING)]
    assert lines == told[-1:], done.stderr
    for word in words:
        assert word in lines[0], done.stderr


def command_of(process: psutil.Process) -> list[str]:
    """The command line of a process, or its title; empty if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def lives(process: psutil.Process) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(
    folder: Path,
    *arguments: str,
    port: int | None = None,
    within: Sequence[str] = (),
    modelled: bool = False,
    engines: str = "",
    inside: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server until the block ends; whatever it started must be gone then.

    Args:
        within: a command that runs the server's in its own process, such as ``groups.join``.
        modelled: with engines that compute nothing and import no torch: for tests of processes.
        engines: code that engines run first of all.
        inside: the same for other processes, by the modules that they run.
    """
    port, errors = port or free_port(), folder / "stderr.txt"
    if errors.exists():  # of a server before
        errors = folder / f"stderr-{port}.txt"
    with errors.open("w") as log:
        alone = ("--frontends", "1")  # on a machine of any size, unless the test wants more
        command = [*within, *WEFT, "serve", "--port", str(port), *alone, *SMALL, *arguments]
        process = subprocess.Popen(
            command, stderr=log, stdout=subprocess.PIPE, text=True,
            env=with_engines(folder, modelled=modelled, code=engines, inside=inside),
        )  # fmt: skip
    server = Server(process, f"http://127.0.0.1:{port}", errors)
    try:
        wait_until_ready(server)
        family = [psutil.Process(process.pid), *server.children().values()]
        yield server
    except BaseException:
        print(errors.read_text(), file=sys.stderr)  # for whoever asks why a test has failed
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(START_S)
    gone, alive = psutil.wait_procs(family, timeout=START_S)
    assert not alive, f"left behind: {alive}"
    assert len(gone) == len(family)


def with_engines(
    folder: Path,
    *,
    modelled: bool = False,
    code: str = "",
    inside: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables with which engines are those of the tests, or run some code first of all.

    Args:
        inside: code that other processes run first of all, by the modules that they run.
    """
    given = {"weft.engine.process": MODELLED * modelled + code, **(inside or {})}
    if not any(given.values()):
        return dict(os.environ)
    site = folder / "site"
    site.mkdir(exist_ok=True)
    text = "".join(
        IN_MODULE.format(module=module, code=textwrap.dedent(lines))
        for module, lines in given.items()
        if lines
    )
    (site / "sitecustomize.py").write_text(text)
    path = os.pathsep.join([str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def wait_until_ready(server: Server) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/ready", timeout=START_S).status_code == 200:
                return
        assert server.process.poll() is None, server.errors.read_text()
        time.sleep(0.05)
    raise AssertionError("the server did not become ready")


def in_shared_memory() -> set[str]:
    """Names in shared memory, but for the folders of other servers that run."""
    return {name for name in os.listdir("/dev/shm") if not _held(Path("/dev/shm") / name)}


def _held(path: Path) -> bool:
    """Whether a process has locked a folder."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(folder)
    return False


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something holds that other processes bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
