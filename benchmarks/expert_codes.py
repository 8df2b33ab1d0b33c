"""Decoding with experts as codes of int8 and int4 on a CPU, beside the same ones in bfloat16.

    python benchmarks/expert_codes.py [--out benchmarks/results/expert_codes.json]

A random model of the shape of GLM-4.5, small: sigmoid routing with a correction bias, and a shared
expert as wide as a routed one. Every parameter that is multiplied is in codes but the router. All
kinds run in turn, each step as one native call; a ratio is the median of those of the rounds. On
one thread the time is that of the CPU, so that other load does not count.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import report
from experts import SPEC, parsed, random_weights, rates_in_turn, step_of
from weft import __version__
from weft.engine.machine import cpu_name
from weft.kernels.cpu import attention as cpu
from weft.kernels.ops import select_ops
from weft.models.layout import weight_bytes

KINDS, GROUP = ("none", "int8", "int4"), 64
assert SPEC.moe is not None
MOE = replace(
    SPEC.moe,
    scoring="sigmoid",
    correction_bias=True,
    routed_scaling_factor=2.5,
    shared=True,
)
LAYERS = tuple(replace(one, intermediate_size=MOE.intermediate_size) for one in SPEC.layers)
SHARED = replace(SPEC, layers=LAYERS, moe=MOE)


def main() -> None:
    options = parsed(__doc__, 15, 20)
    ops = select_ops("cpu", "bfloat16", "cpu")
    weights = {kind: random_weights(ops, kind, SHARED) for kind in KINDS}
    bytes_of = {kind: weight_bytes(SHARED, "bfloat16", kind, GROUP) for kind in KINDS}
    print("weights: " + ", ".join(f"{kind} {n / 2**20:.0f} MiB" for kind, n in bytes_of.items()))
    print(f"{'rows':>4}" + "".join(f"{kind:>10}" for kind in KINDS) + "   tok/s, ratios to floats")
    found = []
    for rows in (1, 8, 32):
        steps = {kind: step_of(weights[kind], ops, rows, False, SHARED) for kind in KINDS}
        rounds = rates_in_turn(steps, rows, options)
        rates = {kind: statistics.median(one[kind] for one in rounds) for kind in KINDS}
        ratios = {
            kind: statistics.median(one[kind] / one["none"] for one in rounds) for kind in KINDS[1:]
        }
        found.append({"rows": rows, "rates": rates, "ratios": ratios})
        numbers = "".join(f"{value:>10.0f}" for value in rates.values())
        words = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items())
        print(f"{rows:>4}{numbers}   {words}", flush=True)
    if options.out:
        facts = {"weft": __version__, "cpu": cpu_name(), "isa": cpu.isa()}
        facts |= {"threads": options.threads, "weight_bytes": bytes_of}
        report.save(options.out, **facts, rows=found)


if __name__ == "__main__":
    main()
