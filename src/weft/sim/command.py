"""``weft sim``: all its runs, from settings to results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.core.results import check_output, write_json
from weft.sim.build import World, build
from weft.sim.chrome import write_timeline
from weft.sim.figures import summarise
from weft.sim.options import SimOptions
from weft.sim.plots import plot_run
from weft.sim.run import Simulated, simulate
from weft.sim.usage import Machine
from weft.workload.plots import check_plots, plot_loads
from weft.workload.sweep import FEWEST_RATES, fit_saturation, serviceable


def run_sim(options: SimOptions) -> dict[str, Any]:
    """Simulate every load, write what is to be written, and return the result.

    Raises:
        WeftError: settings, model, hardware, trace or targets are wrong.
    """
    check_output(options.chrome_trace)
    check_plots(options.out, "sim", "out")
    world = build(options)
    rates: list[float | None] = [*options.rates()] or [None]
    runs = []
    for rate in rates:
        load = world.main.rate if rate is None else rate
        result = _one(world, rate, load)
        runs.append(_figures(world, result, load))
        if options.chrome_trace is not None:
            write_timeline(_numbered(options.chrome_trace, load, len(rates)), result)
    found = {
        "command": "weft sim",
        "options": asdict(options),
        "model": world.shape.name,
        "devices": world.hardware.name + (f" x {options.tp}" if options.tp > 1 else ""),
        "scheduler": options.scheduler,
        "kv_tokens": world.planned.groups[0].num_blocks * options.block_size,
        "runs": runs,
        **_of_the_sweep(runs, options.service_class),
    }
    if options.out is not None:
        _write(found, Path(options.out))
    return found


def _one(world: World, rate: float | None, load: float) -> Simulated:
    with _progress(world, load) as done:
        return simulate(
            world.scheduler(),
            world.cost,
            world.traffic(rate),
            world.errors(),
            world.planned.classes,
            done,
            state_tokens=world.sheet.state_tokens,
        )


@contextmanager
def _progress(world: World, load: float) -> Iterator[Any]:
    from tqdm import tqdm

    arrivals = world.main.arrivals
    total = world.main.requests or (None if arrivals is None else len(arrivals))
    hidden = not sys.stderr.isatty()
    with tqdm(total=total, desc=f"{load:g} requests/s", unit="req", disable=hidden) as bar:
        yield lambda _: bar.update()


def _figures(world: World, result: Simulated, load: float) -> dict[str, Any]:
    machine = Machine(
        world.shape, world.hardware, world.sheet.dtype, world.sheet.kv_dtype, world.options.tp
    )
    workload = world.main.workload
    figures = summarise(
        result, world.planned.classes, machine, workload.targets if workload else ()
    )
    record = result.record
    failures = {
        code: {"count": count, "message": record.examples[code]}
        for code, count in record.failures.items()
    }
    halves = {"split_steps": result.totals.split_steps} if world.planned.halves else {}
    return {"load": load, "unit": "requests/s", **figures, **halves, "failures": failures}


def _of_the_sweep(runs: list[dict[str, Any]], service_class: str) -> dict[str, Any]:
    """Saturation by what the class was given whose rate is swept."""
    found: dict[str, Any] = {}
    if len(runs) >= FEWEST_RATES:
        given = [run["classes"][service_class]["requests_per_s"] for run in runs]
        fit = fit_saturation([run["load"] for run in runs], given)
        found["saturation"] = None if fit is None else asdict(fit)
    if len(runs) > 1 and "attainment" in runs[0]:
        found["serviceable_load"] = serviceable(runs)
    return found


def _write(found: dict[str, Any], folder: Path) -> None:
    write_json(folder / "result.json", found)
    plot_loads(found, str(folder))
    for run in found["runs"]:
        plot_run(run, Path(_numbered(str(folder / "run.png"), run["load"], len(found["runs"]))))


def _numbered(path: str, load: float, runs: int) -> str:
    """The path, with the load before its ending if there are several runs."""
    file = Path(path)
    return path if runs == 1 else str(file.with_name(f"{file.stem}-{load:g}{file.suffix}"))
