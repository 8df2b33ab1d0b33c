"""How the KV memory is split over the groups of layers: bytes, blocks, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.core.errors import ConfigError, OutOfMemoryError
from weft.core.settings import format_bytes

if TYPE_CHECKING:
    from weft.core.config import EngineConfig
    from weft.core.resolved import Facts, GroupFacts


# Slots of recurrent state for each sequence that may run: two that it reads and writes in turns, a
# mark of its prompt and one of its output. One that runs alone needs one beside the two, as it may
# begin with what another one has left.
SLOTS_A_SEQUENCE = 4
LEAST_SLOTS = 3


def kv_budget(config: EngineConfig, facts: Facts, wanted: int) -> int:
    """Bytes for KV where a sequence may have ``wanted`` tokens. Raises OutOfMemoryError."""
    left = facts.left_bytes
    if left <= 0:
        steps = f" and the steps {format_bytes(facts.workspace_bytes)}"
        rounded = ", or round the weights: quantize int8 or int4" * (config.quantize == "none")
        raise OutOfMemoryError(
            f"The weights need {format_bytes(facts.weight_bytes)}"
            f"{steps if facts.workspace_bytes else ''}, but only "
            f"{format_bytes(facts.available_bytes)} are free: {format_bytes(-left)} too few. "
            f"Choose a smaller model{rounded}."
        )
    if config.kv_memory is None:
        return min(
            int(left * facts.kv_share), bytes_for(config, facts, wanted, config.max_num_seqs)
        )
    if config.kv_memory > left:
        raise OutOfMemoryError(
            f"kv_memory is {format_bytes(config.kv_memory)}, but beside "
            f"{'weights and steps' if facts.workspace_bytes else 'the weights'} only "
            f"{format_bytes(left)} are free."
        )
    return config.kv_memory


def _window_tokens(config: EngineConfig, group: GroupFacts, tokens: int) -> int:
    """Tokens of a sequence of ``tokens`` that the group keeps at once."""
    if group.window is None:
        return tokens
    return min(tokens, group.window + config.max_num_batched_tokens + 2 * config.block_size)


def bytes_for(config: EngineConfig, facts: Facts, tokens: int, sequences: int) -> int:
    """Bytes that so many sequences of so many tokens occupy."""
    total = 0
    for group in facts.groups:
        blocks = -(-_window_tokens(config, group, tokens) // config.block_size) * sequences
        total += blocks * config.block_size * group.bytes_per_token
    return total + sequences * SLOTS_A_SEQUENCE * facts.state_bytes


def state_slots(config: EngineConfig, facts: Facts, budget: int, tokens: int) -> int:
    """Return the slots of recurrent state: half the budget, and no more than there may be marks.

    The blocks of one sequence of ``tokens`` come first. A mark is of no use without a block.

    Raises:
        OutOfMemoryError: there is no room for the fewest that an engine can work with.
    """
    size = facts.state_bytes
    if not size:
        return 0
    beside = bytes_for(config, facts, tokens, 1) - SLOTS_A_SEQUENCE * size
    most = min(budget // 2, max(budget - beside, LEAST_SLOTS * size)) // size
    if most < LEAST_SLOTS:
        raise OutOfMemoryError(
            f"A slot of recurrent state needs {format_bytes(size)}, and {LEAST_SLOTS} of them at "
            f"most half of the {format_bytes(budget)} for KV; raise kv_memory."
        )
    return min(most, _useful_slots(config, facts, budget // 2))


def _useful_slots(config: EngineConfig, facts: Facts, half: int) -> int:
    """Slots that there may be a use for, where half of the memory is for blocks."""
    block = config.block_size * sum(group.bytes_per_token for group in facts.groups)
    return SLOTS_A_SEQUENCE * config.max_num_seqs + half // block


def group_blocks(config: EngineConfig, facts: Facts, budget: int) -> tuple[int, ...]:
    """Split the budget over the groups.

    Every group holds the same number of tokens, but a sliding one never more than all rows can use
    at once. Where that leaves the full groups less than one longest sequence, they come first and
    the sliding ones get the rest, as long as they hold their window.
    """
    costs = [config.block_size * group.bytes_per_token for group in facts.groups]
    full = [i for i, group in enumerate(facts.groups) if group.window is None]
    sliding = [i for i, group in enumerate(facts.groups) if group.window is not None]
    blocks = [budget // sum(costs)] * len(costs)
    wanted = -(-(config.max_model_len or facts.max_position_embeddings) // config.block_size)
    if full and sliding and blocks[0] < wanted:
        floor = sum(costs[i] * _rows_blocks(config, facts.groups[i], 1) for i in sliding)
        share = (budget - floor) // sum(costs[i] for i in full)
        for i in full:
            blocks[i] = max(blocks[i], min(share, wanted))
    left = budget - sum(costs[i] * blocks[i] for i in full)
    for i in sliding:
        share = left // sum(costs[i] for i in sliding)
        blocks[i] = min(share, _rows_blocks(config, facts.groups[i], config.max_num_seqs))
    left = budget - sum(costs[i] * blocks[i] for i in sliding)
    for i in full:
        blocks[i] = max(blocks[i], left // sum(costs[i] for i in full))
    return tuple(blocks)


def common_blocks(
    config: EngineConfig, stages: Sequence[Facts], budgets: Sequence[int]
) -> tuple[int, ...]:
    """Return the blocks of each group that every stage has room for.

    Args:
        stages: all with the same groups, whose bytes are 0 where a stage has no layer of them.
        budgets: of each stage.
    """
    found: dict[int, list[int]] = {}
    for facts, budget in zip(stages, budgets, strict=True):
        own = [i for i, group in enumerate(facts.groups) if group.bytes_per_token]
        kept = replace(facts, groups=tuple(facts.groups[i] for i in own))
        for i, count in zip(own, group_blocks(config, kept, budget), strict=True):
            found.setdefault(i, []).append(count)
    return tuple(min(found[i]) for i in sorted(found))


def host_slots(config: EngineConfig, facts: Facts) -> int:
    """Return the slots of recurrent state on the host: half its memory, as on the device.

    Raises:
        ConfigError: that holds not even one.
    """
    if config.host_kv_memory is None or not facts.state_bytes:
        return 0
    half = config.host_kv_memory // 2
    slots = min(half // facts.state_bytes, _useful_slots(config, facts, half))
    if not slots:
        raise ConfigError(
            f"host_kv_memory ({format_bytes(config.host_kv_memory)}) holds in its half not even "
            f"one recurrent state of {format_bytes(facts.state_bytes)}; raise it.",
            param="host_kv_memory",
        )
    return slots


def host_blocks(config: EngineConfig, facts: Facts, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Split the memory of the host over the groups as that of the device is."""
    if config.host_kv_memory is None:
        return ()
    states = host_slots(config, facts) * facts.state_bytes
    share = (config.host_kv_memory - states) / bytes_of(config, facts, blocks)
    counts = tuple(int(count * share) for count in blocks)
    if 0 in counts:
        raise ConfigError(
            f"host_kv_memory ({format_bytes(config.host_kv_memory)}) holds not even one block of "
            f"{config.block_size} tokens; raise it.",
            param="host_kv_memory",
        )
    return counts


def _rows_blocks(config: EngineConfig, group: GroupFacts, rows: int) -> int:
    """Blocks of a sliding group that so many sequences use at once, however long they are."""
    return -(-_window_tokens(config, group, 2**62) // config.block_size) * rows


def longest_sequence(config: EngineConfig, facts: Facts, blocks: tuple[int, ...]) -> int:
    """Tokens of the longest sequence that these blocks hold when it is alone."""
    size = config.block_size
    limits = []
    for group, count in zip(facts.groups, blocks, strict=True):
        if group.window is None or count * size < group.window + 2 * size:
            limits.append(count * size)
    return min(limits, default=2**31 - 1)


def bytes_of(config: EngineConfig, facts: Facts, blocks: tuple[int, ...]) -> int:
    """Bytes that so many blocks of each group occupy."""
    return sum(
        count * config.block_size * group.bytes_per_token
        for group, count in zip(facts.groups, blocks, strict=True)
    )
