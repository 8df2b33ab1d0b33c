"""An engine without HTTP and its request planes, as two real commands, for tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil

from live import (
    SMALL,
    START_S,
    WEFT,
    Server,
    eventually,
    free_port,
    wait_until_ready,
    with_engines,
)

KEY = "a key of the tests, long enough"


class RemoteEngine:
    """A running ``weft serve --engine-only``.

    Attributes:
        address: where request planes connect.
    """

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process, self.errors = process, errors
        eventually(lambda: self._found() is not None or process.poll() is not None, START_S)
        found = self._found()
        assert found, errors.read_text()
        self.address = found[1]

    def _found(self) -> re.Match[str] | None:
        return re.search(r"for request planes at (\S+)", self.errors.read_text())

    def children(self) -> dict[str, psutil.Process]:
        """By title, as those of a ``Server``."""
        return Server(self.process, "", self.errors).children()


@contextlib.contextmanager
def ended(process: subprocess.Popen[str], errors: Path) -> Iterator[None]:
    """Whatever a command has started is gone when the block has ended."""
    try:
        yield
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    except BaseException:
        print(errors.read_text(), file=sys.stderr)  # for whoever asks why a test has failed
        family = []
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(START_S)
    _, alive = psutil.wait_procs(family, timeout=START_S)
    assert not alive, f"left behind: {alive}"


@contextlib.contextmanager
def engine_only(
    folder: Path,
    *given: str,
    listen: str = "127.0.0.1:0",
    within: Sequence[str] = (),
    modelled: bool = True,
) -> Iterator[RemoteEngine]:
    """Run an engine for request planes elsewhere until the block ends.

    Args:
        within: a command that runs the engine's in its own process.
        modelled: it computes nothing and imports no torch.
    """
    folder.mkdir(exist_ok=True)
    errors = folder / f"engine-{len(list(folder.glob('engine-*')))}.txt"
    command = [*within, *WEFT, "serve", "--engine-only", "--ring-listen", listen, *SMALL, *given]
    with errors.open("w") as log:
        process = subprocess.Popen(
            command, stderr=log, text=True, env=with_engines(folder, modelled=modelled)
        )
    with ended(process, errors):
        yield RemoteEngine(process, errors)


@contextlib.contextmanager
def fronting(
    folder: Path, address: str, *given: str, within: Sequence[str] = (), wait: bool = True
) -> Iterator[Server]:
    """Run request planes of an engine elsewhere until the block ends."""
    errors = folder / f"frontend-{len(list(folder.glob('frontend-*')))}.txt"
    port = free_port()
    command = [*within, *WEFT, "frontend", "--ring", address, "--port", str(port), *given]
    command += [] if "--frontends" in given else ["--frontends", "1"]
    with errors.open("w") as log:
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        process = subprocess.Popen(command, stderr=log, text=True, env=environment)
    server = Server(process, f"http://127.0.0.1:{port}", errors)
    with ended(process, errors):
        if wait:
            wait_until_ready(server)
        yield server


class Stream:
    """A stream that is read in the background.

    Attributes:
        tokens: so far.
        ended: why it has ended; empty while it runs, ``broken: ...`` if not by its last event.
    """

    def __init__(self, server: Server, prompt: list[int], tokens: int, **more: object) -> None:
        self.tokens: list[str] = []
        self.ended = ""
        self._body = {
            "model": "builtin",
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        self._url = server.url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        from json import loads

        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=START_S,
            ) as answer:  # fmt: skip
                for line in answer.iter_lines():
                    if self._stop.is_set():
                        self.ended = "left"
                        return
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = loads(line[6:])
                    if "error" in event:
                        self.ended = event["error"]["code"]
                        return
                    choice = event["choices"][0]
                    self.tokens.append(choice["text"])
                    self.ended = choice["finish_reason"] or ""
            self.ended = self.ended or "broken: no end"
        except httpx.HTTPError as error:
            self.ended = f"broken: {error}"

    def leave(self) -> None:
        """Go away at the next token."""
        self._stop.set()

    def outcome(self) -> tuple[str, str]:
        """Its whole text, and why it has ended."""
        self._thread.join(START_S)
        return "".join(self.tokens), self.ended
