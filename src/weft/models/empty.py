"""A decoder whose weights have shapes and no numbers, to find out what its steps launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from weft.core.errors import CheckpointError
from weft.kernels.interface import OpTable
from weft.kernels.storage import Storage
from weft.models.decoder import Decoder
from weft.models.layout import is_kept_float32, parameters
from weft.models.loader import Checkpoint
from weft.models.parameter import Parameter
from weft.models.shard import Shard, cut, shard_spec
from weft.models.spec import ModelSpec
from weft.models.spec_reader import read_spec
from weft.models.weight_files import weight_files


def empty_model(
    path: Path,
    dtype: str,
    max_model_len: int | None,
    ops: OpTable,
    rounding: Callable[[str], Storage | None] = lambda _: None,
) -> Decoder:
    """Return what ``load_model`` does, of the weights no more than their shapes.

    Only the headers of the weights' files are read; where there are no files, the config tells all
    but which weights of a quantised checkpoint are.

    Args:
        ops: whose tensors are on ``meta``.

    Raises:
        UnsupportedModelError, CheckpointError, ConfigError: as ``load_model``.
    """
    import torch

    spec = read_spec(path, max_model_len)
    shard = Shard(ops.ranks.rank, ops.ranks.size)
    kind: torch.dtype = getattr(torch, dtype)
    weights: dict[str, Any] = {}
    for parameter, kept in kept_parameters(path, spec, shard, ops.computes):
        tied = parameter.name == "embed" and spec.tied_embeddings
        name = "lm_head" if tied else parameter.name
        storage = rounding(name) or kept
        if storage is not None:
            found = ops.quantise(name, parameter.shape, dtype, storage)
        else:
            floats = torch.float32 if is_kept_float32(name) else kind
            found = ops.pack(name, torch.empty(parameter.shape, dtype=floats, device="meta"))
        weights[parameter.name] = found
    return Decoder(shard_spec(spec, shard.size), weights, ops)


def kept_parameters(
    path: Path, spec: ModelSpec, shard: Shard, computes: Callable[[Storage], bool]
) -> list[tuple[Parameter, Storage | None]]:
    """Return the parameters of a rank, each with how its codes are kept; None: it is floats.

    Raises:
        CheckpointError: as ``load_model``.
    """
    try:
        weight_files(path)
    except CheckpointError:
        if spec.stored_weights is not None:
            raise
        whole = tuple(parameters(spec, stacked_experts=True))
        return [(parameter, None) for parameter in cut(whole, spec, shard)]
    with ExitStack() as files:
        return Checkpoint(path, spec, files, shard).kept(computes)
