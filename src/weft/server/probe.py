"""The state of the engine, as the request plane reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.core.types import ServiceClass
from weft.ring.layout import EngineInfo, LoggedRecovery, LoggedStep


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's queue, as last reported.

    Attributes:
        updated_ns: when, on the monotonic clock.
        engine: differs between an engine and its successor.
        waiting, queued_tokens: sequences that wait, and tokens of their prompts.
        free_rows: sequences that could start at once.
        started, prompt_tokens: sequences and prompt tokens begun since the engine's start.
    """

    updated_ns: int = 0
    engine: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_rows: int = 0
    started: int = 0
    prompt_tokens: int = 0


class EngineProbe(Protocol):
    """Live facts of the engine; every call must return at once."""

    def ready(self) -> bool:
        """Whether the engine takes requests."""

    def out_of_memory(self) -> bool:
        """Whether there is no engine, for want of memory."""

    def killed_for_memory(self) -> bool:
        """Whether the last engine, or one that was to succeed it, was killed for want of memory."""

    def memory_kills(self) -> int:
        """Engines killed because memory ran out, since the start of the server."""

    def idle_s(self) -> float:
        """Seconds since the engine made a step or had nothing to do; ask several times a second.

        At rest that is as old as its last sign of life.
        """

    def poke(self) -> None:
        """Have an engine at rest look at what it shares with request planes."""

    def gauges(self) -> Mapping[str, float]:
        """Current values and totals by metric name without prefix.

        Names are those of ``metric_families.ENGINE_METRICS`` and ``OWN_METRICS``, such as
        ``num_requests_running``; others are ignored. What is missing is not exposed, or estimated
        from the request plane's own counts.
        """

    def places(self) -> Mapping[str, Mapping[str, float]]:
        """Of each remote place that attends, by address, values of ``place_metrics.FAMILIES``."""

    def load(self) -> EngineLoad | None:
        """The state of the engine's queue; None if it does not say."""

    def classes(self) -> Sequence[ServiceClass]:
        """The service classes with the targets that the engine keeps now; none if it is silent."""

    def policy(self) -> str:
        """The name of the policy that plans now; empty if the engine does not say."""

    def page(self) -> EngineInfo:
        """The engine's info page; all 0 without one."""

    def steps(self, since: int) -> tuple[int, Sequence[LoggedStep]]:
        """How many steps were logged so far, and those from number ``since`` on that are there."""

    def recoveries(self) -> Sequence[LoggedRecovery]:
        """The latest engines that took over from another one, the oldest first."""

    def engines(self) -> int:
        """How many engines there have been, with the present one."""

    def info(self) -> Mapping[str, Any]:
        """Facts for ``/server_info``, as JSON values: kernels, dtypes, limits."""


class NoProbe:
    """A probe without an engine: always ready, no gauges."""

    def ready(self) -> bool:
        return True

    def out_of_memory(self) -> bool:
        return False

    def killed_for_memory(self) -> bool:
        return False

    def memory_kills(self) -> int:
        return 0

    def idle_s(self) -> float:
        return 0.0

    def poke(self) -> None:
        pass

    def gauges(self) -> Mapping[str, float]:
        return {}

    def places(self) -> Mapping[str, Mapping[str, float]]:
        return {}

    def load(self) -> EngineLoad | None:
        return None

    def classes(self) -> Sequence[ServiceClass]:
        return ()

    def policy(self) -> str:
        return ""

    def page(self) -> EngineInfo:
        return EngineInfo()

    def steps(self, since: int) -> tuple[int, Sequence[LoggedStep]]:
        return since, ()

    def recoveries(self) -> Sequence[LoggedRecovery]:
        return ()

    def engines(self) -> int:
        return 0

    def info(self) -> Mapping[str, Any]:
        return {}
