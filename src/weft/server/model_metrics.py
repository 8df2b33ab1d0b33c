"""Families of the page for Prometheus of a server whose models sleep and wake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weft.core.states import LoadState
from weft.ring.model_board import ModelRow


def model_families(rows: Mapping[str, ModelRow]) -> Iterator[Metric]:
    """The states of models, by their first names."""
    state = GaugeMetricFamily(
        "weft:model_state", "1 for the state of a model", labels=["model_name", "state"]
    )
    memory = GaugeMetricFamily(
        "weft:model_memory_bytes",
        "Memory that a model takes while it is awake",
        labels=["model_name"],
    )
    wakes = CounterMetricFamily(
        "weft:model_wakes", "Times that a model was loaded", labels=["model_name"]
    )
    seconds = GaugeMetricFamily(
        "weft:model_wake_seconds", "Seconds that a model last took to load", labels=["model_name"]
    )
    for name, row in rows.items():
        for one in get_args(LoadState):
            state.add_metric([name, one], row.state == one)
        memory.add_metric([name], row.bytes)
        wakes.add_metric([name], row.starts)
        if row.wake_s:
            seconds.add_metric([name], row.wake_s)
    yield from (state, memory, wakes, seconds)
