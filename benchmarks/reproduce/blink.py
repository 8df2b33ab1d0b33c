"""Blink's load sweep in form: 13 rates, tail latencies before saturation, a knee by two segments.

    python benchmarks/reproduce/blink.py [--out FOLDER] [--quick]

weft's FCFS scheduler on the paper's H100, once with the host's overhead of an engine that a CPU
drives and once without any, as a loop on the device would have it (Blink section 6, tables 6 and
B.1, figures 3, 7 and C.1). The data set of the paper is replaced by lengths with the means that its
tables give and the spread of a file of chat lengths.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
from reproduction import Reproduction, chat_spreads

from weft.sim.build import build
from weft.sim.options import SimOptions
from weft.sim.run import Simulated, simulate
from weft.workload.percentiles import percentiles_ms
from weft.workload.sweep import ATTAINED, Fit, fit_saturation

SECONDS = 60.0  # at each rate (section 6.1), longer where that is too short for
REQUESTS = 1000  # so many, since chance would tell more of them than the load
RATES = [1 + 31 / 12 * step for step in range(13)]  # from 1 to 32 (section 6.1)
KNEE_SHARE = 1.5  # loads beyond the paper's range go on to so many times of what is served at most


@dataclass(frozen=True)
class Paper:
    """What the paper says of a model: table 6, B.1, B.2, and the plateau of section 6.2.

    Attributes:
        saturated: requests/s at which Blink saturates; ``served`` of them are completed.
        decode, prefill: tokens/s there; over ``served`` they are the lengths of a request.
        host: the same engine driven by a CPU (TensorRT-LLM): TTFT and TPOT P99, served.
    """

    saturated: float
    served: float
    plateau: float
    ttft_p99: float
    tpot_p99: float
    tpot_p50: float
    tpot_mean: float
    decode: float
    prefill: float
    host: tuple[float, float, float]

    @property
    def at_once(self) -> int:
        """Sequences that decode at once at saturation, by Little's law: tokens/s times TPOT."""
        return round(self.decode * self.tpot_mean / 1e3)


MODELS = {
    "llama-3-8b": Paper(12, 11.87, 11.96, 653.8, 15.1, 7.5, 8.2, 3880, 595, (880.0, 17.7, 10.80)),
    "phi-4": Paper(7, 6.72, 6.86, 1109.4, 25.0, 13.4, 14.1, 2177, 465, (1453.8, 29.8, 6.42)),
    "qwen3-32b": Paper(2, 2.00, 2.13, 9481.3, 113.4, 29.7, 35.9, 537, 236, (9621.4, 115.2, 1.97)),
    "qwen3-30b-a3b": Paper(
        4, 4.85, 5.07, 1397.5, 35.5, 11.9, 13.8, 1437, 374, (4814.7, 65.8, 3.61)
    ),
}


@dataclass(frozen=True)
class Case:
    """How weft runs: with which overhead of the host, and with how many sequences at most.

    Attributes:
        as_paper: no more than the paper's engine had at once, instead of 256.
    """

    label: str
    overhead: str
    as_paper: bool = False


CASES = (
    Case("without host", "none"),
    Case("with host", "cpu-driven"),
    Case("without host, as many at once as the paper", "none", True),
)


@dataclass(frozen=True)
class Load:
    """What came of a rate: requests/s completed in its time, and percentiles in ms."""

    rate: float
    served: float
    ttft: dict[str, float]
    tpot: dict[str, float]


def one(model: str, rate: float, case: Case, times: float) -> Load:
    """A minute at a rate, or more at a low one."""
    paper, spread = MODELS[model], chat_spreads()
    means = (paper.prefill / paper.served, paper.decode / paper.served)
    words = [f"lognormal:{m:.1f}:{m * s:.1f}" for m, s in zip(means, spread, strict=True)]
    options = SimOptions(
        model=model,
        hardware="blink-h100",
        step_times="measured",
        dtype="fp16",
        host_overhead=case.overhead,
        max_num_seqs=MODELS[model].at_once if case.as_paper else 256,
        rate=f"{rate:.6f}",
        requests=round(times * max(REQUESTS, rate * SECONDS)),
        input_tokens=words[0],
        output_tokens=words[1],
        prefix_caching=False,
    )
    world = build(options)
    result = simulate(
        world.scheduler(), world.cost, world.traffic(rate), world.errors(), world.planned.classes
    )
    return load_of(result, rate)


def load_of(result: Simulated, rate: float) -> Load:
    """The figures of the requests that were completed before the last one came.

    Rates are to those that came, which differ from the offered rate by chance. A tenth of the time
    is left out at the start, in which nothing can be complete.
    """
    record = result.record
    end, first = np.asarray(record.end_s), np.asarray(record.first_s)
    arrival = np.asarray(record.arrival_s)
    start, until = 0.1 * arrival[-1], arrival[-1]
    done = end <= until
    served = ((end > start) & done).sum() / ((arrival > start) & (arrival <= until)).sum() * rate
    output = np.asarray(record.output, float)
    tpot = ((end - first) / np.maximum(output - 1, 1))[done & (output > 1)]
    ttft = percentiles_ms((first - arrival)[done])
    each = percentiles_ms(tpot)
    assert ttft is not None
    assert each is not None
    return Load(rate, float(served), ttft, each)


