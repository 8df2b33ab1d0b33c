"""Offline orders whose steps run in halves, in simulation: what splitting and blending gain.

    python benchmarks/halved_orders.py [--heavy N] [--out FILE]

BlendServe's traces on an A100's data sheet, through the scheduler of the product, which splits
steps as an engine does: by one limit of attention, above the compute ridge, with the weights read
twice, and by a predicted gain of more than 3 %. The interference is the one that NanoFlow publishes
for an A100, at the share that suits equal parts best; nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import report

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))

from blendserve import COST, KV, RATES, SEQUENCES, trace_of

from weft import __version__
from weft.blend.jobs import Jobs, Room
from weft.blend.order import make_order
from weft.cost.interference import ridge_of
from weft.engine.machine import cpu_name
from weft.sched.halves import HALF_SIZES, Halves, Measured
from weft.sched.scheduler import Limits
from weft.sim.blended import TRACES
from weft.sim.offline import OfflineRun, run_offline
from weft.sim.overlap import in_a_row, interfering, published

# Sequences and tokens of a step: of blend as its density asks for, of depth first as tuned.
BLEND_TOKENS = {1: 896, 2: 512, 3: 896, 4: 512}
DFS = (256, 2048)


def served(number: int, order: str, heavy: int, halves: Halves | None) -> OfflineRun:
    """Serve a trace."""
    gc.collect()
    trace = trace_of(*TRACES[number], heavy)
    sequences, tokens = (SEQUENCES, BLEND_TOKENS[number]) if order == "blend" else DFS
    made = make_order(order, Jobs(trace.prompts), Room(KV, sequences), RATES)
    return run_offline(trace, made, COST, Limits(sequences, tokens, KV), KV, halves=halves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heavy", type=int, default=300, help="long requests of a trace")
    parser.add_argument("--traces", type=int, nargs="*", default=list(TRACES), help="by number")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    ridge, speeds = ridge_of(COST, 2048), published().chosen
    assert ridge is not None
    halves = Halves(HALF_SIZES, max(2 * HALF_SIZES[0], ridge), Measured(COST, speeds))
    rows = []
    print(f"ridge {ridge} tokens, speeds {speeds.dense:.2f} and {speeds.attention:.2f}")
    print("| trace | order | whole, tok/s | halves | steps split | best of each step |")
    print("|---|---|---|---|---|---|")
    for number in options.traces:
        for order in ("blend", "dfs"):
            run = served(number, order, options.heavy, halves)
            whole_s = run.seconds(in_a_row)
            row = {
                "trace": number,
                "order": order,
                "whole_rate": run.tokens / whole_s,
                "halves_gain": whole_s / run.elapsed_s,
                "split_share": run.split_steps / len(run.compute_s),
                "each_step_gain": whole_s / run.seconds(interfering),
            }
            rows.append(row)
            print(
                f"| {number} | {order} | {row['whole_rate']:.0f} | {row['halves_gain']:.3f} "
                f"| {row['split_share']:.0%} | {row['each_step_gain']:.3f} |", flush=True,
            )  # fmt: skip
    if options.out is not None:
        facts = {"weft": __version__, "cpu": cpu_name(), "heavy": options.heavy, "ridge": ridge}
        report.save(options.out, **facts, rows=rows)


if __name__ == "__main__":
    main()
