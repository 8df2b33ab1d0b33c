"""The only place where an engine is put together."""

from __future__ import annotations

import logging
import platform
import time
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llguidance import LLTokenizer

from weft import __version__
from weft.core.config import (
    DTYPE_BYTES,
    KV_SCALE_BYTES,
    EngineConfig,
    Facts,
    GroupFacts,
    ResolvedConfig,
    resolve,
)
from weft.core.errors import ConfigError, KernelError
from weft.core.grammar import grammar_tokenizer
from weft.core.served import ServedModel
from weft.core.types import NEUTRAL
from weft.cost.fit import Fitted, profile_path
from weft.engine.machine import available_memory, has_fast_bfloat16, usable_cores
from weft.exec.eager import EagerExecutor
from weft.exec.grammar import GrammarRows, Grammars
from weft.exec.rows import RowTable
from weft.exec.store import KVStore
from weft.kernels.kv_storage import KV_TYPES
from weft.kernels.ops import OpTable, select_ops
from weft.kernels.unavailable import KernelUnavailable
from weft.kv.cache import GroupSpec
from weft.models.families import read_spec
from weft.models.fused import describe_layers
from weft.models.generation import GenerationDefaults, read_generation_defaults
from weft.models.hub import resolve_model
from weft.models.layout import num_parameters, storage_of, weight_bytes
from weft.models.loader import load_model
from weft.models.spec import ModelSpec
from weft.sched.choose import Resources, make_scheduler
from weft.sched.planner import Limits, Planner
from weft.sched.slo import Policy

logger = logging.getLogger("weft")


@dataclass(frozen=True)
class Model:
    """A model on disk and what it takes to serve it; nothing is loaded yet.

    Attributes:
        source: a model folder, or a GGUF file.
        dtype: name of the dtype of weights and KV.
    """

    source: Path
    spec: ModelSpec
    generation: GenerationDefaults
    dtype: str
    facts: Facts
    ops: OpTable

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
    """A loaded model with its scheduler and executor."""

    model: Model
    resolved: ResolvedConfig
    scheduler: Planner
    executor: EagerExecutor
    grammars: Grammars
    started_ns: int = field(default_factory=time.monotonic_ns)


def find_model(config: EngineConfig, returning_bytes: int = 0) -> Model:
    """Find the model, read what it is, and choose dtype and kernels.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ConfigError, KernelError.
    """
    source = resolve_model(config.model, revision=config.revision, offline=config.offline)
    spec = read_spec(source, config.max_model_len)
    dtype = _choose_dtype(config.dtype, spec.dtype)
    storage = _check_quantize(config, spec)
    try:
        ops = select_ops(torch.device("cpu"), getattr(torch, dtype), config.attention, storage)
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error
    if config.batch_invariant and not ops.batch_invariant:
        raise KernelError(
            f"attention='{config.attention}' is not batch-invariant; set attention='cpu', or turn "
            "batch_invariant off"
        )
    if config.quantize != "none" and ops.quantise is None:
        raise KernelError(
            f"attention='{config.attention}' computes with floats only; set quantize='none', or "
            "attention='cpu'"
        )
    element = DTYPE_BYTES[dtype]
    scale = KV_SCALE_BYTES.get(config.kv_dtype, 0)
    facts = Facts(
        max_position_embeddings=spec.max_position_embeddings,
        weight_bytes=weight_bytes(spec, dtype, config.quantize, config.quantize_group),
        available_bytes=available_memory() + returning_bytes,
        groups=tuple(
            GroupFacts(
                group.name, group.window, group.bytes_per_token(1 if scale else element, scale)
            )
            for group in spec.kv_groups
        ),
    )
    folder = source.parent if source.is_file() else source
    return Model(source, spec, read_generation_defaults(folder), dtype, facts, ops)


