"""Limits of the requests that wait for the engine; refusals name a time to retry."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from weft.core.errors import WeftError
from weft.server.options import ServerOptions
from weft.server.probe import EngineLoad, EngineProbe

WINDOW_S = 30.0  # over which the rate is measured
SAMPLE_EVERY_S = 0.25
LONGEST_RETRY_S = 60


class QueueFullError(WeftError):
    """Too much waits for the engine already."""

    http_status = 429
    code = "queue_full"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Waiting(NamedTuple):
    """A job of this request plane that the engine has not started.

    Attributes:
        since_ns: when it was submitted, on the monotonic clock.
        prompt_tokens: of all its sequences.
    """

    since_ns: int
    sequences: int
    prompt_tokens: int


class QueueLimit:
    """Keeps the sequences, and their prompt tokens, that wait for the engine below the limits.

    What waits is what the engine says, for all request planes, and what was submitted here since
    it said so. A request that is larger than a limit is taken when nothing waits.
    """

    def __init__(self, options: ServerOptions, probe: EngineProbe) -> None:
        self._most_requests = options.max_queued_requests
        self._most_tokens = options.max_queued_tokens
        self._probe = probe
        self._rates = EngineRates()

    def admit(self, sequences: int, prompt_tokens: int, waiting: Iterable[Waiting]) -> None:
        """Raise QueueFullError if a request goes beyond a limit.

        Args:
            waiting: this request plane's own jobs, the latest first.
        """
        if self._most_requests is None and self._most_tokens is None:
            return
        load = self._probe.load()
        if load is None:
            load = EngineLoad()
        else:
            self._rates.sample(load)
        queued, tokens = _queued(load, waiting)
        self._check("sequences", queued, sequences, self._most_requests, self._rates.sequences)
        self._check("prompt tokens", tokens, prompt_tokens, self._most_tokens, self._rates.tokens)

    def _check(self, what: str, queued: int, more: int, most: int | None, rate: float) -> None:
        if most is None or not queued or queued + more <= most:
            return
        raise QueueFullError(
            f"{queued} {what} wait already, and this server queues {most}; try again later.",
            _retry_after_s(queued + more - most, rate),
        )


def _queued(load: EngineLoad, waiting: Iterable[Waiting]) -> tuple[int, int]:
    """Sequences and prompt tokens that wait; free rows will be taken at once."""
    sequences, tokens = load.waiting, load.queued_tokens
    for job in waiting:
        if job.since_ns <= load.updated_ns:
            break  # the engine has counted it and all before it
        sequences += job.sequences
        tokens += job.prompt_tokens
    free = load.free_rows if load.waiting == 0 else 0
    return max(0, sequences - free), tokens


def _retry_after_s(excess: int, rate: float) -> int:
    """Seconds until so many are through; 1 if no rate is known yet."""
    if math.isnan(rate):
        return 1
    return LONGEST_RETRY_S if rate <= 0 else min(LONGEST_RETRY_S, math.ceil(excess / rate))


class EngineRates:
    """Rates at which the engine starts sequences and reads prompts, from its reports.

    Attributes:
        sequences, tokens: a second; NaN while that is unknown.
    """

    def __init__(self) -> None:
        self.sequences = self.tokens = math.nan
        self._samples: deque[EngineLoad] = deque()

    def sample(self, load: EngineLoad) -> None:
        """Record the engine's present counts."""
        samples = self._samples
        if samples and load.engine != samples[-1].engine:  # another engine counts from 0
            samples.clear()
        newest = samples[-1].updated_ns if samples else -math.inf
        if load.updated_ns - newest < SAMPLE_EVERY_S * 1e9:
            return
        samples.append(load)
        while load.updated_ns - samples[0].updated_ns > WINDOW_S * 1e9 and len(samples) > 2:
            samples.popleft()
        first = samples[0]
        seconds = (load.updated_ns - first.updated_ns) / 1e9
        if seconds > 0:
            self.sequences = (load.started - first.started) / seconds
            self.tokens = (load.prompt_tokens - first.prompt_tokens) / seconds
