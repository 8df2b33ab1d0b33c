"""The measured costs that an engine plans with, and the key of their profile."""

from __future__ import annotations

import logging

from weft.core.config import DTYPE_BYTES, EngineConfig
from weft.core.topology import this_machine
from weft.cost.curves import Grid
from weft.cost.fit import Fitted, ProfileKey, profile_path
from weft.cost.host_costs import CarryCost, HostCosts, MoveCost
from weft.cost.model import CostModel
from weft.engine.devices import device_name, is_cpu
from weft.engine.machine import cpu_name
from weft.engine.model import Model
from weft.engine.threads import compute_threads

logger = logging.getLogger("weft")
LINK_BYTES_S = 12e9  # between device and host, as PCIe 3.0 with 16 lanes copies
MEMORY_BYTES_S = 5e9  # from memory to memory, as a core of a server copies blocks
MOVE_S = 2e-5  # to launch the copies of a step


def measured_costs(config: EngineConfig, model: Model) -> Fitted:
    """The profile of what is to be served, with the costs of its host tier, if there is one.

    Raises:
        ProfileError: there is none; the message says how to make one.
    """
    key = profile_key(config, model)
    return with_host(config, model, Fitted.load(profile_path(key, config.profile), key))


def host_name(config: EngineConfig) -> str:
    """What the costs of a host tier are kept by: who attends there, with how many threads."""
    count = config.num_host_threads
    if not count:
        return "no attention"
    return f"{count} thread{'' if count == 1 else 's'} of {transport(config)}"


def transport(config: EngineConfig) -> str:
    """Where the threads of a host worker are."""
    return "weft-host" if config.host_process else "the engine"


def with_host(config: EngineConfig, model: Model, fitted: Fitted) -> Fitted:
    """The costs with those of the host tier that is served, if there is one.

    A profile that has none for this tier, be it of other threads, gives assumed ones.
    """
    if config.host_kv_memory is None:
        return fitted
    host = fitted.hosts.get(host_name(config))
    if host is None:
        host = assumed_host(config, model, fitted)
        logger.warning("%s.", describe_host_costs(fitted.planned_with(host)).capitalize())
    return fitted.planned_with(host)


def assumed_host(config: EngineConfig, model: Model, fitted: Fitted) -> HostCosts:
    """Costs of a host tier that was not measured.

    Moves take the time of a common link, or, where the device is the CPU and computing waits for
    them, of copies from memory to memory. Attention reads its KV at the latter speed, and a
    piggybacked row takes what copies of its residual, q, k, v and result do.
    """
    cpu = is_cpu(model.device)
    bytes_s = MEMORY_BYTES_S if cpu else LINK_BYTES_S
    token_bytes = sum(group.bytes_per_token for group in model.facts.groups)
    move = MoveCost(MOVE_S, token_bytes / bytes_s)
    name = host_name(config)
    others = f"the profile has {' and '.join(fitted.hosts)}, not {name}; " if fitted.hosts else ""
    assumed = f"{others}copies of {bytes_s / 1e9:.0f} GB/s, until weft profile measures them"
    if not config.attends_on_host:
        return HostCosts(None, move, move, stall=float(cpu), duplex=not cpu, assumed=assumed)
    spec = model.spec
    read_s = token_bytes / MEMORY_BYTES_S
    calls_s = spec.num_layers * MOVE_S
    grid = Grid.of({(n, c): calls_s + n * c * read_s for n in (1, 64) for c in (16, 4096)})
    heads = max(2 * (spec.num_heads + kind.num_kv_heads) * kind.head_dim for kind in spec.layers)
    copied = 2 * (2 * spec.hidden_size + heads) * DTYPE_BYTES[model.dtype]  # read and written
    carry = CarryCost(0.0, copied / MEMORY_BYTES_S)
    return HostCosts(grid, move, move, float(cpu), not cpu, carry, assumed)


def describe_host_costs(cost: CostModel | None) -> str:
    """Which costs of the host tier are planned with; empty if none are."""
    if not isinstance(cost, Fitted) or cost.host is None:
        return ""
    known = f"assumed ({cost.host.assumed})" if cost.host.assumed else "measured"
    return f"costs of the host tier are {known}"


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
