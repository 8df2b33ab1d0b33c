"""Cost of speculation where it cannot help, and its gain where text repeats.

    python benchmarks/speculation.py [--out benchmarks/results/speculation.json]

One engine with the built-in model; runs with and without drafts interleaved, the order turned from
pair to pair. Given is the median of time with / time without over the pairs, with the 95% interval
of the median by order statistics, which bursts of other load do not widen. Text that cannot help:
tokens drawn at a high temperature. Text that misleads: a bias leaves eight tokens to draw from, so
that the last ones have often stood there before, but followed by others. Text that repeats: a bias
makes the output go round in a few tokens.

Where no draft is made, as in text that cannot help, the model computes the very same steps and all
that is left is planning. So planning is compared by itself, too, on tokens drawn at random; its
difference is far smaller than the noise of a model's steps.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import report
from builtin import Counter, prompts
from weft.core.config import EngineConfig
from weft.core.plan import StepResult
from weft.core.types import Request, SamplingParams
from weft.engine.build import Engine, build_engine
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.kv.cache import GroupSpec, KVCache
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits

NEW_TOKENS, DRAFT = 128, 8
PROMPT_TOKENS, BLOCK_SIZE, VOCAB_SIZE = 64, 16, 4096  # where only planning is measured
FREE = SamplingParams(temperature=1.5, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0)
ROUND = dict.fromkeys(range(300, 304), 40.0)
MISLEADING = replace(FREE, logit_bias=dict.fromkeys(range(300, 308), 60.0), temperature=3.0)
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
    steps: list[float] = []
    before = totals.drafted_tokens, totals.accepted_tokens
    for pair in range(pairs + 1):
        taken = {}
        for wish in (0, DRAFT) if pair % 2 else (DRAFT, 0):
            taken[wish] = run(engine, count, replace(params, speculation=wish), pair)
        if pair:  # the first pair warms up
            ratios.append(taken[DRAFT] / taken[0])
            steps.append(taken[0] / NEW_TOKENS * 1e6)
    return {
        "sequences": count,
        "median_ratio": statistics.median(ratios),
        "interval": interval_of_median(ratios),
        "drafted": totals.drafted_tokens - before[0],
        "accepted": totals.accepted_tokens - before[1],
        "step_us": statistics.median(steps),
        "ratios": ratios,
    }


def planning_us(count: int, speculation: int, salt: int) -> float:
    """Microseconds a step of planning and committing, every token drawn at random."""
    length = PROMPT_TOKENS + NEW_TOKENS
    cache = KVCache([GroupSpec("full", BLOCK_SIZE, length // BLOCK_SIZE * count)])
    scheduler = fcfs(cache, Limits(count, length * count, length, speculation))
    draw = random.Random(salt)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for number in range(count):
        prompt = tuple(draw.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS))
        scheduler.add(Request(number, prompt, sampling))
    ids = tuple(range(count))
    seconds = 0.0
    while True:
        started = time.perf_counter()
        plan = scheduler.plan(0.0)
        seconds += time.perf_counter() - started
        if plan is None:
            assert scheduler.totals.output_tokens == count * NEW_TOKENS
            return seconds / NEW_TOKENS * 1e6
        tokens = tuple(draw.randrange(VOCAB_SIZE) for _ in ids)
        started = time.perf_counter()
        scheduler.commit(StepResult(plan.step_id, ids, tokens))
        seconds += time.perf_counter() - started


def compare_planning(count: int, pairs: int) -> dict[str, Any]:
    extra = []
    for pair in range(pairs):
        taken = {}
        for wish in (0, DRAFT) if pair % 2 else (DRAFT, 0):
            taken[wish] = planning_us(count, wish, pair)
        extra.append(taken[DRAFT] - taken[0])
    low, high = interval_of_median(extra)
    return {"planning_us": statistics.median(extra), "planning_interval_us": (low, high)}


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
    for text, params in (("no help", FREE), ("misleading", MISLEADING), ("repeating", REPEATING)):
        for count in (1, 8):
            row = {"text": text, **compare(engine, count, params, options.pairs)}
            if text == "no help":
                row |= compare_planning(count, options.pairs)
            rows.append(row)
            low, high = row["interval"]
            share = f"{row['accepted']}/{row['drafted']}"
            interval = f"{low:.3f}-{high:.3f}"
            print(f"{text:>10} {count:>5} {row['median_ratio']:>15.3f} {interval:>18} {share:>12}")
            if text == "no help":
                low, high = row["planning_interval_us"]
                print(f"{'':>10} planning: {low:.1f} to {high:.1f} of {row['step_us']:.0f} us more")
    engine.executor.close()
    if options.out:
        report.save(options.out, torch=torch.__version__, draft=DRAFT, rows=rows)


if __name__ == "__main__":
    main()
