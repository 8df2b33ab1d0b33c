"""Makes the orders of served batches."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from weft.batch.chunks import ChunkedOrder
from weft.batch.engine import EngineAsker
from weft.batch.order import plan
from weft.batch.ports import LineSource, Sink
from weft.blend.density import UNWEIGHED
from weft.blend.order import Room


@dataclass(frozen=True, slots=True)
class ServedOrders:
    """What the orders of all batches of a process have in common.

    Attributes:
        room: of the engine.
        thread: a single one, on which prompts are read and put in order.
    """

    room: Room
    thread: Executor

    def make(self, source: LineSource, sink: Sink, asker: EngineAsker) -> ChunkedOrder:
        """The order of the lines of a batch that have no result."""
        planning = partial(plan, "dfs", room=self.room, rates=UNWEIGHED)
        return ChunkedOrder(source, sink, asker.prompt, planning, self.thread)
