"""Progress of a batch in the terminal: a bar while it runs, and a summary at the end."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from weft.batch.ports import Result
from weft.batch.results import Results
from weft.batch.usage import Usage

SAY_EVERY_S = 60.0


class ProgressBar:
    """A bar with lines, time left and rates; where standard error is no terminal, a line a minute.

    Attributes:
        ended: lines that got their result in this run.
    """

    def __init__(self, results: Results, lines: int) -> None:
        self._results = results
        self._lines = lines
        self._started = self._latest = time.monotonic()
        self._usage = Usage()
        self.ended = self._failed = 0
        self._bar: tqdm[Any] | None = None
        self._say_at = 0.0

    def start(self, answering: str) -> None:
        """Name the asker, and show the bar; rates are measured from here."""
        before = self._results.resumed
        done = f", {before} of them done before" if before else ""
        self.say(f"{self._count()}{done}; {answering}.")
        self._started = time.monotonic()
        self._say_at = self._started + SAY_EVERY_S
        self._bar = tqdm(
            total=self._lines,
            initial=before,
            unit="req",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def watch(self, result: Result) -> None:
        """Count a result in."""
        self.ended += 1
        self._latest = time.monotonic()
        self._failed += result.error is not None
        self._usage += result.usage
        if self._bar is None:
            return
        rates = self._tokens() + (f", {self._failed} failed" if self._failed else "")
        if not self._bar.disable:
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update()
        elif time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_EVERY_S
            done = self._results.answered + self._results.refused
            left_s = (self._lines - done) * self._seconds() / self.ended
            self.say(f"{done} of {self._count()}, about {left_s / 60:.0f} min left, {rates}")

    def say(self, message: str) -> None:
        """Write a line to standard error, above the bar if there is one."""
        tqdm.write(f"weft: {message}", file=sys.stderr)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()

    def summary(self) -> str:
        """The summary: counts, rates of this run, and the paths of the files."""
        results = self._results
        left = self._lines - results.answered - results.refused
        words = [f"{self._count()}: {results.answered} answered"]
        words += [f"{results.refused} with an error"] if results.refused else []
        words += [f"{left} left"] if left else []
        text = [f"{', '.join(words)}."]
        if results.resumed:
            text.append(f"{results.resumed} of them were done before this run.")
        if self.ended:
            text.append(
                f"This run: {self.ended} in {self._seconds():.1f} s, "
                f"{self.ended / self._seconds():.1f} requests/s, {self._tokens()}."
            )
        text.append(f"Results: {results.output}")
        if results.refused:
            text.append(f"Errors: {results.errors}")
        return "\n".join(text)

    def _count(self) -> str:
        return f"{self._lines} line{'s' if self._lines != 1 else ''}"

    def _seconds(self) -> float:
        """From the first request to the latest result."""
        return max(self._latest - self._started, 1e-9)

    def _tokens(self) -> str:
        read, written = self._usage.input_tokens, self._usage.output_tokens
        return f"tokens/s: {read / self._seconds():.0f} in, {written / self._seconds():.0f} out"
