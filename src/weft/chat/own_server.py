"""A server that chat starts where none is there, and that ends with it, however chat ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from weft.chat.client import ChatClient
from weft.chat.conversation import PRIVATE
from weft.core.errors import ConfigError, WeftError
from weft.core.inert import inert_line
from weft.core.process import die_with_parent_thread, start_child

LOGS_KEPT = 5
LOOK_EVERY_S = 0.1
END_S = 10.0
LONGEST_SOCKET = 100  # characters of a path that a socket may have, nearly
ALONE = ("--frontends", "1", "--no-standby")  # it serves one user
TOLD = "weft: "  # begins lines for users, in a log
URL = "http://localhost"


@contextlib.contextmanager
def own_server(
    model: str | None, settings: Sequence[str], folder: Path, say: Callable[[str], None]
) -> Iterator[ChatClient]:
    """Start a server on a Unix socket of this user; yield a client of it once it is ready.

    It is in a session of its own, where Ctrl-C does not reach it. The kernel tells it to end when
    this process ends.

    Args:
        settings: its flags.
        folder: where its log is kept.
        say: tells the user.

    Raises:
        ConfigError: the log cannot be written.
        WeftError: it does not start, with what it said.
    """
    socket = _socket_path()
    log = _open_log(folder)
    say(f"starting a server for this chat; its log: {log}")
    named = [] if model is None else [model]
    command = [sys.executable, "-m", "weft.cli", "serve", *named, *settings, *ALONE]
    with log.open("wb") as output:
        process = start_child(
            [*command, "--uds", str(socket)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    client = ChatClient(URL, None, str(socket))
    try:
        _wait(process, client, log, say)
        yield client
    finally:
        client.close()
        _end(process)
        socket.unlink(missing_ok=True)


def _end_with_parent() -> None:
    die_with_parent_thread(signal.SIGTERM)


def _socket_path() -> Path:
    """A path for a socket, of a name that nobody guesses."""
    name = f"weft-chat-{secrets.token_hex(8)}"
    path = Path(tempfile.gettempdir()) / name
    return path if len(str(path)) < LONGEST_SOCKET else Path("/tmp") / name


def _open_log(folder: Path) -> Path:
    """A new empty log; the oldest ones are removed."""
    path = folder / f"server-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in sorted(folder.glob("server-*.log"))[: -(LOGS_KEPT - 1)]:
            old.unlink(missing_ok=True)
        path.touch(mode=PRIVATE)
    except OSError as error:
        raise ConfigError(
            f"Cannot write '{path}': {error.strerror}; set XDG_STATE_HOME to a folder that can be "
            "written."
        ) from None
    return path


def _wait(
    process: subprocess.Popen[bytes], client: ChatClient, log: Path, say: Callable[[str], None]
) -> None:
    """Wait until the server is ready, and tell what it tells meanwhile."""
    last = ""
    with log.open(encoding="utf-8", errors="replace") as lines:
        while True:
            ended, ready = process.poll() is not None, client.ready()
            while line := lines.readline():
                if line.startswith(TOLD):
                    last = inert_line(line.removeprefix(TOLD))
                    if not ended:
                        say(last)
            if ended:
                told = last or "it said nothing."
                raise WeftError(f"The server for this chat did not start: {told} Log: {log}")
            if ready:
                return
            time.sleep(LOOK_EVERY_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server: politely, then at once."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            return
