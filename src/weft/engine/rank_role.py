"""The role of each rank beside computing its part, and plans for those that choose no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from weft.core.config import EngineConfig
from weft.core.plan import StepPlan
from weft.core.types import NEUTRAL, SamplingParams
from weft.engine.channel import RankTokens

PLAIN = SamplingParams(**NEUTRAL, seed=0)


class Role(Enum):
    """What a rank does beside computing its part."""

    COMPARES = "compares its tokens with those that rank 0 has"
    HEARS = "chooses no tokens, as it is not of the last stage, and hears of them"
    TELLS = "is the first rank of the last stage, and sends rank 0 the results"


def role_of(rank: int, config: EngineConfig) -> Role:
    """What a rank from 1 on does."""
    first = config.processes - config.tensor_parallel  # of the last stage
    if rank < first:
        return Role.HEARS
    return Role.TELLS if rank == first else Role.COMPARES


def plan_of_stage(plan: StepPlan, collected: Sequence[RankTokens]) -> StepPlan:
    """Return a plan by which a stage computes its layers for all rows, and nothing of their tokens.

    What the last stage has chosen comes along: the plan computes no token before it is known.

    Args:
        collected: the tokens of steps that have ended since the plan before this one.
    """
    return replace(
        plan,
        batches=tuple(replace(b, samples=(False,) * len(b.rows)) for b in plan.batches),
        add=tuple(replace(a, sampling=PLAIN, stop_ids=frozenset(), embed=False) for a in plan.add),
        told=tuple(pair for step in collected for pair in step.tokens.items()),
    )
