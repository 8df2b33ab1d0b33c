"""Formats of weights and KV, checked against the kernels and launches that exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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
from weft.models.empty import kept_parameters
from weft.models.families import FAMILIES
from weft.models.layout import parameters, storage_of, stored_as
from weft.models.parameter import Parameter
from weft.models.quant_config import GGUF
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
    if stored is not None and (config.quantize == "none" or not stored.may_be_rounded):
        if config.quantize != "none":
            raise ConfigError(
                f"The checkpoint is quantised already ({stored}); leave quantize out.",
                param="quantize",
            )
        words = str(stored)
        if stored.is_float and device == "cpu" and config.kernels in ("auto", "cpu"):
            kept = computed_as(stored.storage(LARGE), lambda storage: storage.format == "int")
            words = f"{kept or dtype} (stored as {stored})"
        elif stored.method == GGUF and (device != "cpu" or config.kernels == "reference"):
            words = f"{dtype} where only a CPU's kernels have codes (stored as {stored})"
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
            plan_on(Heads.of(sizes, kind, cache), where, tuning=ops.tuning)
        except ValueError as error:
            raise KernelError(f"{error}; kernels='reference' serves all (slow)") from error


def prefill_bytes(
    config: EngineConfig, spec: ModelSpec, dtype: str, ops: OpTable, device: str, pages: int
) -> int:
    """Return what prefill by cuDNN takes of a step's memory, 0 where no file asks for it.

    Args:
        spec: of the part of a rank.
        pages: blocks of the longest row.

    Raises:
        KernelError: the file asks for it, and it is missing or does not compute this.
    """
    if not isinstance(ops.tuning, Pinned):
        return 0
    import torch

    from weft.kernels.kv_storage import cache_dtype
    from weft.kernels.triton.cudnn_prefill import asks, step_bytes
    from weft.kernels.triton.tiles import Heads

    step = config.max_num_seqs, config.max_num_batched_tokens, pages
    kinds = getattr(torch, dtype), cache_dtype(config.kv_name(dtype))
    every = [Heads.of(sizes, *kinds) for sizes in _heads(spec)]
    try:
        return sum(
            step_bytes(heads, step, config.block_size, torch.device(device))
            for heads in every
            if asks(ops.tuning, heads)
        )
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error


def check_launches(
    config: EngineConfig, spec: ModelSpec, dtype: str, ops: OpTable, source: Path | None = None
) -> None:
    """Check that the file of launches has one for every product of the model and its attention.

    Args:
        source: see ``product_shapes``.

    Raises:
        KernelError: it has not; the message names the shapes and says how to make a file.
        ConfigError: there is a file, and nothing that reads it.
    """
    if isinstance(ops.tuning, Pinned):
        try:
            ops.tuning.require(launch_shapes(config, spec, dtype, source))
        except KernelUnavailable as error:
            raise KernelError(str(error)) from error
    elif config.tuning not in ("auto", "heuristic"):
        raise ConfigError(
            f"tuning: '{config.tuning}' is for the kernels of a GPU, and this engine uses none.",
            param="tuning",
        )


def launch_shapes(
    config: EngineConfig, spec: ModelSpec, dtype: str, source: Path | None = None
) -> list[LaunchShape]:
    """Return all that launches are chosen for; see ``product_shapes``."""
    return product_shapes(config, spec, dtype, source) + attention_shapes(config, spec, dtype)


def attention_shapes(config: EngineConfig, spec: ModelSpec, dtype: str) -> list[LaunchShape]:
    """Return the shapes of attention of a rank, once; windows and soft caps change no launch."""
    kind = kv_kind(dtype, config.kv_name(dtype))
    sizes = _heads(shard_spec(spec, config.tensor_parallel))
    return [LaunchShape(op, kind, heads) for op in (DECODE, PREFILL) for heads in sizes]


def _heads(spec: ModelSpec) -> list[tuple[int, ...]]:
    """KV heads, query heads of each, their size, and that of latents, of every kind of layers."""
    latent = () if spec.latent is None else (spec.latent.rank,)
    return sorted(
        {
            (
                layer.num_kv_heads,
                spec.heads(layer) // layer.num_kv_heads,
                layer.head_dim,
                *latent,
            )
            for layer in spec.layers
            if layer.state is None
        }
    )


def product_shapes(
    config: EngineConfig, spec: ModelSpec, dtype: str, source: Path | None = None
) -> list[LaunchShape]:
    """Return what launches are chosen for: every kind of product of a rank, once.

    Args:
        source: the checkpoint. One that is quantised may keep some layers in floats, which only the
            names of its tensors tell; without it, all its layers are taken to be quantised.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    found = set()
    for name, shape in _products(config, spec, dtype, source):
        found.add(shape)
        if name == "gate_up" and CodeForm.parse(shape.kind) is None:
            found.add(replace(shape, op=GATED))
    return sorted(found)


def head_shape(
    config: EngineConfig, spec: ModelSpec, dtype: str, source: Path | None = None
) -> LaunchShape:
    """Return the product of the output head; see ``product_shapes``."""
    products = _products(config, spec, dtype, source)
    return next(shape for name, shape in products if name == "lm_head")


def _products(
    config: EngineConfig, spec: ModelSpec, dtype: str, source: Path | None
) -> Iterator[tuple[str, LaunchShape]]:
    """Yield what every parameter of a rank that is multiplied with is called, and its product."""
    for parameter, stored in _stored(config, spec, source):
        tied = parameter.name == "embed" and spec.tied_embeddings
        name = "lm_head" if tied else parameter.name.rpartition(".")[2]
        if name in MULTIPLIED:
            storage = storage_of(name, config.quantize, config.quantize_group) or stored
            form = None if storage is None else CodeForm.of(storage)
            kind = _kind(storage, dtype) if form is None else form.kind(dtype)
            yield name, LaunchShape(op_of(name), kind, parameter.shape)


def _stored(
    config: EngineConfig, spec: ModelSpec, source: Path | None
) -> list[tuple[Parameter, Storage | None]]:
    """Return the parameters of a rank with how a quantised checkpoint stores them."""
    shard, stored = Shard(0, config.tensor_parallel), spec.stored_weights
    if stored is not None and source is not None:
        return kept_parameters(source, spec, shard, lambda _: True)
    every = cut(parameters(spec), spec, shard)
    return [(one, None if stored is None else stored_as(stored, one)) for one in every]


def _kind(storage: Storage | None, dtype: str) -> str:
    """Return the kind of a matrix that has not a scale for each group of inputs."""
    if storage is None:
        return kind_of(dtype, None, False)
    return kind_of(dtype, storage.format, storage.format != "int" and storage.inputs != "float")
