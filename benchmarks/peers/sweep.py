"""Blink's load sweep over HTTP: weft, vLLM's CPU build and llama-server, with equal threads.

    python benchmarks/peers/sweep.py [--engines weft,vllm,llamacpp] [--points 13] [--rates 1,2,4]
        [--seconds 30] [--rounds 1] [--envs FOLDER] [--plots FOLDER] [--out FILE]

Installs peers below ``--envs``, as run.py does. ``--out`` is written anew after each rate.

All servers run at once, on checkpoint A (see ``models.py``), and only one of them has requests: at
each rate they take turns. What the others use meanwhile is in the result. Without ``--rates`` the
rates go in even steps up to 1.5 times what the best engine completes with clients that wait for
their answers, twice as many as it computes at once. Requests arrive by a Poisson process, have
random token ids, and ignore the end token; figures are those of ``weft bench serve``.

A load is serviceable if at least 95% of its requests complete in time (Blink, section 6): before
the time of sending is over, or as long after it as two of the engine's answers take at the lowest
rate.
The client runs on the same cores, and its share is in the result.

OpenVINO Model Server is not among them: PyPI, Debian and npm have its client and the runtime only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import install
import servers
from install import InstallError, Setup
from run import machine
from serving import running

import report
from weft.bench.options import ServeBench
from weft.bench.processes import ServerProcesses, cpu_used
from weft.bench.serve import bench_serve
from weft.core.errors import WeftError
from weft.workload.arrivals import parse_rates
from weft.workload.plots import check_plots, plot_compared
from weft.workload.sweep import FEWEST_RATES, fit_saturation

ENGINES = ("weft", "vllm", "llamacpp")
BEYOND = 1.5  # times the knee that the last rate is
COMPLETED = 0.95  # of the requests of a serviceable load
SLACK_S = 120.0  # after which a request that has no answer yet has failed
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


@dataclass
class Served:
    """A running server, and what it was found to do at each rate, in each round."""

    url: str
    pid: int
    capacity: float = 0.0  # requests a second that it completes when it always has enough
    runs: dict[float, list[dict[str, Any]]] = field(default_factory=dict)

    def load(self, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
        settings = {
            "url": self.url,
            "model": "model",
            "duration_s": options.seconds,
            "timeout_s": options.seconds + SLACK_S,
            "prompts": "ids",
            "token_ids": 31000,
            "input_tokens": options.input_tokens,
            "output_tokens": options.output_tokens,
            "server_pids": (self.pid,),
            "samples": True,
        }
        (run,) = bench_serve(ServeBench(**{**settings, **more}))["runs"]
        return dict(run)


def saturate(served: Served, options: argparse.Namespace) -> None:
    """Find out what it completes at most."""
    run = served.load(options, arrivals="closed", clients=(2 * servers.ROWS,))
    served.capacity = run["requests_per_s"]


def measure(
    served: Mapping[str, Served], name: str, rate: float, number: int, options: argparse.Namespace
) -> None:
    """One engine at one rate, while the others have nothing to do."""
    others = [ServerProcesses("", 0, (one.pid,)) for key, one in served.items() if key != name]
    before = [processes.read() for processes in others]
    run = served[name].load(options, rate=f"{rate:.6g}", seed=number)
    used = [
        cpu_used(start, processes.read(), 0)["cpu_s"]
        for processes, start in zip(others, before, strict=True)
    ]
    run["others_cores"] = sum(used) / run["seconds"]
    grace = 2e-3 * _lowest(served[name], run)["e2e_ms"]["p50"] if run["e2e_ms"] else 0.0
    samples, end = run.pop("samples"), options.seconds + grace
    kept = sum(one["failure"] is None and one["end_s"] <= end for one in samples)
    run["completed_in_time"] = kept / max(1, len(samples))
    served[name].runs.setdefault(rate, []).append(run)


def _lowest(one: Served, run: dict[str, Any]) -> dict[str, Any]:
    """The first run at the lowest rate, of those with an answer; the given one if there is none."""
    known = [each for rate in sorted(one.runs) for each in one.runs[rate] if each["e2e_ms"]]
    return known[0] if known else run


def combined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A rate's figures: medians over its rounds."""
    found: dict[str, Any] = {"load": runs[0]["load"], "unit": runs[0]["unit"]}
    names = ("requests", "completed", "requests_per_s", "output_tokens_per_s")
    for name in (*names, "completed_in_time", "others_cores"):
        found[name] = statistics.median(run[name] for run in runs)
    for key in LATENCIES:
        kept = [run[key] for run in runs if run[key] is not None]
        found[key] = (
            {part: statistics.median(one[part] for one in kept) for part in kept[0]}
            if kept
            else None
        )
    for part in ("client", "server"):
        for name in ("cpu_share", "cores", "cpu_s_per_output_token"):
            values = [run[part][name] for run in runs if run[part].get(name) is not None]
            if values:
                found[f"{part}_{name}"] = statistics.median(values)
    return found


