"""Formats of weights and KV, checked against the kernels and launches that exist."""

from __future__ import annotations

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, KernelError
from weft.core.kv_types import KV_TYPES
from weft.kernels.codes import CodeForm
from weft.kernels.interface import OpTable
from weft.kernels.storage import MULTIPLIED, Storage, computed_as
from weft.kernels.tuning import (
    DECODE,
    GATED,
    PREFILL,
    LaunchShape,
    Pinned,
    kind_of,
    kv_kind,
    op_of,
)
from weft.kernels.unavailable import KernelUnavailable
from weft.models.families import FAMILIES
from weft.models.layout import parameters, storage_of, stored_as
from weft.models.parameter import Parameter
from weft.models.shard import Shard, cut, shard_spec
from weft.models.spec import ModelSpec

LARGE = 1 << 20  # inputs, more than any group has
KERNELS_OF = {"cpu": "the kernels of a CPU", "triton": "the kernels of a GPU"}  # by their name


def stored_weights(
    config: EngineConfig, spec: ModelSpec, dtype: str, device: str
) -> dict[str, str]:
    """Storage formats of the ops' weights that are not floats.

    Raises:
        ConfigError: the weights are to be rounded, but are stored as integers already.
    """
    stored = spec.stored_weights
    if stored is not None and (config.quantize == "none" or not stored.is_float):
        if config.quantize != "none":
            raise ConfigError(
                f"The checkpoint is quantised already ({stored}); leave quantize out.",
                param="quantize",
            )
        words = str(stored)
        if stored.is_float and device == "cpu" and config.kernels in ("auto", "cpu"):
            kept = computed_as(stored.storage(LARGE), lambda storage: storage.format == "int")
            words = f"{kept or dtype} (stored as {stored})"
        return dict.fromkeys(("linear", "moe"), words)
    layer, head = (
        storage_of(name, config.quantize, config.quantize_group) for name in ("down", "lm_head")
    )
    if layer is None:
        return {}
    found = {"linear": str(layer), "moe": str(layer)}
    if head is None:
        return found
    found["logits"] = str(head)
    return found | ({"embedding": str(head)} if spec.tied_embeddings else {})


def check_storage(config: EngineConfig, spec: ModelSpec, ops: OpTable) -> None:
    """Check that there are kernels for the storage formats of rounded weights and of KV.

    Raises:
        ConfigError: there are none for what they are to be rounded to, or the family loses its
            accuracy with such KV.
    """
    kernels = KERNELS_OF.get(ops.names["paged_attention"], "those of kernels='reference'")
    kinds = ("down", "expert_down", "lm_head")
    wanted = [storage_of(kind, config.quantize, config.quantize_group) for kind in kinds]
    missing = [storage for storage in wanted if storage is not None and not ops.computes(storage)]
    if missing:
        raise ConfigError(
            f"quantize is {config.quantize}, but {kernels} do not compute with {missing[0]}: those "
            "of a CPU do with int8 and int4, those of a GPU with fp8, int8 and int4, and those of "
            "kernels='reference' with fp8, slowly. These two need torch: the extra weft[cuda].",
            param="quantize",
        )
    unsound = FAMILIES[spec.family].unsound_kv
    if config.kv_dtype in unsound:
        allowed = ", ".join(name for name in ("auto", *KV_TYPES) if name not in unsound)
        raise ConfigError(
            f"Models of the family {spec.family} do not keep their accuracy with kv_dtype "
            f"{config.kv_dtype}: {unsound[config.kv_dtype]}. Allowed: {allowed}.",
            param="kv_dtype",
        )


def check_heads(
    config: EngineConfig, spec: ModelSpec, dtype: str, ops: OpTable, device: str
) -> None:
    """Check that attention on a GPU has tiles for the heads of every layer.

    Args:
        spec: of the part of a rank.

    Raises:
        KernelError: it has none; the message names the sizes.
    """
    if ops.names["paged_attention"] != "triton":
        return
    import torch

    from weft.kernels.kv_storage import cache_dtype
    from weft.kernels.triton.attention import plan_on
    from weft.kernels.triton.tiles import Heads

    kind, where = getattr(torch, dtype), torch.device(device)
    cache = cache_dtype(config.kv_name(dtype))
    for sizes in _heads(spec):
        try:
            plan_on(Heads(*sizes, kind, cache), where, tuning=ops.tuning)
        except ValueError as error:
            raise KernelError(f"{error}; kernels='reference' serves all (slow)") from error


def check_launches(config: EngineConfig, spec: ModelSpec, dtype: str, ops: OpTable) -> None:
    """Check that the file of launches has one for every product of the model and its attention.

    Raises:
        KernelError: it has not; the message names the shapes and says how to make a file.
        ConfigError: there is a file, and nothing that reads it.
    """
    if isinstance(ops.tuning, Pinned):
        try:
            ops.tuning.require(launch_shapes(config, spec, dtype))
        except KernelUnavailable as error:
            raise KernelError(str(error)) from error
    elif config.tuning not in ("auto", "heuristic"):
        raise ConfigError(
            f"tuning: '{config.tuning}' is for the kernels of a GPU, and this engine uses none.",
            param="tuning",
        )


def launch_shapes(config: EngineConfig, spec: ModelSpec, dtype: str) -> list[LaunchShape]:
    """Return all that launches are chosen for."""
    return product_shapes(config, spec, dtype) + attention_shapes(config, spec, dtype)


def attention_shapes(config: EngineConfig, spec: ModelSpec, dtype: str) -> list[LaunchShape]:
    """Return the shapes of attention of a rank, once; windows and soft caps change no launch."""
    kind = kv_kind(dtype, config.kv_name(dtype))
    sizes = _heads(shard_spec(spec, config.tensor_parallel))
    return [LaunchShape(op, kind, heads) for op in (DECODE, PREFILL) for heads in sizes]


def _heads(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """KV heads, query heads of each, and their size, of every kind that layers have."""
    return sorted(
        {
            (group.num_kv_heads, spec.num_heads // group.num_kv_heads, group.head_dim)
            for group in spec.kv_groups
        }
    )


def product_shapes(config: EngineConfig, spec: ModelSpec, dtype: str) -> list[LaunchShape]:
    """Return what launches are chosen for: every kind of product of a rank, once."""
    found = set()
    for parameter in cut(parameters(spec), spec, Shard(0, config.tensor_parallel)):
        tied = parameter.name == "embed" and spec.tied_embeddings
        name = "lm_head" if tied else parameter.name
        if name.rpartition(".")[2] in MULTIPLIED:
            storage = _storage(config, spec, name, parameter)
            form = None if storage is None else CodeForm.of(storage)
            kind = _kind(storage, dtype) if form is None else form.kind(dtype)
            found.add(LaunchShape(op_of(name), kind, parameter.shape))
            if name.rpartition(".")[2] == "gate_up" and form is None:
                found.add(LaunchShape(GATED, kind, parameter.shape))
    return sorted(found)


def _storage(
    config: EngineConfig, spec: ModelSpec, name: str, parameter: Parameter
) -> Storage | None:
    storage = storage_of(name, config.quantize, config.quantize_group)
    if storage is None and spec.stored_weights is not None:
        return stored_as(spec.stored_weights, parameter)
    return storage


def _kind(storage: Storage | None, dtype: str) -> str:
    """Return the kind of a matrix that has not a scale for each group of inputs."""
    if storage is None:
        return kind_of(dtype, None, False)
    return kind_of(dtype, storage.format, storage.format != "int" and storage.inputs != "float")
