"""The only place where an engine is put together."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft import __version__
from weft.core.config import (
    DEVICE_KV_SHARE,
    DTYPE_BYTES,
    HOST_KV_SHARE,
    KV_SCALE_BYTES,
    EngineConfig,
    Facts,
    GroupFacts,
    ResolvedConfig,
    resolve,
)
from weft.core.errors import ConfigError, KernelError
from weft.core.grammar import grammar_tokenizer
from weft.core.ports import Executor
from weft.core.served import ServedModel
from weft.core.settings import format_bytes
from weft.core.types import NEUTRAL
from weft.cost.fit import Fitted, ProfileKey, profile_path
from weft.engine.devices import (
    Stopwatch,
    allocating,
    check_host_memory,
    describe_executor,
    device_name,
    free_memory,
    make_executor,
    pick_device,
)
from weft.engine.machine import has_fast_bfloat16, usable_cores
from weft.engine.ranks import ParallelExecutor, Task, build_parallel, meet
from weft.engine.weights import (
    check_heads,
    check_launches,
    check_storage,
    stored_weights,
)
from weft.exec.grammar import GrammarRows, Grammars
from weft.exec.rows import RowTable
from weft.exec.store import KVStore
from weft.exec.workspace import StepSizes, workspace_bytes
from weft.kernels.collectives import Group
from weft.kernels.kv_storage import KV_TYPES
from weft.kernels.ops import OP_DTYPES, TUNED, OpTable, select_ops
from weft.kernels.unavailable import KernelUnavailable
from weft.kv.cache import GroupSpec
from weft.models.families import read_spec
from weft.models.fused import describe_layers
from weft.models.generation import GenerationDefaults, read_generation_defaults
from weft.models.hub import resolve_model
from weft.models.layout import num_parameters, storage_of, weight_bytes
from weft.models.loader import load_model
from weft.models.shard import Shard, cut_spec
from weft.models.spec import ModelSpec
from weft.sched.policy_slo import TargetPolicy
from weft.sched.registry import Resources, make_scheduler
from weft.sched.scheduler import Limits, Scheduler

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger("weft")
LINK_BYTES_S = 12e9  # between device and host, as PCIe 3.0 with 16 lanes copies
MOVE_S = 2e-5  # to launch the copies of a step

# What to do where there is no memory for a part of an engine.
FOR_WEIGHTS = "set quantize, or cut the model over more GPUs with tensor_parallel"
FOR_KV = "set kv_memory to less"
FOR_STEPS = "lower max_num_seqs, max_num_batched_tokens or kv_memory"

SMALL_BYTES = 256 * 2**20  # of weights that one thread has copied before others have begun to help


@dataclass(frozen=True)
class Model:
    """A model on disk and what it takes to serve it; nothing is loaded yet.

    Attributes:
        source: a model folder, or a GGUF file.
        rank_spec: what each rank computes; the same as ``spec`` where the model is not cut.
        facts: of one rank.
        dtype: name of the dtype of weights and KV.
    """

    source: Path
    spec: ModelSpec
    rank_spec: ModelSpec
    generation: GenerationDefaults
    dtype: str
    facts: Facts
    ops: OpTable
    device: torch.device

    @property
    def folder(self) -> Path:
        """Where tokeniser, template and sampling defaults are looked for."""
        return self.source.parent if self.source.is_file() else self.source

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of ``generation_config.json``, else of ``config.json``."""
        return self.generation.eos_token_ids or self.spec.eos_token_ids

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What ``SamplingParams`` takes for fields that a request leaves open."""
        given = self.generation
        values = {name: getattr(given, name) for name in NEUTRAL}
        values["max_tokens"] = given.max_new_tokens
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Engine:
    """A loaded model with its scheduler and executor.

    Attributes:
        start_s: seconds from the settings to each part of the start, ``ready`` being the end.
    """

    model: Model
    resolved: ResolvedConfig
    scheduler: Scheduler
    executor: Executor
    grammars: Grammars
    start_s: Mapping[str, float]
    started_ns: int = field(default_factory=time.monotonic_ns)

    def check_ranks(self) -> None:
        """Raise EngineDeadError if another rank of a model that is cut has ended."""
        if isinstance(self.executor, ParallelExecutor):
            self.executor.check()


def find_model(config: EngineConfig, returning_bytes: int = 0, rank: int = 0) -> Model:
    """Find the model, read what it is, and choose device, dtype and kernels.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ConfigError, KernelError.
    """
    source = resolve_model(config.model, revision=config.revision, offline=config.offline)
    spec = read_spec(source, config.max_model_len)
    ranks = config.tensor_parallel
    rank_spec = cut_spec(spec, ranks)
    device = pick_device(config.device, rank, ranks)
    dtype = _choose_dtype(config.dtype, spec.dtype, device)
    storage = stored_weights(config, spec)
    try:
        ops = select_ops(device, getattr(torch, dtype), config.attention, storage, config.tuning)
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error
    if config.batch_invariant and not ops.batch_invariant:
        raise KernelError(
            f"attention='{config.attention}' is not batch-invariant; set attention='cpu', or turn "
            "batch_invariant off"
        )
    check_storage(config, spec, ops)
    check_launches(config, spec, dtype, ops)
    check_heads(config, rank_spec, dtype, ops, device)
    element, on_host = DTYPE_BYTES[dtype], device.type == "cpu"
    scale = KV_SCALE_BYTES.get(config.kv_dtype, 0)
    facts = Facts(
        max_position_embeddings=spec.max_position_embeddings,
        weight_bytes=weight_bytes(
            spec, dtype, config.quantize, config.quantize_group, Shard(0, ranks)
        ),
        available_bytes=_free_memory(device, ranks, returning_bytes),
        groups=tuple(
            GroupFacts(
                group.name, group.window, group.bytes_per_token(1 if scale else element, scale)
            )
            for group in rank_spec.kv_groups
        ),
        workspace_bytes=0
        if on_host
        else workspace_bytes(
            rank_spec, element, _step_sizes(config, rank_spec), graphs=config.graphs, ranks=ranks
        ),
        kv_share=HOST_KV_SHARE if on_host else DEVICE_KV_SHARE,
    )
    folder = source.parent if source.is_file() else source
    defaults = read_generation_defaults(folder)
    return Model(source, spec, rank_spec, defaults, dtype, facts, ops, device)


def _free_memory(device: torch.device, ranks: int, returning_bytes: int) -> int:
    """What a rank may take: its share of a host, all of its GPU."""
    if device.type == "cpu":
        return free_memory(device) // ranks + returning_bytes
    return free_memory(device)


def _step_sizes(config: EngineConfig, spec: ModelSpec) -> StepSizes:
    """The largest step that the settings allow."""
    longest = config.max_model_len or spec.max_position_embeddings
    return StepSizes(
        tokens=config.max_num_batched_tokens,
        rows=config.max_num_seqs,
        samples=config.max_num_seqs * (1 + config.speculation),
        blocks=[-(-longest // config.block_size)] * len(spec.kv_groups),
    )


def settle(config: EngineConfig, returning_bytes: int = 0) -> tuple[Model, ResolvedConfig]:
    """Find the model and decide everything that is open.

    The spec depends on the longest sequence served (longrope factors; a window that no sequence
    outgrows is none), so it is read again once that length is known.
    """
    model = find_model(config, returning_bytes)
    resolved = resolve(config, model.facts)
    if resolved.max_model_len == config.max_model_len:
        return model, resolved
    limited = resolved.limited_by_memory
    config = replace(config, max_model_len=resolved.max_model_len)
    model = find_model(config, returning_bytes)
    return model, replace(resolve(config, model.facts), limited_by_memory=limited)


def build_engine(config: EngineConfig, returning_bytes: int = 0) -> Engine:
    """Load the model and put scheduler and executor around it.

    Args:
        returning_bytes: memory that another engine gives back before this one is used.

    Raises:
        WeftError: a typed error for everything that can be wrong with settings, model or memory.
    """
    watch = Stopwatch()
    model, resolved = settle(config, returning_bytes)
    check_host_memory(config)
    if resolved.limited_by_memory:
        logger.warning(
            "The KV memory holds %d tokens, so max_model_len is %d instead of the model's %d; "
            "raise kv_memory for more.",
            resolved.max_model_len,
            resolved.max_model_len,
            model.spec.max_position_embeddings,
        )
    for key in model.generation.unhonoured:
        logger.warning("generation_config.json sets '%s', which weft does not apply.", key)
    scheduler = _scheduler(config, resolved, model)
    grammars = Grammars(lambda: _grammar_tokenizer(config, model))
    rows = GrammarRows(grammars)
    executor: Executor
    if config.tensor_parallel == 1:
        executor = _executor(config, resolved, model, rows, watch)
    else:
        decided = replace(
            config,
            model=str(model.source),
            revision=None,
            device=model.device.type,
            dtype=model.dtype,
            max_model_len=resolved.max_model_len,
        )
        executor = build_parallel(
            decided,
            resolved,
            model.device,
            lambda group: _executor(config, resolved, _among(model, group), rows, watch),
        )
    watch.mark("ready")
    spent = ", ".join(f"{name} after {seconds:.2f} s" for name, seconds in watch.seconds.items())
    logger.info("The start, %s: %s.", describe_executor(executor), spent)
    return Engine(model, resolved, scheduler, executor, grammars, watch.seconds)


def build_rank(config: EngineConfig, task: Task) -> Executor:
    """Load the part of a rank from 1 on, and put an executor around it.

    Args:
        config: with everything that rank 0 has decided.

    Raises:
        WeftError: a typed error; rank 0 has met most of them before.
    """
    ranks = config.tensor_parallel
    device = pick_device(config.device, task.rank, ranks)
    group = meet(task.rank, ranks, task.meeting_point, device)
    model = find_model(config, rank=task.rank)
    grammars = Grammars(lambda: _grammar_tokenizer(config, model))
    # Only rank 0 finds grammars too costly: by its clock, as no two ranks need the same time.
    rows = GrammarRows(grammars, clock=lambda: 0.0)
    if device.type == "cpu":
        # Nothing is planned here, so nothing is gained by steps in flight on a CPU.
        config = replace(config, steps_in_flight=0)
    return _executor(config, task.resolved, _among(model, group), rows, Stopwatch())


def _among(model: Model, group: Group) -> Model:
    """The model as one of several ranks computes it."""
    return replace(model, ops=replace(model.ops, ranks=group))


def _executor(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model: Model,
    grammars: GrammarRows,
    watch: Stopwatch,
) -> Executor:
    """Load the model, or a rank's part of it, and put an executor around it.

    Raises:
        OutOfMemoryError: there is no memory for one of these, whatever was free before.
    """
    threads = compute_threads(config)
    set_threads(threads, model.ops, pinned=config.pin_threads)
    dtype, device = getattr(torch, model.dtype), model.device
    if model.facts.weight_bytes < SMALL_BYTES:
        torch.set_num_threads(1)
    within = partial(allocating, ranks=model.ops.ranks)
    with within(f"the weights ({format_bytes(model.facts.weight_bytes)})", FOR_WEIGHTS):
        decoder = load_model(
            model.source,
            dtype=dtype,
            device=device,
            max_model_len=resolved.max_model_len,
            ops=model.ops,
            rounding=partial(storage_of, quantize=config.quantize, group=config.quantize_group),
        )
    torch.set_num_threads(threads)
    watch.mark("weights")
    groups = model.rank_spec.kv_groups
    kv_dtype = KV_TYPES.get(config.kv_dtype, dtype)
    with within(f"KV ({format_bytes(resolved.kv_bytes)})", FOR_KV):
        store = KVStore(groups, resolved.group_blocks, resolved.block_size, kv_dtype, device)
    blocks_per_row = -(-resolved.max_model_len // resolved.block_size)
    with within("the buffers of steps", FOR_STEPS):
        table = RowTable(
            resolved.max_num_seqs, resolved.max_model_len, [blocks_per_row] * len(groups), grammars
        )
        return make_executor(config, resolved, decoder, store, table)


def compute_threads(config: EngineConfig) -> int:
    """Threads of each rank."""
    return config.threads or max(1, usable_cores() // config.tensor_parallel)


def _grammar_tokenizer(config: EngineConfig, model: Model) -> LLTokenizer:
    """The tokeniser that the request plane checks grammars with."""
    from weft.text.tokenizer import Tokenizer  # few engines ever need it

    tokenizer = Tokenizer.load(Path(config.tokenizer or model.folder))
    text = tokenizer.grammar_document()
    return grammar_tokenizer(text, model.spec.vocab_size, model.eos_token_ids)


def _scheduler(config: EngineConfig, resolved: ResolvedConfig, model: Model) -> Scheduler:
    groups = [
        GroupSpec(group.name, resolved.block_size, blocks, group.window)
        for group, blocks in zip(model.facts.groups, resolved.group_blocks, strict=True)
    ]
    limits = Limits(
        resolved.max_num_seqs,
        resolved.max_num_batched_tokens,
        resolved.max_model_len,
        config.speculation,
    )
    resources = Resources(
        groups,
        limits,
        config.service_classes(),
        prefix_caching=config.prefix_caching,
        cost=None if config.scheduler == "fcfs" else _measured_costs(config, model),
        policy=TargetPolicy(config.slo_admission, config.slo_margin, config.slo_patience_s),
        host_blocks=resolved.host_blocks,
    )
    name = f"{config.scheduler}-swap" if resolved.host_blocks else config.scheduler
    return make_scheduler(name, resources)


def _measured_costs(config: EngineConfig, model: Model) -> Fitted:
    """The profile of what is to be served. Raises ProfileError, which says how to make one.

    Profiles have no time for moves of KV; with a host tier it is that of a common link.
    """
    key = _profile_key(config, model)
    fitted = Fitted.load(profile_path(key, config.profile), key)
    if config.host_kv_memory is None or fitted.move is not None:
        return fitted
    token_s = sum(group.bytes_per_token for group in model.facts.groups) / LINK_BYTES_S
    logger.info(
        "The profile has no time for moves of KV; they are taken to go at %.0f GB/s.",
        LINK_BYTES_S / 1e9,
    )
    return replace(fitted, move=(MOVE_S, token_s))


def _profile_key(config: EngineConfig, model: Model) -> ProfileKey:
    from weft.engine.profiling import profile_key  # which builds engines itself

    return profile_key(config, model)


def describe_served(config: EngineConfig, engine: Engine) -> ServedModel:
    """What the request plane needs to know of a built engine."""
    model, resolved = engine.model, engine.resolved
    groups = zip(model.facts.groups, resolved.group_blocks, strict=True)
    return ServedModel(
        name=config.model,
        folder=str(model.folder),
        family=model.spec.family,
        parameters=num_parameters(model.spec),
        vocab_size=model.spec.vocab_size,
        hidden_size=model.spec.hidden_size,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        block_size=resolved.block_size,
        dtype=model.dtype,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=model.sampling_defaults,
        batch_invariant=model.ops.batch_invariant,
        kernels=describe_kernels(config, model),
        kv_blocks={group.name: blocks for group, blocks in groups},
        weight_bytes=model.facts.weight_bytes,
        kv_memory=resolved.kv_memory,
        device=device_name(model.device),
        executor=describe_executor(engine.executor),
        weights=stored_weights(config, model.spec).get("linear", model.dtype),
        start_s=engine.start_s,
        profile_key=asdict(_profile_key(config, model)),
        versions={
            "weft": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "llguidance": version("llguidance"),
            "tokenizers": version("tokenizers"),
        },
        classes=config.service_classes(),
    )


def describe_kernels(config: EngineConfig, model: Model) -> dict[str, dict[str, str]]:
    """What computes each op, the layers, and the sums over ranks.

    For each its ``kernel`` and ``dtype``, of attention also its ``kv_dtype``; where kernels are
    launched, also the ``tuning``: where their launches come from.
    """
    ops, ranks = model.ops, config.tensor_parallel
    found = {}
    for op, kernel in ops.describe().items():
        found[op] = {"kernel": kernel, "dtype": OP_DTYPES.get(op, model.dtype)}
        if op == "paged_attention":
            kv_dtype = model.dtype if config.kv_dtype == "auto" else config.kv_dtype
            found[op]["kv_dtype"] = kv_dtype
        if ops.tuning is not None:
            found[op]["tuning"] = ops.tuning.source if op in TUNED else "fixed"
    layers = describe_layers(model.rank_spec, ops, ranks)
    found["layers"] = {"kernel": layers, "dtype": model.dtype}
    if ranks > 1:
        backend = "gloo" if model.device.type == "cpu" else "NCCL"
        sums = f"{backend}, over {ranks} ranks in their order"
        found["sums"] = {"kernel": sums, "dtype": "float32"}
    return found


def set_threads(threads: int, ops: OpTable, *, pinned: bool = False) -> None:
    """Give torch and the native kernels the same number of threads; torch does not pin its own."""
    torch.set_num_threads(threads)
    if ops.describe()["paged_attention"] == "cpu":
        from weft.kernels.cpu import attention

        attention.set_threads(threads, pinned=pinned)


def _choose_dtype(wish: str, stored: str | None, device: torch.device) -> str:
    """Follow the checkpoint where its dtype is computed fast, else widen to float32."""
    if device.type != "cpu":
        followed = stored if stored is not None and stored in DTYPE_BYTES else "bfloat16"
        return followed if wish == "auto" else wish
    if wish == "float16":
        raise ConfigError(
            "float16 is very slow on a CPU; set dtype to bfloat16 or float32.", param="dtype"
        )
    if wish != "auto":
        return wish
    if stored in ("bfloat16", "float16") and has_fast_bfloat16():
        return "bfloat16"
    return "float32"
