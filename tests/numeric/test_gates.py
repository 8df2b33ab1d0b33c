"""Gates of attention's output that lie in Q's tensor, head by head, as Qwen3-Next stores them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import CASES, build, prompt, save
from paged import PagedRunner
from safetensors.torch import load_file, save_file

from weft.kernels.ops import select_ops
from weft.models import loader
from weft.models.layout import num_parameters, parameters
from weft.models.loader import Checkpoint, load_model
from weft.models.shard import Shard, cut
from weft.models.spec import GateSpec, ModelSpec
from weft.models.spec_reader import read_spec, spec_from_config

HEADS, DIM = 4, 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint with a tensor for the gates, and the same with the gates among Q's rows."""
    apart, together = (tmp_path_factory.mktemp(name) for name in ("apart", "together"))
    save(build("muse-glimmer"), apart)
    save(build("muse-glimmer"), together)
    tensors = load_file(together / "model.safetensors")
    for name in [name for name in tensors if name.endswith("self_attn.gate_proj.weight")]:
        query = name.replace("gate_proj", "q_proj")
        both = (tensors[query], tensors.pop(name))
        by_head = [x.unflatten(0, (HEADS, DIM)) for x in both]
        tensors[query] = torch.cat(by_head, dim=1).flatten(0, 1).contiguous()
    save_file(tensors, together / "model.safetensors")
    return apart, together


def spec_together(folder: Path) -> ModelSpec:
    spec = read_spec(folder)
    return replace(spec, layout=replace(spec.layout, gate_in_q=True))


def test_they_give_the_bits_of_gates_apart(folders, monkeypatch) -> None:
    apart, together = folders
    ops = select_ops("cpu", "float32", "cpu")
    expected = PagedRunner(load_model(apart, "float32", None, ops)).step([("a", prompt(50))])[0]
    assert num_parameters(spec_together(together)) == num_parameters(read_spec(apart))
    monkeypatch.setattr(loader, "read_spec", lambda folder, _: spec_together(folder))
    found = PagedRunner(load_model(together, "float32", None, ops)).step([("a", prompt(50))])[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_the_gates_of_its_heads(folders, rank: int) -> None:
    ops, shard = select_ops("cpu", "float32", "reference"), Shard(rank, 2)
    found = []
    for folder, spec in zip(
        folders, (read_spec(folders[0]), spec_together(folders[1])), strict=True
    ):
        with ExitStack() as files:
            checkpoint = Checkpoint(folder, spec, files, shard)
            found.append(checkpoint.load("float32", ops, lambda _: None))
    assert found[0].keys() == found[1].keys()
    for name, weight in found[0].items():
        np.testing.assert_array_equal(weight, found[1][name], err_msg=name)
    half = HEADS // 2 * DIM
    assert found[0]["layers.0.output_gate"].shape == (half, 64)
    whole = load_file(folders[0] / "model.safetensors")
    gates = whole["model.language_model.layers.0.self_attn.gate_proj.weight"]
    assert torch.equal(found[1]["layers.0.output_gate"], gates[rank * half : (rank + 1) * half])


def test_a_gate_by_head_is_cut_by_heads() -> None:
    case = CASES["muse-glimmer"]
    config = case.config().to_dict() | {"architectures": [case.architecture]}
    spec = replace(spec_from_config(config), output_gate=GateSpec("softplus", by_head=True))
    parts = {p.name: p for p in cut(parameters(spec), spec, Shard(1, 2))}
    gate = parts["layers.0.output_gate"]
    assert gate.shape == (HEADS // 2, 64)
    assert gate.pieces[0].part == (slice(2, 4),)
