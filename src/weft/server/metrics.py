"""Prometheus metrics, with the names that dashboards of LLM servers use.

The hot path adds to plain numbers; families are built at each scrape.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from weft.core.errors import WeftError
from weft.core.plan import Update
from weft.core.types import DEFAULT_CLASSES, FinishReason, Request, ServiceClass
from weft.server.counts import Board, Counts
from weft.server.probe import EngineProbe

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# What an engine may tell: name -> (kind, help).
ENGINE_METRICS: Mapping[str, tuple[str, str]] = {
    "num_requests_running": ("gauge", "Sequences that the engine computes now"),
    "num_requests_waiting": ("gauge", "Sequences that wait for their first computation"),
    "kv_cache_usage_perc": ("gauge", "Share of the KV cache in use, from 0 to 1"),
    "num_preemptions": ("counter", "Times that a sequence lost its memory to another"),
    "prefix_cache_queries": ("counter", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("counter", "Prompt tokens found in the prefix cache"),
    "spec_decode_num_draft_tokens": ("counter", "Tokens proposed by speculation"),
    "spec_decode_num_accepted_tokens": ("counter", "Proposed tokens that were accepted"),
}

# The same under weft's own name alone, as no dashboard knows them.
OWN_METRICS: Mapping[str, str] = {
    "engine_restarts": "Engine processes that took over from one that had died",
    "engine_memory_kills": "Engine processes that were killed because memory ran out",
    "slo_requests_refused": "Requests refused, as their first token would come too late",
    "slo_requests_demoted": "Requests served as best effort for the same reason",
}

NO_TARGETS = ServiceClass("", 0)


class Metrics(Counts):
    """Counts of one request plane, and their page for Prometheus, with those of all others."""

    def __init__(
        self,
        model: str,
        probe: EngineProbe,
        prefixes: Seq[str] = ("weft",),
        classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    ) -> None:
        super().__init__()
        self._model = model
        self._classes = {row.name: (place, row) for place, row in enumerate(classes)}
        self._probe = probe
        self._prefixes = tuple(prefixes)
        self._board: Board | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def share(self, board: Board) -> None:
        """Continue a predecessor's counts, and share them with the other planes from now on."""
        self._board = board
        self.add(board.read_own(), gauges=False)

    def show(self) -> None:
        """Publish these counts to the other planes."""
        if self._board is not None:
            self._board.write(self)

    def total(self) -> Counts:
        """The sum over all request planes; the others are as they have last shown themselves."""
        total = Counts()
        for counts in (self.dump(), *(self._board.read_others() if self._board else ())):
            total.add(counts)
        return total

    def render(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self._registry)

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count a typed error that ends the block as a request that was never begun."""
        try:
            yield
        except WeftError as error:
            self.rejected[error.code] += 1
            raise

    def judge(self, service_class: str, ttft_s: float, tpot_s: float) -> None:
        """Count which targets of its class a sequence has kept; seconds are infinite if it failed.

        Args:
            tpot_s: mean time of each token after the first; 0 where there is but one.
        """
        place, row = self._classes.get(service_class, (0, NO_TARGETS))
        judged = [
            (name, took <= target)
            for name, took, target in (("ttft", ttft_s, row.ttft_s), ("tpot", tpot_s, row.tpot_s))
            if target is not None
        ]
        if judged:
            judged.append(("all", all(kept for _, kept in judged)))
        for name, kept in judged:
            self.targets[_target_key(place, name, kept)] += 1

    def collect(self) -> Iterator[Metric]:
        """All families, for each name prefix."""
        total = self.total()
        for prefix in self._prefixes:
            yield from self._gauges_and_counters(prefix, total)
            yield from self._histograms(prefix, total)
        yield self._refusals(total)
        yield self._kept_targets(total)
        gauges = self._probe.gauges()
        for name, text in OWN_METRICS.items():
            if name in gauges:
                yield self._plain(f"weft:{name}", "counter", text, gauges[name])

    def _gauges_and_counters(self, prefix: str, total: Counts) -> Iterator[Metric]:
        values: dict[str, float] = {
            "num_requests_running": total.running,
            "num_requests_waiting": total.waiting,
        }
        values |= self._probe.gauges()
        for name, (kind, text) in ENGINE_METRICS.items():
            if name in values:
                yield self._plain(f"{prefix}:{name}", kind, text, values[name])
        text = "Prompt tokens of accepted requests"
        yield self._plain(f"{prefix}:prompt_tokens", "counter", text, total.prompt_tokens)
        text = "Tokens generated"
        yield self._plain(f"{prefix}:generation_tokens", "counter", text, total.generation_tokens)
        family = CounterMetricFamily(
            f"{prefix}:request_success",
            "Sequences that have ended",
            labels=["model_name", "finished_reason"],
        )
        for reason in ("stop", "length", "cancelled", "error"):
            family.add_metric([self._model, reason], total.finished[reason])
        yield family

    def _refusals(self, total: Counts) -> Metric:
        family = CounterMetricFamily(
            "weft:request_rejected",
            "Generation requests refused before the engine took them, by code of the error",
            labels=["model_name", "reason"],
        )
        for reason, count in sorted(total.rejected.items()):
            family.add_metric([self._model, reason], count)
        return family

    def _kept_targets(self, total: Counts) -> Metric:
        family = CounterMetricFamily(
            "weft:slo_targets",
            "Sequences that have kept or missed a target of their class, or all of its targets",
            labels=["model_name", "service_class", "target", "outcome"],
        )
        for place, row in self._classes.values():
            bounds = {"ttft": row.ttft_s, "tpot": row.tpot_s}
            names = [name for name, bound in bounds.items() if bound is not None]
            for name in [*names, "all"] if names else []:
                for outcome, kept in (("kept", True), ("missed", False)):
                    count = total.targets[_target_key(place, name, kept)]
                    family.add_metric([self._model, row.name, name, outcome], count)
        return family

    def _plain(self, name: str, kind: str, text: str, value: float) -> Metric:
        make = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
        family = make(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histograms(self, prefix: str, total: Counts) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token", "From request to first token", total.time_to_first_token),
            ("inter_token_latency", "Between two tokens", total.inter_token_latency),
            ("e2e_request_latency", "From request to last token", total.e2e_latency),
            ("request_queue_time", "Until the engine began to compute", total.queue_time),
            ("request_prefill_time", "From there until the prompt was read", total.prefill_time),
            ("request_decode_time", "From first to last token", total.decode_time),
        ):
            family = HistogramMetricFamily(
                f"{prefix}:{name}_seconds", f"{text}, in seconds", labels=["model_name"]
            )
            family.add_metric([self._model], histogram.buckets(), histogram.total)
            yield family


def _target_key(place: int, target: str, kept: bool) -> str:
    return f"{place} {target} {'kept' if kept else 'missed'}"


class JobTimer:
    """Follows the sequences of one job into the metrics.

    Attributes:
        start_ns: when the engine got them, on the monotonic clock.
        unseen: sequences of which nothing has come yet.
        first_token: when the first token of all came, in seconds; 0 before.
        scheduled_ns, prefilled_ns: of the sequence that ended first; 0 if it never ran.
        output_tokens: so far, of all sequences.
        ends: how sequences have ended.
        ended: when the latest of them did, in seconds; 0 before.
    """

    def __init__(self, metrics: Metrics, requests: Seq[Request], prompt_tokens: int) -> None:
        self._metrics = metrics
        self._class = requests[0].service_class
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
        """Count abandoned sequences as cancelled."""
        self._metrics.finished["cancelled"] += open_sequences
        if open_sequences:
            self.ends.append("cancelled")
            self.ended = time.monotonic()
        self._metrics.running -= len(self._seen)
        self._metrics.waiting -= self.unseen
        self._seen.clear()
        self.unseen = 0

    def _tokens(self, sequence_id: int, count: int, now: float) -> None:
        metrics = self._metrics
        metrics.generation_tokens += count
        self.output_tokens += count
        times = self._seen.get(sequence_id)
        if times is None:
            self._seen[sequence_id] = [now, now, count]
            self.first_token = self.first_token or now
            self.unseen -= 1
            metrics.waiting -= 1
            metrics.running += 1
            metrics.time_to_first_token.observe(now - self._start)
            return
        metrics.inter_token_latency.observe((now - times[1]) / count, count)
        times[1] = now
        times[2] += count

    def _end(self, update: Update, now: float) -> None:
        metrics = self._metrics
        metrics.finished[str(update.finish)] += 1
        metrics.e2e_latency.observe(now - self._start)
        self.ends.append(str(update.finish))
        self.ended = now
        self._engine_times(update)
        times = self._seen.pop(update.sequence_id, None)
        self._judge(update, times)
        if times is None:
            self.unseen -= 1
            metrics.waiting -= 1
            return
        metrics.running -= 1
        metrics.decode_time.observe(now - times[0])

    def _judge(self, update: Update, times: list[float] | None) -> None:
        """Count targets kept and missed, except for cancelled requests and embeddings."""
        if update.finish is FinishReason.CANCELLED or update.embedding is not None:
            return
        if update.finish is FinishReason.ERROR or times is None:
            self._metrics.judge(self._class, math.inf, math.inf)
            return
        first, last, tokens = times
        self._metrics.judge(self._class, first - self._start, (last - first) / max(tokens - 1, 1))

    def _engine_times(self, update: Update) -> None:
        """Count how long a sequence waited, and how long its prompt took, as the engine saw it."""
        scheduled, prefilled = update.scheduled_ns, update.prefilled_ns
        if not scheduled:
            return
        self.scheduled_ns = self.scheduled_ns or scheduled
        self._metrics.queue_time.observe(max(0, scheduled - self.start_ns) / 1e9)
        if prefilled:
            self.prefilled_ns = self.prefilled_ns or prefilled
            self._metrics.prefill_time.observe((prefilled - scheduled) / 1e9)
