"""Engines that the calling thread drives, for measurements of their loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.ports import Inbox
from weft.engine.build import build_engine
from weft.engine.executors import describe_executor
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.kernels.cpu._native import Stamps
from weft.models.layout import weight_bytes
from weft.sched.batch import Totals


class DrivenEngine:
    """An engine in this process.

    Attributes:
        vocab_size: of its model.
        computes: whether the thread that drives it computes, too.
        read_bytes: of the weights that every token of a dense model reads.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._engine = build_engine(config)
        self.vocab_size = self._engine.model.spec.vocab_size
        self.computes = self._engine.executor.depth == 0
        spec = self._engine.model.spec
        self.read_bytes = weight_bytes(
            spec,
            self._engine.model.dtype,
            config.quantize,
            config.quantize_group,
            wanted=lambda name: name != "embed" or spec.tied_embeddings,
        )

    @property
    def totals(self) -> Totals:
        """What its scheduler has counted."""
        return self._engine.scheduler.totals

    def describe(self) -> str:
        """How its steps run."""
        return describe_executor(self._engine.executor)

    def run(self, inbox: Inbox) -> None:
        """Serve an inbox on this thread until nothing is left to do."""
        engine = self._engine
        loop = EngineLoop(engine.scheduler, engine.executor, inbox, WallClock())
        try:
            loop.run_until_idle()
        except BaseException:
            loop.abandon()
            raise

    def close(self) -> None:
        """End its threads."""
        self._engine.close()


@contextmanager
def driven_engines(config: EngineConfig) -> Iterator[tuple[dict[str, DrivenEngine], Stamps]]:
    """Three engines, and what notes the tokens of resident loops.

    Of two the model computes on a thread of its own, as beside an accelerator: ``planned``, whose
    steps are all planned, and ``resident``. ``one thread``: that loop as it is by default.

    Raises:
        ConfigError: the settings have no resident loop.
    """
    engines = {}
    try:
        for name, resident, depth in (
            ("planned", "off", 1),
            ("resident", "auto", 1),
            ("one thread", "auto", 0),
        ):
            own = replace(config, resident=resident, steps_in_flight=depth, prefix_caching=False)
            engines[name] = DrivenEngine(own)
        if "resident" not in engines["resident"].describe():
            raise ConfigError(
                "There is no resident loop to measure: it runs on a CPU with native kernels and "
                "without tensor_parallel."
            )
        yield engines, Stamps()
    finally:
        for engine in engines.values():
            engine.close()
