"""A plugin of pytest: tells each failure when it happens, so that an early end loses no reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

from figures import figure, note

PHASES = ("setup", "call", "teardown")
_ended: Counter[str] = Counter()


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
        note(f"failed: {report.nodeid}: {reason(report.longreprtext)}")
    if report.when == "call" or report.outcome != "passed":
        _ended[report.outcome] += 1


def pytest_sessionfinish() -> None:
    print()  # behind what pytest shows of its progress
    for outcome, times in sorted(_ended.items()):
        figure(f"tests that have {outcome}" if outcome != "skipped" else "tests skipped", times)


def reason(text: str) -> str:
    """The line of a traceback that says what went wrong."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return lines[0] if lines else (text.strip().splitlines() or ["no reason"])[-1]
