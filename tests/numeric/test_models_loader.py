"""The loader: every source form, and one clear error for everything that can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import build, edit_config, prompt, reference_logits, save
from paged import PagedRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.core.errors import CheckpointError, UnsupportedModelError
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.layout import num_parameters, parameters, weight_bytes
from weft.models.loader import load_model
from weft.models.spec_reader import read_spec
from weft.models.weight_files import INDEX, SINGLE

CPU = torch.device("cpu")
NORM = "model.layers.1.post_attention_layernorm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_model(folder, dtype, None, select_ops("cpu", dtype, "reference"))


@pytest.fixture(scope="module")
def reference():
    return build("llama-gqa")


@pytest.fixture(scope="module")
def original(reference, tmp_path_factory) -> Path:
    return save(reference, tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_source_dtypes(reference, folder, dtype) -> None:
    rewrite(folder, lambda t: t.update({name: x.to(dtype) for name, x in t.items()}))
    decoder = load(folder)
    state = reference.state_dict()
    gate = state[GATE].to(dtype).float()
    assert torch.equal(decoder.layers[0].gate_up[: len(gate)], gate)
    assert decoder.dtype == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_target_dtypes_stay_near_float32(reference, original, dtype) -> None:
    tokens = prompt(150)
    expected = reference_logits(reference, tokens)
    found = PagedRunner(load(original, dtype)).step([("a", tokens)])[0]
    assert found.dtype == torch.float32
    error = (found - expected).pow(2).mean().sqrt() / expected.std()
    assert 0 < error < (0.05 if dtype == "bfloat16" else 0.01)


def test_sharded_equals_single(reference, original, tmp_path) -> None:
    save(reference, tmp_path, max_shard_size="60KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    single, sharded = load(original), load(tmp_path)
    assert torch.equal(single.embedding, sharded.embedding)
    for left, right in zip(single.layers, sharded.layers, strict=True):
        assert torch.equal(left.qkv, right.qkv)
        assert torch.equal(left.down, right.down)


def test_every_parameter_is_covered_once(original) -> None:
    for parameter in parameters(read_spec(original)):
        touched = torch.zeros(parameter.shape)
        for piece in parameter.pieces:
            touched[piece.index] += 1
        assert (touched == 1).all(), parameter.name


def test_parameter_count_and_bytes(reference, original) -> None:
    spec = read_spec(original)
    expected = sum(p.numel() for p in reference.parameters())
    assert num_parameters(spec) == expected
    assert weight_bytes(spec, "bfloat16") == 2 * expected
    assert weight_bytes(spec, "float32") == 4 * expected


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], tuple[str, ...]]] = {
    "removed": (lambda t: t.pop(NORM), ("missing", f"'{NORM}'")),
    "renamed": (
        rename(NORM, "model.layers.1.norm2.weight"),
        (f"'{NORM}'", "layers.1.norm2.weight"),
    ),
    "misshapen": (
        lambda t: t.update({GATE: torch.zeros(64, 88)}),
        (GATE, "[64, 88]", "[88, 64]", SINGLE),
    ),
    "extra": (
        lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}),
        ("not known", "layers.0.self_attn.q_norm.weight"),
    ),
    "extra bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        ("not known", "layers.0.self_attn.q_proj.bias"),
    ),
    "layer too many": (
        lambda t: t.update({"model.layers.3.mlp.down_proj.weight": torch.ones(64, 88)}),
        ("not known", "layers.3"),
    ),
    "integers": (lambda t: t.update({NORM: torch.ones(64).long()}), (NORM, "I64", "BF16")),
    "many removed": (
        lambda t: [t.pop(name) for name in list(t) if ".mlp." in name],
        ("missing", "and 1 more"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_names_the_tensor(folder, name) -> None:
    change, words = BROKEN[name]
    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for word in (*words, str(folder)):
        assert word in caught.value.message


def test_ignored_tensors_are_left_unread(folder) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: torch.ones(8)}))
    load(folder)


def test_truncated_file(folder) -> None:
    data = (folder / SINGLE).read_bytes()
    for kept in (len(data) - 1, len(data) // 2, 100, 3, 0):
        (folder / SINGLE).write_bytes(data[:kept])
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*fetch it again"):
            load(folder)


def test_pickle_is_never_read(folder) -> None:
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")
    load(folder)
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        load(folder)


def test_no_weights(folder) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(folder)


def test_index_errors(reference, tmp_path) -> None:
    save(reference, tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(tmp_path)
    shard.write_bytes(kept)
    twice = load_file(shard) | {NORM: torch.ones(64)}
    save_file(twice, shard)
    with pytest.raises(CheckpointError, match=f"'{NORM}' is in two files"):
        load(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match=INDEX):
        load(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="not in the folder"):
        load(tmp_path)


def test_tied_and_present(folder) -> None:
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    decoder = load(folder)
    assert decoder.lm_head is decoder.embedding


def test_untied_without_head(folder) -> None:
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: 'lm_head\.weight'"):
        load(folder)


def test_float16_overflow_is_an_error(folder) -> None:
    rewrite(folder, lambda t: t[NORM].fill_(1e6))
    load(folder)
    with pytest.raises(CheckpointError, match=f"'{NORM}' does not fit into float16"):
        load(folder, "float16")


def test_unreadable_config(folder) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        load(folder)


def test_text_part_that_is_not_nested(tmp_path) -> None:
    """Older checkpoints of Qwen's models that see have the text model's keys beside the others."""
    folder = save(build("qwen2-full"), tmp_path)
    plain = PagedRunner(load(folder)).step([("a", prompt(60))])[0]
    rewrite(folder, lambda t: t.update({"visual.blocks.0.attn.proj.weight": torch.ones(3)}))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": {"depth": 2},
        "vision_token_id": 9,
        "rope_parameters": None,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(PagedRunner(load(folder)).step([("a", prompt(60))])[0], plain)


# Of each family: what its config says of other towers.
MULTIMODAL = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "boi_token_index": 7,
    },
    "mistral-full": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": 10,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    "ministral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": 10,
        "vision_feature_layer": -1,
    },
    "cohere2": {
        "architectures": ["Cohere2VisionForConditionalGeneration"],
        "model_type": "cohere2_vision",
        "downsample_factor": 2,
        "image_token_id": 9,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "video_token_id": 9,
        "vision_start_token_id": 8,
        "vision_end_token_id": 7,
    },
}


@pytest.mark.parametrize("name", MULTIMODAL)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_text_part(tmp_path, prefix, name) -> None:
    reference = build(name)
    folder = save(reference, tmp_path)
    plain = PagedRunner(load(folder)).step([("a", prompt(60))])[0]

    def nest(tensors: dict[str, Tensor]) -> None:
        home = {"language_model.model.": "language_model."}.get(prefix, "")  # of the output head
        for name in list(tensors):
            under = prefix if name.startswith("model.") else home
            tensors[under + name.removeprefix("model.")] = tensors.pop(name)
        tensors["vision_tower.embeddings.weight"] = torch.ones(3, dtype=torch.int64)
        tensors["model.visual.blocks.0.attn.proj.weight"] = torch.ones(3)
        tensors["multi_modal_projector.mm_input_projection_weight"] = torch.ones(3)

    rewrite(folder, nest)
    text = json.loads((folder / "config.json").read_text())
    config = {
        **MULTIMODAL[name],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "eos_token_id": [1, 5],
    }
    (folder / "config.json").write_text(json.dumps(config))
    decoder = load(folder)
    assert decoder.spec.eos_token_ids == (1, 5)
    assert torch.equal(PagedRunner(decoder).step([("a", prompt(60))])[0], plain)
    rewrite(folder, lambda t: t.update({"audio_head.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"audio_head\.weight"):
        load(folder)
