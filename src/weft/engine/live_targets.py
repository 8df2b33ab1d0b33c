"""Targets that are set while the engine runs."""

from __future__ import annotations

import logging

from weft.core.class_table import describe_targets
from weft.core.errors import ConfigError, NoTargetsError, WeftError
from weft.core.logs import notice
from weft.engine.self_profile import PolicyChoice
from weft.ring.target_board import TargetBoard, TargetChange
from weft.sched.policy_slo import SLOPolicy
from weft.sched.resources import Resources
from weft.sched.scheduler import Scheduler
from weft.sched.targets import TargetSettings

logger = logging.getLogger("weft")


class LiveTargets:
    """Keeps the targets that a request plane proposes, and answers it.

    What an earlier engine kept holds from the start.

    Args:
        settings: the targets that the server was started with.
        resources: what schedulers are made of.
        choice: whose choice the policy is, unless it is set.
    """

    def __init__(
        self,
        board: TargetBoard,
        settings: TargetSettings,
        resources: Resources,
        choice: PolicyChoice | None,
        scheduler: Scheduler,
    ) -> None:
        self._board = board
        self._settings = settings
        self._resources = resources
        self._choice = choice
        self._kept = board.kept()
        if self._kept != TargetChange():
            self._keep_on(scheduler)

    def _keep_on(self, scheduler: Scheduler) -> None:
        """Keep what an earlier engine kept."""
        kept = self._kept
        if not isinstance(scheduler.policy, SLOPolicy):
            if self._choice is not None:  # which may go over to SLO later
                self._choice.targets = self._settings.changed(kept.classes, kept.interactivity)
            return
        try:
            self._keep(scheduler.policy, kept)
        except ConfigError as error:
            self._kept = TargetChange()
            logger.warning("Targets are as at the start of the server again. %s", error.message)

    def look(self, scheduler: Scheduler) -> None:
        """Keep the targets that are proposed, if any are."""
        proposal = self._board.proposal()
        if proposal is None:
            return
        error: WeftError | None = None
        try:
            if not isinstance(scheduler.policy, SLOPolicy):
                raise self._no_targets(scheduler)
            self._keep(scheduler.policy, proposal.change)
            self._kept = proposal.change
        except WeftError as refusal:
            error = refusal
        self._board.answer(proposal, self._kept, error)

    def _keep(self, policy: SLOPolicy, change: TargetChange) -> None:
        settings = self._settings.changed(change.classes, change.interactivity)
        resources = settings.applied(self._resources, policy.cost)
        policy.retarget(resources.classes, resources.targets)
        if self._choice is not None:
            self._choice.targets, self._choice.classes = settings, tuple(resources.classes)
        notice(f"targets now: {describe_targets(policy.classes)}")

    def _no_targets(self, scheduler: Scheduler) -> NoTargetsError:
        name = scheduler.policy.name
        why = "as is set" if self._choice is None else f"as {self._choice.reason}"
        return NoTargetsError(
            f"Scheduler slo keeps targets, and scheduling is by {name} now, {why}."
        )
