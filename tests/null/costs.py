"""A cost model that can be computed by hand."""

from __future__ import annotations

from dataclasses import dataclass

from weft.cost.model import Terms
from weft.cost.work import Work


@dataclass(frozen=True)
class LinearCost:
    """So many seconds a step, a token of it, and a token of context that a decode reads."""

    step_s: float
    token_s: float
    context_s: float = 0.0
    layers: int = 2

    def terms(self, work: Work) -> Terms:
        if not work.tokens:
            return Terms()
        return Terms(
            dense=self.step_s + self.token_s * work.tokens,
            decode_attention=self.context_s * work.decode_context,
            cpu_attention=self.context_s * work.host_context,
        )
