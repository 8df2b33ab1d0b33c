"""A cost model that can be computed by hand."""

from __future__ import annotations

from dataclasses import dataclass

from weft.cost.model import Terms
from weft.cost.work import Work


@dataclass(frozen=True)
class LinearCost:
    """So many seconds a step, a token of it, and a token of context that a decode reads.

    On the host reading takes ``host_context_s``; ``move_s`` brings a token's KV to the other tier.
    """

    step_s: float
    token_s: float
    context_s: float = 0.0
    layers: int = 2
    host_context_s: float = 0.0
    move_s: float = 0.0

    def terms(self, work: Work) -> Terms:
        move = self.move_s * max(work.out_tokens, work.in_tokens)
        if not work.tokens:
            return Terms(kv_move=move)
        return Terms(
            kv_move=move,
            dense=self.step_s + self.token_s * work.tokens,
            decode_attention=self.context_s * work.decode_context,
            cpu_attention=self.host_context_s * work.host_context,
        )
