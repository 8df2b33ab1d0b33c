"""Seconds that the tests of each folder took, beside their budgets; too many fail the run.

``budgets.toml`` has the budgets. A run of the whole suite prints a table; with
``WEFT_TEST_BUDGETS=enforced`` it fails where a folder took more than `SLACK` times its budget.
Machines differ, and are busy: a fixed piece of work, timed now and then between the tests, says by
how much this one is slower than that of the budgets.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import depth

SLACK = 2.0
SPIN_S = 0.0054  # of `spin_s`, where the budgets were made
VARIABLE = "WEFT_TEST_BUDGETS"
FILE = Path(__file__).parent / "budgets.toml"


def spin_s() -> float:
    """Seconds of a fixed piece of work."""
    start = time.perf_counter()
    total = 0
    for i in range(100_000):
        total += i * i
    return time.perf_counter() - start


class Spins:
    """In each process that runs tests: the fixed work, timed before the first test of a file."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._module = ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if (module := item.nodeid.split("::")[0]) != self._module:
            self._module = module
            self.times.append(spin_s())

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["spins"] = self.times


def seconds() -> dict[str, float]:
    """The budget of each folder."""
    found: dict[str, float] = tomllib.loads(FILE.read_text(encoding="utf-8"))["seconds"]
    return found


def folder_of(nodeid: str) -> str:
    """The folder of a test below ``tests``."""
    return nodeid.split("::")[0].removeprefix("tests/").split("/")[0]


def over(seconds: dict[str, float], budgets: dict[str, float], slowness: float) -> list[str]:
    """Folders that took more than their budgets allow, or that have none, and the other way round.

    Args:
        slowness: of this machine, relative to the one that the budgets were made on.
    """
    found = []
    for folder, took in sorted(seconds.items()):
        if folder not in budgets:
            found.append(f"tests/{folder} has no budget in {FILE.name}")
        elif took > (limit := budgets[folder] * SLACK * max(1.0, slowness)):
            found.append(f"tests/{folder} took {took:.0f} s; {limit:.0f} s are allowed")
    gone = sorted(budgets.keys() - seconds.keys())
    return found + [f"tests/{folder} has a budget and no tests" for folder in gone]


class Budgets:
    """In the process that started the run: adds up, prints, and fails the run."""

    def __init__(self, config: pytest.Config, spins: Spins) -> None:
        self._budgets = seconds()
        whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        again = getattr(config.option, "lf", False)  # an option of a plugin that may be off
        chosen = config.option.keyword or config.option.markexpr or again
        self._whole = whole and not chosen and not depth.DEEP
        self._enforced = os.environ.get(VARIABLE) == "enforced"
        self._spins = spins
        self._seconds: dict[str, float] = defaultdict(float)
        self._over: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[folder_of(report.nodeid)] += report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._spins.times += getattr(node, "workeroutput", {}).get("spins", [])

    def _slowness(self) -> float:
        times = self._spins.times
        return sum(times) / len(times) / SPIN_S if times else 1.0

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._whole and session.exitstatus == pytest.ExitCode.OK:
            self._over = over(dict(self._seconds), self._budgets, self._slowness())
            if self._over and self._enforced:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._whole:
            return
        terminalreporter.section("seconds of each folder")
        for folder, took in sorted(self._seconds.items(), key=lambda item: -item[1]):
            budget = self._budgets.get(folder)
            allowed = "no budget" if budget is None else f"budget {budget:4.0f}"
            terminalreporter.write_line(f"{folder:12} {took:6.1f}   {allowed}")
        total, budget = sum(self._seconds.values()), sum(self._budgets.values())
        terminalreporter.write_line(f"{'all':12} {total:6.1f}   budget {budget:4.0f}")
        slowness = self._slowness()
        terminalreporter.write_line(
            f"This machine was {slowness:.2f} times as slow as the one that the budgets are for; "
            f"they may be exceeded {SLACK * max(1.0, slowness):.1f} times."
        )
        for line in self._over:
            terminalreporter.write_line(f"{'ERROR' if self._enforced else 'over budget'}: {line}")
