"""What the request plane can learn about the engine behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class EngineProbe(Protocol):
    """Live facts of the engine; every call must return at once."""

    def ready(self) -> bool:
        """Whether the engine takes requests."""

    def gauges(self) -> Mapping[str, float]:
        """Current values and totals by metric name without prefix.

        Names are those of ``metrics.ENGINE_METRICS``, such as ``num_requests_running``; others are
        ignored. What is missing is not exposed, or estimated from the request plane's own counts.
        """

    def info(self) -> Mapping[str, Any]:
        """Facts for ``/server_info``, as JSON values: kernels, dtypes, limits."""


class NoProbe:
    """Stands in where nothing is known: always ready, no gauges."""

    def ready(self) -> bool:
        return True

    def gauges(self) -> Mapping[str, float]:
        return {}

    def info(self) -> Mapping[str, Any]:
        return {}
