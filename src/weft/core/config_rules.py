"""Rules between several settings of the engine."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from weft.core.addresses import parse_address
from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from weft.core.config import EngineConfig

QUANTIZE_GROUPS = (32, 64, 128)


def check_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raise ConfigError if a step cannot hold a token of each running sequence."""
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_num_seqs "
            f"({max_num_seqs}); each running sequence needs one token a step.",
            param="max_num_batched_tokens",
        )


def check_sizes(config: EngineConfig) -> None:
    """Raise ConfigError if a step, the ring or groups of quantised weights have no such size."""
    check_budget(config.max_num_batched_tokens, config.max_num_seqs)
    if config.resident == "on" and config.tensor_parallel > 1:
        raise ConfigError(
            f"resident 'on' is for one process, and tensor_parallel is {config.tensor_parallel}: "
            "no rank goes on by itself; leave resident at 'auto'.",
            param="resident",
        )
    if config.quantize_group not in QUANTIZE_GROUPS:
        raise ConfigError(
            f"quantize_group must be 32, 64 or 128, not {config.quantize_group}.",
            param="quantize_group",
        )
    if config.ring_slots is not None and config.ring_slots < config.max_num_seqs:
        raise ConfigError(
            f"ring_slots {config.ring_slots} is less than max_num_seqs {config.max_num_seqs}: so "
            "many sequences cannot reach the engine at once; raise the one or lower the other.",
            param="ring_slots",
        )


def check_pipeline(config: EngineConfig) -> None:
    """Raise ConfigError if other settings exclude the stages of a pipeline, or need them."""
    stages, flight = config.pipeline_parallel, config.steps_in_flight
    if stages == 1:
        if flight is not None and flight > 1:
            raise ConfigError(
                f"steps_in_flight is {flight}; more than 1 is for the stages of pipeline_parallel.",
                param="steps_in_flight",
            )
        return
    alone = {
        "host_kv_memory": "stages keep their KV in one tier",
        "kv_disk": "stages keep cached prefixes in memory alone",
        "attend": "remote places attend for engines of one process",
    }
    for name, why in alone.items():
        if getattr(config, name):
            raise ConfigError(
                f"{name} does not work with pipeline_parallel {stages}: {why}; leave one of the "
                "two out.",
                param=name,
            )
    if config.resident == "on":
        raise ConfigError(
            f"resident 'on' is for one process, and pipeline_parallel is {stages}: no stage goes "
            "on by itself; leave resident at 'auto'.",
            param="resident",
        )
    if config.scheduler not in ("auto", "fcfs"):
        raise ConfigError(
            f"Scheduler {config.scheduler} predicts step times, and with pipeline_parallel "
            f"{stages} steps overlap; set scheduler to fcfs.",
            param="scheduler",
        )


def check_kv_disk(config: EngineConfig) -> None:
    """Raise ConfigError if other settings exclude the prefix cache on disk."""
    if config.kv_disk is None:
        default = next(row.default for row in fields(config) if row.name == "kv_disk_size")
        if config.kv_disk_size != default:
            raise ConfigError(
                "kv_disk_size limits the prefix cache on disk, and there is none; name its folder "
                "with kv_disk, or leave the size out.",
                param="kv_disk_size",
            )
        return
    if not config.prefix_caching:
        raise ConfigError(
            "kv_disk keeps cached prefixes, and prefix_caching is off; leave one of them out.",
            param="kv_disk",
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"kv_disk is for one process, and tensor_parallel is {config.tensor_parallel}.",
            param="kv_disk",
        )


def excludes_halves(config: EngineConfig) -> str:
    """Why steps cannot be computed in two halves, with these settings; empty if they can."""
    if config.device == "cpu":
        return (
            "device is 'cpu': all cores compute either half already, so nothing is left to hide "
            "behind the other"
        )
    if config.tensor_parallel > 1:
        return f"tensor_parallel is {config.tensor_parallel}, and halves are for one process"
    if config.pipeline_parallel > 1:
        return f"pipeline_parallel is {config.pipeline_parallel}, and halves are for one process"
    if config.attends_on_host:
        return f"scheduler {config.scheduler} has sub-batches of its own, for the host's attention"
    if config.resident == "on":
        return "resident is 'on', and steps that nobody plans are not split"
    return ""


def check_overlap(config: EngineConfig) -> None:
    """Raise ConfigError if halves of steps are asked for where there can be none."""
    why = excludes_halves(config)
    if config.overlap == "on" and why:
        raise ConfigError(
            f"overlap 'on' computes steps in two halves, but {why}; leave overlap at 'auto', which "
            "is off then.",
            param="overlap",
        )


def check_host_attention(config: EngineConfig) -> None:
    """Raise ConfigError if attention on the host lacks what it needs, or what it has lacks it."""
    if not config.attends_on_host:
        for name in ("host_threads", "host_process", "attend"):
            if getattr(config, name):
                which = "slo-piggyback" + " or load-aware" * (name != "attend")
                raise ConfigError(
                    f"{name} is for attention on the host, which scheduler '{config.scheduler}' "
                    f"does not use; set scheduler to {which}, or leave it out.",
                    param=name,
                )
        return
    _check_places(config)
    if config.host_kv_memory is None:
        raise ConfigError(
            f"Scheduler {config.scheduler} keeps KV on the host; set host_kv_memory to its size.",
            param="host_kv_memory",
        )
    if config.tensor_parallel > 1 and config.overlaps:
        raise ConfigError(
            f"Scheduler {config.scheduler} is for one process, and tensor_parallel is "
            f"{config.tensor_parallel}: each rank would wait for its own host in every layer.",
            param="scheduler",
        )


def check_host_experts(config: EngineConfig) -> None:
    """Raise ConfigError if experts cannot lie on the host beside other settings."""
    wish = config.host_experts
    if wish not in ("none", "auto", "all") and not (wish.isdecimal() and int(wish) > 0):
        raise ConfigError(
            f"host_experts is none, auto, all or a number of layers from 1 on, not '{wish}'.",
            param="host_experts",
        )
    if wish == "none":
        if config.host_quantize != "auto":
            raise ConfigError(
                "host_quantize is for experts on the host, and there are none; set host_experts, "
                "or leave it out.",
                param="host_quantize",
            )
        return
    reason = ""
    if config.tensor_parallel > 1:
        reason = f"tensor_parallel is {config.tensor_parallel}, and each rank would have its own"
    elif config.pipeline_parallel > 1:
        reason = (
            f"pipeline_parallel is {config.pipeline_parallel}, and stages have their own layers"
        )
    elif config.attends_on_host:
        reason = (
            f"scheduler {config.scheduler} has the host attend, too, and steps wait for one of them"
        )
    elif config.kernels == "reference":
        reason = "kernels is 'reference', which computes everything on the device"
    if reason:
        raise ConfigError(
            f"host_experts cannot be used here: {reason}; leave one of them out.",
            param="host_experts",
        )


def _check_places(config: EngineConfig) -> None:
    """Raise ConfigError if remote places are named wrongly, or twice."""
    named = [parse_address(address, "attend") for address in config.attend]
    if named and (config.tensor_parallel > 1 or not config.piggybacks):
        who = "one process" if config.piggybacks else "scheduler slo-piggyback"
        raise ConfigError(f"attend, which names remote places, is for {who}.", param="attend")
    if len(set(named)) < len(named):
        raise ConfigError("attend names a place twice; name each once.", param="attend")
    if config.attend_key_file is not None and not named:
        raise ConfigError(
            "attend_key_file is for remote places, and there are none; name them with attend, or "
            "leave it out.",
            param="attend_key_file",
        )
