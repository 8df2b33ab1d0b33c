"""Plots of loads with matplotlib, an extra of weft[bench] and weft[sim]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.core.errors import ConfigError
from weft.core.results import check_folder
from weft.workload.tables import NAMES

SHOWN = ("p50", "p90", "p99", "p99.9")
_CPU = "server_cpu_s_per_output_token"


def check_plots(folder: str | None, extra: str = "bench", param: str = "plots") -> None:
    """Find out before the work that plots can be made, by an extra's matplotlib.

    Raises:
        ConfigError: matplotlib is missing, or the folder cannot be made.
    """
    if folder is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"Plots need matplotlib; install it by: pip install 'weft[{extra}]'", param=param
        ) from None
    check_folder(folder, param)


def plot_loads(result: Mapping[str, Any], folder: str) -> list[Path]:
    """Write the plots of one or several loads and return their paths."""
    runs = result["runs"]
    made = [_latencies(runs, Path(folder))]
    if len(runs) > 1:
        made.append(_throughput(result, Path(folder)))
    return made


def _latencies(runs: list[Mapping[str, Any]], folder: Path) -> Path:
    """Each latency's percentiles over the load; of a single load as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for index, (key, name) in enumerate(NAMES.items(), 1):
        axes = figure.add_subplot(2, 2, index)
        kept = [run for run in runs if run[key] is not None]
        for percentile in SHOWN:
            values = [run[key][percentile] for run in kept]
            if len(runs) == 1:
                axes.bar([percentile], values, color="C0")
            else:
                axes.plot([run["load"] for run in kept], values, "o-", label=percentile)
        axes.set(title=name, ylabel="ms", xlabel="" if len(runs) == 1 else runs[0]["unit"])
        if len(runs) > 1 and kept:
            axes.set_yscale("symlog", linthresh=1.0)  # a time may be 0
            axes.legend()
    return save(figure, folder / "latencies.png")


def _throughput(result: Mapping[str, Any], folder: Path) -> Path:
    """Plot measured over offered throughput, the fit, and the goodput."""
    from matplotlib.figure import Figure

    runs = result["runs"]
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    loads = [run["load"] for run in runs]
    axes.plot(loads, [run["requests_per_s"] for run in runs], "o", label="completed")
    if "goodput_per_s" in runs[0]:
        axes.plot(loads, [run["goodput_per_s"] for run in runs], "x-", label="goodput")
    if (fit := result.get("saturation")) is not None:
        knee, plateau, last = fit["knee"], fit["plateau"], max(loads)
        end = plateau + fit["slope_after"] * (last - knee)
        axes.plot([0, knee, last], [0, plateau, end], "--", label=f"saturation at {knee:.2f}")
    axes.set(xlabel=f"offered, {runs[0]['unit']}", ylabel="requests/s")
    axes.legend()
    return save(figure, folder / "throughput.png")


def plot_compared(results: Mapping[str, Mapping[str, Any]], folder: str) -> Path:
    """Plot the sweeps of several servers beside each other, by their names; return the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    for index, key in enumerate(("ttft_ms", "tpot_ms"), 1):
        axes = figure.add_subplot(2, 2, index)
        for number, (name, result) in enumerate(results.items()):
            kept = [run for run in result["runs"] if run[key] is not None]
            for percentile, style in (("p50", "-"), ("p99", "--"), ("p99.9", ":")):
                axes.plot(
                    [run["load"] for run in kept],
                    [run[key][percentile] for run in kept],
                    style,
                    color=f"C{number}",
                    label=f"{name} {percentile}",
                )
        axes.set(title=NAMES[key], ylabel="ms", yscale="log")
        axes.legend(fontsize="small")
    lower = (("requests_per_s", "completed, requests/s"), (_CPU, "CPU seconds an output token"))
    for index, (key, title) in enumerate(lower, 3):
        axes = figure.add_subplot(2, 2, index)
        for number, (name, result) in enumerate(results.items()):
            kept = [run for run in result["runs"] if run.get(key) is not None]
            points = [run["load"] for run in kept], [run[key] for run in kept]
            axes.plot(*points, "o-", color=f"C{number}", label=name)
        axes.set(title=title, xlabel="offered, requests/s", ylim=(0, None))
        axes.legend(fontsize="small")
    return save(figure, Path(folder) / "compared.png")


def save(figure: Any, path: Path) -> Path:
    """Write a figure of matplotlib and return its path."""
    figure.savefig(path, dpi=120)
    return path
