"""The measured costs that an engine plans with, and the key of their profile."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace

from weft.core.config import DTYPE_BYTES, EngineConfig
from weft.core.settings import settings_of
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
# Settings on which a profile depends, beside the model.
MEASURED_WITH = (
    "device", "dtype", "kernels", "threads", "quantize", "quantize_group", "kv_dtype",
    "tensor_parallel", "host_kv_memory", "host_threads", "host_process", "host_experts",
    "host_quantize",
)  # fmt: skip
LINK_BYTES_S = 12e9  # between device and host, as PCIe 3.0 with 16 lanes copies
MEMORY_BYTES_S = 5e9  # from memory to memory, as a core of a server copies blocks
MOVE_S = 2e-5  # to launch the copies of a step
HANDOFF_S = 2e-5  # to hand rows of a layer to threads that wait for them, and to see their results


def measured_costs(config: EngineConfig, model: Model) -> Fitted:
    """The profile of what is to be served, with the costs of its host tier, if there is one.

    Raises:
        ProfileError: there is none; the message says how to make one.
    """
    key = profile_key(config, model)
    path = profile_path(key, config.profile)
    return with_host(config, model, Fitted.load(path, key, profile_command(config)))


def profile_command(config: EngineConfig) -> str:
    """The command that measures the costs of an engine with these settings."""
    words = ["weft profile --model", shlex.quote(config.model)]
    declared = settings_of(EngineConfig)
    for name in MEASURED_WITH:
        value, flag = getattr(config, name), f"--{name.replace('_', '-')}"
        if value != declared[name].default:
            words.append(flag if value is True else f"{flag} {shlex.quote(str(value))}")
    return " ".join(words)


def host_name(config: EngineConfig) -> str:
    """What the costs of a host tier are kept by: who attends there, with how many threads."""
    count = config.num_host_threads
    if not count:
        return "moves alone"
    return f"{count} thread{'' if count == 1 else 's'} of {transport(config)}"


def transport(config: EngineConfig) -> str:
    """Where the threads of a host worker are."""
    return "weft-host" if config.host_process else "the engine"


def with_host(config: EngineConfig, model: Model, fitted: Fitted) -> Fitted:
    """The costs with those of the host tier that is served, if there is one.

    Moves are those of any tier that was measured, as they do not depend on who attends there. A
    profile that has nothing else for this tier, be it of other threads, gives assumed costs.
    """
    if config.host_kv_memory is None:
        return fitted
    host = fitted.hosts.get(host_name(config))
    if host is None and fitted.hosts and not config.attends_on_host:
        measured = next(iter(fitted.hosts.values()))
        host = HostCosts(
            None, measured.out, measured.back, stall=measured.stall, duplex=measured.duplex
        )
    if host is None:
        host = assumed_host(config, model, fitted)
        logger.warning("The %s.", describe_host_costs(fitted.planned_with(host)))
    return fitted.planned_with(host)


def assumed_host(config: EngineConfig, model: Model, fitted: Fitted) -> HostCosts:
    """Costs of a host tier that was not measured.

    Moves take the time of a common link, or, where the device is the CPU and computing waits for
    them, of copies from memory to memory. A piggybacked row takes what copies of its residual, q,
    k, v and result do, on a GPU what q, k, v and the result take on the link; the residual stays.
    """
    cpu = is_cpu(model.device)
    bytes_s = MEMORY_BYTES_S if cpu else LINK_BYTES_S
    state_s = model.facts.state_bytes / bytes_s  # which goes along, however long the sequence is
    move = MoveCost(MOVE_S + state_s, _token_bytes(model) / bytes_s)
    name = host_name(config)
    others = f"the profile has {' and '.join(fitted.hosts)}, not {name}; " if fitted.hosts else ""
    assumed = f"{others}copies of {bytes_s / 1e9:.0f} GB/s, until weft profile measures them"
    costs = HostCosts(None, move, move, stall=float(cpu), duplex=not cpu, assumed=assumed)
    if not config.attends_on_host:
        return costs
    spec = model.spec
    heads = max(2 * (spec.heads(kind) + kind.num_kv_heads) * kind.head_dim for kind in spec.layers)
    numbers = 2 * (2 * spec.hidden_size + heads) if cpu else heads  # read and written, or sent
    carry = CarryCost(0.0, numbers * DTYPE_BYTES[model.dtype] / bytes_s)
    return replace(costs, attention=_assumed_attention(config, model, fitted), carry=carry)


def _assumed_attention(config: EngineConfig, model: Model, fitted: Fitted) -> Grid:
    """What the same kernel takes on the CPU that is profiled as a device, by the threads of either.

    At least what a copy of the KV takes, and a handoff for each layer.
    """
    host = config.num_host_threads
    share = compute_threads(config, this_machine()) / host if is_cpu(model.device) else 0.0
    read_s = _token_bytes(model) / MEMORY_BYTES_S / host
    known = fitted.coefficients
    context_s = max(known["decode_context"] * share, read_s)
    decode_s = max(known["decode_row"] + known["decode_few"], 0.0) * share
    handoffs_s = model.spec.num_layers * HANDOFF_S
    return Grid.of(
        {
            (decodes, context): handoffs_s + decodes * (decode_s + context * context_s)
            for decodes in (1, 2)
            for context in (0, 2**16)
        }
    )


def _token_bytes(model: Model) -> int:
    return sum(group.bytes_per_token for group in model.facts.groups)


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
    if model.host is not None:
        threads = compute_threads(config, this_machine())
        kernels["host_moe"] = (
            f"{model.host.ops.names['moe']} of {len(model.host.layers)} layers, "
            f"{model.host.quantize}, {threads} threads"
        )
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
