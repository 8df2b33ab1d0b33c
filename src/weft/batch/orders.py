"""Makes the orders of served batches."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from weft.batch.choice import ChosenOrder
from weft.batch.chunks import ChunkedOrder
from weft.batch.engine import EngineAsker
from weft.batch.memory import KvMemory
from weft.batch.order import InOrder, plan
from weft.batch.ports import LineSource, Sink
from weft.blend.density import Rates
from weft.blend.jobs import Room
from weft.blend.lengths import LengthTable

LearningOrder = ChunkedOrder | InOrder


@dataclass(frozen=True, slots=True)
class ServedOrders:
    """What the orders of all batches of a process have in common.

    Attributes:
        room: of the engine.
        thread: a single one, on which prompts are read and put in order.
        lengths: what is known of output lengths.
    """

    chosen: ChosenOrder
    room: Room
    rates: Rates
    thread: Executor
    memory: KvMemory
    lengths: LengthTable

    def make(
        self, source: LineSource, sink: Sink, asker: EngineAsker, endpoint: str
    ) -> LearningOrder:
        """The order of the lines of a batch that have no result."""
        if self.chosen.kind == "fcfs":
            return InOrder(len(source), sink, len(source))
        planning = partial(
            plan,
            self.chosen.kind,
            room=self.room,
            rates=self.rates,
            lengths=self.lengths if self.chosen.forecast else None,
            scope=endpoint.encode(),
        )
        mixed = self.chosen.kind == "blend"
        return ChunkedOrder(
            source, sink, asker.prompt, planning, self.thread, self.memory, mixed=mixed
        )
