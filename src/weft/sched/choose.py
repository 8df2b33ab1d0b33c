"""Schedulers by name, alike for the engine and for simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.core.errors import ConfigError, look_up
from weft.core.types import DEFAULT_CLASSES, ServiceClass
from weft.cost.model import CostModel
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.tiers import TieredCache
from weft.sched.fcfs import FCFSScheduler
from weft.sched.load_aware import LoadAwareScheduler
from weft.sched.planner import Limits, Planner
from weft.sched.riders import RidingScheduler
from weft.sched.slo import DEFAULT_POLICY, Policy, SLOScheduler
from weft.sched.swap import SwapScheduler


@dataclass(frozen=True, slots=True)
class Resources:
    """What a scheduler is made of; each takes what it needs.

    Attributes:
        groups: KV groups of the device.
        host_blocks: for each group, blocks that the host has; empty without a host tier.
        cost: what the scheduler predicts step times with; None where nothing was profiled.
        policy: how scheduler slo keeps the targets of the classes.
    """

    groups: Seq[GroupSpec]
    limits: Limits
    classes: Seq[ServiceClass] = DEFAULT_CLASSES
    prefix_caching: bool = True
    host_blocks: Seq[int] = ()
    cost: CostModel | None = None
    policy: Policy = DEFAULT_POLICY

    def cache(self) -> KVCache:
        """A KV cache of the device alone."""
        return KVCache(self.groups, prefix_caching=self.prefix_caching)


def _fcfs(given: Resources) -> Planner:
    return FCFSScheduler(given.cache(), given.limits, given.classes)


def _swap(given: Resources) -> Planner:
    return SwapScheduler(_tiers(given, "fcfs-swap"), given.limits, given.classes)


def _slo(given: Resources) -> Planner:
    cost = _needed(given.cost, "slo")
    return SLOScheduler(given.cache(), given.limits, cost, given.classes, given.policy)


def _load_aware(given: Resources) -> Planner:
    cost = _needed(given.cost, "load-aware")
    return LoadAwareScheduler(_tiers(given, "load-aware"), given.limits, cost, given.classes)


def _riders(given: Resources) -> Planner:
    cost, cache = _needed(given.cost, "slo-riders"), _tiers(given, "slo-riders")
    return RidingScheduler(cache, given.limits, cost, given.classes, given.policy)


def _tiers(given: Resources, name: str) -> TieredCache:
    if not given.host_blocks:
        raise ConfigError(f"Scheduler '{name}' needs a host tier, and there is none.")
    return TieredCache(given.groups, given.host_blocks, prefix_caching=given.prefix_caching)


def _needed(cost: CostModel | None, name: str) -> CostModel:
    if cost is None:
        raise ConfigError(f"Scheduler '{name}' predicts step times and got no costs to do so.")
    return cost


SCHEDULERS: Mapping[str, Callable[[Resources], Planner]] = {
    "fcfs": _fcfs,
    "fcfs-swap": _swap,
    "load-aware": _load_aware,
    "slo": _slo,
    "slo-riders": _riders,
}


def make_scheduler(name: str, given: Resources) -> Planner:
    """Make a scheduler.

    Raises:
        ConfigError: no scheduler has this name, or it lacks something that it needs.
    """
    return look_up(name, SCHEDULERS, "scheduler")(given)