def result_of(one: Served) -> dict[str, Any]:
    """The sweep of an engine as ``weft bench serve`` gives it, and its serviceable load."""
    runs = [combined(one.runs[rate]) for rate in sorted(one.runs)]
    serviceable = None
    for run in runs:
        if run["completed_in_time"] < COMPLETED:
            break
        serviceable = run["load"]
    found: dict[str, Any] = {"capacity": one.capacity, "serviceable_load": serviceable}
    if len(runs) >= FEWEST_RATES:
        fit = fit_saturation([r["load"] for r in runs], [r["requests_per_s"] for r in runs])
        found["knee"] = None if fit is None else fit.knee
    return {**found, "runs": runs, "rounds": {f"{rate:g}": each for rate, each in one.runs.items()}}


def rates_of(options: argparse.Namespace, served: Mapping[str, Served]) -> list[float]:
    if options.rates:
        return parse_rates(options.rates)
    most = BEYOND * max(one.capacity for one in served.values())
    return [most * (step + 1) / options.points for step in range(options.points)]


def table(results: Mapping[str, dict[str, Any]]) -> str:
    lines = [
        f"{'engine':>10}{'req/s':>8}{'in time':>9}{'tok/s':>8}"
        + "".join(f"{f'{name} {part}':>12}" for name in ("TTFT", "TPOT") for part in PARTS)
        + f"{'CPU ms/tok':>12}{'client':>8}"
    ]
    for name, result in results.items():
        for run in result["runs"]:
            lines.append(
                f"{name:>10}{run['load']:>8.2f}{run['completed_in_time']:>9.1%}"
                f"{run['output_tokens_per_s']:>8.0f}"
                + "".join(
                    f"{run[key][part]:>12.1f}" if run[key] else f"{'-':>12}"
                    for key in ("ttft_ms", "tpot_ms")
                    for part in PARTS
                )
                + f"{1e3 * run.get('server_cpu_s_per_output_token', float('nan')):>12.2f}"
                f"{run['client_cpu_share']:>8.0%}"
            )
    for name, result in results.items():
        load, knee = result["serviceable_load"], result.get("knee")
        lines.append(
            f"{name}: completes {result['capacity']:.2f} requests/s at most; serviceable up to "
            f"{'none' if load is None else f'{load:.2f}'}"
            + ("" if knee is None else f"; saturates at {knee:.2f}")
        )
    return "\n".join(lines)


PARTS = ("p50", "p90", "p99", "p99.9")


def start(
    stack: ExitStack, setup: Setup, names: list[str], folder: Path
) -> tuple[dict[str, Served], dict[str, str]]:
    """The servers that run, and why the others do not."""
    makers: dict[str, Callable[[], servers.Engine]] = {
        "weft": lambda: servers.weft(setup, folder, "fcfs"),
        "vllm": lambda: servers.vllm(setup),
        "llamacpp": lambda: servers.llamacpp(setup),
    }
    served, failures = {}, {}
    for name in names:
        try:
            engine = makers[name]()
            log = setup.envs / "logs" / f"sweep {name}.log"
            context = running(engine.command, log, engine.environment)
            process, port = stack.enter_context(context)
            served[name] = Served(f"http://127.0.0.1:{port}", process.pid)
        except InstallError as error:
            failures[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)
    return served, failures


def keep(
    options: argparse.Namespace,
    served: Mapping[str, Served],
    failures: Mapping[str, str],
    rates: list[float],
) -> dict[str, dict[str, Any]]:
    """The results so far, which are written where the options say."""
    results = {name: result_of(one) for name, one in served.items()}
    if options.out:
        facts = {"threads": options.threads, "seconds": options.seconds, "rates": rates}
        report.save(options.out, machine=machine(), **facts, results=results, failures=failures)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "weft-peers")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--points", type=int, default=13, help="rates")
    parser.add_argument("--rates", default="", help="requests a second, instead of those")
    parser.add_argument("--seconds", type=float, default=30.0, help="of sending, at each rate")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--input-tokens", default="128")
    parser.add_argument("--output-tokens", default="128")
    parser.add_argument("--plots", help="folder for the plot")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.engines.split(",")
    if unknown := sorted(set(names) - set(ENGINES)):
        raise SystemExit(f"unknown engines {', '.join(unknown)}; they are {', '.join(ENGINES)}")
    if min(options.points, options.rounds, options.seconds) < 1:
        raise SystemExit("--points, --rounds and --seconds must be at least 1")
    setup = Setup(options.envs.absolute(), options.threads)
    try:
        check_plots(options.plots)
        if options.rates:
            parse_rates(options.rates)
        install.make_models(setup)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            served, failures = start(stack, setup, names, Path(folder))
            if not served:
                raise SystemExit("no server runs")
            for one in served.values():
                saturate(one, options)
            rates = rates_of(options, served)
            for number in range(options.rounds):
                for place, rate in enumerate(rates):
                    turn = (place + number) % len(served)
                    order = [*served][turn:] + [*served][:turn]
                    for name in order:
                        measure(served, name, rate, number, options)
                        print(f"{name} at {rate:.2f}: done", file=sys.stderr)
                    keep(options, served, failures, rates)
    except (InstallError, WeftError) as error:
        raise SystemExit(str(error)) from None
    results = keep(options, served, failures, rates)
    print(table(results))
    for name, problem in failures.items():
        print(f"{name}: {problem}")
    if options.plots:
        print(f"plot: {plot_compared(results, options.plots)}")


if __name__ == "__main__":
    main()
