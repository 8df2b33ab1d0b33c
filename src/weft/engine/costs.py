"""The measured costs that an engine plans with, and the key of their profile."""

from __future__ import annotations

import logging
from dataclasses import replace

from weft.core.config import DTYPE_BYTES, EngineConfig
from weft.core.topology import this_machine
from weft.cost.fit import Fitted, ProfileKey, profile_path
from weft.engine.devices import device_name, is_cpu
from weft.engine.machine import cpu_name
from weft.engine.model import Model
from weft.engine.threads import compute_threads

logger = logging.getLogger("weft")
LINK_BYTES_S = 12e9  # between device and host, as PCIe 3.0 with 16 lanes copies
MEMORY_BYTES_S = 5e9  # from memory to memory, as a core of a server copies blocks
MOVE_S = 2e-5  # to launch the copies of a step


def measured_costs(config: EngineConfig, model: Model) -> Fitted:
    """The profile of what is to be served. Raises ProfileError, which says how to make one."""
    key = profile_key(config, model)
    fitted = Fitted.load(profile_path(key, config.profile), key)
    return with_piggybacked(config, model, with_moves(config, model, fitted))


def with_moves(config: EngineConfig, model: Model, fitted: Fitted) -> Fitted:
    """The costs with the time of a common link for moves of KV, if there is a host tier.

    Where the device is the CPU, KV moves from memory to memory.
    """
    if config.host_kv_memory is None or fitted.move is not None:
        return fitted
    bytes_s = MEMORY_BYTES_S if is_cpu(model.device) else LINK_BYTES_S
    token_s = sum(group.bytes_per_token for group in model.facts.groups) / bytes_s
    logger.warning(
        "The profile has no time for KV moves; scheduler slo assumes %.0f GB/s.",
        bytes_s / 1e9,
    )
    return replace(fitted, move=(MOVE_S, token_s))


def with_piggybacked(config: EngineConfig, model: Model, fitted: Fitted) -> Fitted:
    """The costs with the time of a piggybacked row in a layer, if there are such rows.

    No profile has it. On a CPU it is what copies between memory and memory take: the residual
    leaves and comes back, as do q, k and v, and the result of the host. On a GPU it is what q, k, v
    and the result take on a common link; the residual stays. What attention on the host takes is
    not assumed, since no step waits for it.
    """
    if not config.attends_on_host:
        return fitted
    spec = model.spec
    heads = max(2 * (spec.num_heads + kind.num_kv_heads) * kind.head_dim for kind in spec.layers)
    element = DTYPE_BYTES[model.dtype]
    if not is_cpu(model.device):
        return replace(fitted, piggyback_layer_s=heads * element / LINK_BYTES_S)
    copied = 2 * (2 * spec.hidden_size + heads) * element  # read and written
    return replace(fitted, piggyback_layer_s=copied / MEMORY_BYTES_S)


def profile_key(config: EngineConfig, model: Model) -> ProfileKey:
    """The key of the profile for an engine with these settings."""
    quantize = "" if config.quantize == "none" else f" {config.quantize}/{config.quantize_group}"
    kv = "" if config.kv_dtype == "auto" else f" kv {config.kv_dtype}"
    kernels = model.ops.describe()
    if model.ops.tuning is not None:
        kernels["launches"] = model.ops.tuning.source
    return ProfileKey(
        hardware=_hardware(config, model),
        model=config.model,
        dtype=f"{model.dtype}{quantize}{kv}",
        parallelism=f"tp{config.tensor_parallel}",
        kernels=" ".join(f"{op}={name}" for op, name in sorted(kernels.items())),
    )


def _hardware(config: EngineConfig, model: Model) -> str:
    """The device, and how steps reach it."""
    if is_cpu(model.device):
        isa = f", {model.ops.isa}" if model.ops.isa else ""
        return f"{cpu_name()}, {compute_threads(config, this_machine())} threads{isa}"
    return f"{device_name(model.device)}{'' if config.graphs else ', uncaptured'}"
