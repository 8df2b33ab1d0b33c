"""Speed of the simulator: requests of Azure's conversation trace through a scheduler.

    python benchmarks/sim.py [--requests 10000] [--scheduler fcfs] [--hardware a100]
        [--trace FILE] [--out benchmarks/results/sim.json]

Goal: 10,000 requests through FCFS in at most 60 s on two cores. The same trace at its first tenth
tells whether memory grows with all requests or with the live ones.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import report
from weft.sim.build import build
from weft.sim.options import SimOptions
from weft.sim.run import simulate

TRACE = Path(__file__).resolve().parents[2] / "shared/data/azure/AzureLLMInferenceTrace_conv.csv"
GOAL_S = 60.0


def run(options: SimOptions) -> dict[str, object]:
    """One simulation, in this process."""
    started, cpu = time.perf_counter(), time.process_time()
    world = build(options)
    most = 0

    def done(_: int) -> None:
        nonlocal most
        most = max(most, len(scheduler.live.sequences))

    scheduler = world.scheduler()
    result = simulate(
        scheduler, world.cost, world.traffic(None), world.errors(), world.planned.classes, done
    )
    return {
        "requests": len(result.record),
        "output_tokens": result.totals.output_tokens,
        "steps": len(result.log),
        "virtual_s": result.seconds,
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "most_live": most,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--scheduler", default="fcfs")
    parser.add_argument("--hardware", default="a100")
    parser.add_argument("--trace", default=str(TRACE))
    parser.add_argument("--alone", action="store_true", help="one run, printed as JSON")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.alone:
        options = SimOptions(
            hardware=given.hardware,
            trace=given.trace,
            requests=given.requests,
            scheduler=given.scheduler,
        )
        print(json.dumps(run(options)))
        return
    rows = []
    for requests in (given.requests // 10, given.requests):  # each in a process of its own
        command = [sys.executable, __file__, "--alone", "--requests", str(requests)]
        command += ["--scheduler", given.scheduler, "--hardware", given.hardware]
        command += ["--trace", given.trace]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        rows.append(row)
        print(
            f"{row['requests']:>7} requests, {row['output_tokens']:>8} tokens, {row['steps']} "
            f"steps: {row['wall_s']:.1f} s wall, {row['cpu_s']:.1f} s CPU, "
            f"{row['peak_mib']:.0f} MiB with {row['most_live']} live at most"
        )
    print(f"goal {GOAL_S:.0f} s: {'ok' if rows[-1]['wall_s'] <= GOAL_S else 'MISSED'}")
    if given.out:
        report.save(given.out, scheduler=given.scheduler, hardware=given.hardware, rows=rows)


if __name__ == "__main__":
    main()
