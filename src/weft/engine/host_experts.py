"""Experts on the host beside a device: which they are, whether it works, and how fast it will be.

See ``exec.hosted_experts`` for how steps reach them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from weft.core.config import DTYPE_BYTES, IN_PLACE_OF_FP8, EngineConfig
from weft.core.errors import ConfigError, KernelError, OutOfMemoryError
from weft.core.kv_split import bytes_for
from weft.core.resolved import Facts
from weft.core.settings import format_bytes
from weft.core.topology import this_machine
from weft.cost.expert_offload import OffloadedModel, OffloadRates, predict_step
from weft.cost.hardware import HARDWARE, Hardware
from weft.engine.threads import plan_threads
from weft.exec.workspace import expert_rows_bytes
from weft.kernels.interface import OpTable
from weft.kernels.ops import select_ops
from weft.kernels.storage import Storage, computed_as
from weft.kernels.unavailable import KernelUnavailable
from weft.models.host_part import HostPart, in_layers
from weft.models.layout import parameters, storage_of, stored_as, weight_bytes
from weft.models.spec import ModelSpec

if TYPE_CHECKING:
    from weft.engine.model import Model

AUTO_TOKENS = 32768  # of a sequence for whose KV ``auto`` leaves room, if the model allows so many
DEVICE_KERNELS = ("triton",)  # of attention, where a host is beside
SHOWN_ROWS = (1, 8, 32)  # sequences for which a speed is predicted
MEASURE_S = 0.15


def place_experts(
    config: EngineConfig, spec: ModelSpec, dtype: str, ops: OpTable, facts: Facts
) -> tuple[Facts, HostPart | None]:
    """Decide which layers have their experts on the host.

    Args:
        facts: as if all weights were on the device.

    Returns:
        the facts of what is on the device, and what is not.

    Raises:
        ConfigError: there is nothing that could lie on the host, or it cannot be computed there.
        KernelError: there are no kernels of the CPU for it.
    """
    layers = [number for number, layer in enumerate(spec.layers) if layer.moe]
    beside = ops.names["paged_attention"] in DEVICE_KERNELS
    if config.host_experts == "none" or (config.host_experts == "auto" and not (layers and beside)):
        return facts, None
    if not beside or not layers:
        why = (
            f"the kernels of this engine ({ops.names['linear']}) compute everything in one place"
            if layers
            else f"this {spec.family} model has none, only dense layers"
        )
        raise ConfigError(
            f"host_experts keeps routed experts on the host of a GPU, but {why}; leave it out.",
            param="host_experts",
        )
    each = weight_bytes(
        spec,
        dtype,
        config.quantize,
        config.quantize_group,
        computes=ops.computes,
        wanted=_of({layers[0]}),
    )
    if config.host_experts == "all":
        count = len(layers)
    elif config.host_experts == "auto":
        count = _needed(config, facts, each, len(layers))
    else:
        count = int(config.host_experts)
    if count > len(layers):
        raise ConfigError(
            f"host_experts is {count}, but the model has {len(layers)} layers with experts; set it "
            "to that or less, or to all.",
            param="host_experts",
        )
    if count == 0:
        return facts, None
    host = _host_part(config, spec, dtype, frozenset(layers[len(layers) - count :]))
    there = weight_bytes(
        spec,
        dtype,
        host.quantize,
        config.quantize_group,
        computes=host.ops.computes,
        wanted=_of({layers[0]}),
    )
    rows = expert_rows_bytes(spec, DTYPE_BYTES[dtype], config.max_num_batched_tokens)
    return replace(
        facts,
        weight_bytes=facts.weight_bytes - count * each,
        pinned_bytes=facts.pinned_bytes + rows,
        host_weight_bytes=count * there,
    ), host


def _of(layers: set[int]) -> Callable[[str], bool]:
    return partial(in_layers, layers=frozenset(layers))


def _needed(config: EngineConfig, facts: Facts, each: int, most: int) -> int:
    """The least number of layers without whose experts there is room for KV."""
    tokens = config.max_model_len or min(facts.max_position_embeddings, AUTO_TOKENS)
    kv = config.kv_memory or int(bytes_for(config, facts, tokens, 1) / facts.kv_share)
    over = facts.weight_bytes + facts.workspace_bytes + kv - facts.available_bytes
    return min(most, max(0, -(-over // each)))


def _host_part(
    config: EngineConfig, spec: ModelSpec, dtype: str, layers: frozenset[int]
) -> HostPart:
    """Who computes these layers' experts on the host, and how their weights are rounded.

    Those that are stored as integers stay so. FP8, with which a CPU does not compute, becomes int8,
    unless the settings say else.
    """
    if dtype == "float16":
        raise ConfigError(
            "A CPU does not compute experts in float16; set dtype to bfloat16, or leave "
            "host_experts out.",
            param="host_experts",
        )
    quantize, stored = config.expert_rounding, spec.stored_weights
    if stored is not None and not stored.is_float and config.host_quantize != "auto":
        raise ConfigError(
            f"The checkpoint is quantised already ({stored}); leave host_quantize out.",
            param="host_quantize",
        )
    kept = _as_stored(spec)
    if config.host_quantize == "auto" and kept is not None and kept.format == "e4m3":
        quantize = IN_PLACE_OF_FP8 if quantize == "none" else quantize
    rounding = partial(storage_of, quantize=quantize, group=config.quantize_group)
    storage = rounding("expert_down")
    try:
        ops = select_ops("cpu", dtype, "cpu", {"moe": str(storage or dtype)})
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error
    return HostPart(layers, ops, rounding, quantize)


def _as_stored(spec: ModelSpec) -> Storage | None:
    """How the checkpoint has its experts, None for floats."""
    if spec.stored_weights is None:
        return None
    experts = next(p for p in parameters(spec) if p.name.endswith("expert_down"))
    return stored_as(spec.stored_weights, experts)


def check_fits_host(facts: Facts, free: int) -> None:
    """Raise OutOfMemoryError if the host has no room for experts and for what steps pin."""
    if facts.host_weight_bytes + facts.pinned_bytes <= free:
        return
    pinned = format_bytes(facts.pinned_bytes)
    only = f"but only {format_bytes(max(0, free))} are free there"
    if not facts.host_weight_bytes:
        raise OutOfMemoryError(
            f"Steps need {pinned} of the host's memory for their buffers, {only}; lower "
            "max_num_batched_tokens, max_num_seqs or steps_in_flight."
        )
    raise OutOfMemoryError(
        f"The experts on the host need {format_bytes(facts.host_weight_bytes)}, and the buffers of "
        f"steps {pinned}, {only}; set host_quantize to int8 or int4, or host_experts to fewer "
        "layers."
    )


def offloaded_model(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    facts: Facts,
    host: HostPart,
    computes: Callable[[Storage], bool] = lambda _: True,
) -> OffloadedModel:
    """What a step of the model reads and computes.

    Args:
        computes: with which codes the device multiplies.
    """
    moe = spec.moe
    assert moe is not None
    number = next(iter(host.layers))
    on_device = weight_bytes(
        spec,
        dtype,
        config.quantize,
        config.quantize_group,
        computes=computes,
        wanted=_of({number}),
    )
    device_layers = sum(layer.moe for layer in spec.layers) - len(host.layers)
    storage = host.rounding("expert_down")
    if storage is None and (stored := _as_stored(spec)) is not None:
        storage = computed_as(stored, host.ops.computes)
    return OffloadedModel(
        layers=len(host.layers),
        device_layers=device_layers,
        experts=moe.num_experts,
        top_k=moe.top_k,
        expert_bytes=facts.host_weight_bytes / len(host.layers) / moe.num_experts,
        device_expert_bytes=on_device / moe.num_experts,
        expert_flops=2 * 3 * spec.hidden_size * moe.intermediate_size,
        row_bytes=2 * spec.hidden_size * DTYPE_BYTES[dtype] + 12 * moe.top_k,
        device_bytes=facts.weight_bytes - device_layers * on_device,
        kind=dtype if storage is None else f"int{storage.bits}",
    )


def measured_rates(config: EngineConfig, kind: str, device: Hardware | None) -> OffloadRates:
    """Measure the host for some tenths of a second; the device's rates are those of its sheet."""
    from weft.kernels import measure
    from weft.kernels.cpu import attention

    plan = plan_threads(config, this_machine())
    attention.set_threads(plan.threads, plan.cpus, plan.nodes)
    reading = measure.read_rate(MEASURE_S)
    measure.release()
    return OffloadRates(
        reading,
        measure.multiply_rate(kind, MEASURE_S),
        0.0 if device is None else device.bandwidth,
        0.0 if device is None else device.link,
    )


