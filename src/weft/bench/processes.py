"""CPU time of a server's processes, seen from beside them: any server, on this machine only."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from weft.core.errors import ConfigError, WeftError

# weft's processes by what they show in ps.
ENGINE = ("weft-engine", "weft-standby", "weft-host", "weft-rank", "weft-forkserver")
REQUEST_PLANE = ("weft-frontend", "weft-renderer", "weft-images")
LISTENING = "0A"  # the state of a socket in /proc/net/tcp
CPU_CLOCK = 2  # of a process's clock id: what the scheduler has given all its threads, in ns


class NotMeasuredError(WeftError):
    """The CPU time of a server cannot be read, and why."""

    http_status = 500
    code = "not_measured"


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """What a process has used so far.

    Attributes:
        name: its title, as ps shows it.
        born: when it was started, so that another one with its number is not taken for it.
        cpu_s: CPU seconds of all its threads.
    """

    pid: int
    name: str
    born: float
    cpu_s: float


class ServerProcesses:
    """The processes of a server: those that listen at its address, and all that they have started.

    Args:
        address: ``host:port`` of the server.
        pids: where its processes begin, if that is known; else who listens there is looked for.

    Raises:
        ConfigError: there is no process with one of the numbers.
        NotMeasuredError: it is on another machine, in this very process, or another user's.
    """

    def __init__(self, host: str, port: int, pids: Seq[int] = ()) -> None:
        missing = [pid for pid in pids if not psutil.pid_exists(pid)]
        if missing:
            raise ConfigError(f"There is no process {missing[0]}.", param="server_pids")
        self._roots = tuple(pids) or _listeners(host, port)
        if os.getpid() in {process.pid for process in self.read()}:
            raise NotMeasuredError("The server is a part of this process.")

    def read(self) -> list[ProcessTime]:
        """The processes that there are now. Those that end meanwhile are left out."""
        found: dict[int, ProcessTime] = {}
        for root in self._roots:
            try:
                parent = psutil.Process(root)
                family = [parent, *parent.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in family:
                time_of = _time_of(process)
                if time_of is not None:
                    found[process.pid] = time_of
        return sorted(found.values(), key=lambda one: one.pid)


def cpu_used(before: Seq[ProcessTime], after: Seq[ProcessTime], tokens: int) -> dict[str, Any]:
    """CPU seconds between two looks: together, by plane, and of each process.

    Args:
        tokens: of output, that came meanwhile.
    """
    start = {(one.pid, one.born): one.cpu_s for one in before}
    rows: list[dict[str, Any]] = []
    planes: dict[str, float] = {}
    for one in after:
        cpu_s, plane = one.cpu_s - start.pop((one.pid, one.born), 0.0), plane_of(one.name)
        rows.append({"pid": one.pid, "name": one.name, "plane": plane} | _each(cpu_s, tokens))
        planes[plane] = planes.get(plane, 0.0) + cpu_s
    return {
        **_each(sum(planes.values()), tokens),
        "planes": {name: _each(cpu_s, tokens) for name, cpu_s in planes.items()},
        "processes": rows,
        "ended": len(start),  # processes, of which nobody knows what they used
    }


def _each(cpu_s: float, tokens: int) -> dict[str, float | None]:
    return {"cpu_s": cpu_s, "cpu_s_per_output_token": cpu_s / tokens if tokens else None}


def plane_of(name: str) -> str:
    """To which part of a server a process belongs, by its title."""
    if name.startswith(ENGINE):
        return "engine"
    if name.startswith(REQUEST_PLANE):
        return "request plane"
    return "supervisor" if name.startswith("weft") else "server"


def _time_of(process: psutil.Process) -> ProcessTime | None:
    try:
        words = process.cmdline()
        name = words[0].rpartition("/")[2].split(" ")[0].rstrip(":") if words else process.name()
        return ProcessTime(process.pid, name, process.create_time(), cpu_seconds(process.pid))
    except (psutil.Error, OSError):
        return None


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process so far, by its clock. Raises OSError without it."""
    return time.clock_gettime(~pid << 3 | CPU_CLOCK)


# -- who listens ----------------------------------------------------------------------------------


def _listeners(host: str, port: int) -> tuple[int, ...]:
    """The processes that hold the listening sockets of a port, without those they have started."""
    if not _is_here(host):
        raise NotMeasuredError(f"{host} is no address of this machine.")
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not sockets:
        raise NotMeasuredError(f"Nothing listens on port {port} of this machine.")
    holders = {pid for pid in psutil.pids() if not sockets.isdisjoint(_open_files(pid))}
    if not holders:
        raise NotMeasuredError(
            f"Who listens on port {port} is another user's or another container's; "
            "name the process by server_pids."
        )
    return tuple(sorted(pid for pid in holders if holders.isdisjoint(_ancestors(pid))))


def _is_here(host: str) -> bool:
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    own = {
        one.address.partition("%")[0] for all_of in psutil.net_if_addrs().values() for one in all_of
    }
    return not found.isdisjoint(own) or any(text.startswith("127.") for text in found)


def _inodes(port: int) -> set[str]:
    """Of the sockets that listen on a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                found.add(words[9])
    return found


def _open_files(pid: int) -> Iterable[str]:
    """What the descriptors of a process lead to; nothing if it is another user's, or has ended."""
    folder = f"/proc/{pid}/fd"
    found = []
    try:
        for name in os.listdir(folder):
            try:
                found.append(os.readlink(f"{folder}/{name}"))
            except OSError:
                continue
    except OSError:
        return ()
    return found


def _ancestors(pid: int) -> set[int]:
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.Error:
        return set()
