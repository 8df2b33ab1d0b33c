"""Records of a simulation: a few numbers for each request and each step, in compact arrays.

About 60 bytes a request and 150 bytes a step; gaps between tokens are counted, since most tokens of
a step have the same one. Nothing here grows with tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from weft.core.plan import StepOutputs
from weft.core.types import FinishReason
from weft.sim.jobs import SimulatedRequest

Floats = NDArray[np.float64]
NEVER_S = -1.0
OPEN, COMPLETED, CANCELLED, FAILED = range(4)
_ENDS = {
    FinishReason.STOP: COMPLETED,
    FinishReason.LENGTH: COMPLETED,
    FinishReason.CANCELLED: CANCELLED,
    FinishReason.ERROR: FAILED,
}
STEP_COLUMNS = (
    "start_s", "seconds", "tokens", "sampled", "prefills", "prefill_area", "prefill_context",
    "decodes", "decode_context", "host_decodes", "host_context", "out_tokens", "in_tokens",
    "sub_batches", "cpu_s", "move_s", "device_kv", "host_kv", "waiting",
)  # fmt: skip


class ClassRecord:
    """Gaps between the tokens of one service class, and who of it waits for the next one."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}
        self.gaps = array("d")
        self.counts = array("L")


class Record:
    """Requests by number (their id), in order of their arrival; times are seconds of the run.

    Attributes:
        live: requests that have come and not ended.
        output: tokens of the whole answer, whether it came or not.
        ended: OPEN, COMPLETED, CANCELLED or FAILED.
        failures: how many failed, by the code of their error; with an example of each.
    """

    def __init__(self, classes: Seq[str], done: Callable[[int], None] | None = None) -> None:
        self.classes = tuple(classes)
        self._kinds = {name: index for index, name in enumerate(self.classes)}
        self.arrival_s, self.scheduled_s = array("d"), array("d")
        self.first_s, self.end_s = array("d"), array("d")
        self.input, self.output, self.cached = array("L"), array("L"), array("L")
        self.kind, self.ended = array("B"), array("B")
        self.by_class = [ClassRecord() for _ in self.classes]
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.live: set[int] = set()
        self._fresh: set[int] = set()
        self._done = done

    def __len__(self) -> int:
        return len(self.arrival_s)

    def arrive(self, at_s: float, job: SimulatedRequest, input_tokens: int) -> int:
        """Record a request and return its number."""
        number = len(self.arrival_s)
        self.arrival_s.append(at_s)
        for times in (self.scheduled_s, self.first_s, self.end_s):
            times.append(NEVER_S)
        self.input.append(input_tokens)
        self.output.append(job.output_tokens)
        self.cached.append(0)
        self.kind.append(self._kinds[job.service_class])
        self.ended.append(OPEN)
        self.live.add(number)
        self._fresh.add(number)
        return number

    def scheduled(self, numbers: Iterable[int], now: float) -> None:
        """Record when requests first got a row."""
        for number in numbers:
            if self.scheduled_s[number] < 0:
                self.scheduled_s[number] = now

    def outputs(self, outputs: StepOutputs, now: float) -> list[int]:
        """Record the tokens of a step and return the requests that ended."""
        numbers = [number for number, _ in outputs.tokens]
        numbers += [update.sequence_id for update in outputs.updates if update.token is not None]
        for number in self._fresh.intersection(numbers):
            self._fresh.discard(number)
            self.first_s[number] = now
            self.by_class[self.kind[number]].last[number] = now
        for record in self.by_class:
            if record.last:
                self._gaps(record, numbers, now)
        ended = []
        for update in outputs.updates:
            if update.finish is not None:
                number = update.sequence_id
                self.cached[number] = update.cached_tokens
                self._end(number, now, update.finish)
                if update.error is not None:
                    self.failures[update.error.code] += 1
                    self.examples.setdefault(update.error.code, update.error.message)
                ended.append(number)
        return ended

    @staticmethod
    def _gaps(record: ClassRecord, numbers: list[int], now: float) -> None:
        """Count the gaps before these tokens; those that came now are first tokens."""
        last = record.last
        own = [number for number in numbers if number in last]
        for before, count in Counter([last[number] for number in own]).items():
            if before < now:
                record.gaps.append(now - before)
                record.counts.append(count)
        last.update(dict.fromkeys(own, now))

    def _end(self, number: int, now: float, reason: FinishReason) -> None:
        self.end_s[number] = now
        self.ended[number] = _ENDS[reason]
        self.live.discard(number)
        self._fresh.discard(number)
        self.by_class[self.kind[number]].last.pop(number, None)
        if self._done is not None:
            self._done(number)


class StepLog:
    """The work and the load of each step, a column for each name above."""

    def __init__(self) -> None:
        self.columns = {name: array("d") for name in STEP_COLUMNS}
        self._appends = [self.columns[name].append for name in STEP_COLUMNS]

    def __len__(self) -> int:
        return len(self.columns["start_s"])

    def add(self, values: Iterable[float]) -> None:
        """Append a step: its values in the order of ``STEP_COLUMNS``."""
        for append, value in zip(self._appends, values, strict=True):
            append(value)

    def column(self, name: str) -> Floats:
        return np.frombuffer(self.columns[name], np.float64) if len(self) else np.zeros(0)
