"""Splits a model into the stages of a pipeline: which layers each of them computes. Torch-free.

The first stage also has the embedding, the last one the final norm and the output head (Huang et
al. 2019, GPipe, section 2). Layers stay whole; ``shard`` cuts those of a stage for its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.core.errors import ConfigError
from weft.models.spec import ModelSpec, PipelineStage

Cost = Callable[[ModelSpec], int]  # of a stage, such as the bytes of its weights


def split_spec(spec: ModelSpec, count: int, cost: Cost) -> tuple[ModelSpec, ...]:
    """Return the stages of a model, such that the most expensive one costs the least.

    Args:
        cost: that of layers one behind the other must be the sum of theirs, beside what only the
            first or the last stage has.

    Raises:
        ConfigError: the model has fewer layers that can be separated.
    """
    if count == 1:
        return (spec,)
    cuts = _cuts(spec)
    if count > len(cuts) + 1:
        raise ConfigError(_too_many(spec, count, len(cuts) + 1), param="pipeline_parallel")
    bounds = _cheapest((0, *cuts, spec.num_layers), spec, count, cost)
    return tuple(
        stage_spec(spec, number, count, range(bounds[number], bounds[number + 1]))
        for number in range(count)
    )


def stage_spec(spec: ModelSpec, number: int, count: int, layers: range) -> ModelSpec:
    """Return these layers of a model as a stage, counted from 0."""
    keys = [(g.name, (g.window, g.num_kv_heads, g.head_dim)) for g in spec.kv_groups]
    stage = PipelineStage(number, count, layers.start, spec.num_layers, tuple(keys))
    inside = [
        layer
        if layer.kv_source is None
        else replace(layer, kv_source=layer.kv_source - layers.start)
        for layer in spec.layers[layers.start : layers.stop]
    ]
    return replace(spec, layers=tuple(inside), stage=stage)


def describe_stage(spec: ModelSpec) -> str:
    """Which parts of the whole model a stage has, for people."""
    stage = spec.stage
    first, last = stage.first, stage.first + spec.num_layers - 1
    layers = f"layers {first} to {last}" if last > first else f"layer {first}"
    parts = ["embedding"] * stage.embeds + [layers] + ["output head"] * stage.ends
    return ", ".join(parts)


def _cuts(spec: ModelSpec) -> list[int]:
    """The layers before which a stage may begin: a layer stays with the one whose KV it reads."""
    reads = [(i, layer.kv_source) for i, layer in enumerate(spec.layers)]
    tied = [range(source + 1, i + 1) for i, source in reads if source is not None]
    return [i for i in range(1, spec.num_layers) if not any(i in together for together in tied)]


def _too_many(spec: ModelSpec, count: int, most: int) -> str:
    if most == spec.num_layers:
        why = f"this model has {most} layers"
    else:
        why = (
            f"the {spec.num_layers} layers of this model make {most} stages at most, since some "
            "read the KV of others"
        )
    return f"pipeline_parallel is {count}, but {why}; set it to {most} or less."


def _cheapest(bounds: Sequence[int], spec: ModelSpec, count: int, cost: Cost) -> tuple[int, ...]:
    """Return ``count + 1`` of these bounds, the first and the last one among them."""
    ends, last = _edges(spec, count, cost), len(bounds) - 1
    sums = [0]
    for number in range(spec.num_layers):
        sums.append(sums[-1] + cost(stage_spec(spec, 1, 3, range(number, number + 1))))

    def of(stage: int, low: int, high: int) -> int:
        return sums[bounds[high]] - sums[bounds[low]] + ends.get(stage, 0)

    # best[i]: of the stages so far, up to bound i, the cost of the dearest, the sum of the squares
    # of all, which is lower for more even ones, and where they begin.
    best: dict[int, tuple[int, int, tuple[int, ...]]]
    best = {i: (of(0, 0, i), of(0, 0, i) ** 2, (0,)) for i in range(1, last - count + 2)}
    for stage in range(1, count):
        highest = last - (count - 1 - stage)
        best = {
            high: min(
                (
                    max(dearest, of(stage, low, high)),
                    squares + of(stage, low, high) ** 2,
                    (*starts, bounds[low]),
                )
                for low, (dearest, squares, starts) in best.items()
                if low < high
            )
            for high in range(stage + 1, highest + 1)
        }
    return (*best[last][2], bounds[-1])


def _edges(spec: ModelSpec, count: int, cost: Cost) -> dict[int, int]:
    """What the first and the last stage cost beside their layers."""
    first, last = range(1), range(spec.num_layers - 1, spec.num_layers)
    inner = [cost(stage_spec(spec, 1, 3, layers)) for layers in (first, last)]
    embeds = cost(stage_spec(spec, 0, 3, first)) - inner[0]
    ends = cost(stage_spec(spec, 2, 3, last)) - inner[1]
    return {0: embeds, count - 1: ends}
