"""``scripts/gpu_check.sh``: every check and measurement on a GPU, each with a time limit.

A part is a command of its own. What it prints goes to the screen; a line that is a JSON object is a
figure: ``name``, ``value``, ``unit``, and where there is one, the ``goal`` (a bound: a number, at
least or at most as ``better`` says, "more" or "less"). The file of results is written after every
part, so that an early end loses nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402

BUILD = ROOT / "build" / "gpu"
LAST_LINES = 12  # of a part that failed
GRACE_S = 5.0  # to read the end of what a part printed


@dataclass(frozen=True)
class Part:
    """A command with the seconds that it may take."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass
class Outcome:
    """How a part ended: ``passed``, ``failed`` or ``too long``, and what it found."""

    name: str
    status: str
    seconds: float
    figures: list[dict[str, Any]] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)


def parts() -> list[Part]:
    """Every part, in the order in which they run. Their limits add up to less than 10 minutes."""
    python, here = sys.executable, ROOT / "benchmarks" / "gpu"
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "80"]
    if importlib.util.find_spec("xdist") is not None:  # most of the time goes to compiling kernels
        pytest += ["-n", str(max(1, min(12, (os.cpu_count() or 1) - 2)))]
    absent = [f"--ignore=tests/triton/test_{name}.py" for name in ("compile", "triton_tuning")]
    return [
        Part("build", [python, str(here / "build.py"), str(BUILD)], 55),
        Part("probes", [python, str(here / "probes.py")], 45),
        Part("kernels", [*pytest, "tests/triton", *absent], 95),
        Part("engine", [*pytest, "tests/gpu"], 90),
        Part("decode", [python, str(here / "decode.py"), "--seconds", "97"], 125),
        Part("leases", [python, str(here / "leases.py"), "--limit", "19"], 60),
        Part("lanes", [python, str(here / "lanes.py")], 24),
        Part("overlap", [python, str(here / "overlap.py")], 20),
        Part("shares", [python, str(here / "kernels.py")], 45),
        Part("transformers", [python, str(here / "transformers_decode.py")], 40),
    ]


def run(part: Part, environment: dict[str, str]) -> Outcome:
    """Run a part in a process group of its own, which is killed when it ends or its time does."""
    started = time.monotonic()
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    outcome = Outcome(part.name, "passed", 0.0)
    reader = threading.Thread(target=_read, args=(process.stdout, outcome), daemon=True)
    reader.start()
    try:
        if process.wait(part.limit_s):
            outcome.status = "failed"
    except subprocess.TimeoutExpired:
        outcome.status = "too long"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(GRACE_S)  # not for ever: a process that left the group may hold the pipe
    outcome.seconds = time.monotonic() - started
    return outcome


def _read(lines: Iterable[str], outcome: Outcome) -> None:
    """Show what a part prints, and keep its figures and last lines."""
    for line in lines:
        print(line, end="", flush=True)
        figure = read_figure(line)
        if figure is not None:
            outcome.figures.append(figure)
        else:
            outcome.last_lines = [*outcome.last_lines, line.rstrip()][-LAST_LINES:]


def read_figure(line: str) -> dict[str, Any] | None:
    """The figure that a line of output states, or None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"name", "value"} <= found.keys() else None


def verdict(figure: dict[str, Any]) -> str:
    """How a figure stands to its goal."""
    goal = figure.get("goal")
    if goal is None:
        return ""
    reached = figure["value"] >= goal if figure.get("better") == "more" else figure["value"] <= goal
    word = "at least" if figure.get("better") == "more" else "at most"
    return f"{'reached' if reached else 'MISSED'} ({word} {goal:g})"


def table(outcomes: Sequence[Outcome]) -> str:
    """Parts and their figures as a table in Markdown."""
    rows = ["| part | figure | value | goal |", "|---|---|---|---|"]
    for outcome in outcomes:
        rows.append(f"| **{outcome.name}** | {outcome.status} | {outcome.seconds:.0f} s | |")
        for figure in outcome.figures:
            value = figure["value"]
            shown = f"{value:.5g}" if isinstance(value, float) else str(value)
            unit = figure.get("unit", "")
            rows.append(f"| | {figure['name']} | {shown} {unit} | {verdict(figure)} |")
    return "\n".join(rows)


def machine() -> dict[str, Any]:
    """What the GPU and the software are. Raises SystemExit where there is no GPU."""
    try:
        import torch
    except ImportError:
        raise SystemExit("This Python has no torch; set PYTHON to one that has.") from None
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no NVIDIA GPU here; nothing was checked.")
    import triton

    return {
        "gpu": torch.cuda.get_device_name(0),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def environment_of(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that parts run with: weft from here, tests on the GPU, kernels compiled."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), given.get("PYTHONPATH"))))
    chosen = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "WEFT_TEST_DEVICE": "cuda"}
    return {name: x for name, x in given.items() if name != "TRITON_INTERPRET"} | chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check.json")
    parser.add_argument("--only", default="", help="names of parts, with commas between")
    options = parser.parse_args()
    chosen = select(parts(), options.only)
    facts = machine()
    print(json.dumps(facts))
    environment = environment_of(os.environ)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for part in chosen:
        print(f"== {part.name} (at most {part.limit_s:.0f} s)", flush=True)
        outcomes.append(run(part, environment))
        report.save(options.out, machine=facts, parts=[vars(o) for o in outcomes])
    print(table(outcomes))
    for outcome in outcomes:
        if outcome.status != "passed":
            print(f"\n{outcome.name}: {outcome.status}\n  " + "\n  ".join(outcome.last_lines))
    return int(any(outcome.status != "passed" for outcome in outcomes))


def select(every: Sequence[Part], only: str) -> list[Part]:
    """The parts of the given names, all for none. Raises SystemExit for an unknown name."""
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {part.name for part in every}
    if unknown:
        known = ", ".join(part.name for part in every)
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; they are: {known}")
    return [part for part in every if not names or part.name in names]


if __name__ == "__main__":
    sys.exit(main())
