"""Targets of service classes derived from what steps cost on this machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from weft.core.class_table import class_table, with_targets
from weft.core.errors import ConfigError
from weft.core.types import ServiceClass
from weft.cost.model import CostModel, step_time
from weft.cost.work import Work
from weft.sched.first_token import first_token_s
from weft.sched.resources import Resources, TargetPolicy
from weft.sched.scheduler import Limits

TYPICAL_TOKENS = 1024  # of a prompt, and of the context of a decode
LONGER = {"priority": 1.0, "interactive": 1.5}  # times as long as it must take, by class
ROOM = 1.25  # times a step in which every row decodes, so that prompts advance beside it
DIGITS = 2  # that a target is rounded up to


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Targets as the user has set them.

    Attributes:
        classes: changes of the class table, see ``core.class_table``.
        interactivity: from 0, lax, to 1, strict.
    """

    classes: Mapping[str, Mapping[str, Any]]
    interactivity: float

    def changed(
        self, targets: Mapping[str, Mapping[str, float]], interactivity: float | None
    ) -> TargetSettings:
        """These settings with other targets.

        Args:
            targets: ``ttft_s`` and ``tpot_s`` by class; a class that is missing keeps its own.
            interactivity: None for no other one.
        """
        rows = {name: dict(row) for name, row in self.classes.items()}
        for name, row in targets.items():
            rows[name] = {**rows.get(name, {}), **row}
        return TargetSettings(rows, self.interactivity if interactivity is None else interactivity)

    def applied(self, resources: Resources, cost: CostModel) -> Resources:
        """What an SLO scheduler is made of, with derived targets where none are set.

        Raises:
            ConfigError: a class or a target is malformed.
        """
        resources = replace(resources, classes=class_table(self.classes))
        return with_derived_targets(resources, with_targets(self.classes), cost, self.interactivity)


def idle_step_s(cost: CostModel, limits: Limits, ttft_s: float) -> float:
    """Seconds that a step of best effort may take while a latency-sensitive request may arrive.

    An eighth of the target for its first token, but enough for every row to decode, and never more
    than a quarter.
    """
    context = max(1, min(TYPICAL_TOKENS, limits.max_model_len // 2))
    every_row = step_time(cost, [_decodes(limits.max_num_seqs, context)])
    return min(ttft_s / 4, max(ttft_s / 8, ROOM * every_row))


def slowdown(interactivity: float) -> float:
    """Times as long as it takes by itself that best effort may make a latency-sensitive step.

    1 for an interactivity of 1, 2 for one half, 4 for none.
    """
    return math.exp((1 - interactivity) * math.log(4))


def with_derived_targets(
    resources: Resources, given: Collection[str], cost: CostModel, interactivity: float
) -> Resources:
    """What an SLO scheduler is made of, with targets for the classes whose targets nobody has set.

    Best effort alone is held back for derived targets; where the user has set one, prompts of
    classes with targets are cut for them, too.

    Args:
        given: names of the classes whose targets are set.
        interactivity: from 0, lax, to 1, strict.
    """
    limits, policy = resources.limits, resources.targets
    classes = derived_targets(resources.classes, given, cost, limits, interactivity, policy.margin)
    tightest = min((row.ttft_s for row in classes if row.ttft_s is not None), default=None)
    policy = replace(
        policy,
        slowdown=slowdown(interactivity),
        idle_step_s=None if given or tightest is None else idle_step_s(cost, limits, tightest),
        strict=bool(given),
    )
    return replace(resources, cost=cost, classes=classes, targets=policy)


def derived_targets(
    classes: Seq[ServiceClass],
    given: Collection[str],
    cost: CostModel,
    limits: Limits,
    interactivity: float,
    margin: float,
) -> tuple[ServiceClass, ...]:
    """The classes with targets that this machine keeps at half load.

    Half load is half of the rows decoding. The time between tokens is that of such a step, and the
    first token of a prompt of ``TYPICAL_TOKENS`` comes after its chunks in steps with these
    decodes; both are never shorter than an idle machine takes, times ``slowdown``.

    Args:
        given: names of the classes that have targets of their own, or are to have none.
        interactivity: from 0, lax, to 1, strict.
        margin: share of a target that predictions leave unused.
    """
    context = max(1, min(TYPICAL_TOKENS, limits.max_model_len // 2))
    rows = max(1, limits.max_num_seqs // 2)
    slack = slowdown(interactivity)
    alone, busy = (step_time(cost, [_decodes(n, context)]) for n in (1, rows))
    tpot_s = max(slack * alone, busy / (1 - margin))
    first_s = first_token_s(
        cost,
        [(0, context)],
        _decodes(rows, context),
        limit_s=2 * tpot_s,
        budget=limits.max_num_batched_tokens,
    )
    if not math.isfinite(first_s):
        first_s = step_time(cost, [_decodes(rows, context)]) * context
    found = []
    for row in classes:
        longer = LONGER.get(row.name)
        if longer is not None and row.name not in given:
            ttft_s = longer * slack * first_s + 2 * tpot_s
            row = replace(row, ttft_s=rounded_up(ttft_s), tpot_s=rounded_up(longer * tpot_s))
        found.append(row)
    return tuple(found)


def check_targets(classes: Seq[ServiceClass], cost: CostModel, targets: TargetPolicy) -> None:
    """Raise ConfigError if a target would be missed by a server that has nothing else to do."""
    if not any(row.ttft_s or row.tpot_s for row in classes):
        raise ConfigError(
            "No service class has a target, which scheduler slo needs; set ttft_s or tpot_s of "
            "one, or use scheduler fcfs.",
            param="classes",
        )
    decode = Work()
    decode.add(1, 1)
    takes = step_time(cost, [decode])
    least = takes / (1 - targets.margin)
    for row in classes:
        for name, target in (("tpot_s", row.tpot_s), ("ttft_s", row.ttft_s)):
            if target is not None and target < least:
                raise ConfigError(
                    f"Class '{row.name}' has {name} {target:g}, but a step with a single token "
                    f"takes {takes:.4g} s as predicted, and a margin of {targets.margin:.0%} is "
                    f"kept: no load can meet it. Raise it to {least:.4g} at least.",
                    param="classes",
                )


def rounded_up(seconds: float) -> float:
    """The next larger number of seconds with ``DIGITS`` digits."""
    unit = math.pow(10, math.floor(math.log10(seconds)) - DIGITS + 1)
    return round(math.ceil(round(seconds / unit, 6)) * unit, 12)


def _decodes(rows: int, context: int) -> Work:
    work = Work()
    for _ in range(rows):
        work.add(context, 1)
    return work
