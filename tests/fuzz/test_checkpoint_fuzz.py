"""Damaged checkpoints load or are refused with one sentence, whatever their files say.

No traceback, no more than 10 s of CPU time and 1 GiB of memory beside what the process has; see
``checkpoints.py``, which runs each case in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from depth import deep

RUNNER = Path(__file__).parent / "checkpoints.py"


def failures(first: int, count: int) -> list[str]:
    """What the runner says of the cases that do not end well."""
    command = [sys.executable, str(RUNNER), str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [
        f"{r['case']} ({r['kind']}): {r['exit']}, {r['outcome']}\n{r['stderr']}"
        for r in map(json.loads, done.stdout.splitlines())
    ]


def test_a_hundred_cases():
    assert not failures(0, 100)


@deep
def test_two_thousand_cases():
    assert not failures(100, 2000)


def test_the_runner_finds_what_is_wrong():
    """An error that is not typed, memory, and time."""
    script = f"""
        import sys
        sys.path.insert(0, {str(RUNNER.parent)!r})
        import checkpoints, tempfile, pathlib
        checkpoints.CPU_S = 1
        found = []
        def untyped(kind, folder): raise KeyError("x")
        def large(kind, folder): bytearray(2 ** 31)
        def slow(kind, folder):
            while True: pass
        def fine(kind, folder): pass
        with tempfile.TemporaryDirectory() as folder:
            base = pathlib.Path(folder) / "base"
            base.mkdir()
            (base / "generation_config.json").write_text("{{}}")
            checkpoints.KINDS = ((checkpoints.generation, 1),)
            for checkpoints.load in (untyped, large, slow, fine):
                print(checkpoints.failed(checkpoints.run_one(base, 1)))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "False"]
