"""Drives llama.cpp: its batched benchmark (no sampling, no HTTP), a process for each run.

python drive_llamacpp.py MODEL.gguf THREADS FORMAT FOLDER [--prefix-caching]

The benchmark caches no prefixes, so with ``--prefix-caching`` it is the server, over HTTP. FOLDER
has the programs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable

from driving import CACHING, MOST_TOKENS, Work, drive

SLOTS = 4
LIVES = contextlib.ExitStack()  # until the driver ends


def load(model: str, threads: str, program: str) -> Callable[[Work], dict[str, float]]:
    def run(work: Work) -> dict[str, float]:
        context = work.requests * (work.prompt + work.output) + 64 * work.requests
        command = [program, "-m", model, "-c", str(context), "-b", "2048", "-ub", "512"]
        command += ["-npp", str(work.prompt), "-ntg", str(work.output), "-npl", str(work.requests)]
        command += ["-t", threads, "-tb", threads, "--output-format", "jsonl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise SystemExit((done.stderr.strip().splitlines() or ["no output"])[-1])
        row = json.loads(lines[-1])
        tokens = work.requests * work.output
        return {
            "first_s": row["t_pp"] if work.requests == 1 else float("nan"),
            "all_first_s": row["t_pp"],
            "seconds": row["t_pp"] + row["t_tg"],
            "tokens": tokens,
            "after_all_first": tokens,
        }

    run(Work(1, 1, 1, 0))  # each run loads the model anew; this one says how long that takes
    return run


def serve(model: str, threads: str, program: str) -> Callable[[Work], dict[str, float]]:
    """Run work on a server whose slots keep what they have computed."""
    from serving import running, streamed

    command = [program, "-m", model, "--alias", "m", "-t", threads, "-tb", threads, "--no-webui"]
    command += ["-np", str(SLOTS), "-c", str(SLOTS * MOST_TOKENS), "-b", "2048", "-ub", "512"]
    _, port = LIVES.enter_context(running(command))
    return streamed(port, "m")


def main() -> None:
    model, threads, _, folder = sys.argv[1:5]
    start, program = load, "llama-batched-bench"
    if CACHING in sys.argv:
        start, program = serve, "llama-server"
    with LIVES:
        # the commit is not in the archive; the package's number is in the path of the program
        drive(lambda: start(model, threads, f"{folder}/{program}"), lambda: program)


if __name__ == "__main__":
    main()
