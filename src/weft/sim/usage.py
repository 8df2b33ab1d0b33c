"""Utilisation of the machine by the steps of a simulation, in total and over time.

Arithmetic and bytes are those that the work needs, whatever time it took: shares of what the
hardware sheet says, so they never depend on how good a cost model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.cost.hardware import Hardware
from weft.cost.roofline import BYTES, KV_BYTES
from weft.cost.shape import ModelShape
from weft.sim.record import Floats, StepLog

BINS = 100


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on devices, as the use of them is counted."""

    shape: ModelShape
    hardware: Hardware
    dtype: str
    kv_dtype: str
    tp: int = 1

    def flops(self, log: StepLog) -> Floats:
        """Arithmetic of each step on the device: matrices of layers and head, and attention."""
        shape = self.shape
        pairs = log.column("prefill_area") + self._kept(log, "decode_context", "decodes")
        return (
            2.0 * (shape.active_parameters - shape.head_parameters) * log.column("tokens")
            + 2.0 * shape.head_parameters * log.column("sampled")
            + 4.0 * shape.attention_width * shape.attention_layers * pairs
        )

    def bytes(self, log: StepLog) -> Floats:
        """Device memory that each step reads and writes: weights, KV of contexts, and states."""
        shape, size = self.shape, BYTES[self.dtype]
        kv = shape.kv_values_per_token * KV_BYTES[self.kv_dtype]
        contexts = self._kept(log, "prefill_context", "prefills")
        contexts = contexts + self._kept(log, "decode_context", "decodes")
        written = log.column("tokens") - log.column("host_decodes")
        states = 2 * shape.state_bytes * (log.column("prefills") + log.column("decodes"))
        return self._weights(log) * size + kv * (contexts + written) + states

    def _weights(self, log: StepLog) -> Floats:
        """Weights read: of the experts of a mixture those that a token is expected to go to."""
        shape, tokens = self.shape, log.column("tokens")
        experts = np.ones(len(log))
        if shape.experts:
            miss = 1 - shape.experts_per_token / shape.experts
            experts = shape.experts * (1 - miss**tokens)
        layers = shape.layers * (shape.dense_parameters + experts * shape.expert_parameters)
        layers = layers + shape.recurrent_more
        passes = np.maximum(log.column("sub_batches"), 1)
        return passes * layers + (log.column("sampled") > 0) * shape.head_parameters

    def _kept(self, log: StepLog, context: str, rows: str) -> Floats:
        """Tokens of the contexts that attention sees, averaged over full and sliding layers."""
        whole, shape = log.column(context), self.shape
        if shape.window is None:
            return whole
        share = shape.window_layers / shape.attention_layers
        seen = np.minimum(whole, log.column(rows) * shape.window)
        return (1 - share) * whole + share * seen

    def use(self, log: StepLog) -> dict[str, Floats]:
        """Seconds of each step for which each resource was busy at its full rate."""
        sheet = self.hardware
        return {
            "compute": self.flops(log) / (sheet.peak(self.dtype) * self.tp),
            "bandwidth": self.bytes(log) / (sheet.bandwidth * self.tp),
            "cpu": log.column("cpu_s"),
            "link": log.column("move_s"),
        }


def usage(machine: Machine, log: StepLog, seconds: float) -> dict[str, float]:
    """Mean share of each resource over the whole run, and the highest share of KV in use."""
    seconds = max(seconds, 1e-9)
    took = log.column("seconds")
    found = {name: float(busy.sum() / seconds) for name, busy in machine.use(log).items()}
    found["device"] = float(took.sum() / seconds)
    for name in ("device_kv", "host_kv"):
        held = log.column(name)
        found[name] = float((held * took).sum() / seconds)
        found[f"{name}_most"] = float(held.max(initial=0.0))
    return found


def timeline(machine: Machine, log: StepLog, seconds: float, bins: int = BINS) -> dict[str, Any]:
    """Means over equal spans of the run: shares, tokens a second, and requests.

    Returns:
        ``seconds``, the start of each span, and a list of as many values for each name.
    """
    edges = np.linspace(0.0, max(seconds, 1e-9), bins + 1)
    width = float(edges[1])
    took = log.column("seconds")
    amounts: Mapping[str, Floats] = {
        **machine.use(log),
        "device": took,
        "device_kv": log.column("device_kv") * took,
        "host_kv": log.column("host_kv") * took,
        "waiting": log.column("waiting") * took,
        "running": (log.column("prefills") + log.column("decodes") + log.column("host_decodes"))
        * took,
        "tokens_per_s": log.column("tokens"),
        "output_tokens_per_s": log.column("sampled"),
    }
    means = {name: spread(log, amount, edges) / width for name, amount in amounts.items()}
    return {"seconds": edges[:-1].tolist(), **{name: m.tolist() for name, m in means.items()}}


def spread(log: StepLog, amounts: Floats, edges: Floats) -> Floats:
    """Spread each step's amount evenly over its time; return the sums between edges."""
    if not len(log):
        return np.zeros(len(edges) - 1)
    start = log.column("start_s")
    times = np.column_stack([start, start + log.column("seconds")]).ravel()
    after = np.cumsum(amounts)
    totals = np.column_stack([after - amounts, after]).ravel()
    return np.diff(np.interp(edges, times, totals, left=0.0))
