"""The families of the page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from weft.server.attainment import WINDOW_S
from weft.server.counts import Counts
from weft.server.metrics import Metrics, target_key
from weft.server.place_metrics import place_families

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

# Latencies of sequences: name -> (field of `Latencies`, help).
LATENCIES: Mapping[str, tuple[str, str]] = {
    "time_to_first_token": ("time_to_first_token", "From request to first token"),
    "inter_token_latency": ("inter_token_latency", "Between two tokens"),
    "e2e_request_latency": ("e2e", "From request to last token"),
    "request_queue_time": ("queue_time", "Until the engine began to compute"),
    "request_prefill_time": ("prefill_time", "From there until the prompt was read"),
    "request_decode_time": ("decode_time", "From first to last token"),
    "request_time_per_output_token": (
        "time_per_output_token",
        "Mean time of each token of a sequence after its first",
    ),
}

# The same under weft's own name alone, as no dashboard knows them.
OWN_METRICS: Mapping[str, tuple[str, str]] = {
    "engine_restarts": ("counter", "Engine processes that took over from one that had died"),
    "engine_memory_kills": (
        "counter",
        "Engine processes that were killed because memory ran out",
    ),
    "engine_steps": ("counter", "Steps computed"),
    "resident_steps": ("counter", "Steps computed by the resident loop, without Python between"),
    "split_steps": ("counter", "Steps computed in two halves that overlap on a GPU"),
    "slo_requests_refused": (
        "counter",
        "Requests refused, as their first token would come too late",
    ),
    "slo_requests_demoted": ("counter", "Requests served as best effort for the same reason"),
    "host_kv_blocks": ("gauge", "KV blocks of the host tier, of its fullest group of layers"),
    "host_kv_blocks_free": ("gauge", "Those of them that no sequence holds"),
    "kv_blocks_to_host": (
        "counter",
        "KV blocks that were copied from the device to the host",
    ),
    "kv_blocks_to_device": ("counter", "KV blocks that came back to the device"),
    "host_attention_tokens": ("counter", "Tokens generated whose attention the host computed"),
    "host_attention_queue": ("gauge", "Rows that wait in a layer for attention on the host"),
    "host_attention_calls": ("counter", "Calls of attention on the host"),
    "host_attention_jobs": ("counter", "Rows in those calls"),
    "host_attention_busy_seconds": ("counter", "Time that the host spent in them"),
    "host_attention_round_trip_seconds": (
        "counter",
        "Sum over the rows of the time from submission to result",
    ),
    "host_attention_restarts": ("counter", "Processes weft-host that took over from a dead one"),
    "host_attention_step_slowdown": (
        "gauge",
        "Time of steps with decodes of the host for each second predicted, as load-aware measured",
    ),
    "host_attention_step_surplus_seconds": (
        "gauge",
        "Time that piggybacked rows add to a step, as slo-piggyback measured",
    ),
    "host_sequences_lost": (
        "counter",
        "Sequences computed again because the remote place with their KV was gone",
    ),
    "kv_disk_bytes": ("gauge", "Bytes of the folder of prefixes"),
    "kv_disk_blocks_saved": ("counter", "KV blocks that were saved there"),
    "kv_disk_blocks_lost": ("counter", "KV blocks that were to be saved there, and are not"),
    "kv_disk_blocks_missing": (
        "counter",
        "KV blocks that were to be read from disk, and were not there or not whole",
    ),
    "kv_disk_tokens": ("counter", "Prompt tokens that came from there, not computed"),
}


def render(models: Seq[Metrics], *, by_key: bool, more: Iterable[Metric] = ()) -> bytes:
    """The page of all models; without what names keys, anybody who has a key may see it.

    Args:
        more: families beside theirs.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page([_Families(metrics, by_key) for metrics in models], more))
    return generate_latest(registry)


def families_of(metrics: Metrics, *, by_key: bool) -> Iterator[Metric]:
    """The families of the page."""
    return _Families(metrics, by_key).collect()


class _Page(Collector):
    """Families of several models, each once with the samples of all."""

    def __init__(self, models: Seq[_Families], more: Iterable[Metric]) -> None:
        self._models = models
        self._more = more

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for model in self._models:
            for family in model.collect():
                found.setdefault(family.name, family)
                if found[family.name] is not family:
                    found[family.name].samples += family.samples
        yield from found.values()
        yield from self._more


