"""Schedulers by name, alike for the engine and for simulations: a policy, and parts beside it.

Each policy has a row without a host tier, and one (``-swap``) where KV that gives way is kept
there; then come the rows with a part that computes what lies with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.core.errors import ConfigError, look_up
from weft.core.types import DEFAULT_CLASSES, ServiceClass
from weft.cost.model import CostModel
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.tiers import AnyCache, TieredCache
from weft.sched.balance import Balance
from weft.sched.memory_device import DeviceMemory
from weft.sched.memory_host import HostMemory, SwapMemory
from weft.sched.piggyback import PiggybackPart
from weft.sched.policy_fcfs import FCFSPolicy
from weft.sched.policy_slo import DEFAULT_POLICY, SLOPolicy, TargetPolicy
from weft.sched.scheduler import Limits, Scheduler
from weft.sched.two_batch import TwoBatch


@dataclass(frozen=True, slots=True)
class Resources:
    """What a scheduler is made of; each takes what it needs.

    Attributes:
        groups: KV groups of the device.
        host_blocks: for each group, blocks that the host has; empty without a host tier.
        cost: what the scheduler predicts step times with; None where nothing was profiled.
        policy: how the targets of the classes are kept.
    """

    groups: Seq[GroupSpec]
    limits: Limits
    classes: Seq[ServiceClass] = DEFAULT_CLASSES
    prefix_caching: bool = True
    host_blocks: Seq[int] = ()
    cost: CostModel | None = None
    policy: TargetPolicy = DEFAULT_POLICY

    def device(self) -> KVCache:
        """A KV cache of the device alone."""
        return KVCache(self.groups, prefix_caching=self.prefix_caching)

    def tiers(self) -> TieredCache:
        """A KV cache of device and host."""
        return TieredCache(self.groups, self.host_blocks, prefix_caching=self.prefix_caching)


def _memory(cache: AnyCache, *, preempts_ahead: bool = True) -> DeviceMemory:
    """The memory for a cache of one tier or of two, where nothing is computed on the host."""
    if isinstance(cache, KVCache):
        return DeviceMemory(cache)
    return SwapMemory(cache, preempts_ahead=preempts_ahead)


def fcfs(
    cache: AnyCache, limits: Limits, classes: Seq[ServiceClass] = DEFAULT_CLASSES
) -> Scheduler:
    """First come, first served, within classes."""
    return Scheduler(FCFSPolicy(classes), _memory(cache), limits)


def slo(
    cache: AnyCache,
    limits: Limits,
    cost: CostModel,
    classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    policy: TargetPolicy = DEFAULT_POLICY,
) -> Scheduler:
    """Latency targets first, best effort in what is left (OmniServe section 3.3)."""
    memory = _memory(cache, preempts_ahead=False)
    return Scheduler(SLOPolicy(cost, classes, policy), memory, limits)


def load_aware(
    cache: TieredCache,
    limits: Limits,
    cost: CostModel,
    classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    *,
    host_only: bool = False,
) -> Scheduler:
    """First come, first served; decodes of the host join the steps of the device (NEO).

    Args:
        host_only: all KV lies with the host, so that all decode attention is computed there: the
            baseline that NEO calls FastDecode+ (section 5.1).
    """
    memory = SwapMemory(cache, host_computes=True, comes_back=not host_only)
    part = TwoBatch(memory, Balance(cost, limits.max_num_batched_tokens), host_only=host_only)
    return Scheduler(FCFSPolicy(classes, cost, fills=not host_only), memory, limits, [part])


def slo_piggyback(
    cache: TieredCache,
    limits: Limits,
    cost: CostModel,
    classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    policy: TargetPolicy = DEFAULT_POLICY,
) -> Scheduler:
    """Latency targets first; best effort of the host is piggybacked (OmniServe section 3.2)."""
    targets, memory = SLOPolicy(cost, classes, policy), HostMemory(cache)
    return Scheduler(targets, memory, limits, [PiggybackPart(memory, targets)])


@dataclass(frozen=True, slots=True)
class SchedulerEntry:
    """A scheduler that can be chosen.

    Attributes:
        make: makes it of what there is.
        needs_cost: it predicts step times.
        needs_host: it has a host tier; without that KV that gives way is computed again.
    """

    make: Callable[[Resources], Scheduler]
    needs_cost: bool = False
    needs_host: bool = False


def _cost(given: Resources) -> CostModel:
    assert given.cost is not None
    return given.cost


def _slo(given: Resources, cache: AnyCache) -> Scheduler:
    return slo(cache, given.limits, _cost(given), given.classes, given.policy)


SCHEDULERS: Mapping[str, SchedulerEntry] = {
    "fcfs": SchedulerEntry(lambda g: fcfs(g.device(), g.limits, g.classes)),
    "fcfs-swap": SchedulerEntry(lambda g: fcfs(g.tiers(), g.limits, g.classes), needs_host=True),
    "slo": SchedulerEntry(lambda g: _slo(g, g.device()), needs_cost=True),
    "slo-swap": SchedulerEntry(lambda g: _slo(g, g.tiers()), needs_cost=True, needs_host=True),
    "load-aware": SchedulerEntry(
        lambda g: load_aware(g.tiers(), g.limits, _cost(g), g.classes),
        needs_cost=True,
        needs_host=True,
    ),
    "slo-piggyback": SchedulerEntry(
        lambda g: slo_piggyback(g.tiers(), g.limits, _cost(g), g.classes, g.policy),
        needs_cost=True,
        needs_host=True,
    ),
}


def make_scheduler(name: str, given: Resources) -> Scheduler:
    """Make a scheduler.

    Raises:
        ConfigError: no scheduler has this name, or it lacks something that it needs.
    """
    row = look_up(name, SCHEDULERS, "scheduler")
    if row.needs_host and not given.host_blocks:
        raise ConfigError(f"Scheduler '{name}' needs a host tier, and there is none.")
    if row.needs_cost and given.cost is None:
        raise ConfigError(f"Scheduler '{name}' predicts step times and got no costs to do so.")
    return row.make(given)
