"""The model to serve: its spec, device, dtype and kernels. Loads no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.core.config import DTYPE_BYTES, EngineConfig
from weft.core.errors import ConfigError, KernelError, OutOfMemoryError, TokenizerError
from weft.core.kv_types import KV_TYPES
from weft.core.memory import available_memory
from weft.core.pooling import TEXT_MODEL, Pooling
from weft.core.resolved import (
    DEVICE_KV_SHARE,
    HOST_KV_SHARE,
    Facts,
    GroupFacts,
    ResolvedConfig,
    resolve,
)
from weft.core.settings import format_bytes
from weft.engine.devices import free_memory, is_cpu, is_resident, pick_device, steps_in_flight
from weft.engine.encoders import check_encodes, step_tokens
from weft.engine.host_experts import check_fits_host, place_experts
from weft.engine.host_rules import check_attends_on_host
from weft.engine.images import tower_bytes, why_no_images
from weft.engine.machine import has_fast_bfloat16
from weft.engine.pooling import find_pooling
from weft.engine.recurrent import check_recurrent
from weft.engine.weights import (
    check_heads,
    check_launches,
    check_storage,
    prefill_bytes,
    stored_weights,
)
from weft.exec.workspace import StepSizes, pinned_bytes, workspace_bytes
from weft.kernels.gpus import Gpu
from weft.kernels.interface import OpTable
from weft.kernels.lanes import lanes_for
from weft.kernels.ops import OP_DTYPES, TUNED, select_ops
from weft.kernels.unavailable import KernelUnavailable
from weft.models.fused import describe_layers
from weft.models.generation import GenerationDefaults, read_generation_defaults
from weft.models.gguf_text import text_folder
from weft.models.host_part import HostPart
from weft.models.hub import resolve_model
from weft.models.layout import weight_bytes
from weft.models.shard import Shard, shard_spec
from weft.models.spec import ModelSpec
from weft.models.spec_reader import read_spec
from weft.models.stages import describe_stage, split_spec, stage_spec

ABSENT = "meta"  # the device where torch follows shapes and has no numbers
CONTEXT_BYTES = 2**30  # that a driver takes of a GPU, an estimate


@dataclass(frozen=True)
class Model:
    """A model on disk and the settings to serve it; nothing is loaded yet.

    Attributes:
        source: a model folder, or a GGUF file.
        folder: of tokeniser, template and sampling defaults.
        rank_spec: what this rank computes; the same as ``spec`` where the model is neither cut nor
            split into stages.
        facts: of one rank.
        host: the experts that stay on the host of the device; None for none.
        dtype: name of the dtype of weights and KV.
        no_images: why images are not read, as a sentence; empty where they are, or nothing is there
            to read them with.
    """

    source: Path
    folder: Path
    spec: ModelSpec
    rank_spec: ModelSpec
    generation: GenerationDefaults
    dtype: str
    facts: Facts
    ops: OpTable
    device: str
    host: HostPart | None = None
    layers: tuple[range, ...] = ()  # of each stage; empty where there is one
    pooling: Pooling = TEXT_MODEL
    no_images: str = ""

    @property
    def own_layers(self) -> range | None:
        """Those of this rank's stage; None where there is one stage."""
        return self.layers[self.rank_spec.stage.number] if self.layers else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of ``generation_config.json``, else of ``config.json``."""
        return self.generation.eos_token_ids or self.spec.eos_token_ids

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What ``SamplingParams`` takes for fields that a request leaves open."""
        return dict(self.generation.sampling)


