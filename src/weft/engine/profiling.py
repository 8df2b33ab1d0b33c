"""``weft profile``: measures steps of a built engine as its loop runs them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from weft.core.config import EngineConfig
from weft.core.config_rules import excludes_halves
from weft.core.errors import ConfigError, ProfileError
from weft.cost.fit import Fitted, ProfileKey
from weft.cost.host_profiler import profile_host
from weft.cost.interference import Interference
from weft.cost.interference_profiler import profile_interference
from weft.cost.options import ProfileOptions
from weft.cost.profiler import profile
from weft.cost.steps import StepRoom
from weft.cost.work import Work
from weft.engine.build import Engine, build_engine
from weft.engine.costs import profile_key
from weft.engine.devices import is_cpu, pick_device
from weft.engine.halves import attention_limits
from weft.engine.timer import HostTimer, room_of
from weft.sched.balance import Balance, HostWork


def profiled_config(settings: Mapping[str, Any]) -> EngineConfig:
    """The settings of an engine to measure: one that attends on the host if they say how.

    Where it can, it overlaps sub-batches as well as it carries rows; and on a GPU it has steps in
    halves, unless overlap is off or experts may lie on the host.

    Raises:
        ConfigError: they cannot be.
    """
    if int(settings.get("pipeline_parallel") or 1) > 1:
        raise ConfigError(
            "The steps of a pipeline are not measured, as they overlap; leave pipeline_parallel "
            "out.",
            param="pipeline_parallel",
        )
    if not (settings.get("host_threads") or settings.get("host_process")):
        config = EngineConfig.from_mapping(settings)
        if config.overlap == "off" or config.host_experts != "none" or excludes_halves(config):
            return config
        return config if is_cpu(pick_device(config.device)) else replace(config, overlap="on")
    config = EngineConfig.from_mapping({"scheduler": "slo-piggyback", **settings})
    if "scheduler" in settings or config.tensor_parallel > 1 or config.attend:
        return config
    overlaps = is_cpu(pick_device(config.device))
    return replace(config, scheduler="load-aware") if overlaps else config


def load_aware_splits(
    cost: Fitted, own: Work, contexts: Seq[int], most: int
) -> list[tuple[Seq[int], Seq[int]]]:
    """What ``load-aware`` compares; implements ``weft.cost.overlap_steps.Splits``."""
    balance = Balance(cost, own.tokens + most)
    compared = balance.compared(own, HostWork(contexts, (), most))
    return [(share.first, share.second) for share in compared]


def profile_engine(
    config: EngineConfig, options: ProfileOptions
) -> tuple[ProfileKey, Fitted, dict[str, Any]]:
    """Build the engine, measure it, and fit costs to it; the key, the fit and its report.

    Raises:
        WeftError: a typed error for everything that can be wrong with settings, model or memory.
    """
    engine = build_engine(config, unprofiled=True)
    key = profile_key(config, engine.model)
    room = room_of(config, engine.model, engine.resolved)
    run = HostTimer(engine.executor, engine.mailbox)
    try:
        fitted, report = profile(run.run, room, key, engine.model.spec.num_layers, options)
        if room.host is not None:
            costs, report["host"] = profile_host(run, room, fitted, options, load_aware_splits)
            fitted = replace(fitted, hosts={room.host.name: costs})
        if engine.resolved.half_sizes is not None:
            found, report["interference"] = _measure_halves(engine, run, room, fitted, options)
            fitted = replace(fitted, interference=found)
    finally:
        engine.close()
    return key, fitted, report


def _measure_halves(
    engine: Engine, run: HostTimer, room: StepRoom, fitted: Fitted, options: ProfileOptions
) -> tuple[Interference | None, dict[str, Any]]:
    """What halves slow each other down to, and the report; None and why if steps are too small."""
    executor: Any = engine.executor  # a graph executor, as only these have halves

    def limit(programs: int) -> None:
        executor.limit_attention(programs or None)

    limits = attention_limits(engine.model.device)
    try:
        return profile_interference(run.run, room, fitted, limit, limits, options)
    except ProfileError as error:
        return None, {"problem": error.message}
