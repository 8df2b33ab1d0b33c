"""The figures of a simulation: latencies, rates, SLO attainment by class, and utilisation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.types import ServiceClass
from weft.sim.record import CANCELLED, COMPLETED, FAILED, Floats, Record
from weft.sim.run import Simulated
from weft.sim.usage import Machine, timeline, usage
from weft.sim.workload_file import Target
from weft.workload.percentiles import PERCENTILES, percentiles_ms


def summarise(
    result: Simulated,
    classes: Seq[ServiceClass],
    machine: Machine,
    targets: Seq[Target] = (),
) -> dict[str, Any]:
    """The figures of a run, as they are written as JSON.

    Rates are over the whole run. A request is good if it kept the targets of its class; goodput and
    attainment count the classes that have targets. Who was refused has kept none.

    Args:
        targets: percentiles that the workload asks for, of all requests.
    """
    view = _View(result.record)
    seconds = max(result.seconds, 1e-9)
    figures = {**_rates(view, seconds), **_latencies(view)}
    bound = np.zeros(len(view.arrival), bool)
    good = np.zeros(len(view.arrival), bool)
    by_class = {}
    for index, row in enumerate(classes):
        mine = view.kind == index
        if not mine.any():
            continue
        part = _View(result.record, index)
        own = {**_rates(part, seconds), **_latencies(part)}
        if row.has_target:
            kept = view.kept(row) & mine
            bound |= mine
            good |= kept
            own["slo"] = {"ttft_s": row.ttft_s, "tpot_s": row.tpot_s}
            own["attainment"] = float(kept.sum() / mine.sum())
            own["goodput_per_s"] = float(kept.sum() / seconds)
        by_class[row.name] = own
    if bound.any():
        figures["goodput_per_s"] = float(good.sum() / seconds)
        figures["attainment"] = float(good.sum() / bound.sum())
    return {
        **figures,
        "classes": by_class,
        "targets": [_verdict(figures, target) for target in targets],
        "steps": len(result.log),
        "preemptions": result.totals.preemptions,
        "use": usage(machine, result.log, seconds),
        "timeline": timeline(machine, result.log, seconds),
    }


class _View:
    """Columns of the record of one class, or of all."""

    def __init__(self, record: Record, kind: int | None = None) -> None:
        kinds = np.frombuffer(record.kind, np.uint8) if len(record) else np.zeros(0, np.uint8)
        mine = np.ones(len(kinds), bool) if kind is None else kinds == kind

        def column(values: Any) -> Floats:
            chosen: Floats = np.asarray(values, np.float64)[mine]
            return chosen

        self.kind = kinds[mine]
        self.arrival, self.first = column(record.arrival_s), column(record.first_s)
        self.scheduled, self.end = column(record.scheduled_s), column(record.end_s)
        self.input, self.output = column(record.input), column(record.output)
        self.cached, self.ended = column(record.cached), column(record.ended)
        self.failures, self.examples = record.failures, record.examples
        chosen = record.by_class if kind is None else [record.by_class[kind]]
        self.gaps = np.concatenate([np.asarray(each.gaps) for each in chosen])
        self.counts = np.concatenate([np.asarray(each.counts, np.int64) for each in chosen])
        self.done = self.ended == COMPLETED
        self.tokens = int(self.counts.sum() + (self.first >= 0).sum())

    @property
    def ttft_s(self) -> Floats:
        return self.first - self.arrival

    @property
    def tpot_s(self) -> Floats:
        """Mean time of each token after the first; 0 where there is but one."""
        return (self.end - self.first) / np.maximum(self.output - 1, 1)

    def kept(self, row: ServiceClass) -> NDArray[np.bool_]:
        """The requests that kept the targets of a class."""
        good: NDArray[np.bool_] = self.done.copy()
        if row.ttft_s is not None:
            good &= self.ttft_s <= row.ttft_s
        if row.tpot_s is not None:
            good &= self.tpot_s <= row.tpot_s
        return good


def _rates(view: _View, seconds: float) -> dict[str, Any]:
    done = view.done
    return {
        "requests": len(view.arrival),
        "completed": int(done.sum()),
        "cancelled": int((view.ended == CANCELLED).sum()),
        "failed": int((view.ended == FAILED).sum()),
        "seconds": seconds,
        "requests_per_s": float(done.sum() / seconds),
        "input_tokens_per_s": float(view.input[view.first >= 0].sum() / seconds),
        "output_tokens_per_s": view.tokens / seconds,
        "input_tokens": int(view.input.sum()),
        "output_tokens": view.tokens,
        "cached_tokens": int(view.cached.sum()),
    }


def _latencies(view: _View) -> dict[str, Any]:
    done = view.done
    longer = done & (view.output > 1)
    return {
        "ttft_ms": percentiles_ms(view.ttft_s[done]),
        "tpot_ms": percentiles_ms(view.tpot_s[longer]),
        "itl_ms": percentiles_ms(view.gaps, view.counts),
        "e2e_ms": percentiles_ms((view.end - view.arrival)[done]),
        "queue_ms": percentiles_ms((view.scheduled - view.arrival)[done]),
    }


def _verdict(figures: dict[str, Any], target: Target) -> dict[str, Any]:
    """Whether a percentile kept its bound; of those that are computed the next higher one."""
    values = figures[f"{target.metric}_ms"]
    shown = next((p for p in PERCENTILES if p >= target.percentile), PERCENTILES[-1])
    value = None if values is None else values[f"p{shown:g}"]
    return {
        "metric": target.metric,
        "percentile": shown,
        "bound_ms": target.bound_ms,
        "value_ms": value,
        "kept": value is not None and value <= target.bound_ms,
    }
