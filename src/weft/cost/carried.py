"""Seconds that piggybacked rows add to a step, layer by layer (OmniServe section 3.3.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from weft.cost.model import CostModel
from weft.cost.work import Work


def dense_s(cost: CostModel, tokens: int) -> float:
    """Seconds of all layers without attention for so many tokens; 0 for none."""
    return cost.terms(Work(tokens=tokens)).linear if tokens else 0.0


def carried_s(cost: CostModel, tokens: int, by_layer: Seq[int]) -> float:
    """Seconds beyond those of a step of ``tokens``, if it carries so many rows in each layer.

    Never below 0, whatever a fit says of few rows.

    Each layer has the products of its rows together with those of the step.
    """
    alone_s = dense_s(cost, tokens)
    counts = Counter(by_layer)
    dense = sum(
        times * (dense_s(cost, tokens + rows) - alone_s) for rows, times in counts.items() if rows
    )
    carry_s = cost.terms(Work(piggyback_layers=sum(by_layer))).piggybacked
    return max(0.0, dense / len(by_layer) + carry_s)
