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
        has_part: a part of it computes what lies with the host.
        piggybacks: that part's rows go through the layers in several steps, which need not wait.
        served: of those with a part: what it does, to go on a sentence that begins with its name,
            where engines can do that as well as simulations.
    """

    policy: str
    needs_cost: bool = False
    needs_host: bool = False
    has_part: bool = False
    piggybacks: bool = False
    served: str = ""


def scheduler_name(setting: str, host: bool) -> str:
    """The name of the scheduler that a setting of ``SERVED`` means, with a host tier or without."""
    return f"{setting}-swap" if host and setting in POLICIES else setting


def _of_policies() -> Iterator[tuple[str, SchedulerEntry]]:
    for name, row in POLICIES.items():
        for host in (False, True):
            yield scheduler_name(name, host), SchedulerEntry(name, row.needs_cost, host)


SCHEDULERS: Mapping[str, SchedulerEntry] = {
    **dict(_of_policies()),
    "load-aware": SchedulerEntry(
        "fcfs",
        needs_cost=True,
        needs_host=True,
        has_part=True,
        served="is fcfs, and sequences that the device has no room for decode on the host's CPUs "
        "within its steps, where that is predicted to pay",
    ),
    "slo-piggyback": SchedulerEntry(
        "slo",
        needs_cost=True,
        needs_host=True,
        has_part=True,
        piggybacks=True,
        served="is slo, and best effort that the device has no room or no time for decodes on the "
        "host's CPUs, while steps go on without it",
    ),
}
# What an engine may be set to: a policy, whatever the tiers, or a scheduler with a part.
SERVED = (*POLICIES, *(name for name, row in SCHEDULERS.items() if row.served))


def describe_schedulers() -> str:
    """What each of ``SERVED`` computes first, as one sentence."""
    rows = [f"{name} {row.comes_first}" for name, row in POLICIES.items()]
    rows += [f"{name} {row.served}" for name, row in SCHEDULERS.items() if row.served]
    return f"what comes first: {'; '.join(rows)}"
