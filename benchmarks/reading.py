"""Share of the rate of reading that whole decodes of one sequence reach, in turns.

    python benchmarks/reading.py MODEL ... [--quantize none,int8,int4] [--threads 2] [--rounds 20]
        [--out benchmarks/results/reading.json]

A round decodes 48 tokens in process behind a prompt, and reads memory on the same threads before
and after. Each figure is the mean over all of its turn, so that neighbours on a shared machine slow
both. The share of a round is the bytes of weights that a token reads, times tokens a second, over
the rate of reading; the prompt's step is not counted, nor are KV and what is written.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import report
import resident
from weft.core.config import EngineConfig
from weft.core.plan import StepOutputs
from weft.engine.driven import DrivenEngine
from weft.engine.machine import cpu_name
from weft.kernels import measure

READ_S, TOKENS = 0.1, 48


class TimedAnswers(resident.Answers):
    """Answers that note when the first token came."""

    first_at = 0.0

    def publish(self, outputs: StepOutputs) -> None:
        self.first_at = self.first_at or time.perf_counter()
        super().publish(outputs)


def decode_rate(engine: DrivenEngine, salt: int) -> float:
    """Tokens a second between the first one and the last one of a request."""
    ask = {"temperature": 0, "max_tokens": TOKENS}
    answers = TimedAnswers(resident.drawn(engine, 1, salt, ask))
    engine.run(answers)
    return (TOKENS - 1) / (time.perf_counter() - answers.first_at)


def measured(model: str, quantize: str, threads: int, rounds: int) -> dict[str, Any]:
    """Decode and read in turns; prints a line."""
    config = EngineConfig(
        model=model,
        quantize=quantize,
        threads=threads,
        prefix_caching=False,
        kv_memory="512MiB",
        steps_in_flight=1,
    )
    engine, rows = DrivenEngine(config), []
    for number in range(rounds + 1):
        before = measure.mean_read_rate(READ_S)
        decoded = decode_rate(engine, number)
        read = 2 / (1 / before + 1 / measure.mean_read_rate(READ_S))
        if number:  # the first round warms up
            rows.append((decoded, read / 1e9, decoded * engine.read_bytes / read))
    engine.close()
    tokens, reading, share = (statistics.quantiles(row, n=4) for row in zip(*rows, strict=True))
    gigabytes = engine.read_bytes / 1e9
    print(
        f"{Path(model).name} {quantize}: {tokens[1]:.1f} tok/s, {tokens[1] * gigabytes:.1f} GB/s "
        f"of weights; reading {reading[1]:.1f} GB/s; share {share[1]:.0%} "
        f"({share[0]:.0%} to {share[2]:.0%})"
    )
    kind = {"model": Path(model).name, "quantize": quantize, "weights_gb": gigabytes}
    return {**kind, "share": share[1], "tok_s, read GB/s, share": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--quantize", default="none,int8,int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measure.set_threads(options.threads)
    print(f"{cpu_name()}, instruction set {measure.isa()}, {options.threads} threads")
    cells = [
        measured(model, quantize, options.threads, options.rounds)
        for model in options.models
        for quantize in options.quantize.split(",")
    ]
    if options.out:
        report.save(options.out, cpu=cpu_name(), threads=options.threads, cells=cells)


if __name__ == "__main__":
    main()
