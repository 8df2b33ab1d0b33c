"""What speculation costs where it cannot help, and what it gives where text repeats.

    python benchmarks/speculation.py [--out benchmarks/results/speculation.json]

One engine with the built-in model; runs with and without drafts interleaved, the order turned from
pair to pair. Given is the median of time with / time without over the pairs, with the 95% interval
of the median by order statistics, which bursts of other load do not widen. Text that cannot help:
tokens drawn at a high temperature. Text that repeats: a bias makes the output go round in a few
tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import report
from builtin import Counter, prompts
from weft.core.config import EngineConfig
from weft.core.types import Request, SamplingParams
from weft.engine.build import Engine, build_engine
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock

NEW_TOKENS, DRAFT = 128, 8
FREE = SamplingParams(temperature=1.5, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0)
ROUND = dict.fromkeys(range(300, 304), 40.0)
REPEATING = replace(FREE, temperature=0.0, logit_bias=ROUND)


def run(engine: Engine, count: int, params: SamplingParams, salt: int) -> float:
    """Seconds to generate from so many prompts at once."""
    inbox = Counter()
    vocab_size = engine.model.spec.vocab_size
    inbox.requests = [
        Request(number, prompt, replace(params, seed=salt * 100 + number).with_defaults({}))
        for number, prompt in enumerate(prompts(count, vocab_size, salt))
    ]
    loop = EngineLoop(engine.scheduler, engine.executor, inbox, WallClock())
    started = time.perf_counter()
    loop.run_until_idle()
    seconds = time.perf_counter() - started
    assert inbox.tokens == count * NEW_TOKENS
    return seconds


def compare(engine: Engine, count: int, params: SamplingParams, pairs: int) -> dict[str, Any]:
    totals = engine.scheduler.totals
    ratios: list[float] = []
    before = totals.drafted_tokens, totals.accepted_tokens
    for pair in range(pairs + 1):
        taken = {}
        for wish in (0, DRAFT) if pair % 2 else (DRAFT, 0):
            taken[wish] = run(engine, count, replace(params, speculation=wish), pair)
        if pair:  # the first pair warms up
            ratios.append(taken[DRAFT] / taken[0])
    return {
        "sequences": count,
        "median_ratio": statistics.median(ratios),
        "interval": interval_of_median(ratios),
        "drafted": totals.drafted_tokens - before[0],
        "accepted": totals.accepted_tokens - before[1],
        "ratios": ratios,
    }


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Order statistics that hold the median between them with at least 95%."""
    n = len(values)
    below, rank = 0.0, 0
    while below + math.comb(n, rank) / 2**n <= 0.025:
        below += math.comb(n, rank) / 2**n
        rank += 1
    ordered = sorted(values)
    return ordered[rank - 1], ordered[n - rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    engine = build_engine(
        EngineConfig(threads=options.threads, prefix_caching=False, kv_memory=2**28)
    )
    rows = []
    print(f"{'text':>10} {'seqs':>5} {'with / without':>15} {'95% interval':>18} {'accepted':>12}")
    for text, params in (("no help", FREE), ("repeating", REPEATING)):
        for count in (1, 8):
            row = {"text": text, **compare(engine, count, params, options.pairs)}
            rows.append(row)
            low, high = row["interval"]
            share = f"{row['accepted']}/{row['drafted']}"
            interval = f"{low:.3f}-{high:.3f}"
            print(f"{text:>10} {count:>5} {row['median_ratio']:>15.3f} {interval:>18} {share:>12}")
    engine.executor.close()
    if options.out:
        report.save(options.out, torch=torch.__version__, draft=DRAFT, rows=rows)


if __name__ == "__main__":
    main()