def sheet_of(device_name: str) -> Hardware | None:
    """The hardware sheet of a GPU by the name that its driver gives; None if there is none."""
    words = device_name.lower()
    found = [name for name, sheet in HARDWARE.items() if sheet.host is not None and name in words]
    return HARDWARE[max(found, key=len)] if found else None


def predicted_lines(config: EngineConfig, model: Model, on: str) -> list[str]:
    """Measure the host and predict speeds; nothing where no experts lie there.

    Args:
        on: the name of the device.
    """
    if model.host is None:
        return []
    given = model.spec, model.dtype, model.facts, model.host, model.ops.computes
    offloaded = offloaded_model(config, *given)
    rates = measured_rates(config, offloaded.kind, sheet_of(on))
    return describe_offload(config, offloaded, rates, model.facts.host_weight_bytes)


def kept_settings(config: EngineConfig, host: HostPart | None) -> dict[str, str]:
    """What tells packed weights of the host from those with other settings."""
    rounding = config.quantize if host is None else host.quantize
    group = "" if rounding == "none" else f"/{config.quantize_group}"
    settings = {"quantize": f"{rounding}{group}"}
    if host is None:
        return settings
    return settings | {"experts": f"of layers {', '.join(map(str, sorted(host.layers)))}"}


def describe_offload(
    config: EngineConfig, model: OffloadedModel, rates: OffloadRates, bytes_on_host: int
) -> list[str]:
    """Sentences for people: what lies on the host, and the speed that is predicted with it."""
    steps = {rows: predict_step(model, rates, rows) for rows in SHOWN_ROWS}
    speeds = ", ".join(f"{_number(n / step.seconds)} for {n}" for n, step in steps.items())
    share = steps[1].host_s / steps[1].seconds
    most = config.max_num_batched_tokens
    chunk = predict_step(model, rates, most)
    layers = model.layers + model.device_layers
    device = "" if rates.device_read else "; the device's part, of unknown rates, is left out"
    return [
        f"experts of {model.layers} of {layers} layers on the host: {format_bytes(bytes_on_host)} "
        f"in {model.kind}, read at {rates.host_read / 1e9:.1f} GB/s at most",
        f"predicted tokens/s, by sequences that decode: {speeds}; of one, {share:.0%} is the "
        f"host's time{device}",
        f"predicted for prompts: {_number(most / chunk.seconds)} tokens/s; a step of {most} takes "
        f"{chunk.seconds:.2g} s, in which others wait",
    ]


def _number(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
