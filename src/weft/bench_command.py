"""The commands of ``weft bench``: their settings, what they measure, and where results go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.bench.options import (
    EnergyBench,
    InterfereBench,
    KernelsBench,
    ServeBench,
    ThroughputBench,
)
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.flags import given_settings


def _bench_serve(options: dict[str, Any]) -> int:
    from weft.bench.report import format_serve
    from weft.bench.serve import bench_serve

    (settings,) = given_settings(options, ServeBench)
    bench = ServeBench(**settings)
    return _bench_load(bench, lambda: bench_serve(bench), format_serve)


def _bench_energy(options: dict[str, Any]) -> int:
    from weft.bench.energy import bench_energy, format_energy

    energy_settings, load_settings = given_settings(options, EnergyBench, ServeBench)
    bench, load = EnergyBench(**energy_settings), ServeBench(**load_settings)
    return _bench_load(load, lambda: bench_energy(bench, load), format_energy)


def _bench_load(
    load: ServeBench,
    measure: Callable[[], dict[str, Any]],
    show: Callable[[Mapping[str, Any]], str],
) -> int:
    """Measure a server under load, and write the result where the load's settings say."""
    from weft.core.results import check_output
    from weft.workload.plots import check_plots, plot_loads

    if load.samples and load.output is None:
        raise ConfigError("--samples are written into the file of --output FILE.", param="samples")
    check_output(load.output)
    check_plots(load.plots)
    result = measure()
    _told(show(result), result, load.output)
    if load.plots is not None:
        plot_loads(result, load.plots)
    return 0 if all(run["completed"] for run in result["runs"]) else 1


def _told(text: str, result: dict[str, Any], output: str | None) -> int:
    """Print a result, and write it into a file if one is named; the exit code."""
    from weft.core.results import write_json

    print(text)
    if output is not None:
        write_json(output, result)
    return 0


def _bench_throughput(options: dict[str, Any]) -> int:
    from weft.bench.report import format_throughput
    from weft.bench.throughput import bench_throughput
    from weft.core.results import check_output

    bench_settings, engine_settings = given_settings(options, ThroughputBench, EngineConfig)
    bench = ThroughputBench(**bench_settings)
    check_output(bench.output)
    EngineConfig.from_mapping(engine_settings)
    from weft.engine.llm import LLM

    with LLM(**engine_settings) as llm:
        result = bench_throughput(llm, llm.config.model, llm.served.vocab_size, bench)
    return _told(format_throughput(result), result, bench.output)


def _bench_interfere(options: dict[str, Any]) -> int:
    from weft.bench.interfere import bench_interfere, control_cpu
    from weft.bench.report import format_interfere
    from weft.core.results import check_output

    bench_settings, engine_settings = given_settings(options, InterfereBench, EngineConfig)
    bench = InterfereBench(**bench_settings)
    check_output(bench.output)
    config = EngineConfig.from_mapping(engine_settings)
    from weft.engine.driven import driven_engines

    with control_cpu() as cpu, driven_engines(config) as (loops, stamps):
        result = bench_interfere(loops, stamps, config.model, cpu, bench)
    return _told(format_interfere(result), result, bench.output)


def _bench_kernels(options: dict[str, Any]) -> int:
    from weft.bench.kernels import bench_kernels, format_kernels
    from weft.core.results import check_output

    (settings,) = given_settings(options, KernelsBench)
    bench = KernelsBench(**settings)
    check_output(bench.output)
    from weft.core.errors import KernelError
    from weft.engine.machine import cpu_name
    from weft.kernels import measure
    from weft.kernels.unavailable import KernelUnavailable

    try:
        result = bench_kernels(measure, bench, cpu_name())
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error
    return _told(format_kernels(result), result, bench.output)


BENCHES: Mapping[str, tuple[Mapping[str, Any], Callable[[dict[str, Any]], int], str]] = {
    "serve": (
        {"benchmark": ServeBench},
        _bench_serve,
        "put load on any server with OpenAI's API",
    ),
    "energy": (
        {"benchmark": EnergyBench, "load": ServeBench},
        _bench_energy,
        "CPU time and joules of a server for each token",
    ),
    "throughput": (
        {"benchmark": ThroughputBench, "engine": EngineConfig},
        _bench_throughput,
        "tokens a second of an engine",
    ),
    "interfere": (
        {"benchmark": InterfereBench, "engine": EngineConfig},
        _bench_interfere,
        "the loop with neighbours on its core",
    ),
    "kernels": (
        {"benchmark": KernelsBench},
        _bench_kernels,
        "each kernel against what the machine can do",
    ),
}
"""For each name the settings of its groups of flags, what runs it, and a line of help."""
