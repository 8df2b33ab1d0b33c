"""Steps in halves are measured beside whole ones: on the CPU with a tiny shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_halves_are_measured_beside_whole_steps() -> None:
    script = str(ROOT / "benchmarks" / "gpu" / "nano.py")
    tiny = ("--device", "cpu", "--model", "tiny", "--quantize", "none", "--rows", "8")
    tiny += ("--context", "40", "--chunk", "16", "--repeats", "2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, script, *tiny], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    for case in ("8 decodes of 40 tokens", "4 of them and a prompt of 16"):
        for limit in ("at most 1 programs", "any number of programs"):
            assert found[f"tiny bf16, {case}: in halves, {limit} of attention"]["value"] > 0
            assert found[f"tiny bf16, {case}: tokens as of the whole step, {limit}"]["value"] == 1
        assert found[f"tiny bf16, {case}: best of the halves"]["goal"] == 1.03
