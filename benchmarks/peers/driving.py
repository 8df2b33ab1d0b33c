"""Shared code of the drivers: the lines that they exchange with ``run.py``. Standard library only.

A driver is a process that loads a model once and then runs scenarios. It writes a JSON line when
the model is loaded, and one for each line that it reads; what libraries print goes to standard
error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CACHING = "--prefix-caching"  # argument of every driver
MOST_TOKENS = 17408  # of a request: 17k


@dataclass(frozen=True)
class Work:
    """A scenario: requests sent at once, with prompts of random tokens, and greedy outputs.

    Attributes:
        prompt, output: tokens of each request.
        shared: so many tokens at the beginning of the prompts are the same in all of them.
    """

    requests: int
    prompt: int
    output: int
    seed: int
    shared: int = 0

    def prompts(self) -> list[list[int]]:
        draw = random.Random(self.seed)
        common = draw.choices(range(100, 31000), k=self.shared)
        own = self.prompt - self.shared
        return [common + draw.choices(range(100, 31000), k=own) for _ in range(self.requests)]


class Watch:
    """Notes when tokens come."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._began: dict[Any, float] = {}
        self._count = self._at_all_first = 0
        self._now = self._start = time.perf_counter()

    def tokens(self, request: Any, count: int = 1, now: float | None = None) -> None:
        """``count`` further tokens of a request have come, just now or at ``now``."""
        if count:
            self._now = time.perf_counter() if now is None else now
            self._count += count
            if request not in self._began:
                self._began[request] = self._now - self._start
                self._at_all_first = self._count

    def result(self) -> dict[str, float]:
        wanted = self._work.requests * self._work.output
        if self._count != wanted or len(self._began) != self._work.requests:
            raise SystemExit(f"{self._count} tokens came instead of {wanted}")
        return {
            "first_s": min(self._began.values()),
            "all_first_s": max(self._began.values()),
            "seconds": self._now - self._start,
            "tokens": self._count,
            "after_all_first": self._count - self._at_all_first,
        }


def drive(
    load: Callable[[], Callable[[Work], dict[str, float]]], version: Callable[[], str]
) -> None:
    """Load, then run what is read line by line until there is no more."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print
    started = time.perf_counter()
    run = load()
    ready = {"load_s": time.perf_counter() - started, "version": version()}
    own.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        own.write(json.dumps(run(Work(**json.loads(line)))) + "\n")
