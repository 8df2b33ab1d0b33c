"""Time and memory to order offline requests.

    python benchmarks/order.py [--prompts 400000] [--out benchmarks/results/order.json]

Prompts of 256 tokens on average, mixed from three synthetic kinds: building the prefix tree,
estimating outputs from the sample, sorting and splitting. Memory is the peak of the process,
prompts included.
"""

from __future__ import annotations

import argparse
import platform
import resource
import time
from dataclasses import replace
from pathlib import Path

import report
from weft.blend.blending import choose_samples
from weft.blend.density import Rates
from weft.blend.lengths import estimate_outputs
from weft.blend.sort import sort_tree
from weft.blend.tree import build_tree
from weft.cost.hardware import hardware
from weft.cost.shape import model_shape
from weft.sim.blended import BURSTGPT, MMLU, OPENVID, synthesise

SHARES = (0.5, 0.05, 0.45)  # of the requests, as in the paper's traces with high sharing


def measure(prompts: int, seed: int) -> dict[str, float]:
    """Seconds of each step, and what came of it."""
    rates = Rates.of(model_shape("llama-3.1-8b"), hardware("a100"))
    few = replace(MMLU, system=16, topic_tokens=208, own=36.0)
    kinds = (replace(BURSTGPT, own=250.0), OPENVID, few)
    trace = synthesise([round(prompts * share) for share in SHARES], kinds, rates, seed)
    found = {"prompts": len(trace), "tokens": sum(map(len, trace.prompts))}
    start = time.perf_counter()
    tree = build_tree(trace.prompts)
    built = time.perf_counter()
    known = {int(n): float(trace.outputs[n]) for n in choose_samples(len(trace), seed=seed)}
    outputs = estimate_outputs(trace.prompts, known)[tree.leaves]
    estimated = time.perf_counter()
    order = sort_tree(tree, outputs, rates)
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found | {
        "mean_tokens": found["tokens"] / len(trace),
        "nodes": len(tree.parent),
        "tree_s": built - start,
        "estimate_s": estimated - built,
        "sort_and_split_s": ended - estimated,
        "all_s": ended - start,
        "split": order.split,
        "sorts": order.rounds,
        "sharing_kept": float(order.shared.sum() / tree.shared.sum()),
        "peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    found = measure(options.prompts, options.seed)
    for name, value in found.items():
        print(f"{name:18} {value:,.3f}" if isinstance(value, float) else f"{name:18} {value:,}")
    if options.out:
        report.save(Path(options.out), machine=platform.machine(), **found)


if __name__ == "__main__":
    main()
