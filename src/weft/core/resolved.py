"""Resolves the open settings of an engine with the facts of model and machine.

``resolve`` turns an ``EngineConfig`` into a frozen ``ResolvedConfig`` in which nothing is open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, OutOfMemoryError
from weft.core.kv_split import (
    bytes_for,
    bytes_of,
    common_blocks,
    host_blocks,
    host_slots,
    kv_budget,
    longest_sequence,
    state_slots,
)
from weft.core.settings import format_bytes

# Of the memory beside the weights. Others use a host's memory too; of a GPU's a tenth stays free
# for what the allocator and the driver take, as in vLLM (gpu_memory_utilization).
HOST_KV_SHARE = 0.5
DEVICE_KV_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV group of a model, with the memory of a token."""

    name: str
    window: int | None
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of model and machine that resolve unset settings.

    Attributes:
        max_position_embeddings: tokens that the model was made for.
        weight_bytes: memory of the weights, of the largest part where the model is cut.
        available_bytes: memory that is free for one rank before the weights are loaded.
        workspace_bytes: what steps need there beside weights and KV, captured ones included.
        pinned_bytes: of the host, for what goes between it and a device.
        host_weight_bytes: memory of the host for weights that are not on the device.
        state_bytes: of a slot of recurrent state; 0 for a model of attention alone.
        kv_share: of what is left beside both, how much the KV takes unless that is set.
        stages: the facts of each stage of a pipeline, whose groups have no bytes where it has none
            of their layers; empty where there is one stage. All else is of the largest one.
    """

    max_position_embeddings: int
    weight_bytes: int
    available_bytes: int
    groups: tuple[GroupFacts, ...]
    workspace_bytes: int = 0
    pinned_bytes: int = 0
    host_weight_bytes: int = 0
    kv_share: float = HOST_KV_SHARE
    state_bytes: int = 0
    stages: tuple[Facts, ...] = ()

    @property
    def left_bytes(self) -> int:
        """Memory beside weights and steps."""
        return self.available_bytes - self.weight_bytes - self.workspace_bytes


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The resolved settings, from which the engine is built; nothing is unset.

    Attributes:
        kv_memory: what there was for the KV.
        kv_bytes: what it takes, in whole blocks.
        group_blocks: KV blocks of each group, in the order of ``Facts.groups``.
        host_blocks: those of the host; empty without a host tier.
        limited_by_memory: whether ``max_model_len`` was lowered to what the KV memory holds.
        half_sizes: tokens of captured halves of a step; None where steps run whole.
        state_slots, host_slots: of recurrent state, on the device and on the host; 0 for a model of
            attention alone.
        attention_programs: of decode attention in halves at the most; None for any.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_memory: int
    kv_bytes: int
    group_blocks: tuple[int, ...]
    limited_by_memory: bool
    host_blocks: tuple[int, ...] = ()
    half_sizes: tuple[int, ...] | None = None
    attention_programs: int | None = None
    state_slots: int = 0
    host_slots: int = 0


def resolve(config: EngineConfig, facts: Facts) -> ResolvedConfig:
    """Decide everything that is open.

    Stages of a pipeline share their block tables, so each has as many blocks as the one that has
    the least room.

    Raises:
        ConfigError: ``max_model_len`` is more than the model was made for.
        OutOfMemoryError: weights or KV do not fit; the message says by how much.
    """
    longest = facts.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {longest} positions that the "
            f"model was made for; set it to {longest} or less.",
            param="max_model_len",
        )
    wanted = config.max_model_len or longest
    parts = facts.stages or (facts,)
    budgets = [_budget(config, part, wanted, len(parts)) for part in parts]
    slots = state_slots(config, facts, min(budgets), wanted)
    state_bytes = slots * facts.state_bytes
    blocks = common_blocks(config, parts, [budget - state_bytes for budget in budgets])
    for part in parts:
        if bytes_of(config, part, blocks) > part.left_bytes:
            kv_budget(config, part, wanted)  # raises
    budget = min(budgets)
    holds = longest_sequence(config, facts, blocks)
    if holds < 2 or (config.max_model_len is not None and holds < wanted):
        needed = max(bytes_for(config, part, wanted, 1) for part in parts)
        raise OutOfMemoryError(
            f"One sequence of {wanted} tokens needs {format_bytes(needed)} of KV memory, but there "
            f"are {format_bytes(budget)}, enough for {holds} tokens; lower max_model_len or raise "
            "kv_memory."
        )
    taken = [bytes_of(config, part, blocks) for part in parts]
    return ResolvedConfig(
        max_model_len=min(wanted, holds),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        kv_memory=budget if len(parts) == 1 else max(taken),
        kv_bytes=max(taken) + state_bytes,
        group_blocks=blocks,
        limited_by_memory=holds < wanted,
        state_slots=slots,
        host_blocks=host_blocks(config, facts, blocks),
        host_slots=host_slots(config, facts),
    )


def _budget(config: EngineConfig, facts: Facts, wanted: int, stages: int) -> int:
    """What a stage may take for its KV, be it more than is free where it will not take all of it.

    Raises:
        OutOfMemoryError: there is nothing free, or with one stage less than is asked for.
    """
    if config.kv_memory is None or stages == 1 or facts.left_bytes <= 0:
        return kv_budget(config, facts, wanted)
    return config.kv_memory


def largest_context(config: EngineConfig, facts: Facts) -> int:
    """Tokens of the longest sequence that memory and model allow; 0 if the weights do not fit."""
    try:
        open_config = replace(config, max_model_len=None)
        return resolve(open_config, facts).max_model_len
    except OutOfMemoryError:
        return 0
