"""Scheduling policies and schedulers by name: what a user may choose, and what each needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy that can be chosen; ``make_policy`` in ``weft/sched/policy_NAME.py`` makes it.

    Attributes:
        comes_first: what it computes first, to go on a sentence that begins with its name.
        needs_cost: it predicts step times, so an engine needs a profile.
    """

    comes_first: str
    needs_cost: bool = False


POLICIES: Mapping[str, PolicyEntry] = {
    "fcfs": PolicyEntry("is class priorities, then arrival"),
    "slo": PolicyEntry(
        "keeps the targets of the classes, by the costs that weft profile has measured, and fills "
        "the rest with best effort",
        needs_cost=True,
    ),
}


@dataclass(frozen=True, slots=True)
class SchedulerEntry:
    """A scheduler that can be chosen; ``weft.sched.registry`` makes it.

    Attributes:
        policy: the name of its policy.
        needs_cost: it predicts step times.
        needs_host: it has a host tier; without that KV that gives way is computed again.
        has_part: a part of it computes what lies with the host; simulations only.
    """

    policy: str
    needs_cost: bool = False
    needs_host: bool = False
    has_part: bool = False


def scheduler_name(policy: str, host: bool) -> str:
    """The name of the scheduler of a policy, with a host tier or without."""
    return f"{policy}-swap" if host else policy


def _of_policies() -> Iterator[tuple[str, SchedulerEntry]]:
    for name, row in POLICIES.items():
        for host in (False, True):
            yield scheduler_name(name, host), SchedulerEntry(name, row.needs_cost, host)


SCHEDULERS: Mapping[str, SchedulerEntry] = {
    **dict(_of_policies()),
    "load-aware": SchedulerEntry("fcfs", needs_cost=True, needs_host=True, has_part=True),
    "slo-piggyback": SchedulerEntry("slo", needs_cost=True, needs_host=True, has_part=True),
}


def describe_policies() -> str:
    """What each policy computes first, as one sentence."""
    rows = "; ".join(f"{name} {row.comes_first}" for name, row in POLICIES.items())
    return f"what comes first: {rows}"
