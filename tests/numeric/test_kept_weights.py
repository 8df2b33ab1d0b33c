"""Weights of models from the cache: the very bytes that loading the checkpoint gives."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import build, edit_config, save
from golden import checkpoint
from packed import bytes_of, same

from weft.core.errors import CheckpointError
from weft.kernels.cpu import attention
from weft.kernels.interface import OpTable
from weft.kernels.ops import select_ops
from weft.models import loader
from weft.models.kept_weights import PACKING, KeptWeights
from weft.models.layout import storage_of
from weft.models.packed_cache import PackedCache, kept_files

CASES = ["llama-gqa", "llama-tied-biases", "qwen3-moe", "gemma4", "gemma4-moe-key-is-value"]


@pytest.fixture(params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(build(request.param), tmp_path / "model")


class Loading:
    """Loads with a cache; what is loaded is the weights and not the decoder around them."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = cache
        self._checkpoint = loader.Checkpoint
        self._patch = monkeypatch
        monkeypatch.setattr(loader, "Decoder", lambda spec, weights, ops: weights)  # noqa: ARG005

    def __call__(
        self,
        folder: Path,
        dtype: str,
        quantize: str = "none",
        ops: OpTable | None = None,
        **how: Any,
    ) -> tuple[dict[str, Any], KeptWeights]:
        kept = KeptWeights(PackedCache(2**30, self.folder), {"quantize": quantize}, **how)
        rounding = partial(storage_of, quantize=quantize, group=32)
        ops = ops or select_ops("cpu", dtype, "cpu")
        weights: Any = loader.load_model(folder, dtype, 256, ops, rounding, kept)
        kept.write()
        assert kept.join(60)
        return weights, kept

    def without_checkpoint(self) -> None:
        """From now on no header and no byte of a checkpoint can be read."""
        self._patch.setattr(loader, "Checkpoint", None)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loading:
    return Loading(tmp_path / "packed", monkeypatch)


def test_a_second_load_maps_what_the_first_one_packed(folder, load):
    kinds = [(d, q) for d in ("float32", "bfloat16") for q in ("none", "int8", "int4")]
    first = {}
    for dtype, quantize in kinds:
        weights, kept = load(folder, dtype, quantize)
        assert kept.state == "packed"
        first[dtype, quantize] = weights
    load.without_checkpoint()
    for dtype, quantize in kinds:
        weights, kept = load(folder, dtype, quantize, verify=True)
        assert kept.state == "mapped"
        assert same(weights, first[dtype, quantize])


def test_each_rank_has_its_own(load, tmp_path):
    folder = save(build("llama-gqa"), tmp_path / "model")
    both = [SimpleNamespace(rank=rank, size=2) for rank in range(2)]
    ops = [replace(select_ops("cpu", "float32", "cpu"), ranks=ranks) for ranks in both]
    first = [load(folder, "float32", ops=one)[0] for one in ops]
    load.without_checkpoint()
    for one, expected in zip(ops, first, strict=True):
        assert same(load(folder, "float32", ops=one)[0], expected)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save(build("llama-gqa"), tmp_path / "model")


def test_another_instruction_set_packs_for_itself(plain, load):
    load(plain, "float32")
    attention.use_isa("baseline")
    try:
        assert load(plain, "float32")[1].state == "packed"
    finally:
        attention.use_isa(attention.isas()[0])
    assert load(plain, "float32")[1].state == "mapped"


def test_a_checkpoint_that_changes_is_loaded_again(plain, load):
    before, _ = load(plain, "float32")
    save(build("llama-gqa", seed=1), plain)
    after, kept = load(plain, "float32")
    assert kept.state == "packed"
    with pytest.raises(AssertionError):
        same(after, before)
    assert same(load(plain, "float32")[0], after)


def test_a_checkpoint_that_does_not_fit_its_config_any_more_is_an_error(plain, load):
    load(plain, "float32")
    edit_config(plain, intermediate_size=8)
    with pytest.raises(CheckpointError):
        load(plain, "float32")


def test_weights_of_other_names_or_shapes_are_not_used(plain, load, monkeypatch, caplog):
    """As after a change of the loader in the same version of weft."""
    load(plain, "float32")
    parameters = loader.parameters

    def renamed(spec: Any, **how: Any) -> Any:
        for parameter in parameters(spec, **how):
            yield replace(parameter, name=parameter.name.replace("qkv", "in"))

    monkeypatch.setattr(loader, "parameters", renamed)
    assert load(plain, "float32")[1].state == "packed"
    assert "are not those of its config.json" in caplog.text


def test_kernels_without_packed_matrices_keep_nothing(plain, load):
    ops = replace(select_ops("cpu", "float32", "cpu"), packed=None)
    _, kept = load(plain, "float32", ops=ops)
    assert kept.state == ""
    assert kept_files(load.folder) == []


def test_the_index_of_a_checkpoint_counts(plain, load):
    """The same files, of which another one has the tensor."""
    weights = {"model.safetensors": plain / "model.safetensors"}
    names = loader.Checkpoint(plain, loader.read_spec(plain, 256), loader.ExitStack())._stored
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(plain, "float32")[1].state == "packed"
    assert load(plain, "float32")[1].state == "mapped"
    (plain / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    assert load(plain, "float32")[1].state == "packed"
    assert weights


# Of `PACKING` 2, on every instruction set. If one changes, weights of older files are not those
# that this version packs: raise it, then record them.
DIGESTS = {
    "llama-gqa": "0aa0e6278a65",
    "qwen3-moe": "b4e99184b99c",
    "gemma4": "ccd5086799b0",
}


@pytest.mark.parametrize("case", DIGESTS)
def test_what_is_packed_is_that_of_its_version(case, load, tmp_path):
    assert PACKING == 2
    folder = checkpoint(case, tmp_path / "model")
    found = blake2b(digest_size=6)
    for dtype, quantize in (("float32", "none"), ("bfloat16", "int4")):
        weights, _ = load(folder, dtype, quantize)
        for name, weight in sorted(weights.items()):
            parts = weight if isinstance(weight, tuple) else (weight,)
            found.update(repr((name, [getattr(part, "form", None) for part in parts])).encode())
            found.update(b"".join(bytes_of(weight)))
    assert found.hexdigest() == DIGESTS[case]
