"""Splits a model for tensor parallelism: the part of every parameter on each rank. Torch-free.

Projections into heads and into the MLP are cut by outputs, those back by inputs (Shoeybi et al.
2019, Megatron-LM, section 3), experts like the MLP, embedding and output head by vocabulary. Norms,
routers and everything else small is on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from weft.core.errors import ConfigError
from weft.kernels.parts import UNGATED
from weft.models.parameter import Parameter, Piece
from weft.models.spec import LayerSpec, ModelSpec

ADDED_ONCE = ("output_bias", "down_bias", "expert_down_bias")  # to sums over all ranks


@dataclass(frozen=True)
class Shard:
    """A part of a model: that of one rank, or all of it."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


def shard_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """Return the model that each of ``size`` ranks computes; its vocabulary is still the whole one.

    Raises:
        ConfigError: something cannot be divided; the message says which sizes would work.
    """
    problem = _problem(spec, size)
    if problem is not None:
        fit = [n for n in range(1, spec.num_heads + 1) if _problem(spec, n) is None]
        raise ConfigError(
            f"tensor_parallel {size} does not divide this model: {problem}. Sizes that do: "
            f"{', '.join(map(str, fit))}.",
            param="tensor_parallel",
        )
    layers = tuple(
        replace(
            layer,
            num_heads=layer.num_heads and layer.num_heads // size,
            num_kv_heads=max(1, layer.num_kv_heads // size),
            intermediate_size=layer.intermediate_size // size,
        )
        for layer in spec.layers
    )
    moe = spec.moe and replace(spec.moe, intermediate_size=spec.moe.intermediate_size // size)
    return replace(spec, num_heads=spec.num_heads // size, layers=layers, moe=moe)


def _problem(spec: ModelSpec, size: int) -> str | None:
    """Return what prevents a split into so many parts, None if nothing does."""
    if size == 1:
        return None
    if spec.states is not None:
        return "its recurrent layers keep whole states"
    if spec.latent is not None:
        return "all of its heads read one cached row (MLA)"
    for heads in {spec.num_heads, *map(spec.heads, spec.layers)}:
        if heads % size:
            return f"it has {heads} heads"
    if spec.vocab_size < size:
        return f"it has {spec.vocab_size} tokens"
    if spec.moe is not None and spec.moe.intermediate_size % size:
        return f"its experts are {spec.moe.intermediate_size} wide"
    for layer in spec.layers:
        if layer.num_kv_heads % size and size % layer.num_kv_heads:
            return f"it has {layer.num_kv_heads} KV heads"
        if has_mlp(spec, layer) and layer.intermediate_size % size:
            return f"its MLP is {layer.intermediate_size} wide"
        inputs = [spec.heads(layer) * (spec.value_dim or layer.head_dim)]
        inputs += [layer.intermediate_size] if has_mlp(spec, layer) else []
        inputs += [spec.moe.intermediate_size] if layer.moe and spec.moe is not None else []
        group = spec.stored_weights.group if spec.stored_weights is not None else None
        for width in inputs:
            if group is not None and group < width and width // size % group:
                return f"its weights are stored in groups of {group} of {width} inputs"
    return None


def has_mlp(spec: ModelSpec, layer: LayerSpec) -> bool:
    """Whether a layer has a dense MLP; shared experts are one."""
    if not layer.moe:
        return layer.has_feed_forward
    return spec.moe is not None and spec.moe.has_mlp


def shard_range(count: int, shard: Shard) -> range:
    """Return a rank's share of ``count`` things; the last ranks have less if it does not divide."""
    each = -(-count // shard.size)
    return range(min(count, shard.rank * each), min(count, (shard.rank + 1) * each))


def cut(parameters: Iterable[Parameter], spec: ModelSpec, shard: Shard) -> Iterator[Parameter]:
    """Yield a rank's part of the parameters of a model that ``shard_spec`` can cut."""
    for parameter in parameters:
        name = parameter.name.rpartition(".")[2]
        if shard.size == 1 or (shard.rank == 0 and name in ADDED_ONCE):
            yield parameter
        elif name not in ADDED_ONCE:
            dimension, kept = _kept(parameter, spec, shard)
            yield _cut(parameter, dimension, kept) if kept else parameter


def _kept(parameter: Parameter, spec: ModelSpec, shard: Shard) -> tuple[int, list[range]]:
    """Return the split dimension and a rank's share of it; empty if it keeps all."""
    prefix, _, name = parameter.name.rpartition(".")
    shape = parameter.shape
    match name:
        case "embed" | "lm_head" | "per_layer_embed":
            return 0, [shard_range(shape[0], shard)]
        case "qkv" | "qkv_bias" | "qk_norm":
            layer = spec.layers[int(prefix.removeprefix("layers."))]
            each = name == "qk_norm" and not spec.qk_norm_whole  # has a row of its own
            unit = 1 if each else layer.head_dim
            units = unit, 1 if each else (spec.value_dim or unit)
            return 0, _heads(spec.heads(layer), layer.num_kv_heads, shape[0], units, shard)
        case "output_gate" | "sinks":
            count = spec.heads(spec.layers[int(prefix.removeprefix("layers."))])
            unit, heads = shape[0] // count, shard_range(count, shard)
            return 0, [range(heads.start * unit, heads.stop * unit)]
        case "up":
            return 0, [shard_range(shape[0], shard)]
        case "output" | "down":
            return 1, [shard_range(shape[1], shard)]
        case "expert_down":
            return 2, [shard_range(shape[2], shard)]
        case "gate_up_bias" if spec.activation in UNGATED:
            return 0, [shard_range(shape[0], shard)]
        case "gate_up" | "gate_up_bias":
            return 0, _halves(shape[0], shard)
        case "expert_gate_up" | "expert_gate_up_bias":
            return 1, _halves(shape[1], shard)
    return 0, []


def _heads(
    heads: int, kv_heads: int, rows: int, units: tuple[int, int], shard: Shard
) -> list[range]:
    """Rows of Q, then of K and V as far as they are there.

    Ranks that share a KV head have it each.

    Args:
        units: rows of a head of Q and K, and of V.
    """
    unit = units[0]
    query, first = shard_range(heads, shard), shard.rank * kv_heads // shard.size
    kept = [range(query.start * unit, query.stop * unit)]
    count = max(1, kv_heads // shard.size)
    offset = heads * unit
    for each in units:
        if offset < rows:
            start = offset + first * each
            kept.append(range(start, start + count * each))
        offset += kv_heads * each
    return kept


def _halves(rows: int, shard: Shard) -> list[range]:
    half, part = rows // 2, shard_range(rows // 2, shard)
    return [part, range(half + part.start, half + part.stop)]


def _cut(parameter: Parameter, dimension: int, kept: list[range]) -> Parameter:
    shape = list(parameter.shape)
    pieces = tuple(
        part for piece in parameter.pieces for part in _pieces(piece, shape, dimension, kept)
    )
    shape[dimension] = sum(map(len, kept))
    return replace(parameter, shape=tuple(shape), pieces=pieces)


def _pieces(piece: Piece, shape: list[int], dimension: int, kept: list[range]) -> Iterator[Piece]:
    """Yield what of a piece lies within ``kept``, with its new place."""
    index = piece.index + (slice(None),) * (dimension + 1 - len(piece.index))
    numbers = sum(isinstance(at, int) for at in index)
    inside = index[dimension]
    assert isinstance(inside, slice)
    covered = range(*inside.indices(shape[dimension]))
    # The tensor's own dimension; negative for one that it is repeated over.
    own = dimension - numbers - (len(shape) - numbers - len(piece.shape))
    place = 0
    for span in kept:
        first, last = max(span.start, covered.start), min(span.stop, covered.stop)
        if first < last:
            at = place + first - span.start
            target = (*index[:dimension], slice(at, at + last - first), *index[dimension + 1 :])
            part = piece.part
            if own >= 0:
                start = (piece.taken[own].start or 0) - covered.start
                source = slice(start + first, start + last)
                part = (*piece.taken[:own], source, *piece.part[own + 1 :])
            yield replace(piece, index=target, part=part)
        place += len(span)
