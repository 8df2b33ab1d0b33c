"""Parts of a scheduler: limits, classes, targets, costs, and the KV blocks of both tiers."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.core.types import DEFAULT_CLASSES, ServiceClass
from weft.cost.model import CostModel
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.disk_cache import DiskCache
from weft.kv.tiers import AnyCache, TieredCache
from weft.sched.halves import Halves
from weft.sched.scheduler import Limits


@dataclass(frozen=True, slots=True)
class TargetPolicy:
    """How targets are kept.

    Attributes:
        admission: what becomes of a request that would miss its target for the first token, as is
            predicted: "demote" serves it as best effort, "reject" refuses it with the time after
            which it may come again, "off" takes it and lets it be late.
        margin: share of the target between tokens that predictions leave unused.
        patience_s: seconds without progress after which a best-effort class is helped.
        slowdown: times as long as by itself that best effort may make a step with latency-sensitive
            rows, however lax their targets are.
        idle_step_s: seconds that a step may take while no latency-sensitive request is there; None
            for a quarter of the tightest target for the first token.
        strict: latency-sensitive prompts are cut, too, so that steps keep the targets between
            tokens; else only best effort is, and classes with targets alone are served as by FCFS.
    """

    admission: str = "demote"
    margin: float = 0.1
    patience_s: float = 30.0
    slowdown: float = math.inf
    idle_step_s: float | None = None
    strict: bool = True


DEFAULT_POLICY = TargetPolicy()


@dataclass(frozen=True, slots=True)
class Resources:
    """What a scheduler is made of; each takes what it needs.

    Attributes:
        groups: KV groups of the device.
        host_blocks: for each group, blocks that the host has; empty without a host tier.
        cost: what the scheduler predicts step times with; None where nothing was profiled.
        targets: how the targets of the classes are kept.
        disk: keeps the prefixes that the device gives up.
        halves: splits steps in two that overlap on the device; None where they run whole.
    """

    groups: Seq[GroupSpec]
    limits: Limits
    classes: Seq[ServiceClass] = DEFAULT_CLASSES
    prefix_caching: bool = True
    host_blocks: Seq[int] = ()
    cost: CostModel | None = None
    targets: TargetPolicy = DEFAULT_POLICY
    disk: DiskCache | None = None
    halves: Halves | None = None

    @property
    def known_cost(self) -> CostModel:
        """The costs, for those whose row says that they need them."""
        assert self.cost is not None, "make_scheduler refuses them without"
        return self.cost

    def tiers(self) -> TieredCache:
        """A KV cache of device and host."""
        return TieredCache(
            self.groups, self.host_blocks, prefix_caching=self.prefix_caching, disk=self.disk
        )

    def cache(self, host: bool) -> AnyCache:
        """A KV cache of the device, or of device and host."""
        if host:
            return self.tiers()
        return KVCache(self.groups, prefix_caching=self.prefix_caching, disk=self.disk)
