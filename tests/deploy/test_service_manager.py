"""What a service manager is told, by sd_notify's protocol, on sockets as systemd makes them."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from live import START_S, serving
from weft.cli import EXIT_USAGE
from weft.core.service_manager import ServiceManager
from weft.core.settings import settings_of
from weft.server.options import ServerOptions
from weft.supervise import GRACE_S

PATIENCE_S = 60.0
SILENT_S = 2.0


@contextlib.contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(address.replace("@", "\0", 1) if address[0] == "@" else address)
        bound.settimeout(PATIENCE_S)
        yield bound


def next_of(bound: socket.socket, skipped: str = "") -> str:
    """The next message that is not ``skipped``."""
    while (message := bound.recv(4096).decode()) == skipped:
        pass
    return message


def test_a_server_says_that_it_is_ready_lives_and_stops(tmp_path, monkeypatch):
    """While its engine is held up it says nothing."""
    address, gate = str(tmp_path / "notify"), tmp_path / "gate"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    hold = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.02)"
    silent = []
    with manager(address) as bound:

        def wait() -> None:
            silent.append(not select.select([bound], [], [], SILENT_S)[0])
            gate.touch()

        waiting = threading.Thread(target=wait)
        waiting.start()
        with serving(tmp_path, modelled=True, engines=hold) as server:
            waiting.join()
            assert silent == [True]
            assert next_of(bound) == "READY=1"
            assert httpx.get(f"{server.url}/ready", timeout=START_S).status_code == 200
            assert [next_of(bound) for _ in range(4)] == ["WATCHDOG=1"] * 4
            server.process.send_signal(signal.SIGTERM)
            assert next_of(bound, "WATCHDOG=1") == "STOPPING=1"
            server.process.wait(START_S)
            assert server.process.returncode == 0


class TestManager:
    @pytest.mark.parametrize("kind", ["path", "abstract"])
    def test_is_told_at_both_kinds_of_addresses(self, tmp_path, kind):
        name = str(tmp_path / "n") if kind == "path" else f"@weft-test-{secrets.token_hex(8)}"
        with manager(name) as bound:
            told = ServiceManager.of({"NOTIFY_SOCKET": name})
            assert told.tell("STATUS=x")
            assert next_of(bound) == "STATUS=x"
            told.close()
            assert told.tell("STATUS=y")
            bound.setblocking(False)
            with pytest.raises(BlockingIOError):
                bound.recv(4096)

    @pytest.mark.parametrize(
        ("variables", "watched"),
        [
            ({}, None),
            ({"WATCHDOG_USEC": "2000000"}, 2.0),
            ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
            ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
            ({"WATCHDOG_USEC": "0"}, None),
            ({"WATCHDOG_USEC": "soon"}, None),
        ],
    )
    def test_watches_the_process_that_it_means(self, variables, watched):
        assert ServiceManager.of(variables).watchdog_s == watched

    @pytest.mark.parametrize("address", ["vsock:2:99", "/nowhere/notify"])
    def test_that_cannot_be_reached_is_logged(self, address, caplog):
        told = ServiceManager.of({"NOTIFY_SOCKET": address})
        assert told.tell("READY=1")
        assert [address in message for message in caplog.messages] == [True]

    def test_that_does_not_read_is_told_ready_once_it_does(self, tmp_path):
        address = str(tmp_path / "notify")

        async def follow(bound: socket.socket) -> list[str]:
            told = ServiceManager.of({"NOTIFY_SOCKET": address})
            filled = 0
            while told.tell("STATUS=x"):
                filled += 1
            told.follow(lambda: True)
            await asyncio.sleep(0.2)
            found = []
            end = time.monotonic() + PATIENCE_S
            while "READY=1" not in found and time.monotonic() < end:
                await asyncio.sleep(0.01)
                with contextlib.suppress(BlockingIOError):
                    found.append(bound.recv(4096).decode())
            told.close()
            assert found[:filled] == ["STATUS=x"] * filled
            return found[filled:]

        with manager(address) as bound:
            bound.setblocking(False)
            assert asyncio.run(follow(bound)) == ["READY=1"]

    def test_without_one_nothing_runs(self):
        async def tasks() -> int:
            told = ServiceManager.of({})
            told.follow(lambda: True)
            told.stopping()
            return len(asyncio.all_tasks())

        assert asyncio.run(tasks()) == 1


def test_the_unit_has_what_the_server_needs():
    """Names that the code knows: folders, time-outs, exit codes."""
    text = (Path(__file__).parents[2] / "deploy" / "weft.service").read_text(encoding="utf-8")
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string(text)
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["RestartPreventExitStatus"] == str(EXIT_USAGE)
    drain_s = settings_of(ServerOptions)["drain_timeout_s"].default
    assert float(service["TimeoutStopSec"]) > drain_s + 2 * GRACE_S
    assert service["StateDirectory"] == service["CacheDirectory"] == "weft"