def sweep(model: str, case: Case, quick: bool) -> tuple[list[Load], Fit | None]:
    """The paper's 13 rates, and some more that go beyond what can be served."""
    times = 0.25 if quick else 1.0
    loads = [one(model, rate, case, times) for rate in RATES[:: 4 if quick else 1]]
    flood = one(model, 256.0, case, times)
    for step in range(1, 8, 2 if quick else 1):
        rate = KNEE_SHARE * flood.served * step / 7
        if rate > loads[-1].rate:
            loads.append(one(model, rate, case, times))
    fit = fit_saturation([load.rate for load in loads], [load.served for load in loads])
    return loads, fit


def geometric(loads: list[Load], metric: str, percentile: str, upto: float) -> float:
    """The mean over the loads before saturation, as tables 6 and B.1 take it."""
    values = [getattr(load, metric)[percentile] for load in loads if load.rate <= upto + 1e-9]
    return statistics.geometric_mean(values)


def serviceable(loads: list[Load]) -> float:
    """The highest rate of which at least 95 % was completed (appendix C)."""
    kept = 0.0
    for load in loads:
        if load.served < ATTAINED * load.rate:
            break
        kept = load.rate
    return kept


def main() -> None:
    found = Reproduction.start("blink", __doc__.splitlines()[0])
    rows, curves, drawn = [], {}, {}
    models = ["llama-3-8b"] if found.quick else list(MODELS)
    offered = "offered, requests/s"
    for model in models:
        paper = MODELS[model]
        for case in CASES:
            loads, fit = sweep(model, case, found.quick)
            rows.append(
                [
                    model,
                    case.label,
                    fit.knee if fit else float("nan"),
                    fit.plateau if fit else float("nan"),
                    serviceable(loads),
                    geometric(loads, "ttft", "p99", paper.saturated),
                    geometric(loads, "tpot", "p99", paper.saturated),
                    geometric(loads, "tpot", "p50", paper.saturated),
                ]
            )
            points = ([load.rate for load in loads], [load.served for load in loads])
            if not case.as_paper:
                curves[f"{model}, {case.label}"] = points
            if model == "llama-3-8b":
                drawn[case.label] = loads
        compare(found, model, paper, *rows[-3:])
    found.table(
        "weft, by model: rates in requests/s, latencies in ms over the paper's range of loads",
        ["model", "host", "knee", "plateau", "serviceable", "TTFT P99", "TPOT P99", "TPOT P50"],
        rows,
    )
    found.curves("throughput", "Completed over offered", offered, "requests/s", curves)
    for metric in ("ttft", "tpot"):
        found.curves(
            metric,
            f"llama-3-8b on H100: {metric.upper()}",
            offered,
            "ms",
            {
                f"{percentile.upper()}, {label}": (
                    [load.rate for load in loads],
                    [getattr(load, metric)[percentile] for load in loads],
                )
                for label, loads in list(drawn.items())[:2]
                for percentile in ("p50", "p99", "p99.9")
            },
            yscale="log",
        )
    found.finish(seconds_a_rate=SECONDS, lengths="lognormal, means of table B.2 (synthetic)")


def compare(
    found: Reproduction,
    model: str,
    paper: Paper,
    without: list[float],
    host: list[float],
    as_many: list[float],
) -> None:
    """The paper's figures beside weft's."""
    for index, what, figure, unit, where in (
        (2, "saturates at", paper.saturated, "req/s", "section 6.2"),
        (3, "plateau", paper.plateau, "req/s", "section 6.2"),
        (5, "TTFT P99", paper.ttft_p99, "ms", "table 6"),
        (6, "TPOT P99", paper.tpot_p99, "ms", "table 6"),
        (7, "TPOT P50", paper.tpot_p50, "ms", "table B.1"),
    ):
        found.compare(f"{model}: {what}, without host", figure, without[index], unit, where)
    found.compare(
        f"{model}: saturates at, {paper.at_once} at once", paper.saturated, as_many[2], "req/s"
    )
    ratios = [
        (5, "TTFT P99 with host / without", paper.host[0] / paper.ttft_p99),
        (6, "TPOT P99 with host / without", paper.host[1] / paper.tpot_p99),
    ]
    for index, what, ratio in ratios:
        found.compare(f"{model}: {what}", ratio, host[index] / without[index], "", "table 6")
    gain = without[3] / host[3]
    paper_gain = paper.plateau / (paper.host[2] / paper.served * paper.plateau)
    found.compare(f"{model}: plateau without host / with", paper_gain, gain, "", "table 6")


if __name__ == "__main__":
    main()
