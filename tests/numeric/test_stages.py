"""Models split into the stages of a pipeline: every layer on one stage, the bits of one process."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import CASES, prompt, saved_once
from paged import PagedRunner
from ranks import layers_of, load, on_ranks, on_stages

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, OutOfMemoryError
from weft.core.resolved import Facts, GroupFacts, resolve
from weft.exec.workspace import StepSizes, workspace_bytes
from weft.kernels.collectives import ALONE, Collectives
from weft.kernels.process_group import Pipe
from weft.models.layout import embedding_name, parameters, weight_bytes
from weft.models.shard import Shard, cut, shard_spec
from weft.models.spec import ModelSpec
from weft.models.spec_reader import read_spec
from weft.models.stages import describe_stage, split_spec, stage_spec

# Families whose stages differ in more than their numbers.
ONE_OF_EACH = ["gemma3", "gemma4", "llama-tied-biases", "phi3-plain", "qwen3-moe-mixed"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved_once(tmp_path_factory)


def in_bytes(part: ModelSpec) -> int:
    return weight_bytes(part, "float32")


def stages_of(spec: ModelSpec, count: int) -> tuple[ModelSpec, ...]:
    return split_spec(spec, count, in_bytes)


# -- what each stage has


@pytest.mark.parametrize("name", CASES)
def test_stages_have_every_parameter_of_a_model_once(name, folders) -> None:
    spec = read_spec(folders(name), CASES[name].max_model_len)
    whole = {piece.tensor: p.shape for p in parameters(spec) for piece in p.pieces}
    found: dict[str, tuple[int, ...]] = {}
    for part in stages_of(spec, most_stages(spec)):
        own = {piece.tensor: p.shape for p in parameters(part) for piece in p.pieces}
        shared = {embedding_name(spec)} if spec.tied_embeddings else set()
        assert not own.keys() & found.keys() - shared
        found |= own
    assert found == whole


def test_the_dearest_stage_is_as_cheap_as_can_be(folders) -> None:
    spec = replace(read_spec(folders("llama-gqa")), tied_embeddings=False)
    spec = replace(spec, layers=spec.layers[:1] * 10)
    each = in_bytes(stage_spec(spec, 1, 3, range(1)))
    for embedding, expected in ((0, [3, 3, 4]), (2, [2, 5, 3]), (5, [1, 7, 2])):
        # As if embedding and head were so many layers each.
        def cost(part: ModelSpec, extra: int = embedding) -> int:
            return each * part.num_layers + extra * each * (part.stage.embeds + part.stage.ends)

        parts = split_spec(spec, 3, cost)
        dearest = max(map(cost, parts))
        assert dearest == min(
            max(cost(stage_spec(spec, n, 3, layers)) for n, layers in enumerate(bounds))
            for first in range(1, 9)
            for second in range(first + 1, 10)
            for bounds in [(range(first), range(first, second), range(second, 10))]
        )
        assert [part.num_layers for part in parts] == expected


def test_stages_keep_the_groups_of_the_whole_model(folders) -> None:
    spec = read_spec(folders("gemma3"))
    parts = stages_of(spec, spec.num_layers)
    for part in parts:
        assert [(g.name, g.window, g.head_dim) for g in part.kv_groups] == [
            (g.name, g.window, g.head_dim) for g in spec.kv_groups
        ]
    for index, group in enumerate(spec.kv_groups):
        kept = [
            part.stage.first + number for part in parts for number in part.kv_groups[index].layers
        ]
        assert kept == list(group.layers)
    assert any(not group.layers for part in parts for group in part.kv_groups)


def test_steps_of_a_stage_have_room_for_the_inputs_of_all_layers(folders) -> None:
    """The first stage computes them, and others get those of the layers behind them as well."""
    spec = read_spec(folders("gemma4"))
    assert spec.per_layer_input_size
    sizes = StepSizes(tokens=128, rows=4, samples=4, blocks=[8] * len(spec.kv_groups))
    for part in (spec, *stages_of(spec, 2)):
        without, given = (
            workspace_bytes(one, 4, sizes, graphs=False)
            for one in (replace(part, per_layer_input_size=0), part)
        )
        assert given - without == 2 * 4 * 128 * spec.num_layers * spec.per_layer_input_size


def test_a_layer_stays_with_the_one_whose_kv_it_reads(folders) -> None:
    spec = read_spec(folders("gemma4-shared-kv"))
    reads = [
        (i, kind.kv_source) for i, kind in enumerate(spec.layers) if kind.kv_source is not None
    ]
    assert reads
    most = most_stages(spec)
    assert 1 <= most < spec.num_layers
    with pytest.raises(ConfigError, match=rf"{most} stages at most, .* set it to {most} or less"):
        stages_of(spec, most + 1)
    for part in stages_of(spec, most):
        here = range(part.stage.first, part.stage.first + part.num_layers)
        assert all((i in here) == (source in here) for i, source in reads)


def most_stages(spec: ModelSpec) -> int:
    """Into how many a model can be split."""
    for count in range(spec.num_layers, 1, -1):
        with contextlib.suppress(ConfigError):
            return len(stages_of(spec, count))
    return 1


def test_more_stages_than_layers_are_refused(folders) -> None:
    spec = read_spec(folders("llama-gqa"))
    with pytest.raises(ConfigError, match=r"is 4, but this model has 3 layers; set it to 3 or"):
        stages_of(spec, 4)


def test_stages_are_described(folders) -> None:
    words = [describe_stage(part) for part in stages_of(read_spec(folders("llama-gqa")), 2)]
    assert words[0].startswith("embedding, layer")
    assert words[1].endswith("output head")


def test_bytes_of_a_stage_and_rank_are_those_of_its_tensors(folders) -> None:
    spec, shard = read_spec(folders("qwen3-moe-mixed")), Shard(1, 2)
    for part in stages_of(spec, 2):
        counts = [math.prod(p.shape) for p in cut(parameters(part), part, shard)]
        assert weight_bytes(part, "bfloat16", shard=shard) == 2 * sum(counts)


def test_stages_of_a_cut_model_have_its_heads(folders) -> None:
    spec = shard_spec(read_spec(folders("llama-gqa")), 2)
    assert {group.num_kv_heads for part in stages_of(spec, 2) for group in part.kv_groups} == {1}


def test_stages_have_the_blocks_of_the_one_with_the_least_room() -> None:
    full, sliding = GroupFacts("full", None, 64), GroupFacts("sliding", 32, 32)
    without = replace(full, bytes_per_token=0)
    config = EngineConfig(block_size=16, max_num_seqs=4, max_num_batched_tokens=16, kv_memory=2**17)
    small, large, odd = (
        Facts(512, weight_bytes, 2**20, groups)
        for weight_bytes, groups in (
            (2**18, (full, sliding)),
            (2**19, (replace(full, bytes_per_token=128), sliding)),
            (2**19, (without, sliding)),
        )
    )
    alone = [resolve(config, facts).group_blocks for facts in (small, large)]
    found = resolve(config, replace(large, stages=(small, large, odd)))
    assert found.group_blocks == tuple(map(min, *alone))
    assert found.group_blocks[0] == alone[1][0] < alone[0][0]
    assert found.kv_bytes == resolve(config, large).kv_bytes <= config.kv_memory
    # An engine that takes over is told what the largest stage takes, which another need not have.
    tight = replace(small, available_bytes=2**18 + 2**15, groups=(without, sliding))
    stages = replace(large, stages=(tight, large))
    open_config = replace(config, kv_memory=None, max_model_len=64)
    first = resolve(open_config, stages)
    assert first.kv_memory > tight.left_bytes
    again = resolve(replace(open_config, kv_memory=first.kv_memory), stages)
    assert again.group_blocks == first.group_blocks
    both = replace(tight, groups=(full, sliding))
    with pytest.raises(OutOfMemoryError, match="beside the weights only 32"):
        resolve(replace(open_config, kv_memory=2**18), replace(large, stages=(both, large)))
    with pytest.raises(OutOfMemoryError, match=r"weights need 1\.50 MiB"):
        resolve(config, replace(large, stages=(small, replace(large, weight_bytes=3 * 2**19))))


# -- what they compute


def logits_of(decoder, rows) -> list[torch.Tensor] | None:
    """The logits of several steps; None for a stage without the output head."""
    if decoder.spec.stage.ends:
        runner = PagedRunner(decoder)
        return [part for step in rows for part in runner.step(step)]
    decoder.logits = lambda hidden: hidden  # which is none
    runner = PagedRunner(decoder)
    for step in rows:
        runner.step(step)
    return None


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    """A rank that has failed is not waited for."""
    monkeypatch.setattr("weft.kernels.process_group.TIMEOUT_S", 20)


STEPS = [
    [("a", prompt(40)), ("b", prompt(70, 1))],
    [("b", prompt(1, 2)), ("c", prompt(3, 3)), ("a", prompt(2, 4))],
    [("a", prompt(1, 5))],
]


def of_stages(folder: Path, stages: int, width: int, at: Path, **more) -> list[list[torch.Tensor]]:
    def work(ranks: Collectives, pipe: Pipe):
        return logits_of(load(folder, ranks, link=pipe, **more), STEPS)

    found = on_stages(stages, width, at, work)
    assert found[: (stages - 1) * width] == [None] * ((stages - 1) * width)
    return found[(stages - 1) * width :]


@pytest.mark.parametrize("name", CASES)
def test_stages_give_the_bits_of_one_process(name, folders, tmp_path) -> None:
    more = {"max_model_len": CASES[name].max_model_len}
    count = most_stages(read_spec(folders(name)))
    if count == 1:
        pytest.skip("its layers cannot be separated")
    expected = logits_of(load(folders(name), ALONE, **more), STEPS)
    (found,) = of_stages(folders(name), count, 1, tmp_path, **more)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if name in CASES])
def test_two_stages_of_two_ranks_give_the_bits_of_two_ranks(name, folders, tmp_path) -> None:
    more = {"max_model_len": CASES[name].max_model_len}
    one = on_ranks(2, tmp_path, lambda g: logits_of(load(folders(name), g, **more), STEPS))
    for found in of_stages(folders(name), 2, 2, tmp_path, **more):
        assert all(map(torch.equal, found, one[0]))


def test_a_stage_is_layers_of_a_model_and_no_more(folders) -> None:
    first, last = layers_of(folders("llama-gqa"), 2)
    assert (first.start, first.stop, last.stop) == (0, last.start, 3)