def find_model(
    config: EngineConfig,
    returning_bytes: int = 0,
    rank: int = 0,
    absent: Gpu | None = None,
    *,
    halves: bool = False,
) -> Model:
    """Find the model, read what it is, and choose device, dtype and kernels.

    Args:
        absent: the GPU for which kernels are compiled, where ``meta`` stands for its tensors.
        halves: whether steps need memory for two halves.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ConfigError, KernelError.
    """
    source = resolve_model(config.model, revision=config.revision, offline=config.offline)
    spec = read_spec(source, config.max_model_len)
    ranks = config.tensor_parallel
    device = ABSENT if absent else pick_device(config.device, rank, config.processes)
    dtype = _choose_dtype(config, spec.dtype, device)
    storage = stored_weights(config, spec, dtype, device)
    try:
        ops = select_ops(
            device, dtype, config.kernels, storage, config.tuning, config.fp8_accumulation
        )
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error
    if config.require_batch_invariance and not ops.batch_invariant:
        raise KernelError(
            f"kernels='{config.kernels}' is not batch-invariant; set kernels='cpu', or turn "
            "require_batch_invariance off"
        )
    stages = split_spec(spec, config.pipeline_parallel, partial(_weight_bytes, config, dtype, ops))
    stage_specs = _of_ranks(shard_spec(spec, ranks), stages)
    rank_spec = stage_specs[rank // ranks]
    check_storage(config, spec, ops)
    check_launches(config, spec, dtype, ops, source)
    check_heads(config, shard_spec(spec, ranks), dtype, ops, device)
    check_recurrent(config, spec, ops, device)
    check_encodes(config, spec, ops, device)
    check_attends_on_host(config, spec, ops)
    free = (
        _free_memory(config, device, returning_bytes)
        if absent is None
        else absent.memory_bytes - CONTEXT_BYTES
    )
    facts = _facts_of_all(
        [
            _facts(config, dtype, ops, device, free, stage, of_rank, halves=halves)
            for stage, of_rank in zip(stages, stage_specs, strict=True)
        ]
    )
    facts, host = place_experts(config, spec, dtype, ops, facts)
    folder = _text_folder(source, config.tokenizer)
    defaults = read_generation_defaults(folder)
    layers = tuple(range(s.stage.first, s.stage.first + s.num_layers) for s in stages)
    if len(stages) == 1:
        layers = ()
    pooling = find_pooling(config, source, spec)
    return Model(
        source,
        folder,
        spec,
        rank_spec,
        defaults,
        dtype,
        facts,
        ops,
        device,
        host,
        layers,
        pooling,
        why_no_images(config, spec, ops, device),
    )


def _text_folder(source: Path, tokenizer: str | None) -> Path:
    """The folder of a model's text files; beside another tokeniser, its own need not be known."""
    try:
        return text_folder(source)
    except TokenizerError:
        if tokenizer is None:
            raise
        return source.parent


def _weight_bytes(config: EngineConfig, dtype: str, ops: OpTable, spec: ModelSpec) -> int:
    """The memory of the weights of a rank, of a whole model or a stage of it."""
    shard = Shard(0, config.tensor_parallel)
    return weight_bytes(
        spec, dtype, config.quantize, config.quantize_group, shard, computes=ops.computes
    )


def _of_ranks(cut: ModelSpec, stages: Sequence[ModelSpec]) -> list[ModelSpec]:
    """What a rank computes of each stage of a model, which is cut like this."""
    if len(stages) == 1:
        return [cut]
    found = []
    for spec in stages:
        at = spec.stage
        found.append(
            stage_spec(cut, at.number, at.count, range(at.first, at.first + spec.num_layers))
        )
    return found


def _facts(
    config: EngineConfig,
    dtype: str,
    ops: OpTable,
    device: str,
    available_bytes: int,
    spec: ModelSpec,
    rank_spec: ModelSpec,
    *,
    halves: bool,
) -> Facts:
    """The facts of a rank of a stage.

    Args:
        spec, rank_spec: of the stage, and what the rank computes of it.
    """
    element, on_host = DTYPE_BYTES[dtype], is_cpu(device)
    kv = KV_TYPES.get(config.kv_dtype)
    kv_bytes = (element, 0) if kv is None else (kv.code_bytes, kv.scale_bytes)
    steps = pinned = 0
    if not on_host:
        sizes = _step_sizes(config, rank_spec, kv_bytes, halves=halves)
        ranks = config.tensor_parallel
        steps = workspace_bytes(rank_spec, element, sizes, graphs=config.graphs, ranks=ranks)
        prefill = prefill_bytes(config, rank_spec, dtype, ops, device, sizes.blocks[0])
        steps += prefill * (1 + config.graphs)  # those that are captured keep theirs
        pinned = pinned_bytes(rank_spec, element, sizes)
    return Facts(
        max_position_embeddings=spec.max_position_embeddings,
        weight_bytes=_weight_bytes(config, dtype, ops, spec)
        + tower_bytes(config, spec, dtype, ops, device),
        available_bytes=available_bytes,
        groups=tuple(
            GroupFacts(group.name, group.window, group.bytes_per_token(*kv_bytes))
            for group in rank_spec.kv_groups
        ),
        workspace_bytes=steps,
        pinned_bytes=pinned,
        kv_share=HOST_KV_SHARE if on_host else DEVICE_KV_SHARE,
        state_bytes=0 if spec.states is None else spec.states.slot_bytes,
    )


def _facts_of_all(stages: Sequence[Facts]) -> Facts:
    """The facts of all stages, with the most that one of them needs of everything."""
    if len(stages) == 1:
        return stages[0]
    groups = tuple(
        max(group, key=lambda one: one.bytes_per_token)
        for group in zip(*(facts.groups for facts in stages), strict=True)
    )
    return replace(
        stages[0],
        weight_bytes=max(facts.weight_bytes for facts in stages),
        workspace_bytes=max(facts.workspace_bytes for facts in stages),
        pinned_bytes=max(facts.pinned_bytes for facts in stages),
        groups=groups,
        stages=tuple(stages),
    )


def describe_stages(config: EngineConfig, model: Model) -> list[str]:
    """What each stage of a pipeline holds, a line each; none where there is one stage."""
    lines = []
    for number, (layers, facts) in enumerate(zip(model.layers, model.facts.stages, strict=True)):
        part = stage_spec(model.spec, number, len(model.layers), layers)
        first, width = number * config.tensor_parallel, config.tensor_parallel
        who = f"rank {first}" if width == 1 else f"ranks {first} to {first + width - 1}"
        kv = sum(group.bytes_per_token for group in facts.groups)
        lines.append(
            f"stage {number} ({who}): {describe_stage(part)}; weights "
            f"{format_bytes(facts.weight_bytes)}, KV {format_bytes(kv)} a token"
            f"{' each' * (width > 1)}"
        )
    return lines


def resolve_settings(
    config: EngineConfig,
    returning_bytes: int = 0,
    absent: Gpu | None = None,
    *,
    halves: bool = False,
) -> tuple[Model, ResolvedConfig]:
    """Find the model and decide all that is open but how steps are split; see ``find_model``.

    The spec depends on the longest sequence served (longrope factors; a window that no sequence
    outgrows is none), so it is read again once that length is known.
    """
    model = find_model(config, returning_bytes, absent=absent, halves=halves)
    resolved = resolve(config, model.facts)
    if resolved.max_model_len == config.max_model_len:
        return model, step_tokens(resolved, model.spec)
    limited = resolved.limited_by_memory
    config = replace(config, max_model_len=resolved.max_model_len)
    model = find_model(config, returning_bytes, absent=absent, halves=halves)
    resolved = replace(resolve(config, model.facts), limited_by_memory=limited)
    return model, step_tokens(resolved, model.spec)


def check_host_memory(config: EngineConfig, model: Model, resolved: ResolvedConfig) -> None:
    """Check that the host has the memory for experts, what steps pin, and the KV of its tier.

    Of all ranks.

    Before any of them takes its part, as the others would find that much less. On a CPU the weights
    and the KV of the device take theirs from the same memory.

    Raises:
        OutOfMemoryError: it has not.
    """
    each, ranks, facts = config.host_kv_memory or 0, config.processes, model.facts
    if is_cpu(model.device):
        free = facts.available_bytes - facts.weight_bytes - resolved.kv_bytes  # of one rank
        where = "beside weights and KV the host has"
    else:
        free, where = available_memory() // ranks, "the host has"
    check_fits_host(facts, free)
    free -= facts.host_weight_bytes + facts.pinned_bytes
    if each > free:
        rank = " for each rank" if ranks > 1 else ""
        raise OutOfMemoryError(
            f"host_kv_memory is {format_bytes(each)}{rank}, but {where} only {format_bytes(free)} "
            f"free{rank}; set it lower."
        )


def describe_kernels(config: EngineConfig, model: Model) -> dict[str, dict[str, str]]:
    """The kernel of each op, of the layers, of sums over ranks and of what stages send.

    For each its ``kernel`` and ``dtype``, of attention also its ``kv_dtype``; where kernels are
    launched, also the ``tuning``: where their launches come from.
    """
    ops, ranks = model.ops, config.tensor_parallel
    found = {}
    for op, kernel in ops.describe().items():
        found[op] = {"kernel": kernel, "dtype": OP_DTYPES.get(op, model.dtype)}
        if op == "paged_attention":
            found[op]["kv_dtype"] = config.kv_name(model.dtype)
        if ops.tuning is not None:
            found[op]["tuning"] = ops.tuning.source if op in TUNED else "fixed"
    for kind in sorted(
        {layer.state.kind for layer in model.spec.layers if layer.state is not None}
    ):
        found[kind] = {"kernel": ops.names["gate"], "dtype": "float32"}
    if model.host is not None:
        found["host_moe"] = {"kernel": model.host.ops.names["moe"], "dtype": model.dtype}
    layers = describe_layers(model.rank_spec, ops, ranks)
    found["layers"] = {"kernel": layers, "dtype": model.dtype}
    backend = "gloo" if is_cpu(model.device) else "NCCL"
    if model.layers:
        stages = f"{backend}, through {len(model.layers)} stages"
        found["stages"] = {"kernel": stages, "dtype": model.dtype}
    if ranks > 1:
        ways = backend if is_cpu(model.device) else f"peer memory if small, else {backend}"
        sums = f"{ways}, over {ranks} ranks in their order"
        found["sums"] = {"kernel": sums, "dtype": "float32"}
    return found


def _free_memory(config: EngineConfig, device: str, returning_bytes: int) -> int:
    """The memory for a rank: its share of a host's, or all of its GPU's."""
    if not is_cpu(device):
        return free_memory(device)
    free = free_memory(device) // config.processes + returning_bytes
    return free if config.memory_limit is None else min(free, config.memory_limit)


def _step_sizes(
    config: EngineConfig, spec: ModelSpec, kv_bytes: tuple[int, int], *, halves: bool
) -> StepSizes:
    """The largest step that the settings allow.

    Args:
        kv_bytes: of a number of KV, and of a scale.
        halves: whether steps may be computed in two halves.
    """
    longest = config.max_model_len or spec.max_position_embeddings
    blocks = -(-longest // config.block_size)
    return StepSizes(
        tokens=config.max_num_batched_tokens,
        rows=config.max_num_seqs,
        samples=config.max_num_seqs * (1 + config.speculation),
        blocks=[blocks] * len(spec.kv_groups),
        lanes=lanes_for(config.max_num_seqs) if config.piggybacks else 0,
        overlaps=config.overlaps,
        halves=halves,
        depth=steps_in_flight(config, ABSENT),
        leases=is_resident(config, ABSENT),
        scratch_bytes=sum(
            blocks * config.block_size * group.bytes_per_token(*kv_bytes) // len(group.layers)
            for group in spec.kv_groups
            if config.overlaps
        ),
    )


def _choose_dtype(config: EngineConfig, stored: str | None, device: str) -> str:
    """Follow the checkpoint; on a CPU float16 becomes bfloat16.

    With the reference kernels a CPU without products of bfloat16 computes in float32: the library's
    bfloat16 is many times slower there.
    """
    wish = config.dtype
    if not is_cpu(device):
        followed = stored if stored is not None and stored in DTYPE_BYTES else "bfloat16"
        return followed if wish == "auto" else wish
    if wish == "float16":
        raise ConfigError(
            "float16 is very slow on a CPU; set dtype to bfloat16 or float32.", param="dtype"
        )
    if wish != "auto":
        return wish
    fast = config.kernels != "reference" or has_fast_bfloat16()
    if stored in ("bfloat16", "float16") and fast:
        return "bfloat16"
    return "float32"
