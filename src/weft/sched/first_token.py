"""Predicts the time of a new request's first token before admission.

OmniServe section 3.3.3: queueing and prefill time of a new request, found by stepping through the
unfinished prompts ahead of it, each step with the largest chunks that keep the step's limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from weft.cost.model import CostModel, step_time
from weft.cost.work import Work
from weft.sched.batch import TimedBatch

Prompt = tuple[int, int]  # tokens that are computed already, tokens to compute


def first_token_s(
    cost: CostModel,
    prompts: Iterable[Prompt],
    decodes: Work,
    *,
    limit_s: float,
    budget: int,
    patience_s: float = float("inf"),
) -> float:
    """Predict the seconds until the last of these prompts gives its first token.

    A prompt that is computed decodes in the steps after it. No arrivals are foreseen, nor ends of
    decoding sequences.

    Args:
        decodes: one token of each sequence that decodes.
        limit_s: seconds that a step may take.
        budget: tokens that a step may have.
        patience_s: after so many seconds the rest is only estimated, at the pace until then.

    Returns:
        Infinity if the decodes leave no room for any prompt.
    """
    queue = deque(prompts)
    left = total = sum(count for _, count in queue)
    work, seconds = decodes.copy(), 0.0
    while queue:
        step = TimedBatch(budget - work.decodes, cost=cost, limit_s=limit_s, work=work.copy())
        ended = _fill(step, queue)
        taken = step.work.tokens - work.tokens
        if not taken:
            return float("inf")
        seconds += step.seconds()
        left -= taken
        if seconds > patience_s:
            return seconds * total / (total - left)
        for context in ended:
            work.add(context, 1)
    return seconds


def prefill_s(cost: CostModel, start: int, upto: int, chunk: int) -> float:
    """Predict the seconds to compute tokens [start, upto) of a prompt alone, in chunks."""
    seconds = 0.0
    for first in range(start, upto, chunk):
        work = Work()
        work.add(first, min(chunk, upto - first), 0)
        seconds += step_time(cost, [work])
    return seconds


def _fill(step: TimedBatch, queue: deque[Prompt]) -> list[int]:
    """Put as much of the queue into the step as fits; return the lengths of prompts it ends."""
    ended = []
    while queue:
        start, count = queue[0]
        chunk = step.room(start, count)
        if chunk <= 0:
            break
        step.work.add(start, chunk, chunk == count)
        step.budget -= chunk
        queue.popleft()
        if chunk < count:
            queue.appendleft((start + chunk, count - chunk))
            break
        ended.append(start + count)
    return ended
