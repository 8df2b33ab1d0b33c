"""Looks for wrong memory accesses of a tiny engine with compute-sanitizer, if it is installed."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from figures import figure, note

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck", "initcheck")  # the most important first
LEAST_S = 8.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.device == "cpu" or shutil.which("compute-sanitizer") is None:
        note("memory errors were not looked for: there is no compute-sanitizer, or no GPU")
        return 0
    deadline, wrong = time.perf_counter() + options.seconds, 0
    engine = [sys.executable, str(HERE / "leases.py"), "--model", "tiny", "--batch", "4"]
    engine += ["--steps", "12", "--way", "replayed"]
    for tool in TOOLS:
        left = deadline - time.perf_counter()
        if left < LEAST_S:
            note(f"no time left for {tool}")
            continue
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *engine]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            note(f"{tool} has not ended within {left:.0f} s")
            continue
        found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
        if found is None:
            note(f"{tool} has no result: {(done.stdout + done.stderr).strip()[-200:]}")
            wrong += 1
            continue
        figure(f"{tool}: errors", int(found[1]), "", 0, "less")
        if int(found[1]):
            print(done.stdout)
            wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
