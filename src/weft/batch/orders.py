"""Makes the orders of served batches."""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from dataclasses import dataclass

from weft.batch.choice import ChosenOrder
from weft.batch.chunks import ChunkedOrder
from weft.batch.engine import EngineAsker
from weft.batch.memory import KvMemory
from weft.batch.order import InOrder, Planned, Prompts, plan
from weft.batch.ports import LineSource, Sink
from weft.blend.density import Rates
from weft.blend.jobs import Room
from weft.blend.lengths import LengthTable

logger = logging.getLogger("weft.batch")

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

        def planning(prompts: Prompts) -> Planned:
            lengths = self.lengths if self.chosen.forecast else None
            scope = endpoint.encode()
            try:
                return plan(self.chosen.kind, prompts, self.room, self.rates, lengths, scope)
            except Exception:
                logger.exception("%d lines go as in the file: no order of them.", len(prompts))
                return plan("fcfs", prompts, self.room, self.rates)

        mixed = self.chosen.kind == "blend"
        return ChunkedOrder(
            source, sink, asker.prompt, planning, self.thread, self.memory, mixed=mixed
        )
