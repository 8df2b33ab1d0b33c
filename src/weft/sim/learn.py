"""The scheduler's cost model in a simulation: costs fitted to noisy measurements of the true ones.

As on a real machine: steps of known work are measured, each as the median of some repeats that
differ by the same errors as every step does, and weft's fits go through them. So a scheduler never
sees the costs that step times come from.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from weft.cost.curves import Grid
from weft.cost.fit import Fitted, Point, ProfileKey, fit
from weft.cost.host_costs import HostCosts, MoveCost
from weft.cost.model import CostModel, step_time
from weft.cost.work import Work
from weft.sched.scheduler import Limits
from weft.sim.simulated import Errors

REPEATS = 20
CONTEXTS = (64, 512, 2048, 8192)


def learn(
    cost: CostModel, key: ProfileKey, limits: Limits, errors: Errors, host: bool = False
) -> Fitted:
    """Profile a cost model as ``weft profile`` does an executor.

    Args:
        limits: of the steps that are measured.
        host: also CPU attention and moves of KV.
    """

    def measure(work: Work) -> float:
        exact = step_time(cost, [work])
        return exact * statistics.median(errors.factor() for _ in range(REPEATS))

    knots = _doubling(limits.max_num_batched_tokens)
    points = [Point(work, measure(work)) for work in _works(limits, knots)]
    if not host:
        return fit(key, cost.layers, points, knots)
    contexts = [c for c in CONTEXTS if c < limits.max_model_len]
    rows = _doubling(limits.max_num_seqs)
    table = {(n, c): _cpu_s(cost, n, c) * errors.factor() for n in rows for c in contexts}
    move = MoveCost(0.0, cost.terms(Work(out_tokens=1000)).moving / 1000 * errors.factor())
    host_costs = HostCosts(Grid.of(table), move, move)
    return fit(key, cost.layers, points, knots).planned_with(host_costs)


def _cpu_s(cost: CostModel, decodes: int, context: int) -> float:
    work = Work(
        tokens=decodes, sampled=decodes, host_decodes=decodes, host_context=decodes * context
    )
    return cost.terms(work).cpu_attention


def _doubling(upto: int) -> list[int]:
    """1, 2, 4, ... and the end itself."""
    return [*(1 << i for i in range((upto - 1).bit_length())), upto]


def _works(limits: Limits, knots: list[int]) -> Iterator[Work]:
    """Prompts, chunks, decodes and mixtures of them within the limits."""
    for tokens in knots:
        for start in (0, *CONTEXTS):
            if start + tokens < limits.max_model_len:
                yield _work([(start, tokens)])
        for rows in (4, 16):
            if rows * 2 <= tokens:
                yield _work([(0, tokens // rows)] * (rows - 1) + [_rest(tokens, rows)])
    for rows in _doubling(limits.max_num_seqs):
        for context in CONTEXTS:
            if context < limits.max_model_len:
                yield _work([(context - 1, 1)] * rows)
                if rows + 128 <= limits.max_num_batched_tokens:
                    yield _work([(context - 1, 1)] * rows + [(0, 128)])


def _rest(tokens: int, rows: int) -> tuple[int, int]:
    return (0, tokens - (rows - 1) * (tokens // rows))


def _work(rows: list[tuple[int, int]]) -> Work:
    work = Work()
    for start, count in rows:
        work.add(start, count)
    return work
