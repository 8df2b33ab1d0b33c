"""The supervisor of ``weft serve``: starts engine and request plane, and outlives both."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.config import EngineConfig
from weft.core.errors import EngineDeadError
from weft.core.logs import log_level, set_up_logs
from weft.core.process import set_process_title
from weft.core.served import ServedModel

if TYPE_CHECKING:
    from weft.engine.remote import EngineProcess
    from weft.ring.segment import RingFds
    from weft.server.options import ServerOptions

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 5.0  # to end what is open with an error, until the request plane is killed


def serve(settings: Mapping[str, Any], options: ServerOptions) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code.

    Raises:
        ConfigError: a setting is wrong, or the address cannot be used.
        WeftError: what kept the engine from starting.
    """
    from weft.engine.remote import EngineProcess
    from weft.ring.segment import create_ring

    config = EngineConfig.from_mapping(settings)
    set_up_logs("supervisor", log_level(config.log_level), config.log_format)
    set_process_title("weft")
    with _listening(options) as listener, _signals() as wake:
        ring = create_ring()
        engine = EngineProcess.start(settings, [ring])
        frontend = None
        try:
            frontend, card = _start_frontend(config, options, ring, listener, engine)
            ring.close()
            served = _wait_for_engine(engine, frontend, wake)
            if served is None:
                return 0
            card.write(served.to_json() + "\n")
            card.close()
            return _watch(engine, frontend, wake, options)
        finally:
            alive = engine.process.poll() is None  # without an engine nothing can be finished
            _end(frontend, options.drain_timeout_s if alive else 0.0, wake)
            engine.stop()


def _start_frontend(
    config: EngineConfig,
    options: ServerOptions,
    ring: RingFds,
    listener: socket.socket,
    engine: EngineProcess,
) -> tuple[subprocess.Popen[bytes], Any]:
    """Start the request plane; it serves once it has read the model's facts from the pipe."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "weft.server.process", "--parent", str(os.getpid())]
    command += ["--ring", str(ring), "--socket", str(listener.fileno()), "--card", str(read_end)]
    command += ["--engine-pid", str(engine.process.pid)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        pass_fds=[read_end, listener.fileno(), *ring.pass_fds],
        start_new_session=True,
    )
    os.close(read_end)
    assert process.stdin is not None
    settings = {
        "options": asdict(options),
        "tokenizer": config.tokenizer,
        "chat_template": config.chat_template,
        "base_seed": config.base_seed,
        "log_level": config.log_level,
        "log_format": config.log_format,
    }
    process.stdin.write(json.dumps(settings).encode())
    process.stdin.close()
    return process, os.fdopen(write_end, "w")


def _wait_for_engine(
    engine: EngineProcess, frontend: subprocess.Popen[bytes], wake: int
) -> ServedModel | None:
    """Wait until the engine is ready; None if a signal came first."""
    report, pidfd = engine.report.fileno(), os.pidfd_open(frontend.pid)
    readable, _, _ = select.select([report, pidfd, wake], [], [])
    os.close(pidfd)
    if wake in readable:
        return None
    if report not in readable:
        raise EngineDeadError(f"The request plane ended (exit code {frontend.wait()}).")
    return engine.wait_until_ready()


def _watch(
    engine: EngineProcess,
    frontend: subprocess.Popen[bytes],
    wake: int,
    options: ServerOptions,
) -> int:
    """Wait for a signal, or for a child to end, which it must not do by itself."""
    names = {
        os.pidfd_open(engine.process.pid): ("engine", engine.process),
        os.pidfd_open(frontend.pid): ("request plane", frontend),
    }
    readable, _, _ = select.select([*names, wake], [], [])
    for pidfd in names:
        if pidfd in readable and wake not in readable:
            name, process = names[pidfd]
            raise EngineDeadError(f"The {name} ended (exit code {process.wait()}).")
    _end(frontend, options.drain_timeout_s, wake)
    return 0


def _end(process: subprocess.Popen[bytes] | None, timeout_s: float, wake: int) -> None:
    """Ask the request plane to finish what is open and end.

    After the time-out, or at another signal, it is asked to end what is open with an error; if
    that takes longer than a moment, or at a third signal, it is killed.
    """
    if process is None or process.poll() is not None:
        return
    pidfd = os.pidfd_open(process.pid)
    for patience_s in (timeout_s, GRACE_S):
        _empty(wake)
        process.terminate()
        readable, _, _ = select.select([pidfd, wake], [], [], patience_s)
        if pidfd in readable:
            break
    else:
        process.kill()
    os.close(pidfd)
    process.wait()


def _empty(wake: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Turn the signals that end the server into bytes that can be waited for."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    signal.set_wakeup_fd(write_end)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)


@contextlib.contextmanager
def _listening(options: ServerOptions) -> Iterator[socket.socket]:
    """Listen on the address of the options; a Unix socket is removed at the end."""
    from weft.server.listen import listen

    with listen(options) as bound:
        try:
            yield bound
        finally:
            if options.uds is not None:
                Path(options.uds).unlink(missing_ok=True)