class _Families:
    """The families of one model."""

    def __init__(self, metrics: Metrics, by_key: bool) -> None:
        self._metrics = metrics
        self._by_key = by_key

    def collect(self) -> Iterator[Metric]:
        """All families, for each name prefix."""
        total = self._metrics.total()
        for prefix in self._metrics.prefixes:
            yield from self._gauges_and_counters(prefix, total)
            yield from self._histograms(prefix, total)
        yield self._refusals(total)
        yield self._kept_targets(total)
        yield self._attained(total)
        yield self._targets()
        yield from self._policy()
        if self._by_key:
            yield from self._usage(total)
        yield from place_families(self._metrics.model, self._metrics.probe.places())
        gauges = self._metrics.probe.gauges()
        for name, (kind, text) in OWN_METRICS.items():
            if name in gauges:
                yield self._plain(f"weft:{name}", kind, text, gauges[name])

    def _gauges_and_counters(self, prefix: str, total: Counts) -> Iterator[Metric]:
        values: dict[str, float] = {
            "num_requests_running": total.running,
            "num_requests_waiting": total.waiting,
        }
        values |= self._metrics.probe.gauges()
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
            family.add_metric([self._metrics.model, reason], total.finished[reason])
        yield family

    def _refusals(self, total: Counts) -> Metric:
        family = CounterMetricFamily(
            "weft:request_rejected",
            "Generation requests refused before the engine took them, by code of the error",
            labels=["model_name", "reason"],
        )
        for reason, count in sorted(total.rejected.items()):
            family.add_metric([self._metrics.model, reason], count)
        return family

    def _kept_targets(self, total: Counts) -> Metric:
        family = CounterMetricFamily(
            "weft:slo_targets",
            "Sequences that have kept or missed a target of their class, or all of its targets",
            labels=["model_name", "service_class", "target", "outcome"],
        )
        for place, row in self._metrics.classes.values():
            bounds = {"ttft": row.ttft_s, "tpot": row.tpot_s}
            names = [name for name, bound in bounds.items() if bound is not None]
            for name in [*names, "all"] if names else []:
                for outcome, kept in (("kept", True), ("missed", False)):
                    count = total.targets[target_key(place, name, kept)]
                    family.add_metric([self._metrics.model, row.name, name, outcome], count)
        return family

    def _targets(self) -> Metric:
        self._metrics.follow_targets()
        family = GaugeMetricFamily(
            "weft:slo_target_seconds",
            "Targets of service classes: seconds to the first token, mean seconds per further one",
            labels=["model_name", "service_class", "target"],
        )
        for _, row in self._metrics.classes.values():
            for name, bound in (("ttft", row.ttft_s), ("tpot", row.tpot_s)):
                if bound is not None:
                    family.add_metric([self._metrics.model, row.name, name], bound)
        return family

    def _policy(self) -> Iterator[Metric]:
        if policy := self._metrics.probe.policy():
            family = GaugeMetricFamily(
                "weft:scheduler_policy",
                "1 for the policy that plans steps now",
                labels=["model_name", "policy"],
            )
            family.add_metric([self._metrics.model, policy], 1)
            yield family

    def _attained(self, total: Counts) -> Metric:
        family = GaugeMetricFamily(
            "weft_slo_attainment",
            f"Share of the sequences that ended in the last {WINDOW_S / 60:g} minutes "
            "which kept all targets of their class",
            labels=["model_name", "service_class"],
        )
        for place, row in self._metrics.classes.values():
            keys = (target_key(place, "all", kept) for kept in (True, False))
            share = self._metrics.attainment.share(total.targets, *keys)
            if share is not None:
                family.add_metric([self._metrics.model, row.name], share)
        return family

    def _plain(self, name: str, kind: str, text: str, value: float) -> Metric:
        make = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
        family = make(name, text, labels=["model_name"])
        family.add_metric([self._metrics.model], value)
        return family

    def _histograms(self, prefix: str, total: Counts) -> Iterator[Metric]:
        for name, (field, text) in LATENCIES.items():
            family = HistogramMetricFamily(
                f"{prefix}:{name}_seconds",
                f"{text}, in seconds",
                labels=["model_name", "service_class"],
            )
            for place, row in self._metrics.classes.values():
                histogram = getattr(total.latencies_of(str(place)), field)
                labels = [self._metrics.model, row.name]
                family.add_metric(labels, histogram.buckets(), histogram.total)
            yield family

    def _usage(self, total: Counts) -> Iterator[Metric]:
        labels = ["model_name", "key", "service_class"]
        requests, prompt, output = families = (
            CounterMetricFamily(
                "weft:key_requests", "Requests by API key and class", labels=labels
            ),
            CounterMetricFamily(
                "weft:key_prompt_tokens", "Prompt tokens by API key and class", labels=labels
            ),
            CounterMetricFamily(
                "weft:key_generation_tokens", "Tokens generated by API key and class", labels=labels
            ),
        )
        for (key, name), use in sorted(self._metrics.by_name(total.usage).items()):
            for family, value in zip((requests, prompt, output), use, strict=True):
                family.add_metric([self._metrics.model, key, name], value)
        yield from families
