"""What ``batch_invariant`` costs: tokens a second of the built-in model with it on and off.

    python benchmarks/invariance.py [--out benchmarks/results/invariance.json]

Both engines in one process, runs interleaved; the ratio is on over off, the median of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

import report
from builtin import ForwardTimer, run_weft
from weft.core.config import EngineConfig
from weft.engine.build import build_engine


def measure(dtype: str, pairs: int, threads: int | None) -> list[dict[str, Any]]:
    """One row for each number of sequences."""
    settings = {"dtype": dtype, "threads": threads, "prefix_caching": False, "kv_memory": 2**28}
    engines = {
        wish: build_engine(EngineConfig(batch_invariant=wish, **settings)) for wish in (True, False)
    }
    timers = {wish: ForwardTimer(engine.executor._decoder) for wish, engine in engines.items()}
    rows = []
    for count in (1, 8, 32):
        rates: dict[bool, list[float]] = {True: [], False: []}
        for pair in range(pairs + 1):
            for wish in (True, False) if pair % 2 else (False, True):
                rate, _ = run_weft(engines[wish], timers[wish], count, pair)
                if pair:  # the first pair warms up
                    rates[wish].append(rate)
        ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
        row = {"dtype": dtype, "sequences": count, "ratio": statistics.median(ratios)}
        row |= {"on": statistics.median(rates[True]), "off": statistics.median(rates[False])}
        rows.append({**row, "ratios": ratios})
        print(f"{dtype:>9} {count:>5} {row['on']:>10.0f} {row['off']:>10.0f} {row['ratio']:>7.3f}")
    for engine in engines.values():
        engine.executor.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    print(f"{'dtype':>9} {'seqs':>5} {'on tok/s':>10} {'off tok/s':>10} {'ratio':>7}")
    rows = [
        row
        for dtype in ("bfloat16", "float32")
        for row in measure(dtype, options.pairs, options.threads)
    ]
    if options.out:
        report.save(options.out, torch=torch.__version__, pairs=options.pairs, rows=rows)


if __name__ == "__main__":
    main()
