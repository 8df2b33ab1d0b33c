"""The memory that a model takes on this machine, and whether it fits."""

from __future__ import annotations

from typing import Any

from weft.core.config import EngineConfig
from weft.core.errors import OutOfMemoryError
from weft.core.kv_split import bytes_of
from weft.core.resolved import largest_context, resolve
from weft.core.settings import format_bytes
from weft.engine.devices import device_name
from weft.engine.host_experts import predicted_lines
from weft.engine.host_rules import describe_host_attention
from weft.engine.model import Model, check_host_memory


def memory_facts(config: EngineConfig, model: Model) -> dict[str, Any]:
    """The memory that a model takes, whether it fits, and for which sequences."""
    facts = model.facts
    memory: dict[str, Any] = {
        "weight_bytes": facts.weight_bytes,
        "workspace_bytes": facts.workspace_bytes,
        "pinned_bytes": facts.pinned_bytes,
        "kv_dtype": config.kv_name(model.dtype),
        "kv_bytes_per_token": sum(group.bytes_per_token for group in facts.groups),
        "state_bytes": facts.state_bytes,
        "largest_context": largest_context(config, facts),
        "host_weight_bytes": facts.host_weight_bytes,
        "host_experts": predicted_lines(config, model, device_name(model.device)),
    }
    try:
        resolved = resolve(config, facts)
        check_host_memory(config, model, resolved)
        memory |= {
            "fits": True,
            "kv_bytes": resolved.kv_bytes,
            "state_slots": resolved.state_slots,
            "host_kv_bytes": bytes_of(config, facts, resolved.host_blocks)
            + resolved.host_slots * facts.state_bytes
            if resolved.host_blocks
            else 0,
            "host_attention": describe_host_attention(config),
            "kv_disk": describe_disk(config),
            "max_model_len": resolved.max_model_len,
        }
    except OutOfMemoryError as error:
        memory |= {"fits": False, "reason": error.message}
    return memory


def describe_disk(config: EngineConfig) -> str:
    """Where prefixes are kept on disk, and how much of them; empty if they are not."""
    if config.kv_disk is None:
        return ""
    return f"cached prefixes kept in {config.kv_disk}, {format_bytes(config.kv_disk_size)} at most"
