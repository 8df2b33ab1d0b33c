"""Runs the deep tests in parts, the most productive first, within a time limit if one is set.

    python tools/deep.py [--within SECONDS] [--offline] [PART ...]

A part that would not end in time is left out, and one that has not ended by then is ended; both are
said at the end, and are no failure. Tests that fail run once more, one after the other: a part
where they pass then is called unsteady, and is no failure. Exits with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_TESTS = 5  # the exit code of pytest where it has found none


@dataclass(frozen=True)
class Part:
    """A command of the deep tests.

    Attributes:
        finds: the kinds of bugs that the ordinary tests may miss.
        seconds: that it takes on two idle cores.
        downloads: it needs packages from a registry.
        again: the command that runs what failed once more; empty if a failure is final.
    """

    name: str
    finds: str
    command: tuple[str, ...]
    seconds: float
    downloads: bool = False
    again: tuple[str, ...] = ()


def tests(name: str, finds: str, seconds: float, *folders: str) -> Part:
    """The tests of folders that run in deep runs only, or do more there."""
    workers = str(min(8, len(os.sched_getaffinity(0))))
    command = ("-m", "pytest", "-q", "-m", "deep or deeper", *(f"tests/{f}" for f in folders))
    alone = (*command, "--last-failed", "--last-failed-no-failures=none")
    return Part(name, finds, (*command, "-n", workers, "--dist", "loadfile"), seconds, again=alone)


PARTS = (
    Part("mutants", "tests that find no bugs any more", ("tools/mutants.py",), 120),
    tests("schedulers", "rare traffic: leaks, starvation, wrong order", 150, "null", "sim"),
    tests("servers", "kills at any moment, hangs, leaks", 300, "e2e", "batch", "bench", "chat"),
    tests("ring", "races of processes", 40, "ring", "deploy"),
    tests("native", "memory errors and data races in C++", 120, "kernels", "native", "resident"),
    tests("requests", "bodies, texts and files of any kind", 120, "server", "api", "text", "arch"),
    tests("engines", "every family, data type and chunking", 200, "numeric", "gpu", "attend"),
    tests("kernels", "every shape on every kind of GPU, compiled ahead", 150, "triton", "cuda"),
    tests("fuzz", "damaged checkpoints and requests", 400, "fuzz"),
    tests("referees", "answers that OpenAI's description does not allow", 20, "referees"),
    Part("batches", "two hundred kills beside batches", ("tests/batch_soak.py",), 600),
    Part("wheel", "what packages lack, or bring too much of", ("tests/wheel.py",), 240, True),
    Part("deploy", "panels and alerts without data", ("tests/deploy/programs.py",), 90, True),
    Part("page", "what a browser makes of the page", ("tests/referees/page/run.py",), 100, True),
    Part("clients", "requests of real programs", ("tests/referees/clients/run.py",), 480, True),
)


@dataclass
class Outcome:
    part: Part
    status: str
    seconds: float = 0.0


def run(part: Part, limit_s: float | None) -> Outcome:
    """Run a part, and what failed of it once more; it ends when its time is up."""
    start = time.monotonic()
    code = _exit_code(part.command, limit_s)
    status = "passed" if code in (0, NO_TESTS) else "failed"
    if code is None:
        status = "cut off"
    elif status == "failed" and part.again:
        left = None if limit_s is None else max(0.0, limit_s - (time.monotonic() - start))
        if _exit_code(part.again, left) == 0:
            status = "unsteady"
    return Outcome(part, status, time.monotonic() - start)


def _exit_code(command: Sequence[str], limit_s: float | None) -> int | None:
    """Run a command; when its time is up it ends with everything that it started: None."""
    environment = {**os.environ, "WEFT_TEST_DEEP": "1"}
    command = [sys.executable, *command]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:  # the time is up, or Ctrl-C
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt, so that servers of tests are ended by them; kill what stays."""
    for number, patience_s in ((signal.SIGINT, 30.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
            return


def run_all(parts: Sequence[Part], within_s: float | None) -> Iterator[Outcome]:
    """Run parts in their order while there is time."""
    start = time.monotonic()
    for part in parts:
        left = None if within_s is None else within_s - (time.monotonic() - start)
        if left is not None and left < part.seconds:
            yield Outcome(part, "left out")
            continue
        print(f"== {part.name}: {part.finds}", flush=True)
        yield run(part, left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--within", type=float, metavar="SECONDS", help="stop after so long")
    parser.add_argument("--offline", action="store_true", help="leave out what downloads packages")
    parser.add_argument("parts", nargs="*", metavar="PART", help="all, if none is named")
    asked = parser.parse_args()
    known = {part.name: part for part in PARTS}
    if wrong := [name for name in asked.parts if name not in known]:
        parser.error(f"no part is called {wrong[0]}; they are: {', '.join(known)}")
    chosen = [known[name] for name in asked.parts] or list(PARTS)
    outcomes = []
    if asked.offline:
        outcomes = [Outcome(part, "left out") for part in chosen if part.downloads]
        chosen = [part for part in chosen if not part.downloads]
    try:
        for outcome in run_all(chosen, asked.within):
            outcomes.append(outcome)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130
    finally:
        print("== deep tests", flush=True)
        for outcome in outcomes:
            print(f"{outcome.part.name:12} {outcome.status:9} {outcome.seconds:6.0f} s", flush=True)
    return int(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
