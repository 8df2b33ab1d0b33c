"""The time of arithmetic and memory reads when an executor overlaps them.

Operators that are bound by arithmetic (dense layers, prefill attention, head) can run beside those
that are bound by memory bandwidth (decode attention), on other parts of the GPU (NanoFlow, Zhu et
al. 2025). The two interfere, so overlap is neither free nor useless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from weft.cost.interference import Interference, Speeds, side_by_side
from weft.cost.model import CostModel, Terms
from weft.cost.work import Work

Overlap = Callable[[Any, Any], Any]  # seconds of arithmetic and of reads alone -> of both

# Speed of decode attention over its speed alone, by the share of the GPU that dense layers lose to
# it: measured on A100 for NanoFlow (efeslab/Nanoflow, autosearch/trace/gemv_interference.csv).
LOST = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
GAINED = np.array([0.0, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0])


MIXES = (0.25, 0.5, 1.0, 2.0)  # reads for arithmetic, which one share of the GPU is to suit


def published() -> Interference:
    """The same as weft measures it, at each share that dense layers lose."""
    points = []
    for lost, gained in zip(LOST[1:-1].tolist(), GAINED[1:-1].tolist(), strict=True):
        speeds = Speeds(0, 1 - lost, gained)
        gains = [(1 + reads) / speeds.both_s(1.0, reads) for reads in MIXES]
        saved = sum(1 - 1 / max(1.0, gain) for gain in gains) / len(MIXES)
        points.append(speeds._replace(gain=max(gains), saved=saved))
    return Interference(tuple(points))


def in_a_row(compute_s: Any, memory_s: Any) -> Any:
    """No overlap: one after the other, as vLLM and SGLang run them."""
    return compute_s + memory_s


def ideal(compute_s: Any, memory_s: Any) -> Any:
    """The shorter one is free: the roofline's bound, which no GPU reaches."""
    return np.maximum(compute_s, memory_s)


def interfering(compute_s: Any, memory_s: Any) -> Any:
    """As measured: the GPU is split so that both end soonest.

    With a share R of the GPU lost to reads, arithmetic runs at 1 - R of its speed and reads at the
    measured one; what is left of either when the other has ended runs at full speed. The best R of
    a fine grid is taken, interpolated between the measured ones.
    """
    shape = np.shape(compute_s)
    compute, memory = np.atleast_1d(compute_s).astype(float), np.atleast_1d(memory_s).astype(float)
    best = compute + memory
    for lost in np.linspace(0.02, 0.98, 49):
        kept, gained = 1 - lost, float(np.interp(lost, LOST, GAINED))
        best = np.minimum(best, side_by_side(compute, memory, kept, gained))
    return best.reshape(shape) if shape else float(best[0])


OVERLAPS: dict[str, Overlap] = {"none": in_a_row, "measured": interfering, "ideal": ideal}


def compute_s(terms: Terms) -> float:
    """Seconds of a step that arithmetic bounds."""
    return terms.dense + terms.prefill_attention + terms.head


def memory_s(terms: Terms) -> float:
    """Seconds of a step in which decode attention reads KV."""
    return terms.decode_attention


class Overlapped:
    """A cost model whose decode attention overlaps arithmetic; hidden time is free.

    Implements ``weft.cost.model.CostModel``.
    """

    def __init__(self, cost: CostModel, overlap: Overlap) -> None:
        self._cost, self._overlap = cost, overlap
        self.layers = cost.layers

    def terms(self, work: Work) -> Terms:
        terms = self._cost.terms(work)
        compute, memory = compute_s(terms), memory_s(terms)
        if not compute or not memory:
            return terms
        shown = self._overlap(compute, memory) - compute
        return terms._replace(decode_attention=float(shown))
