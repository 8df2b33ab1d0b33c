"""The KV memory of an engine, shared out among the forecasts of several orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from weft.blend.forecast import Forecast


class KvState(Protocol):
    """What an engine says of its memory."""

    @property
    def blocks(self) -> int: ...

    @property
    def free_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...


class KvMemory:
    """Says how much of the memory each forecast may count on.

    Args:
        total: tokens that the memory holds.
        state: what the engine says now; None if nobody else uses it.
    """

    def __init__(self, total: int, state: Callable[[], KvState] | None = None) -> None:
        self._total = total
        self._state = state
        self._forecasts: WeakSet[Forecast] = WeakSet()

    def give(self, forecast: Forecast) -> None:
        """Give a forecast what is left beside the others, and beside everybody else's requests."""
        self._forecasts.add(forecast)
        live = [one for one in self._forecasts if len(one)]
        others = sum(one.peak() for one in live if one is not forecast)
        forecast.alone = not others
        forecast.capacity = max(1, self._available(sum(one.held() for one in live)) - others)

    def _available(self, held: int) -> int:
        """Tokens for all forecasts together, which hold so many now."""
        state = None if self._state is None else self._state()
        if state is None or not state.blocks:  # nobody says anything yet
            return self._total
        used = (state.blocks - state.free_blocks) * state.block_size
        return self._total - max(0, used - held)
