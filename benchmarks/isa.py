"""The CPU kernels on each instruction set that this machine runs, as shares of their bounds.

    python benchmarks/isa.py [--only linear] [--threads 1] [--out benchmarks/results/isa.json]
    python benchmarks/isa.py --model FOLDER [--threads 2] [--out benchmarks/results/isa_model.json]

`weft bench kernels` in a process for each set. With one thread all times are CPU time. The table
has the median and the best share of the bound; `m`: memory bounds it.

With a model (`peers/models.py` makes some), the decode rate of one stream and of eight instead, by
`weft bench throughput`, in turns of all sets. The share is that of reading the weights once a step,
at the best rate found before and after each run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
from weft.engine.machine import cpu_name
from weft.kernels import measure
from weft.kernels.cpu import attention
from weft.models.layout import weight_bytes
from weft.models.spec_reader import read_spec

QUANTIZE = {"bfloat16": "none", "int8": "int8", "int4": "int4"}
GROUP = 64  # inputs that share a scale of int4
STREAMS = (1, 8)


def run(isa: str, command: list[str]) -> dict[str, Any]:
    """The result of `weft bench` with an instruction set."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        full = [sys.executable, "-m", "weft.cli", "bench", *command, "--output", str(out)]
        environment = {**os.environ, "WEFT_ISA": isa}
        subprocess.run(full, check=True, env=environment, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def measured(isa: str, options: argparse.Namespace) -> dict[str, Any]:
    """The result of `weft bench kernels` with an instruction set."""
    command = ["kernels", "--threads", str(options.threads), "--seconds", str(options.seconds)]
    return run(isa, [*command, "--only", options.only])


def decoded(isa: str, storage: str, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second that a model decodes, and the rate of reading around that."""
    command = ["throughput", "--model", str(options.model), "--device", "cpu"]
    command += ["--dtype", "bfloat16", "--quantize", QUANTIZE[storage]]
    command += ["--quantize-group", str(GROUP), "--threads", str(options.threads)]
    command += ["--prompts", str(streams), "--input-tokens", "8", "--repeats", "1"]
    command += ["--output-tokens", str(options.tokens)]
    before = measure.read_rate(0.1)
    found = run(isa, command)
    return {
        "tokens_per_s": found["decode_tokens_per_s"]["median"],
        "read_bytes_per_s": max(before, measure.read_rate(0.1)),
    }


def decoding(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each set, form of weights and number of streams: medians of the rounds."""
    measure.set_threads(options.threads)
    spec = read_spec(options.model, None)
    isas = attention.isas()
    rows = []
    for storage, quantize in QUANTIZE.items():
        step_bytes = weight_bytes(spec, "bfloat16", quantize, GROUP)
        for streams in STREAMS:
            turns = [
                [decoded(isa, storage, streams, options) for isa in isas]
                for _ in range(options.rounds)
            ]
            for isa, runs in zip(isas, zip(*turns, strict=True), strict=True):
                shares = [
                    one["tokens_per_s"] / streams * step_bytes / one["read_bytes_per_s"]
                    for one in runs
                ]
                rows.append(
                    {
                        "isa": isa,
                        "weights": storage,
                        "streams": streams,
                        "step_bytes": step_bytes,
                        "tokens_per_s": statistics.median(one["tokens_per_s"] for one in runs),
                        "share": statistics.median(shares),
                        "runs": runs,
                    }
                )
    return rows


def decoding_table(rows: list[dict[str, Any]]) -> str:
    """A row for each form of weights and number of streams, a column for each set."""
    sets = list(dict.fromkeys(row["isa"] for row in rows))
    lines = ["| weights, streams | " + " | ".join(sets) + " |", "|---" * (1 + len(sets)) + "|"]
    for storage in QUANTIZE:
        for streams in STREAMS:
            cells = [
                f"{row['tokens_per_s']:.0f} tok/s, {row['share']:.0%}"
                for row in rows
                if (row["weights"], row["streams"]) == (storage, streams)
            ]
            lines.append(f"| {storage}, {streams} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(results: list[dict[str, Any]]) -> str:
    """A row for each kernel, a column for each set."""
    sets = [result["isa"] for result in results]
    lines = ["| kernel | " + " | ".join(sets) + " |", "|---" * (1 + len(sets)) + "|"]
    for rows in zip(*(result["kernels"] for result in results), strict=True):
        cells = [
            f"{row['share']:.0%}, {row['best_share']:.0%}{' m' if row['bound'] == 'memory' else ''}"
            for row in rows
        ]
        lines.append(f"| {rows[0]['name']} | " + " | ".join(cells) + " |")
    rates = [
        ", ".join(f"{rate / 1e9:.0f} {name}" for name, rate in one["multiply_flops_per_s"].items())
        for one in results
    ]
    lines.append("| multiply-adds in registers, GFLOP/s | " + " | ".join(rates) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="linear")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer of a model")
    parser.add_argument("--rounds", type=int, default=3, help="runs of a model for each cell")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.model is not None:
        rows = decoding(options)
        print(f"{cpu_name()}, {options.threads} threads\n\n{decoding_table(rows)}")
        if options.out is not None:
            report.save(options.out, processor=cpu_name(), threads=options.threads, rows=rows)
        return
    results = [measured(isa, options) for isa in attention.isas()]
    print(f"{results[0]['processor']}, {options.threads} threads\n\n{table(results)}")
    if options.out is not None:
        report.save(options.out, processor=results[0]["processor"], results=results)


if __name__ == "__main__":
    main()
