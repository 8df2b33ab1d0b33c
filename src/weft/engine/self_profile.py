"""The policy of a server that sets none: FCFS until the costs of steps are known, then SLO.

If no profile of this model on this machine lies in the cache folder, the engine measures itself
while it is idle (``cost.quick_profile``), keeps the result, and goes over to the SLO policy as soon
as no request is open. It measures again when steps take much longer or shorter than predicted, and
when other programs took the processors meanwhile: such costs are used until then, and never kept.
A profile that another engine has kept meanwhile is taken instead: a standby may be older than it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.class_table import describe_targets
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, ProfileError
from weft.core.plan import StepPlan
from weft.core.ports import Executor
from weft.cost.fit import Fitted, ProfileKey, profile_path
from weft.cost.quick_profile import Result, quick_host_profile, quick_profile
from weft.cost.steps import Run, StepRoom
from weft.engine.costs import describe_host_costs, profile_key, with_host
from weft.engine.timer import Timer, room_of
from weft.kv.tiers import TieredCache
from weft.sched.batch import Totals
from weft.sched.policy_slo import SLOPolicy
from weft.sched.registry import compose, make_policy
from weft.sched.resources import Resources
from weft.sched.scheduler import Scheduler
from weft.sched.targets import TargetSettings

if TYPE_CHECKING:
    from weft.engine.build import Engine

logger = logging.getLogger("weft")
DRIFT = 1.5  # a pace of so many times the predicted one, or less than its inverse, is a drift
DRIFT_S = 30.0  # that it must last
AGAIN_S = 600.0  # at least between two measurements
LEAST_ACCURACY = 0.6  # on steps held out, below which costs are those of a busy machine


@dataclass(frozen=True)
class Costs:
    """Where the costs of steps come from.

    Attributes:
        key: what the profile is kept by.
        path: its file.
        complete: chooses the costs of the host tier, or assumes what was not measured.
    """

    key: ProfileKey
    path: Path
    complete: Callable[[Fitted], Fitted]


class PolicyChoice:
    """Chooses between FCFS and SLO while an engine serves.

    Args:
        resources: of schedulers, with costs where there is a profile.
        targets: that are set.
        seconds: that measuring may take; 0 for never.
        run, room: how and where steps are measured.

    Attributes:
        policy: the name of the one that plans.
        reason: why, as a sentence.
        host_costs: which costs of the host tier are planned with; empty if none are.
        classes: the class table with the targets that hold.
        targets: those that are set; may change.
    """

    def __init__(
        self,
        resources: Resources,
        targets: TargetSettings,
        seconds: float,
        costs: Costs,
        run: Run,
        room: StepRoom,
        layers: int,
    ) -> None:
        self._resources, self.targets = resources, targets
        self._seconds, self._costs = seconds, costs
        self._run, self._room, self._layers = run, room, layers
        self.policy, self.classes = "fcfs", tuple(resources.classes)
        self.host_costs = ""
        self.reason = "there is no profile of the costs of steps"
        if seconds:
            self.reason += "; the engine measures them while it is idle"
        self._measuring: Generator[None, None, Result | Fitted] | None = None
        self._wanted = bool(seconds)
        self._found: Fitted | None = None
        self._lacks_host: Fitted | None = None  # what is planned with, if it lacks this host
        self._drifts_since: float | None = None
        self._measured_at = -math.inf
        self._lost = False  # what was measured, as it cannot be kept
        self._disturbed = False  # while it was measured

    @property
    def settled(self) -> bool:
        """Whether nothing is to be measured at present."""
        return self._found is None and not self._wanted

    def with_costs(self, cost: Fitted, scheduler: Scheduler) -> Scheduler:
        """Return an SLO scheduler over the same cache; the given one must be idle.

        Raises:
            ConfigError: no load can keep a target that the user has set.
        """
        complete = self._costs.complete(cost)
        resources = self.targets.applied(self._resources, complete)
        made = compose(make_policy("slo", resources), scheduler.memory.kv, scheduler.limits)
        for counted in fields(Totals):
            setattr(made.totals, counted.name, getattr(scheduler.totals, counted.name))
        self.policy, self.classes = "slo", tuple(resources.classes)
        self.reason = f"the costs of steps are those of {self._costs.path}"
        if self._lost:
            self.reason = "the costs of steps are measured, and are lost when this engine ends"
        if self._disturbed:
            self.reason = (
                "the costs of steps were measured beside other programs; they are measured again"
            )
        self.host_costs = describe_host_costs(complete)
        host = self._room.host
        lacks = host is not None and host.name not in cost.hosts
        self._lacks_host = cost if lacks and self._seconds else None
        self._wanted = self._lacks_host is not None
        return made

    def look(self, scheduler: Scheduler) -> Scheduler | None:
        """Go over to SLO if another engine has kept a profile; the given scheduler must be idle.

        Returns:
            The scheduler that plans from now on, or None if that is the given one.
        """
        if self.policy == "slo":
            return None
        try:
            cost = Fitted.load(self._costs.path, self._costs.key)
        except ProfileError:  # which the start has logged
            return None
        return self.switch(scheduler, cost)

    def idle(self, scheduler: Scheduler, executor: Executor) -> Scheduler | None:
        """Use a moment in which no request is open and no step in flight.

        Returns:
            The scheduler that plans from now on, or None if there was nothing to do.
        """
        if self.settled:
            return None
        if dropped := scheduler.sequences.take_dropped():
            executor.launch(StepPlan(0, (), drop=dropped)).result()
        if self._found is not None:
            return self.switch(scheduler, self._found)
        if self._measuring is None:
            stored = self.look(scheduler)
            if stored is not None or not self._wanted:
                return stored
        self._forget_prefixes(scheduler)
        try:
            if self._measuring is None:
                self._measuring = self._begin()
            next(self._measuring)
        except StopIteration as end:
            self._keep(end.value)
        except (ProfileError, ConfigError) as error:
            host = self._lacks_host is not None
            self._give_up(f"{'' if host else 'the costs of steps could not be measured: '}{error}")
        return scheduler

    def _begin(self) -> Generator[None, None, Result | Fitted]:
        """Begin to measure everything, or the host tier if nothing else is lacking."""
        if self._lacks_host is not None:
            logger.info("Measuring moves of KV between the tiers while idle.")
            return quick_host_profile(self._run, self._room, self._lacks_host)
        logger.info("Measuring the costs of steps while idle, %g s at most.", self._seconds)
        return quick_profile(self._run, self._room, self._costs.key, self._layers, self._seconds)

    def watch(self, scheduler: Scheduler, now: float) -> None:
        """Want new costs where steps have taken much longer or shorter than predicted for long.

        Args:
            now: seconds, on any clock that goes on.
        """
        if self._disturbed and not self._wanted and now - self._measured_at > AGAIN_S:
            self._wanted, self._lacks_host = True, None
            return
        if not isinstance(scheduler.policy, SLOPolicy) or not self._seconds:
            return
        if not 1 / DRIFT < scheduler.policy.pace.drift < DRIFT:
            self._drifts_since = now if self._drifts_since is None else self._drifts_since
        else:
            self._drifts_since = None
        if self._drifts_since is None or now - self._drifts_since < DRIFT_S:
            return
        if not self._wanted and now - self._measured_at > AGAIN_S:
            logger.warning(
                "Steps take %.2f times what the profile predicts; their costs are measured again "
                "while the engine is idle.",
                scheduler.policy.pace.drift,
            )
            self._wanted, self._measured_at, self._drifts_since = True, now, None
            self._lacks_host = None

    def _forget_prefixes(self, scheduler: Scheduler) -> None:
        """Leave nothing in the prefix cache of the blocks that are measured with, of any tier."""
        for pool, group in zip(scheduler.cache.pools, self._room.groups, strict=True):
            pool.evict(range(group.num_blocks))
        if (states := scheduler.cache.states) is not None:
            states.pool.evict(range(2 * self._room.rows))  # those of steps by hand
        kv = scheduler.memory.kv
        if isinstance(kv, TieredCache):
            for pool in kv.host.all_pools:
                pool.forget()

    def _keep(self, result: Result | Fitted) -> None:
        fitted, report = (result, None) if isinstance(result, Fitted) else result
        self._measuring, self._wanted, self._found = None, False, fitted
        self._measured_at = time.monotonic()
        if report is None:
            logger.info("Moves of KV between the tiers are measured.")
        else:
            self._disturbed = self._was_disturbed(report)
        if self._disturbed:
            return
        try:
            fitted.save(self._costs.path, report)
        except OSError as error:
            self._lost = True
            logger.warning(
                "The costs of steps cannot be kept in %s: %s.", self._costs.path, error.strerror
            )

    @staticmethod
    def _was_disturbed(report: Mapping[str, Any]) -> bool:
        """Whether costs predict steps too badly to be kept; says how well they do."""
        held_out = report["held_out"]
        shown = f"{max(0.0, held_out['average']):.0%}" if held_out else "nobody"
        if not held_out or held_out["average"] >= LEAST_ACCURACY:
            logger.info(
                "The costs of steps are measured, in %g s; held-out steps are predicted by %s.",
                report["seconds"],
                shown,
            )
            return False
        logger.warning(
            "The costs of steps are of little use, as other programs kept this machine busy: "
            "held-out steps are predicted by %s. They are not kept, and are measured again while "
            "idle, after %g minutes.",
            shown,
            AGAIN_S / 60,
        )
        return True

    def _give_up(self, reason: str) -> None:
        self._measuring, self._wanted = None, False
        if self._lacks_host is not None:
            self._lacks_host = None
            logger.warning("The costs of the host tier stay assumed: %s", reason)
            return
        self.reason = reason
        logger.warning("Scheduling stays with %s: %s", self.policy, self.reason)

    def switch(self, scheduler: Scheduler, cost: Fitted) -> Scheduler | None:
        """Go over to SLO, unless no load can keep a target that is set.

        That refuses no server, be it a new one: a later engine of one that serves would be refused,
        too, and requests would end with it.
        """
        self._found = None
        try:
            return self.with_costs(cost, scheduler)
        except ConfigError as error:
            self._give_up(error.message)
            return None

    def describe(self) -> str:
        """The policy and the reason, in one sentence."""
        host = f"; {self.host_costs}" if self.host_costs else ""
        return f"scheduling by {self.policy}, as {self.reason}{host}"

    def describe_with_targets(self) -> str:
        """The same with the targets that the policy keeps."""
        kept = f"; targets: {describe_targets(self.classes)}" if self.policy == "slo" else ""
        return self.describe() + kept


def choose_policy(config: EngineConfig, engine: Engine) -> PolicyChoice:
    """Let a server choose its policy by itself; it plans by SLO at once if there is a profile."""
    model, scheduler = engine.model, engine.scheduler
    key = profile_key(config, model)
    costs = Costs(key, profile_path(key, config.profile), partial(with_host, config, model))
    choice = PolicyChoice(
        engine.resources,
        TargetSettings(config.classes, config.interactivity),
        config.self_profile_s,
        costs,
        Timer(engine.executor).run,
        room_of(config, engine.model, engine.resolved),
        model.spec.num_layers,
    )
    try:
        stored = Fitted.load(costs.path, key)
    except ProfileError as error:
        logger.info("%s", error.message)
    else:
        engine.scheduler = choice.switch(scheduler, stored) or scheduler
    return choice
