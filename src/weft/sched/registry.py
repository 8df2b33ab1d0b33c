"""Makes the schedulers of ``weft.core.schedulers``, alike for the engine and for simulations.

Each policy makes two: one without a host tier, and one (``-swap``) where KV that gives way is kept
there. Others have a part that computes what lies with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from importlib import import_module
from typing import cast

from weft.core.errors import ConfigError, look_up
from weft.core.schedulers import SCHEDULERS
from weft.core.types import DEFAULT_CLASSES, ServiceClass
from weft.cost.model import CostModel
from weft.cost.work import Work
from weft.kv.cache import KVCache
from weft.kv.tiers import AnyCache, TieredCache
from weft.sched.balance import Balance
from weft.sched.first_token import prefill_s
from weft.sched.memory_device import DeviceMemory
from weft.sched.memory_host import HostMemory, SwapMemory
from weft.sched.piggyback import PiggybackPart
from weft.sched.policy_fcfs import FCFSPolicy
from weft.sched.policy_slo import SLOPolicy
from weft.sched.resources import DEFAULT_POLICY, Resources, TargetPolicy
from weft.sched.scheduler import Limits, Policy, Scheduler
from weft.sched.two_batch import TwoBatch


def make_policy(name: str, given: Resources) -> Policy:
    """The policy of this name, from its own module."""
    module = import_module(f"weft.sched.policy_{name.replace('-', '_')}")
    return cast(Policy, module.make_policy(given))


def compose(policy: Policy, cache: AnyCache, limits: Limits) -> Scheduler:
    """A scheduler over one tier or over two, where nothing is computed on the host."""
    if isinstance(policy, SLOPolicy):
        _predict_prefills(policy.cost, cache, limits)
    if isinstance(cache, KVCache):
        return Scheduler(policy, DeviceMemory(cache), limits)
    memory = SwapMemory(cache, preempts_ahead=policy.preempts_ahead)
    return Scheduler(policy, memory, limits)


def _predict_prefills(cost: CostModel, cache: AnyCache, limits: Limits) -> None:
    """Have kept prefixes come back only where that is predicted to be faster than computing."""
    lower = (cache if isinstance(cache, KVCache) else cache.device).lower
    if lower is not None:
        chunk = limits.max_num_batched_tokens
        lower.compute_s = lambda start, upto: prefill_s(cost, start, upto, chunk)
        lower.fill_s = lambda tokens: cost.terms(Work(in_tokens=tokens)).moving


def fcfs(
    cache: AnyCache, limits: Limits, classes: Seq[ServiceClass] = DEFAULT_CLASSES
) -> Scheduler:
    """First come, first served, within classes."""
    return compose(FCFSPolicy(classes), cache, limits)


def slo(
    cache: AnyCache,
    limits: Limits,
    cost: CostModel,
    classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    targets: TargetPolicy = DEFAULT_POLICY,
) -> Scheduler:
    """Latency targets first, best effort in what is left (OmniServe section 3.3)."""
    return compose(SLOPolicy(cost, classes, targets), cache, limits)


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
    _predict_prefills(cost, cache, limits)
    memory = SwapMemory(cache, host_computes=True, comes_back=not host_only)
    part = TwoBatch(memory, Balance(cost, limits.max_num_batched_tokens), host_only=host_only)
    return Scheduler(FCFSPolicy(classes, cost, fills=not host_only), memory, limits, [part])


def slo_piggyback(
    cache: TieredCache,
    limits: Limits,
    cost: CostModel,
    classes: Seq[ServiceClass] = DEFAULT_CLASSES,
    targets: TargetPolicy = DEFAULT_POLICY,
) -> Scheduler:
    """Latency targets first; best effort of the host is piggybacked (OmniServe section 3.2)."""
    _predict_prefills(cost, cache, limits)
    policy, memory = SLOPolicy(cost, classes, targets), HostMemory(cache)
    return Scheduler(policy, memory, limits, [PiggybackPart(memory, policy)])


# The schedulers that have a part.
WITH_PART: Mapping[str, Callable[[Resources], Scheduler]] = {
    "load-aware": lambda g: load_aware(g.tiers(), g.limits, g.known_cost, g.classes),
    "slo-piggyback": lambda g: slo_piggyback(
        g.tiers(), g.limits, g.known_cost, g.classes, g.targets
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
    if row.has_part:
        return WITH_PART[name](given)
    made = compose(make_policy(row.policy, given), given.cache(row.needs_host), given.limits)
    made.halves = given.halves
    return made
