"""Which models are awake, within a limit of memory; stand-ins for the models, without engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from weft.core.served import ServedModel
from weft.kept_model import KeptModel
from weft.ring.model_board import ModelBoard, ModelFds, ModelRow, create_model_board
from weft.server.options import ServerOptions
from weft.several import ModelsKeeper

SERVED = cast("ServedModel", SimpleNamespace())


class StandIn(KeptModel):
    """A model that wakes and sleeps at once.

    Attributes:
        works: whether it is busy.
        slept: how often it was put to sleep.
    """

    def __init__(self, number: int, fds: ModelFds, size: int) -> None:
        self.name = "abc"[number]
        self._board, self._number = ModelBoard(fds), number
        self.row = ModelRow(bytes=size)
        self.used = float(number)
        self.served: ServedModel | None = None
        self.works = False
        self.slept = 0

    async def busy(self) -> bool:
        """As the test says."""
        return self.works

    def wake(self, done: Callable[..., None]) -> None:  # noqa: ARG002
        """It is awake."""
        self.show(state="awake", blocked_ns=0)

    async def sleep(self, why: str) -> bool:  # noqa: ARG002
        """It sleeps."""
        self.show(state="asleep")
        self.slept += 1
        return True


def keeping(limit: int, *sizes: int) -> tuple[ModelsKeeper, list[StandIn]]:
    """Models of these sizes, and what keeps them within a limit."""
    fds = create_model_board(len(sizes), 1)
    models = [StandIn(number, fds, size) for number, size in enumerate(sizes)]
    return ModelsKeeper(models, ModelBoard(fds), fds.bell, limit, ServerOptions()), models


def test_no_model_sleeps_in_vain():
    keeper, (busy, idle, wanted) = keeping(10, 6, 3, 5)
    for model in (busy, idle):
        model.wake(keeper.look_again)
    busy.works = True
    asyncio.run(keeper._wake(wanted))
    assert (idle.slept, idle.row.state, wanted.row.state) == (0, "awake", "asleep")
    assert wanted.row.blocked_ns > 0
    busy.works = False
    asyncio.run(keeper._wake(wanted))
    assert (busy.slept, idle.slept, wanted.row.state) == (1, 0, "awake")


def test_a_model_that_turned_out_larger_than_the_limit_is_awake_alone(caplog):
    keeper, (large, small) = keeping(10, 5, 4)
    for model in (large, small):
        model.wake(keeper.look_again)
    large.served, large.row = SERVED, ModelRow("awake", bytes=12)
    asyncio.run(keeper._keep_within_limit())
    assert [model.row.state for model in (large, small)] == ["asleep", "awake"]
    asyncio.run(keeper._wake(large))
    assert [model.row.state for model in (large, small)] == ["awake", "asleep"]
    assert "a takes 12 B, more than --models-memory" in caplog.text
    asyncio.run(keeper._keep_within_limit())
    assert large.row.state == "awake"
    asyncio.run(keeper._wake(small))
    assert [model.row.state for model in (large, small)] == ["asleep", "awake"]
