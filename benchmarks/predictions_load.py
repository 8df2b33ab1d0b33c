"""Predicted against published latencies under load: Blink's tables 6, B.1 and B.2, simulated.

    python benchmarks/predictions_load.py [--out benchmarks/results/predictions_load.json]

Needs the extra weft[sim]. weft's FCFS scheduler on the paper's H100, with step times by the kernels
measured with vLLM: Poisson arrivals at those of the paper's 13 rates at which Blink is not
saturated, 60 s each (section 6.1), of which counts what is complete by then. Latencies are
geometric means over the rates, as in the paper. Lengths are log-normal with the means of table B.2
(tokens/s by requests/s) and the spread of a file of chat lengths: the data set is not at hand.

How many sequences an engine computes at once is not published: 256 is a default of engines; "as
published" is tokens/s of table B.2 times mean TPOT of table B.1 (Little's law), so that it owes
its size to the figures and predicts what follows from it. Blink has no host in its steps; that of
the others costs what was measured of an older engine (``cost/roofline.py``). Nothing is fitted.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import report
from weft.sim.build import World, build
from weft.sim.options import SimOptions
from weft.sim.run import simulate

HERE = Path(__file__).parent
LENGTHS = HERE.parents[1] / "shared/data/lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
RATES = [1 + 31 / 12 * step for step in range(13)]
SECONDS = 60.0
SEEDS = 2
AT_ONCE = ("256", "as published")
LATENCIES = ("ttft_p50", "ttft_mean", "ttft_p99", "tpot_p50", "tpot_mean", "tpot_p99")


@cache
def spreads() -> tuple[float, float]:
    """Deviation over mean of the prompts and the answers of chats."""
    with LENGTHS.open() as file:
        rows = list(csv.DictReader(file))
    columns = [[int(row[f"num_{part}_tokens"]) for row in rows] for part in ("prefill", "decode")]
    given, asked = (statistics.pstdev(each) / statistics.fmean(each) for each in columns)
    return given, asked


def options_of(row: dict[str, Any], at_once: str) -> SimOptions:
    """The settings for a system of the paper; rate and requests are those of each run."""
    means = [row[f"{part}_tokens_per_s"] / row["requests_per_s"] for part in ("prefill", "decode")]
    prompt, answer = (
        f"lognormal:{mean:.1f}:{mean * spread:.1f}"
        for mean, spread in zip(means, spreads(), strict=True)
    )
    published = max(1, round(row["decode_tokens_per_s"] * row["tpot_mean_ms"] / 1e3))
    return SimOptions(
        model=row["model"],
        hardware="blink-h100",
        step_times="measured",
        dtype="fp16",
        host_overhead="none" if row["system"] == "blink" else "cpu-driven",
        max_num_seqs=256 if at_once == "256" else published,
        input_tokens=prompt,
        output_tokens=answer,
        rate="1",
        prefix_caching=False,
    )


def minute(world: World, rate: float) -> dict[str, float]:
    """A minute at a rate, some times over: latencies in ms, and requests/s completed."""
    ttft, tpot, completed = [], [], 0
    for seed in range(SEEDS):
        requests = round(1.2 * rate * SECONDS) + 20
        world = replace(
            world,
            options=replace(world.options, seed=seed),
            main=replace(world.main, seed=seed, requests=requests),
        )
        result = simulate(
            world.scheduler(), world.cost, world.traffic(rate), world.errors(),
            world.planned.classes,
        )  # fmt: skip
        record = result.record
        arrival, first = np.asarray(record.arrival_s), np.asarray(record.first_s)
        end, output = np.asarray(record.end_s), np.asarray(record.output, float)
        assert arrival[-1] > SECONDS
        done = end <= SECONDS
        completed += int(done.sum())
        ttft.append((first - arrival)[done])
        longer = done & (output > 1)
        tpot.append(((end - first) / np.maximum(output - 1, 1))[longer])
    found = {"served": completed / SEEDS / SECONDS}
    for name, seconds in (("ttft", np.concatenate(ttft)), ("tpot", np.concatenate(tpot))):
        found[f"{name}_mean"] = float(seconds.mean()) * 1e3
        for percentile in (50, 99):
            found[f"{name}_p{percentile}"] = float(np.percentile(seconds, percentile)) * 1e3
    return found


def predict(row: dict[str, Any], at_once: str) -> dict[str, float]:
    """The figures of tables 6 and B.1 for a system of the paper."""
    world = build(options_of(row, at_once))
    loads = [minute(world, rate) for rate in RATES if rate <= row["most"]]
    found = {name: statistics.geometric_mean(load[name] for load in loads) for name in LATENCIES}
    return found | {"requests_per_s": minute(world, row["most"])["served"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = json.loads((HERE / "published.json").read_text("utf-8"))["blink"]["rows"]
    predicted = []
    for row in rows:
        for at_once in AT_ONCE:
            found = predict(row, at_once)
            predicted.append({"model": row["model"], "system": row["system"], "at_once": at_once}
                             | {"predicted": found, "published": published(row)})  # fmt: skip
            print(
                row["model"],
                row["system"],
                at_once,
                {k: round(v, 1) for k, v in found.items()},
                flush=True,
            )
    table = summary(predicted)
    for line in table:
        print(
            f"{line['system']:8} {line['at_once']:13} {line['figure']:15} {line['figures']:3} "
            f"{line['median']:+9.0%} {line['lowest']:+9.0%} {line['highest']:+9.0%}"
        )
    if options.out is not None:
        report.save(options.out, seconds=SECONDS, seeds=SEEDS, summary=table, rows=predicted)


def published(row: dict[str, Any]) -> dict[str, float]:
    """The same figures as the paper prints them."""
    return {name: row[f"{name}_ms"] for name in LATENCIES} | {
        "requests_per_s": row["requests_per_s"]
    }


def summary(predicted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors (predicted / published - 1) of each figure, of Blink and of all others."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in predicted:
        system = "blink" if one["system"] == "blink" else "others"
        for name, value in one["predicted"].items():
            groups[system, one["at_once"], name].append(value / one["published"][name] - 1)
    return [
        {
            "system": system,
            "at_once": at_once,
            "figure": name,
            "figures": len(errors),
            "median": statistics.median(errors),
            "median_abs": statistics.median(map(abs, errors)),
            "lowest": min(errors),
            "highest": max(errors),
        }
        for (system, at_once, name), errors in groups.items()
    ]


if __name__ == "__main__":
    main()
