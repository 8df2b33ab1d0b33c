"""GGUF files of hybrids, latent attention and mixtures of experts: the checkpoint's own logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CASES, build, prompt, randomise, reference_logits, save
from gguf import GGMLQuantizationType as Type
from gguf_converted import convert
from paged import PagedRunner
from test_models_gguf import stored

from weft.core.errors import CheckpointError, UnsupportedModelError
from weft.kernels.cpu.matrix import gather
from weft.kernels.ops import select_ops
from weft.kernels.storage import MULTIPLIED
from weft.models.loader import load_model

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
}
PLAIN = {"attention_bias": False}
WHOLE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}
UNBIASED = {"attention_bias": False, "position_embedding_type": "nope"}
# By the architecture of a file: cases of ``checkpoints``, and what differs.
CONVERTED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "qwen35": [("qwen3.5", {}), ("qwen3.5-layers", {})],
    "qwen35moe": [("qwen3.5-moe", {}), ("qwen3.5-moe-layers", {})],
    "qwen3next": [("qwen3-next", {})],
    "glm4moe": [
        ("glm4-moe", {}),
        ("glm4-moe-groups", {}),
        ("solar-moe", {"rope_parameters": WHOLE}),
    ],
    "deepseek2": [
        ("deepseek-v3", {}),
        ("deepseek-v3", {"rope_parameters": YARN}),
        ("deepseek-v2", {}),
        ("deepseek-v2-lite", {"rope_parameters": YARN}),
        ("glm-flash", {}),
        ("youtu", {}),
    ],
    "gemma4": [("gemma4", {}), ("gemma4-shared-kv", {}), ("gemma4-moe-key-is-value", {})],
    "qwen2moe": [("qwen2-moe", {})],
    "minimax-m2": [("minimax-m2-moe", {}), ("minimax-m2-moe-tied", {})],
    "dots1": [("dots1-moe", {})],
    "lfm2": [("lfm2", {})],
    "lfm2moe": [("lfm2-moe", {})],
    "granitehybrid": [("granite-hybrid", {}), ("granite-hybrid-moe", UNBIASED)],
    "granitemoe": [("granite-moe", {}), ("granite-moe-shared", {})],
    "nemotron_h": [("nemotron-h", {}), ("nemotron-h-ends", {"layer_norm_epsilon": 1e-5})],
    "nemotron_h_moe": [("nemotron-h-moe", {})],
    "ernie4_5-moe": [("ernie-moe", {}), ("ernie-moe-mixed", {})],
    "hunyuan-moe": [("hunyuan-moe", {"rope_parameters": {"rope_type": "default"}})],
    "olmoe": [("olmoe", {})],
    "kimi-linear": [("kimi-linear", {})],
    "command-r": [("cohere", {}), ("cohere-norms", {**PLAIN, "tie_word_embeddings": True})],
    "cohere2": [("cohere2", {})],
    "mistral3": [("ministral3", {}), ("mistral-full", {})],
    "olmo2": [("olmo3", {}), ("olmo3-layers", {})],
    "exaone-moe": [("exaone-moe", {})],
    "afmoe": [("afmoe", {})],
    "llama": [("mixtral-moe", {})],
    "gemma": [("gemma", {})],
    "arcee": [("arcee", {"mlp_bias": False})],
    "step35": [("step", {})],
    "bailingmoe2": [("ling2", {}), ("sarvam-moe", {})],
    "qwen2vl": [("qwen2-full", {})],
    "qwen3vl": [("qwen3-full", {})],
    "qwen3vlmoe": [("qwen3-moe", {})],
}
EACH = [(arch, *case) for arch, cases in CONVERTED.items() for case in cases]


def made(name: str, changes: dict[str, Any]) -> Any:
    """A random model of a case with other values in its config."""
    if not changes:
        return build(name)
    case = CASES[name]
    config = case.config()
    config = type(config)(**{**config.to_dict(), **changes})
    config._attn_implementation = "eager"
    model = case.model(config)
    randomise(model, 0)
    return model


def load(path: Path, kernels: str = "reference") -> Any:
    return load_model(path, "float32", None, select_ops("cpu", "float32", kernels))


@pytest.mark.parametrize(("arch", "name", "changes"), EACH)
def test_logits_are_those_of_the_checkpoint(tmp_path, arch, name, changes) -> None:
    model, path = made(name, changes), tmp_path / "model.gguf"
    convert(save(model, tmp_path / "folder"), arch, path)
    tokens = prompt(100)
    expected = reference_logits(model, tokens)
    for kernels in ("reference", "cpu"):
        found = PagedRunner(load(path, kernels)).step([("a", tokens)])[0]
        assert (found - expected).abs().max() < 1e-4 * expected.std(), kernels


WIDE = {  # sizes of which all are multiples of a K-quant's 256
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "shared_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "share_expert_dim": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "v_head_dim": 64,
    "linear_value_head_dim": 64,
    "mamba_head_dim": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "hidden_size_per_layer_input": 0,
    "block_auto_adjust_ff_dim": False,
    "rotary_dim": 64,
}


def wide(arch: str) -> Any:
    name, changes = CONVERTED[arch][0]
    config = CASES[name].config().to_dict()
    text = config.get("text_config", config)
    sizes = {key: value for key, value in WIDE.items() if key in text}
    if text is not config:
        sizes = {"text_config": text | sizes}
    return made(name, sizes | changes)


def mixed(name: str, shape: tuple[int, ...]) -> Type:
    """Types as in a Q4_K_M: where inputs are no whole blocks Q8_0, or floats."""
    plain = ("_norm", "conv1d", "shortconv.conv", "ssm_a", "ssm_d", "gate_inp", "exp_probs_b")
    if any(part in name for part in (*plain, ".scale")) or len(shape) < 2:
        return Type.F32
    if any(part in name for part in ("attn_output", "ssm_out", "out_proj")):
        return Type.Q8_0 if shape[-1] % 32 == 0 else Type.F32
    kind = Type.Q6_K if "down" in name else Type.Q4_K
    return kind if shape[-1] % 256 == 0 else Type.Q8_0 if shape[-1] % 32 == 0 else Type.F32


def matrices(weights: Any) -> Iterator[tuple[str, Any]]:
    """What a layer multiplies by, experts one by one."""
    for name in MULTIPLIED:
        found = getattr(weights, name, None)
        if found is not None:
            experts = name.startswith("expert")
            yield from (
                ((f"{name}.{i}", one) for i, one in enumerate(found))
                if experts
                else [(name, found)]
            )


@pytest.mark.parametrize("arch", CONVERTED)
def test_kernels_read_codes_as_they_are(tmp_path, arch) -> None:
    path = tmp_path / "model.gguf"
    convert(save(wide(arch), tmp_path / "folder"), arch, path, mixed, stored)
    coded, plain = load(path, "cpu"), load(path)
    formats = set()
    for own, other in zip(coded.layers, plain.layers, strict=True):
        for (place, matrix), (_, expected) in zip(matrices(own), matrices(other), strict=True):
            rows = torch.arange(matrix.shape[0])
            assert torch.equal(gather(matrix, rows), expected), place
            formats.add(matrix.format)
    assert formats >= {"int4", "int6", "int8"}


def same(tmp_path: Path, arch: str, name: str, **changes: Any) -> bool:
    """Whether a file with other metadata or tensors has the logits of its checkpoint."""
    model, path = build(name), tmp_path / "model.gguf"
    convert(save(model, tmp_path / "folder"), arch, path, **changes)
    expected = reference_logits(model, prompt(50))
    found = PagedRunner(load(path)).step([("a", prompt(50))])[0]
    return bool((found - expected).abs().max() < 1e-4 * expected.std())


def test_layers_that_guess_further_tokens_are_left_out(tmp_path) -> None:
    def edit(tensors: dict[str, Any]) -> dict[str, Any]:
        further = {f"blk.3.{name}": np.ones((4, 4)) for name in ("attn_q.weight", "nextn.eh_proj")}
        return tensors | further

    more = {"block_count": 4, "nextn_predict_layers": 1}
    assert same(tmp_path, "glm4moe", "glm4-moe", more=more, edit=edit)
    with pytest.raises(UnsupportedModelError, match="fewer than all 3 layers"):
        same(tmp_path, "glm4moe", "glm4-moe", more={"nextn_predict_layers": 3})


def test_gates_and_what_they_multiply_may_be_one_tensor(tmp_path) -> None:
    def edit(tensors: dict[str, Any]) -> dict[str, Any]:
        sides = ("gate", "up")
        for layer in range(4):
            parts = [tensors.pop(f"blk.{layer}.ffn_{side}_exps.weight") for side in sides]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, 1)
        return tensors

    assert same(tmp_path, "qwen35moe", "qwen3.5-moe", edit=edit)


def test_q_k_and_v_may_be_one_tensor(tmp_path) -> None:
    def edit(tensors: dict[str, Any]) -> dict[str, Any]:
        for layer in range(3):
            for kind in ("weight", "bias"):
                names = [f"blk.{layer}.attn_{side}.{kind}" for side in "qkv"]
                parts = [tensors.pop(name) for name in names if name in tensors]
                if parts:
                    tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
        return tensors

    assert same(tmp_path, "qwen2moe", "qwen2-moe", edit=edit)
    with pytest.raises(UnsupportedModelError, match="Q, K and V in one tensor"):
        same(tmp_path, "granitemoe", "granite-moe", edit=edit)


def test_older_files_of_deepseek_have_whole_keys_and_values(tmp_path) -> None:
    def edit(tensors: dict[str, Any]) -> dict[str, Any]:
        for layer in range(3):
            keys, values = (tensors.pop(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
            whole = np.concatenate((keys.swapaxes(1, 2), values), 1)
            tensors[f"blk.{layer}.attn_kv_b.weight"] = whole.reshape(-1, whole.shape[-1])
        return tensors

    more = {
        "attention.head_count_kv": 4,
        "attention.key_length": 32,
        "attention.value_length": 20,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "expert_gating_func": None,  # told by the bias of the router
    }
    assert same(tmp_path, "deepseek2", "deepseek-v3", more=more, edit=edit)


def test_a_granite_4_of_attention_alone_is_a_granite(tmp_path) -> None:
    state = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
    more = {f"ssm.{key}": 64 for key in state}
    more |= {"expert_count": 0, "expert_used_count": 0, "rope.scaling.finetuned": True}
    assert same(tmp_path, "granite", "granite-hybrid-attention", more=more)


@pytest.mark.parametrize(
    ("arch", "name", "more", "words"),
    [
        ("glm4moe", "glm4-moe", {"expert_gating_func": 1}, "2, sigmoid, is supported"),
        ("qwen2moe", "qwen2-moe", {"expert_gating_func": 2}, "1, softmax, is supported"),
        ("deepseek2", "deepseek-v3", {"expert_gating_func": 4}, "softmax .1. and sigmoid .2."),
        ("deepseek2", "deepseek-v3", {"attention.key_length_mla": 8}, "more than the 8 that"),
        ("qwen35", "qwen3.5", {"ssm.inner_size": 30}, "whole heads are supported"),
        ("lfm2", "lfm2", {"attention.head_count_kv": [0, 0, 2]}, "4 entries are needed"),
        ("lfm2", "lfm2", {"attention.head_count_kv": [0, 1, 2, 0]}, "one number for all layers"),
        ("gemma4", "gemma4", {"attention.sliding_window_pattern": [True]}, "a list of 3 flags is"),
        ("gemma4", "gemma4", {"rope.dimension_count": 8}, "whole heads of 32 are supported"),
        ("gemma4", "gemma4", {"feed_forward_length": [88, 88, 90]}, "one width, or twice it"),
        ("step35", "step", {"attention.head_count": [4, 8, 4, 4]}, "one number for each kind of"),
        ("step35", "step", {"rope.dimension_count": 8}, "16 is supported, of which full layers"),
        ("nemotron_h_moe", "nemotron-h-moe", {"expert_latent_length": 8}, "does not know this key"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, arch, name, more, words) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        same(tmp_path, arch, name, more=more)


def test_a_tensor_of_another_layer_kind_is_missed(tmp_path) -> None:
    def edit(tensors: dict[str, Any]) -> dict[str, Any]:
        return {n: t for n, t in tensors.items() if n != "blk.0.ssm_conv1d.weight"}

    with pytest.raises(CheckpointError, match=r"missing.*layers\.0\.self_attn\.q_proj"):
        same(tmp_path, "qwen35", "qwen3.5", edit=edit)
