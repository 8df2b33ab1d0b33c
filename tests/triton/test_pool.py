"""Tasks in processes of their own: one that fails, crashes or hangs costs nothing but itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from weft.kernels.pool import CompileTask, TaskOutcome, do_all


def fails(alone: bool) -> None:  # noqa: ARG001
    raise ValueError("no such register")


def has_no_room(alone: bool) -> None:  # noqa: ARG001
    raise OSError(28, "No space left on device")


def crashes(alone: bool) -> None:  # noqa: ARG001
    os._exit(3)


def by_name(outcomes: list[TaskOutcome]) -> dict[str, TaskOutcome]:
    return {outcome.name: outcome for outcome in outcomes}


def test_each_task_has_its_outcome(tmp_path: Path) -> None:
    def writes(alone: bool) -> None:
        (tmp_path / f"done, alone {alone}").touch()

    tasks = [
        CompileTask("writes", writes),
        CompileTask("fails", fails),
        CompileTask("full", has_no_room),
    ]
    told: list[TaskOutcome] = []
    found = by_name(do_all([*tasks, CompileTask("crashes", crashes)], 2, told.append))
    assert by_name(told) == found
    assert (found["writes"].error, found["writes"].full) == ("", False)
    assert [path.name for path in tmp_path.iterdir()] == ["done, alone False"]
    assert found["fails"].error == "ValueError: no such register"
    assert "No space left" in found["full"].error
    assert found["full"].full
    assert found["crashes"].error == "its process ended: exit code 3"


def test_what_was_lost_is_tried_again_by_itself(tmp_path: Path) -> None:
    """As the kernel ends processes when memory runs out."""
    first = tmp_path / "first"

    def dies_once(alone: bool) -> None:
        if not first.exists():
            first.write_text(str(alone))
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "second").write_text(str(alone))

    (outcome,) = do_all([CompileTask("dies once", dies_once)], 4)
    assert outcome.error == ""
    assert (first.read_text(), (tmp_path / "second").read_text()) == ("False", "True")


def test_what_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    started = tmp_path / "started"

    def hangs(alone: bool) -> None:
        assembler = subprocess.Popen(["sleep", "60"])
        started.write_text(f"{assembler.pid}" if alone else "")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assembler.wait()

    began = time.monotonic()
    found = by_name(
        do_all([CompileTask("hangs", hangs), CompileTask("fails", fails)], 1, deadline_s=0.5)
    )
    assert time.monotonic() - began < 20
    assert found["hangs"].error == "its process ended: it took more than 0.5 s"
    assert found["fails"].error.startswith("ValueError")
    state = Path(f"/proc/{started.read_text()}/stat")
    assert not state.exists() or ") Z" in state.read_text()  # nobody may reap it here
