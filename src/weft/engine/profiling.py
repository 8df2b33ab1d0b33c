"""``weft profile``: measures steps of a built engine as its loop runs them."""

from __future__ import annotations

from dataclasses import replace

from weft.core.config import EngineConfig
from weft.cost.fit import Fitted, ProfileKey
from weft.cost.options import ProfileOptions
from weft.cost.profiler import profile
from weft.engine.build import build_engine
from weft.engine.costs import profile_key
from weft.engine.timer import Timer, room_of


def profile_engine(
    config: EngineConfig, options: ProfileOptions
) -> tuple[ProfileKey, Fitted, dict[str, object]]:
    """Build the engine, measure it, and fit costs to it; the key, the fit and its report.

    Raises:
        WeftError: a typed error for everything that can be wrong with settings, model or memory.
    """
    engine = build_engine(replace(config, scheduler="fcfs"))  # the others need a profile
    key = profile_key(config, engine.model)
    try:
        fitted, report = profile(
            Timer(engine.executor).run,
            room_of(engine.model, engine.resolved),
            key,
            engine.model.spec.num_layers,
            options,
        )
    finally:
        engine.executor.close()
    return key, fitted, report
