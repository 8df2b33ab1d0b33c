"""Describes a built engine for the request plane."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict

import numpy as np

from weft import __version__
from weft.core.config import EngineConfig
from weft.core.served import ServedModel
from weft.core.topology import this_machine
from weft.engine.build import Engine
from weft.engine.costs import profile_key
from weft.engine.devices import device_name, is_cpu
from weft.engine.executors import describe_executor
from weft.engine.fitting import describe_disk
from weft.engine.host_rules import describe_host_attention
from weft.engine.model import describe_kernels, describe_stages
from weft.engine.threads import plan_threads
from weft.engine.weights import stored_weights
from weft.models.kept_weights import checkpoint_digest
from weft.models.layout import num_parameters
from weft.models.weight_files import weight_files


def describe_served(config: EngineConfig, engine: Engine) -> ServedModel:
    """Describe a built engine for the request plane."""
    model, resolved = engine.model, engine.resolved
    groups = zip(model.facts.groups, resolved.group_blocks, strict=True)
    return ServedModel(
        name=config.model,
        folder=str(model.folder),
        checkpoint=checkpoint_digest(model.source, weight_files(model.source)),
        family=model.spec.family,
        parameters=num_parameters(model.spec),
        vocab_size=model.spec.vocab_size,
        hidden_size=model.spec.vector_size,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        block_size=resolved.block_size,
        dtype=model.dtype,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=model.sampling_defaults,
        batch_invariant=model.ops.batch_invariant,
        kernels=describe_kernels(config, model),
        kv_blocks={group.name: blocks for group, blocks in groups},
        host_kv_blocks={
            group.name: blocks
            for group, blocks in zip(model.facts.groups, resolved.host_blocks, strict=False)
        },
        host_kv_memory=config.host_kv_memory or 0,
        weight_bytes=model.facts.weight_bytes,
        kv_memory=resolved.kv_memory,
        host_attention=describe_host_attention(config),
        host_costs=engine.host_costs,
        places=config.attend,
        kv_disk=describe_disk(config),
        stages=tuple(describe_stages(config, model)),
        kv_dtype=model.dtype if config.kv_dtype == "auto" else config.kv_dtype,
        device=device_name(model.device),
        isa=model.ops.isa,
        threads=plan_threads(config, this_machine()).describe()
        if is_cpu(model.device) or model.host is not None
        else "",
        executor=describe_executor(engine.executor),
        overlaps=engine.executor.overlaps,
        halves=engine.halves,
        kept_weights="" if engine.kept is None else engine.kept.state,
        weights=stored_weights(config, model.spec, model.dtype, model.device).get(
            "linear", model.dtype
        ),
        start_s=engine.start_s,
        started=engine.started,
        profile_key=asdict(profile_key(config, model)),
        versions={
            "weft": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            **({"torch": sys.modules["torch"].__version__} if "torch" in sys.modules else {}),
        },
        classes=config.service_classes(),
        pooling=model.pooling,
        images=None if model.no_images or model.spec.vision is None else model.spec.vision.input,
        no_images=model.no_images,
    )
