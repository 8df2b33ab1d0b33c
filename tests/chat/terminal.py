"""A terminal for tests: a real pty, whose other end understands what terminals do."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import termios
import threading
from collections.abc import Iterator
from typing import Any

import pyte

from live import START_S, WEFT, eventually

ENTER, ALT_ENTER, TAB = "\r", "\x1b\r", "\t"
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"


class Terminal:
    """A terminal of some size, and the process that runs in it."""

    def __init__(
        self, *arguments: str, columns: int = 80, rows: int = 24, **variables: str
    ) -> None:
        self._master, other = pty.openpty()
        termios.tcsetwinsize(other, (rows, columns))
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._screen.write_process_input = self.type  # answers to what programs ask terminals
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.raw = b""
        environment = {**os.environ, "TERM": "xterm-256color", **variables}
        for name in ("NO_COLOR", "OPENAI_API_KEY"):
            if name not in variables:
                environment.pop(name, None)
        self.process = subprocess.Popen(
            [*WEFT, "chat", *arguments],
            stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(other)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._master, 65536)
            except OSError:  # the process has ended
                return
            with self._lock:
                self.raw += part
                self._stream.feed(part)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._master, text.encode())

    def send(self, text: str) -> None:
        """Write a line and press Enter."""
        self.type(text + ENTER)

    def lines(self) -> list[str]:
        """All lines from the first one, also those that have left the screen."""
        with self._lock:
            gone = [
                "".join(row[x].data for x in range(self._screen.columns)).rstrip()
                for row in self._screen.history.top
            ]
            return [*gone, *(line.rstrip() for line in self._screen.display)]

    def text(self) -> str:
        return "\n".join(self.lines()).rstrip()

    def cells(self, words: str) -> list[Any]:
        """The characters of some words on the screen, with their colours."""
        with self._lock:
            for y, line in enumerate(self._screen.display):
                if (x := line.find(words)) >= 0:
                    return [self._screen.buffer[y][x + i] for i in range(len(words))]
        raise AssertionError(f"{words} is not on the screen")

    def wait_for(self, words: str, count: int = 1, seconds: float = START_S) -> None:
        """Wait until words are to be read, so often, wherever lines end."""
        sought = " ".join(words.split())
        self.wait_until(lambda: " ".join(self.text().split()).count(sought) >= count, seconds)

    def wait_for_line(self, seconds: float = START_S) -> None:
        """Wait until the user can write, in an empty line."""
        self.wait_until(lambda: self.line() == ">", seconds)

    def wait_until(self, holds: Any, seconds: float = START_S) -> None:
        try:
            eventually(holds, seconds)
        except AssertionError:
            raise AssertionError(f"it did not come about in:\n{self.text()}") from None

    def line(self) -> str:
        """The line that the cursor is in, as far as it is written."""
        with self._lock:
            return self._screen.display[self._screen.cursor.y].rstrip()

    def ended(self) -> int:
        """Wait for the end; the exit status."""
        status = self.process.wait(START_S)
        self._reader.join(START_S)
        return status


@contextlib.contextmanager
def chatting(*arguments: str, **options: Any) -> Iterator[Terminal]:
    """A chat in a terminal until the block ends."""
    terminal = Terminal(*arguments, **options)
    try:
        yield terminal
    except BaseException:
        print(terminal.text())
        raise
    finally:
        if terminal.process.poll() is None:
            terminal.process.send_signal(signal.SIGTERM)
        terminal.ended()
        os.close(terminal._master)
