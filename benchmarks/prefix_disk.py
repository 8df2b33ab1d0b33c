"""The first token of a long prompt: computed, with its prefix from disk, and from memory.

    python benchmarks/prefix_disk.py [--model builtin] [--tokens 512,1024,1900] [--rounds 7]
        [--threads N] [--out benchmarks/results/prefix_disk.json]

One engine in this process. In each round a new prompt is computed, found in memory, then evicted by
others and read from disk, so that all three are measured side by side; a ratio is the median of
those of the rounds. The file system's cache has the files, as it has those of a server that was
restarted. The rate at which blocks are read and checked is printed, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from weft import LLM, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were not computed."""
    begun = time.perf_counter()
    [result] = llm.generate([prompt], ONE, progress=False)
    return time.perf_counter() - begun, result.cached_tokens


def measure(settings: dict[str, Any], tokens: int, rounds: int) -> dict[str, Any]:
    """Ratios of times, and seconds, of prompts of so many tokens."""
    draw = random.Random(tokens)
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM.in_process(**settings, kv_disk=folder, max_num_seqs=1) as llm,
    ):
        served = llm.served
        held = min(served.kv_blocks.values()) * served.block_size

        def prompt() -> list[int]:
            return [draw.randrange(100, served.vocab_size - 100) for _ in range(tokens)]

        def crowd_out() -> None:
            for _ in range(held // tokens + 1):
                first_token_s(llm, prompt())
            time.sleep(0.2)  # what is to be written is written

        crowd_out()
        found: dict[str, list[float]] = {"computed": [], "disk": [], "memory": []}
        for _ in range(rounds):
            one = prompt()
            times = {"computed": first_token_s(llm, one), "memory": first_token_s(llm, one)}
            crowd_out()
            times["disk"] = first_token_s(llm, one)
            cached = [times[name][1] for name in found]
            if cached[0] or not cached[1] == cached[2] > 0:
                raise SystemExit(f"cached tokens are {cached}: nothing was measured")
            for name, (seconds, _) in times.items():
                found[name].append(seconds)
        disk = llm.engine.built.resources.disk
        pairs = zip(found["computed"], found["disk"], strict=True)
        return {
            "tokens": tokens,
            **{f"{name}_s": statistics.median(times) for name, times in found.items()},
            "computed/disk": statistics.median(a / b for a, b in pairs),
            "disk_bytes_s": disk.bytes_s,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--tokens", default="512,1024,1900")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-memory", default="32MiB")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    settings = {"model": given.model, "threads": given.threads, "kv_memory": given.kv_memory}
    rows = []
    for tokens in map(int, given.tokens.split(",")):
        row = measure(settings, tokens, given.rounds)
        rows.append(row)
        print(
            f"{tokens} tokens: computed {row['computed_s']:.3f} s, from disk {row['disk_s']:.3f} s "
            f"({row['computed/disk']:.1f} times as fast), from memory {row['memory_s']:.3f} s; "
            f"disk {row['disk_bytes_s'] / 1e6:.0f} MB/s"
        )
    if given.out:
        report.save(given.out, model=given.model, rows=rows)


if __name__ == "__main__":
    main()
