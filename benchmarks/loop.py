"""Cost of planning: ``plan`` + ``commit`` of a scheduler on a null executor, no model.

    python benchmarks/loop.py [--scheduler slo|load-aware] [--out benchmarks/results/loop.json]

Every running sequence generates one token a step; blocks fill and are hashed as in real use. With
scheduler slo every other sequence is best effort, more of them wait than ever fit, and times are
predicted by the roofline of a Llama-3.1-8B on an H100. With scheduler load-aware half of the
sequences find no room on the device, a g5.16xlarge with ten times the arithmetic and a hundred
times the host, so that no sequence has to wait and every step weighs what the host can add. Prints
medians in microseconds, and as a ratio to a fixed pure-Python workload timed in the same
run, so that runs on different or busy machines can be compared. Three of four steps are also
written into the log of a ring, counted by class: for each time without, that with it, and that of
a step whose rows are not quite those of the step before.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import replace
from pathlib import Path

import report
from weft.core.plan import StepPlan, StepResult
from weft.core.types import DEFAULT_CLASSES, Request, SamplingParams
from weft.cost.hardware import hardware
from weft.cost.roofline import Roofline
from weft.cost.shape import model_shape
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.tiers import TieredCache
from weft.ring import _native
from weft.ring.codec import SAMPLING
from weft.ring.segment import create_ring
from weft.ring.step_log import StepWriter
from weft.sched.registry import fcfs, load_aware, slo
from weft.sched.resources import TargetPolicy
from weft.sched.scheduler import Limits, Scheduler

GOALS_US = {"fcfs": {256: 300.0, 1024: 1000.0}, "slo": {512: 1000.0}, "load-aware": {512: 3000.0}}
PROMPT_TOKENS, BLOCK_SIZE = 512, 16
STEP_S = 0.01  # of steps in the log
TURNS = 4  # without the log; with it, of rows that have changed, that are the same, and have again
CLASSES = [row.name for row in DEFAULT_CLASSES]


def scheduler_with(name: str, sequences: int, steps: int) -> Scheduler:
    """A scheduler with so many requests queued, no two alike."""
    length = PROMPT_TOKENS + steps + 8
    blocks = (length // BLOCK_SIZE + 2) * sequences
    cache = KVCache([GroupSpec("full", BLOCK_SIZE, blocks)])
    limits = Limits(sequences, max(8192, sequences), length)
    if name == "load-aware":
        group = GroupSpec("full", BLOCK_SIZE, max(blocks // 2, length // BLOCK_SIZE + 2))
        machine = hardware("g5.16xlarge")
        assert machine.host is not None
        host = replace(
            machine.host, bandwidth=100 * machine.host.bandwidth, flops=100 * machine.host.flops
        )
        flops = {dtype: 10 * peak for dtype, peak in machine.flops.items()}
        cost = Roofline(model_shape("llama-3.1-8b"), replace(machine, host=host, flops=flops))
        scheduler: Scheduler = load_aware(TieredCache([group], (blocks,)), limits, cost)
    elif name == "slo":
        cost = Roofline(model_shape("llama-3.1-8b"), hardware("h100"))
        scheduler = slo(cache, limits, cost, targets=TargetPolicy("off"))
    else:
        scheduler = fcfs(cache, limits)
    mixed = name == "slo"
    for number in range(2 * sequences if mixed else sequences):
        prompt = tuple((number * 31 + i * 7) % 50_000 for i in range(PROMPT_TOKENS - number % 64))
        sampling = SamplingParams(max_tokens=length - len(prompt) - 1)
        service_class = "batch" if mixed and (number % 2 or number >= sequences) else "interactive"
        scheduler.add(Request(number, prompt, sampling, service_class=service_class))
    return scheduler


def answer(plan: StepPlan, ids: dict[int, int]) -> StepResult:
    """What an executor would return: a token for every row that samples."""
    for add in plan.add:
        ids[add.row] = add.sequence_id
    sampled = tuple(
        ids[row]
        for batch in plan.batches
        for row, samples in zip(batch.rows, batch.samples, strict=True)
        if samples
    )
    return StepResult(plan.step_id, sampled, tuple((i * 13 + 5) % 50_000 for i in sampled))


def measure(name: str, sequences: int, steps: int) -> dict[str, float]:
    """Median microseconds of plan and commit over steps in which every sequence decodes.

    With scheduler load-aware: over those in which every sequence runs, in one tier or the other.
    """
    least = 1 if name == "load-aware" else sequences
    scheduler = scheduler_with(name, sequences, TURNS * 2 * steps)
    ring = create_ring(4, 1 << 16)
    log = StepWriter(_native.Engine([(ring.memory, ring.wake)], SAMPLING), CLASSES)
    ids: dict[int, int] = {}
    plans: list[float] = []
    commits: list[float] = []
    logged: dict[bool, list[float]] = {True: [], False: []}  # by whether all rows are the same
    now = 0.0
    while len(plans) < steps:
        started = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = answer(plan, ids)
        runs = len(scheduler.sequences.running) == sequences
        counts = runs and plan.num_tokens == len(result.tokens) >= least
        resumed = time.perf_counter()
        if (turn := plan.step_id % TURNS) != 0:
            now += STEP_S
            outputs = scheduler.commit(result, now)
            assert outputs.step is not None
            step = outputs.step
            if turn == 3:  # as if the first sequence were not there
                step = step._replace(sequences=step.sequences[1:], counts=step.counts[1:])
            log.write(step)
            ended = time.perf_counter()
            if counts:
                logged[turn == 2].append((planned - started + ended - resumed) * 1e6)
            continue
        scheduler.commit(result)
        ended = time.perf_counter()
        if counts:
            plans.append((planned - started) * 1e6)
            commits.append((ended - resumed) * 1e6)
    scheduler.check()
    ring.close()
    both = [p + c for p, c in zip(plans, commits, strict=True)]
    return {
        "plan_us": statistics.median(plans),
        "commit_us": statistics.median(commits),
        "both_us": statistics.median(both),
        "both_p99_us": statistics.quantiles(both, n=100)[98],
        "with_log": statistics.median(logged[True]) / statistics.median(both),
        "with_changed": statistics.median(logged[False]) / statistics.median(both),
    }


def yardstick_us(items: int) -> float:
    """Median time to append ``items`` tuples to a list and add them up: what Python costs here."""
    times = []
    for _ in range(200):
        started = time.perf_counter()
        rows = []
        for number in range(items):
            rows.append((number, number + 1))
        total = 0
        for first, second in rows:
            total += first + second
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheduler", choices=sorted(GOALS_US), default="fcfs")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gc.freeze()
    rows = []
    print(
        f"{'running':>8} {'plan us':>9} {'commit us':>10} {'both us':>9} {'p99 us':>9}  ratio "
        "with log  changed  goal"
    )
    goals = GOALS_US[options.scheduler]
    for sequences in (1, 64, 256, 512, 1024):
        row = {"sequences": sequences, **measure(options.scheduler, sequences, options.steps)}
        row["yardstick_us"] = yardstick_us(sequences)
        row["ratio"] = row["both_us"] / row["yardstick_us"]
        goal = goals.get(sequences)
        row["goal_us"] = goal
        verdict = (
            "" if goal is None else f"{goal:.0f} {'ok' if row['both_us'] <= goal else 'MISSED'}"
        )
        print(
            f"{sequences:>8} {row['plan_us']:>9.1f} {row['commit_us']:>10.1f} "
            f"{row['both_us']:>9.1f} {row['both_p99_us']:>9.1f} {row['ratio']:>6.1f} "
            f"{row['with_log']:>9.3f} {row['with_changed']:>8.3f}  {verdict}"
        )
        rows.append(row)
    if options.out:
        report.save(options.out, scheduler=options.scheduler, rows=rows)


if __name__ == "__main__":
    main()
