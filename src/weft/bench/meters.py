"""Costs of a load beside time: CPU seconds of the server's processes, joules of the machine."""

from __future__ import annotations

from typing import Any, Protocol

from weft.bench.processes import NotMeasuredError, ProcessTime, ServerProcesses, cpu_used
from weft.bench.rapl import Rapl

SAMPLE_S = 5.0  # between two looks while a load runs
NOT_MEASURED = "not_measured"  # the key of why something is not


class Meter(Protocol):
    """Measures something from the start of a load to its end.

    Attributes:
        key: of what it finds, in the result of a load.
    """

    key: str

    def start(self) -> None: ...

    def look(self) -> None:
        """Is called now and then."""

    def end(self, seconds: float, output_tokens: int) -> dict[str, Any]:
        """Return what the load has cost, in all and for each token of output."""


class CpuMeter:
    """CPU seconds of a server's processes; without them, why they are not measured."""

    key = "server"

    def __init__(self, processes: ServerProcesses | NotMeasuredError) -> None:
        self._processes = processes
        self._before: list[ProcessTime] = []

    def start(self) -> None:
        if isinstance(self._processes, ServerProcesses):
            self._before = self._processes.read()

    def look(self) -> None:
        """Their clocks lose nothing."""

    def end(self, seconds: float, output_tokens: int) -> dict[str, Any]:
        if isinstance(self._processes, NotMeasuredError):
            return {NOT_MEASURED: self._processes.message}
        found = cpu_used(self._before, self._processes.read(), output_tokens)
        return {**found, "cores": found["cpu_s"] / seconds}


class JouleMeter:
    """Joules of the whole machine, which are not the server's alone."""

    key = "energy"

    def __init__(self, rapl: Rapl) -> None:
        self._rapl = rapl
        self._before = 0.0
        self._failed = rapl.missing

    def start(self) -> None:
        self._before = self._read()

    def look(self) -> None:
        self._read()

    def end(self, seconds: float, output_tokens: int) -> dict[str, Any]:
        joules = self._read() - self._before
        if self._failed:
            return {NOT_MEASURED: self._failed}
        return {
            "joules": joules,
            "joules_per_output_token": joules / output_tokens if output_tokens else None,
            "watts": joules / seconds,
            "counters": self._rapl.zones,
        }

    def _read(self) -> float:
        if self._failed:
            return 0.0
        try:
            return self._rapl.joules()
        except (OSError, ValueError) as error:
            self._failed = f"a counter could not be read any more: {error}"
            return 0.0


def find_processes(
    host: str, port: int, pids: tuple[int, ...]
) -> ServerProcesses | NotMeasuredError:
    """The processes of a server, or why its CPU time cannot be read.

    Raises:
        ConfigError: there is no process with one of the numbers.
    """
    try:
        return ServerProcesses(host, port, pids)
    except NotMeasuredError as error:
        return error
