"""``scripts/gpu_check.sh``: every check and measurement on a GPU, each with a time limit.

A part is a command of its own (``parts.py``). What it prints goes to the screen and into a file; a
line that is a JSON object is a figure: ``name``, ``value``, ``unit``, and where there is one, the
``goal``. This program never calls the driver of the GPU, so that nothing can hold it up.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]

import tables  # noqa: E402
from journal import Journal  # noqa: E402
from parts import BUILD, LAST, OUT, PARTS, TOTAL_S, Part, dry_run, select  # noqa: E402
from running import LATE_S, Outcome, Runner  # noqa: E402

LOG = "log.txt"


def environment_of(given: Mapping[str, str], *, dry: bool = False) -> dict[str, str]:
    """The variables that parts run with: weft from here, tests on the GPU, kernels compiled."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(HERE), given.get("PYTHONPATH"))))
    chosen = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    kept = {name: x for name, x in given.items() if name != "TRITON_INTERPRET"}
    if dry:
        chosen |= {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(BUILD / "none")}
        return kept | chosen | {"WEFT_TEST_DEVICE": "cpu"}
    kept.setdefault("TRITON_CACHE_DIR", str(BUILD / "triton"))
    return kept | chosen | {"WEFT_TEST_DEVICE": "cuda"}


def folder_of(wish: Path | None, given: Mapping[str, str], *, dry: bool = False) -> Path:
    """The folder of the results: as asked for, ``$OUT``, in the repository, or a temporary one.

    Raises:
        SystemExit: nothing can be written into the one that was asked for.
    """
    asked = wish or (Path(given["OUT"]) if given.get("OUT") else None)
    found = asked or ROOT / "build" / ("gpu_check_dry" if dry else "gpu_check")
    try:
        found.mkdir(parents=True, exist_ok=True)
        with (found / LOG).open("a"):
            pass
    except OSError as error:
        if asked is not None:
            raise SystemExit(
                f"cannot write results into {found} ({error}); name another with --out"
            ) from None
        found = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    return found.resolve()


class Check:
    """Runs parts within a total of seconds."""

    def __init__(
        self,
        parts: Sequence[Part],
        journal: Journal,
        environment: Mapping[str, str],
        folder: Path,
        total_s: float,
    ) -> None:
        self._parts, self._journal, self._folder = parts, journal, folder
        self._ends = time.monotonic() + total_s
        last = next((each for each in parts if each.name == LAST), None)
        self._kept_s = 0.0 if last is None else last.limit_s
        log = (folder / LOG).open("a")
        self._runner = Runner(environment, journal.take, self._end, log)

    def run(self, *, skip_done: bool) -> None:
        """Run all parts, or say of each why it does not run."""
        for part in self._parts:
            if skip_done and part.name in self._journal.done:
                outcome = self._journal.done[part.name]
                outcome.status = "done before"
                self._journal.outcomes[part.name] = outcome
                continue
            why = self._obstacle(part)
            limit_s = self._limit(part)  # after the wait for what it needs
            if not why and limit_s < part.least_s:
                why = "no time is left"
            if why:
                self._not_run(part, why)
                continue
            self._begin(part, limit_s)
        self._runner.stop()

    def stop(self) -> None:
        """End what runs, and say what does not run any more."""
        self._runner.stop()
        for part in self._parts:
            if part.name not in self._journal.outcomes:
                self._not_run(part, "interrupted")

    def _limit(self, part: Part) -> float:
        kept = 0.0 if part.name == LAST else self._kept_s
        return min(part.limit_s, self._ends - time.monotonic() - kept - LATE_S)

    def _obstacle(self, part: Part) -> str:
        """Why a part cannot run, if so; waits for the parts that it needs."""
        facts = self._journal.outcomes.get("facts")
        if facts is not None and facts.status == "failed":
            return "the GPU cannot be used, as 'facts' says"
        missing = [name for name in part.modules if importlib.util.find_spec(name) is None]
        if missing:
            return f"this Python has no {', '.join(missing)}"
        for name in part.needs:
            self._runner.wait_for(name)
            outcome = self._journal.outcomes.get(name)
            if outcome is not None and outcome.status not in ("passed", "done before"):
                return f"it needs '{name}', which has not passed"
        return ""

    def _not_run(self, part: Part, why: str) -> None:
        outcome = Outcome(part.name, "not run", why=why)
        print(f"== {part.name}: not run, {why}", flush=True)
        self._journal.end(outcome)

    def _begin(self, part: Part, limit_s: float) -> None:
        command = [word.replace(OUT, str(self._folder)) for word in part.command]
        print(f"== {part.name} (at most {limit_s:.0f} s)", flush=True)
        running = self._runner.start(replace(part, command=command), limit_s)
        self._journal.begin(running.outcome, limit_s)
        if not part.beside:
            self._runner.wait([running])

    def _end(self, outcome: Outcome) -> None:
        self._journal.end(outcome)
        why = f" ({outcome.why})" if outcome.why else ""
        print(f"== {outcome.name}: {outcome.status}{why}, {outcome.seconds:.0f} s", flush=True)