def _check_quantize(config: EngineConfig, spec: ModelSpec) -> dict[str, str]:
    """How the weights of ops are stored that are not floats.

    Raises:
        ConfigError: the weights are to be rounded, but are stored as integers already.
    """
    if spec.stored_weights is not None:
        if config.quantize != "none":
            raise ConfigError(
                f"The checkpoint is quantised already ({spec.stored_weights}); leave quantize out.",
                param="quantize",
            )
        return {"linear": str(spec.stored_weights)}
    layer, head = (
        storage_of(name, config.quantize, config.quantize_group) for name in ("down", "lm_head")
    )
    if layer is None:
        return {}
    stored = {"linear": str(layer), "moe": str(layer), "logits": str(head)}
    return stored | ({"embedding": str(head)} if spec.tied_embeddings else {})


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
    model, resolved = settle(config, returning_bytes)
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
    set_threads(config.threads or usable_cores(), model.ops, pinned=config.pin_threads)
    scheduler = _scheduler(config, resolved, model)
    dtype, device = getattr(torch, model.dtype), torch.device("cpu")
    decoder = load_model(
        model.source,
        dtype=dtype,
        device=device,
        max_model_len=resolved.max_model_len,
        ops=model.ops,
        rounding=partial(storage_of, quantize=config.quantize, group=config.quantize_group),
    )
    groups = model.spec.kv_groups
    kv_dtype = KV_TYPES.get(config.kv_dtype, dtype)
    store = KVStore(groups, resolved.group_blocks, resolved.block_size, kv_dtype, device)
    blocks_per_row = -(-resolved.max_model_len // resolved.block_size)
    grammars = Grammars(lambda: _grammar_tokenizer(config, model))
    table = RowTable(
        resolved.max_num_seqs,
        resolved.max_model_len,
        [blocks_per_row] * len(groups),
        GrammarRows(grammars),
    )
    return Engine(
        model,
        resolved,
        scheduler,
        EagerExecutor(decoder, store, table, config.steps_in_flight),
        grammars,
    )


def _grammar_tokenizer(config: EngineConfig, model: Model) -> LLTokenizer:
    """The tokeniser that the request plane checks grammars with."""
    from weft.text.tokenizer import Tokenizer  # few engines ever need it

    tokenizer = Tokenizer.load(Path(config.tokenizer or model.folder))
    text = tokenizer.reference.to_str()
    return grammar_tokenizer(text, model.spec.vocab_size, model.eos_token_ids)


def _scheduler(config: EngineConfig, resolved: ResolvedConfig, model: Model) -> Planner:
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
        policy=Policy(config.slo_admission, config.slo_margin, config.slo_patience_s),
    )
    return make_scheduler(config.scheduler, resources)


def _measured_costs(config: EngineConfig, model: Model) -> Fitted:
    """The profile of what is to be served. Raises ProfileError, which says how to make one."""
    from weft.engine.profiling import profile_key  # which builds engines itself

    key = profile_key(config, model)
    return Fitted.load(profile_path(key, config.profile), key)


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
        kernels=model.ops.describe() | {"layers": describe_layers(model.spec, model.ops)},
        kv_blocks={group.name: blocks for group, blocks in groups},
        weight_bytes=model.facts.weight_bytes,
        kv_memory=resolved.kv_memory,
        versions={
            "weft": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "llguidance": version("llguidance"),
            "tokenizers": version("tokenizers"),
        },
    )


def set_threads(threads: int, ops: OpTable, *, pinned: bool = False) -> None:
    """Give torch and the native kernels the same number of threads; torch does not pin its own."""
    torch.set_num_threads(threads)
    if ops.describe()["paged_attention"] == "cpu":
        from weft.kernels.cpu import attention

        attention.set_threads(threads, pinned=pinned)


def _choose_dtype(wish: str, stored: str | None) -> str:
    """Follow the checkpoint where the CPU computes its dtype fast, else widen to float32."""
    if wish == "float16":
        raise ConfigError(
            "float16 is very slow on a CPU; set dtype to bfloat16 or float32.", param="dtype"
        )
    if wish != "auto":
        return wish
    if stored in ("bfloat16", "float16") and has_fast_bfloat16():
        return "bfloat16"
    return "float32"
