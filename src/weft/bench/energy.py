"""``weft bench energy``: CPU seconds and joules for each output token of a server under load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from weft.bench.meters import NOT_MEASURED, CpuMeter, JouleMeter, Meter
from weft.bench.options import EnergyBench, ServeBench
from weft.bench.processes import ServerProcesses
from weft.bench.rapl import Rapl
from weft.bench.serve import bench_serve
from weft.core.addresses import host_of


def bench_energy(options: EnergyBench, load: ServeBench) -> dict[str, Any]:
    """Run all loads and return the result of ``bench_serve``, with energy and the server at rest.

    Raises:
        ConfigError: there is no process with one of the numbers of ``server_pids``.
        NotMeasuredError: the server's processes are not found, or not readable.
        WeftError: as ``bench_serve``.
    """
    processes = ServerProcesses(*host_of(load.url), load.server_pids)
    meters: list[Meter] = [CpuMeter(processes), JouleMeter(Rapl())]
    at_rest = _at_rest(meters, options.rest_s) if options.rest_s else None
    result = bench_serve(load, meters)
    return {**result, "command": "weft bench energy", "at_rest": at_rest}


def _at_rest(meters: list[Meter], seconds: float) -> dict[str, Any]:
    """What is used while nothing is asked of the server."""
    for meter in meters:
        meter.start()
    began = time.perf_counter()
    time.sleep(seconds)
    taken = time.perf_counter() - began
    return {"seconds": taken, **{meter.key: meter.end(taken, 0) for meter in meters}}


def format_energy(result: Mapping[str, Any]) -> str:
    """Tables of a result of ``weft bench energy``: one for each load."""
    lines = [f"{result['model']} at {result['server']}"]
    if result["at_rest"] is not None:
        lines += ["", f"at rest: {_rates(result['at_rest'])}"]
    for run in result["runs"]:
        lines += ["", *_table(run)]
    return "\n".join(lines)


def _table(run: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"at {run['load']:g} {run['unit']}: {run['completed']} of {run['requests']} requests, "
        f"{run['output_tokens_per_s']:.0f} output tokens/s; {_rates(run)}"
    )
    yield f"{'':>28}{'CPU s':>10}{'CPU ms/token':>14}{'share':>8}"
    server = run["server"]
    rows = [(f"{one['name']} {one['pid']}", one) for one in server["processes"] if one["cpu_s"]]
    rows += [(name, one) for name, one in server["planes"].items()]
    for name, one in [*rows, ("together", server)]:
        share = one["cpu_s"] / max(server["cpu_s"], 1e-9)
        each = _ms(one["cpu_s_per_output_token"])
        yield f"{name:>28}{one['cpu_s']:>10.3f}{each:>14}{share:>8.0%}"
    if server["ended"]:
        yield f"{server['ended']} processes have ended; what they used is missing"
    energy = run["energy"]
    if NOT_MEASURED in energy:
        yield f"{'joules/token':>28}  not measured: {energy[NOT_MEASURED]}"
    elif energy["joules_per_output_token"] is not None:
        yield f"{'joules/token':>28}{energy['joules_per_output_token']:>10.4f}  (whole machine)"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.4f}"


def _rates(found: Mapping[str, Any]) -> str:
    watts = found["energy"].get("watts")
    shown = "power not measured" if watts is None else f"{watts:.1f} W"
    return f"{found['server']['cores']:.2f} cores, {shown}"