def say(journal: Journal, folder: Path, parts: Sequence[Part], *, dry: bool) -> int:
    """Print and save the tables; return the exit code."""
    outcomes = list(journal.outcomes.values())
    gpu = gpu_of(outcomes)
    head = "A dry run: nothing was measured." if dry else f"GPU: {gpu or 'unknown'}"
    figures, goals = tables.of_figures(outcomes, gpu), tables.of_goals(outcomes, gpu, dry=dry)
    failures = tables.of_parts(outcomes)
    text = f"{head}\n\n{goals}\n\n{figures}\n\n{failures}\n"
    (folder / "table.md").write_text(text)
    print(f"\n{figures}\n\n{goals}\n\n{failures}\n\n{head}")
    print(f"Results: {folder} (send table.md, figures.jsonl, log.txt and, if there, traces.tar)")
    if dry:
        ends = {part.name: part.ends for part in parts}
        wrong = [each for each in outcomes if each.status not in (ends[each.name], "done before")]
        for each in wrong:
            print(f"'{each.name}' should have ended as '{ends[each.name]}', not '{each.status}'")
        return int(bool(wrong))
    return int(any(each.status not in ("passed", "done before") for each in outcomes))


def gpu_of(outcomes: Sequence[Outcome]) -> str:
    """The name of the GPU, as the part that looks for facts has found it."""
    for outcome in outcomes:
        for figure in outcome.figures:
            if (outcome.name, figure["name"]) == ("facts", "GPU"):
                return str(figure["value"])
    return ""


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the results (default: $OUT)")
    parser.add_argument("--only", default="", help="names of parts, with commas between")
    parser.add_argument(
        "--skip-done",
        nargs="?",
        type=Path,
        const=Path(),
        metavar="FILE",
        help="leave out what passed before, by the figures.jsonl of the results, or another one",
    )
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all of it")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    parser.add_argument(
        "--dry-run", action="store_true", help="without a GPU: test this script with stand-ins"
    )
    options = parser.parse_args()
    chosen = select(PARTS, options.only)
    if options.list:
        for part in PARTS:
            print(f"{part.name:14} {part.limit_s:4.0f} s{'  only if named' * part.asked}")
        return 0
    if options.dry_run:
        chosen = dry_run(chosen)
    elif shutil.which("nvidia-smi") is None and not any(Path("/dev").glob("nvidia[0-9]*")):
        raise SystemExit(
            "There is no NVIDIA GPU here; nothing was checked. --dry-run tests the script itself."
        )
    folder = folder_of(options.out, os.environ, dry=options.dry_run)
    earlier = options.skip_done if options.skip_done != Path() else None
    if earlier is not None and not earlier.is_file():
        raise SystemExit(f"there is no file {earlier}; --skip-done takes an earlier figures.jsonl")
    journal = Journal(folder, dry=options.dry_run, earlier=earlier)
    environment = environment_of(os.environ, dry=options.dry_run)
    check = Check(chosen, journal, environment, folder, options.seconds)
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        check.run(skip_done=options.skip_done is not None)
    except KeyboardInterrupt:
        check.stop()
    return say(journal, folder, chosen, dry=options.dry_run)


if __name__ == "__main__":
    sys.exit(main())
