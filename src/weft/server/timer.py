"""Follows the sequences of one job into the metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq

from weft.core.plan import Update
from weft.core.types import FinishReason, Request
from weft.server.counts import Use
from weft.server.metrics import Metrics

USE_EVERY_TOKENS = 64  # that usage may lag behind while a sequence is computed


class JobTimer:
    """Follows the sequences of one job into the metrics.

    Args:
        payer: name of the key whose they are.
        begun: what usage has of them from the start; by default a request and its prompt.

    Attributes:
        start_ns: when the engine got them, on the monotonic clock.
        unseen: sequences of which nothing has come yet.
        first_token: when the first token of all came, in seconds; 0 before.
        scheduled_ns, prefilled_ns: of the sequence that ended first; 0 if it never ran.
        output_tokens: so far, of all sequences.
        ends: how sequences have ended.
        ended: when the latest of them did, in seconds; 0 before.
    """

    def __init__(
        self,
        metrics: Metrics,
        requests: Seq[Request],
        prompt_tokens: int,
        payer: str = "",
        begun: Use | None = None,
    ) -> None:
        self._metrics = metrics
        self._class = requests[0].service_class
        self._latencies = metrics.latencies_of(metrics.place_of(self._class))
        self._payer = payer
        self._used = 0  # of the output tokens, those that usage has
        self.start_ns = time.monotonic_ns()
        self.unseen = len(requests)
        self.first_token = 0.0
        self.scheduled_ns = 0
        self.prefilled_ns = 0
        self.output_tokens = 0
        self.ends: list[str] = []
        self.ended = 0.0
        self._start = self.start_ns / 1e9
        self._seen: dict[int, list[float]] = {}  # times of first and latest token, and how many
        metrics.use(payer, self._class, begun or Use(1, prompt_tokens))
        metrics.prompt_tokens += prompt_tokens
        metrics.waiting += self.unseen

    def saw(self, updates: Seq[Update]) -> list[int]:
        """Count updates that have just arrived; return the sequences that have ended."""
        now = time.monotonic()
        first = updates[0]
        if len(updates) == 1 and first.token is not None and first.finish is None:
            self._tokens(first.sequence_id, 1, now)  # what nearly every call is
            return []
        tokens: dict[int, int] = {}
        ends: list[Update] = []
        for update in updates:
            if update.token is not None:
                tokens[update.sequence_id] = tokens.get(update.sequence_id, 0) + 1
            if update.finish is not None:
                ends.append(update)
        for sequence_id, count in tokens.items():
            self._tokens(sequence_id, count, now)
        for end in ends:
            self._end(end, now)
        return [end.sequence_id for end in ends]

    def close(self, open_sequences: int) -> None:
        """Count sequences that nobody waits for any more as cancelled."""
        self._count_use()
        self._metrics.finished["cancelled"] += open_sequences
        if open_sequences:
            self.ends.append("cancelled")
            self.ended = time.monotonic()
        self._metrics.running -= len(self._seen)
        self._metrics.waiting -= self.unseen
        self._seen.clear()
        self.unseen = 0

    def _count_use(self) -> None:
        """Let usage have all output tokens so far."""
        fresh, self._used = self.output_tokens - self._used, self.output_tokens
        if fresh:
            self._metrics.use(self._payer, self._class, Use(0, 0, fresh))

    def _tokens(self, sequence_id: int, count: int, now: float) -> None:
        metrics = self._metrics
        metrics.generation_tokens += count
        self.output_tokens += count
        if self.output_tokens - self._used >= USE_EVERY_TOKENS:
            self._count_use()
        times = self._seen.get(sequence_id)
        if times is None:
            self._seen[sequence_id] = [now, now, count]
            self.first_token = self.first_token or now
            self.unseen -= 1
            metrics.waiting -= 1
            metrics.running += 1
            self._latencies.time_to_first_token.observe(now - self._start)
            return
        self._latencies.inter_token_latency.observe((now - times[1]) / count, count)
        times[1] = now
        times[2] += count

    def _end(self, update: Update, now: float) -> None:
        metrics = self._metrics
        metrics.finished[str(update.finish)] += 1
        self._latencies.e2e.observe(now - self._start)
        self.ends.append(str(update.finish))
        self.ended = now
        self._engine_times(update)
        self._count_use()
        times = self._seen.pop(update.sequence_id, None)
        self._judge(update, times)
        if times is None:
            self.unseen -= 1
            metrics.waiting -= 1
            return
        metrics.running -= 1
        self._latencies.decode_time.observe(now - times[0])

    def _judge(self, update: Update, times: list[float] | None) -> None:
        """Count targets kept and missed, and time a token; not of whoever left, nor of vectors."""
        if update.finish is FinishReason.CANCELLED or update.embedding is not None:
            return
        if update.finish is FinishReason.ERROR or times is None:
            self._metrics.judge(self._class, math.inf, math.inf)
            return
        first, last, tokens = times
        tpot_s = (last - first) / max(tokens - 1, 1)
        if tokens > 1:
            self._latencies.time_per_output_token.observe(tpot_s)
        self._metrics.judge(self._class, first - self._start, tpot_s)

    def _engine_times(self, update: Update) -> None:
        """Count how long a sequence waited, and how long its prompt took, as the engine saw it."""
        scheduled, prefilled = update.scheduled_ns, update.prefilled_ns
        if not scheduled:
            return
        self.scheduled_ns = self.scheduled_ns or scheduled
        self._latencies.queue_time.observe(max(0, scheduled - self.start_ns) / 1e9)
        if prefilled:
            self.prefilled_ns = self.prefilled_ns or prefilled
            self._latencies.prefill_time.observe((prefilled - scheduled) / 1e9)
