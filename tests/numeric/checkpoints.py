"""Random checkpoints of every family, made with transformers: the reference of the model tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hybrid_checkpoints import hybrid_cases
from latent_checkpoints import latent_cases
from moe_checkpoints import moe_cases
from state_checkpoints import GRANITE, GRANITE_ATTENTION, state_cases
from torch import Tensor, nn

from weft.models.families import FAMILIES
from weft.models.hub import resolve_model

VOCAB = 199


@dataclass(frozen=True)
class Case:
    """One configuration of a family, and the longest sequence that weft is told to serve."""

    architecture: str
    config: Callable[[], Any]
    max_model_len: int | None = None
    computed_by: str = ""  # the class in transformers, where it has another name

    def model(self, config: Any) -> Any:
        """Return a reference model; ``save`` writes it under the name of the architecture."""
        made = getattr(transformers, self.computed_by or self.architecture)(config)
        made.saved_as = self.architecture
        return made.eval().requires_grad_(False)


def _sizes(**more: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": None,
    }
    return sizes | more


def _case(
    architecture: str,
    config: str,
    max_model_len: int | None = None,
    computed_by: str = "",
    **values: Any,
) -> Case:
    def made() -> Any:
        return getattr(transformers, config)(**_sizes(**values))

    return Case(architecture, made, max_model_len, computed_by)


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


LLAMA3_ROPE = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS_2_1 = [SLIDING, SLIDING, FULL]


def _longrope(rotary_dim: int) -> dict[str, Any]:
    return _rope(
        "longrope",
        short_factor=[1.0 + 0.05 * i for i in range(rotary_dim // 2)],
        long_factor=[1.5 + 0.7 * i for i in range(rotary_dim // 2)],
        original_max_position_embeddings=160,
    )


def _phi3(max_model_len: int, **values: Any) -> Case:
    common = {"original_max_position_embeddings": 160, "max_position_embeddings": 512}
    return _case("Phi3ForCausalLM", "Phi3Config", max_model_len, **(common | values))


def _muse(**values: Any) -> Case:
    """Muse Glimmer with a vision tower of hardly any size."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    }
    towers = {"vision_config": vision, "out_hidden_size": 64, "projector_hidden_size": 16}
    text = _sizes(rms_norm_eps=1e-5, **values)
    return Case(
        "MuseGlimmerForConditionalGeneration",
        lambda: transformers.MuseGlimmerConfig(
            text_config=text, tie_word_embeddings=text.get("tie_word_embeddings", False), **towers
        ),
    )


def _step(**values: Any) -> Case:
    """Step 3.7 with a vision tower of hardly any size."""
    vision = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "mlp_ratio": 1.0}
    text = _sizes(
        pad_token_id=0,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        share_expert_dim=40,
        **values,
    )
    return Case(
        "Step3p7ForConditionalGeneration",
        lambda: transformers.Step3p7Config(text_config=dict(text), vision_config=dict(vision)),
    )


def _gemma4(**values: Any) -> Case:
    common = {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 24,
        "layer_types": LAYERS_2_1,
        "vocab_size_per_layer_input": VOCAB,
    }
    return _case("Gemma4ForCausalLM", "Gemma4TextConfig", **(common | values))


CASES: dict[str, Case] = (
    {
        "llama-gqa": _case("LlamaForCausalLM", "LlamaConfig"),
        "llama-tied-biases": _case(
            "LlamaForCausalLM",
            "LlamaConfig",
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            head_dim=24,
            num_key_value_heads=4,
            rms_norm_eps=1e-3,
        ),
        "llama3-rope": _case(
            "LlamaForCausalLM", "LlamaConfig", rope_parameters=LLAMA3_ROPE, num_key_value_heads=1
        ),
        "llama-linear-rope": _case(
            "LlamaForCausalLM", "LlamaConfig", rope_parameters=_rope("linear", factor=3.0)
        ),
        "mistral-window": _case(
            "MistralForCausalLM", "MistralConfig", sliding_window=37, num_attention_heads=8
        ),
        "mistral-full": _case(
            "MistralForCausalLM",
            "MistralConfig",
            sliding_window=None,
            head_dim=40,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
        "qwen2-full": _case("Qwen2ForCausalLM", "Qwen2Config", tie_word_embeddings=True),
        "qwen2-window": _case(
            "Qwen2ForCausalLM",
            "Qwen2Config",
            use_sliding_window=True,
            sliding_window=20,
            max_window_layers=1,
            num_attention_heads=6,
            num_key_value_heads=3,
            hidden_size=72,
        ),
        "qwen2-yarn": _case(
            "Qwen2ForCausalLM",
            "Qwen2Config",
            rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64),
            max_position_embeddings=256,
        ),
        "qwen3-full": _case("Qwen3ForCausalLM", "Qwen3Config", head_dim=20),
        "qwen3-window": _case(
            "Qwen3ForCausalLM",
            "Qwen3Config",
            head_dim=32,
            use_sliding_window=True,
            sliding_window=33,
            layer_types=LAYERS_2_1,
            attention_bias=True,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
        "qwen3-moe": _case(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            norm_topk_prob=True,
        ),
        "qwen3-moe-mixed": _case(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            num_hidden_layers=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            use_sliding_window=True,
            sliding_window=50,
            tie_word_embeddings=True,
        ),
        "phi3-plain": _phi3(512, sliding_window=45),
        "phi3-short": _phi3(160, rope_parameters=_longrope(16), num_key_value_heads=4),
        "phi3-long": _phi3(161, rope_parameters=_longrope(16)),
        "phi4-partial": _phi3(
            512,
            rope_parameters=_longrope(12) | {"partial_rotary_factor": 0.75},
            tie_word_embeddings=True,
        ),
        "smollm3": _case("SmolLM3ForCausalLM", "SmolLM3Config", num_hidden_layers=4),
        "smollm3-windows": _case(
            "SmolLM3ForCausalLM",
            "SmolLM3Config",
            no_rope_layers=[0, 1, 0],
            use_sliding_window=True,
            sliding_window=21,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "seed-oss": _case(
            "SeedOssForCausalLM", "SeedOssConfig", head_dim=20, attention_dropout=0.0
        ),
        "seed-oss-biases": _case(
            "SeedOssForCausalLM",
            "SeedOssConfig",
            head_dim=16,
            attention_bias=False,
            attention_out_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
        "ernie": _case("Ernie4_5ForCausalLM", "Ernie4_5Config", head_dim=20),
        "ernie-biases": _case(
            "Ernie4_5ForCausalLM",
            "Ernie4_5Config",
            head_dim=16,
            use_bias=True,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        ),
        "hunyuan": _case(
            "HunYuanDenseV1ForCausalLM",
            "HunYuanDenseV1Config",
            head_dim=16,
            rope_parameters=_rope("dynamic", alpha=1000.0, factor=1.0),
        ),
        "hunyuan-plain-rope": _case(
            "HunYuanDenseV1ForCausalLM",
            "HunYuanDenseV1Config",
            head_dim=24,
            attention_bias=True,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
        "granite": _case(
            "GraniteForCausalLM",
            "GraniteConfig",
            attention_multiplier=0.07,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=3.0,
            tie_word_embeddings=True,
        ),
        "granite-biases": _case(
            "GraniteForCausalLM",
            "GraniteConfig",
            attention_multiplier=0.3,
            residual_multiplier=1.3,
            logits_scaling=0.5,
            attention_bias=True,
            mlp_bias=True,
            num_key_value_heads=1,
        ),
        "granite-swa": _case(
            "GraniteSWAForCausalLM",
            "GraniteSWAConfig",
            num_hidden_layers=5,
            sliding_window=24,
            attention_multiplier=0.2,
            embedding_multiplier=6.0,
            residual_multiplier=0.4,
            logits_scaling=0.5,
            layer_rope_theta=[10000.0, 500.0, 500.0, 500.0, 0],
        ),
        "granite-swa-biases": _case(
            "GraniteSWAForCausalLM",
            "GraniteSWAConfig",
            layer_types=LAYERS_2_1,
            sliding_window=40,
            attention_multiplier=0.25,
            attention_bias=True,
            mlp_bias=True,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        ),
        "muse-glimmer": _muse(
            num_hidden_layers=5, head_dim=16, sliding_window=24, output_multiplier=0.6
        ),
        "muse-glimmer-layers": _muse(
            head_dim=20,
            num_key_value_heads=1,
            layer_types=LAYERS_2_1,
            layer_rope_theta=[0, 10000.0, 10000.0],
            sliding_window=40,
            qk_scale_factor=1.5,
            output_multiplier=0.5,
            final_logit_softcapping=8.0,
            post_norm_eps=1e-3,
            attention_bias=True,
        ),
        "olmo2": _case("Olmo2ForCausalLM", "Olmo2Config"),
        "olmo2-one-kv-head": _case(
            "Olmo2ForCausalLM", "Olmo2Config", num_key_value_heads=1, attention_bias=True
        ),
        "olmo3": _case(
            "Olmo3ForCausalLM",
            "Olmo3Config",
            num_hidden_layers=4,
            sliding_window=24,
            rope_parameters={
                "full_attention": _rope("yarn", factor=4.0, original_max_position_embeddings=64),
                "sliding_attention": _rope("default"),
            },
        ),
        "olmo3-layers": _case(
            "Olmo3ForCausalLM",
            "Olmo3Config",
            sliding_window=40,
            layer_types=LAYERS_2_1[::-1],
            tie_word_embeddings=True,
        ),
        "exaone4": _case(
            "Exaone4ForCausalLM", "Exaone4Config", num_hidden_layers=4, sliding_window=24
        ),
        "exaone4-full": _case(
            "Exaone4ForCausalLM",
            "Exaone4Config",
            sliding_window=None,
            layer_types=["full_attention"] * 3,
            tie_word_embeddings=True,
            num_key_value_heads=1,
        ),
        "glm": _case("GlmForCausalLM", "GlmConfig", head_dim=16, attention_bias=True),
        "glm-quarter": _case(
            "GlmForCausalLM",
            "GlmConfig",
            head_dim=32,
            attention_bias=False,
            rope_parameters=_rope("default", partial_rotary_factor=0.25),
            num_key_value_heads=1,
        ),
        "glm4": _case("Glm4ForCausalLM", "Glm4Config", head_dim=16),
        "glm4-whole": _case(
            "Glm4ForCausalLM",
            "Glm4Config",
            head_dim=24,
            attention_bias=False,
            rope_parameters=_rope("default", partial_rotary_factor=1.0),
            tie_word_embeddings=True,
        ),
        "ministral": _case(
            "MinistralForCausalLM",
            "MinistralConfig",
            head_dim=16,
            sliding_window=24,
            layer_types=LAYERS_2_1,
        ),
        "ministral-windows": _case(
            "MinistralForCausalLM", "MinistralConfig", sliding_window=50, head_dim=20
        ),
        "ministral3": _case(
            "Ministral3ForCausalLM",
            "Ministral3Config",
            head_dim=16,
            rope_parameters=_rope(
                "yarn",
                factor=16.0,
                original_max_position_embeddings=16,
                max_position_embeddings=256,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.4,
            ),
        ),
        "ministral3-window": _case(
            "Ministral3ForCausalLM",
            "Ministral3Config",
            head_dim=24,
            sliding_window=40,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            rope_parameters=_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=24,
                llama_4_scaling_beta=0.9,
                beta_fast=4.0,
            ),
        ),
        "cohere": _case("CohereForCausalLM", "CohereConfig", logit_scale=0.5),
        "cohere-norms": _case(
            "CohereForCausalLM",
            "CohereConfig",
            use_qk_norm=True,
            logit_scale=1.5,
            attention_bias=True,
            tie_word_embeddings=False,
            layer_norm_eps=1e-3,
        ),
        "cohere2": _case(
            "Cohere2ForCausalLM",
            "Cohere2Config",
            num_hidden_layers=4,
            sliding_window=24,
            logit_scale=1.0,
        ),
        "cohere2-layers": _case(
            "Cohere2ForCausalLM",
            "Cohere2Config",
            sliding_window=50,
            layer_types=LAYERS_2_1,
            attention_bias=True,
            num_key_value_heads=1,
            logit_scale=2.0,
        ),
        "gemma2": _case(
            "Gemma2ForCausalLM",
            "Gemma2Config",
            head_dim=16,
            sliding_window=24,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=8.0,
        ),
        "gemma2-uncapped": _case(
            "Gemma2ForCausalLM",
            "Gemma2Config",
            head_dim=24,
            sliding_window=70,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            num_hidden_layers=2,
            tie_word_embeddings=False,
        ),
        "gemma3": _case(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            head_dim=16,
            sliding_window=24,
            num_hidden_layers=7,
            query_pre_attn_scalar=12,
        ),
        "gemma3-scaled-rope": _case(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            head_dim=20,
            sliding_window=40,
            layer_types=LAYERS_2_1,
            num_key_value_heads=1,
            final_logit_softcapping=10.0,
            rope_parameters={
                "full_attention": _rope("linear", factor=8.0) | {"rope_theta": 1e6},
                "sliding_attention": _rope("default"),
            },
        ),
        "gemma4": _gemma4(hidden_size_per_layer_input=8, final_logit_softcapping=9.0),
        "gemma4-shared-kv": _gemma4(
            num_hidden_layers=6,
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=12,
            num_key_value_heads=1,
        ),
        "apertus": _case(
            "ApertusForCausalLM",
            "ApertusConfig",
            rope_parameters=LLAMA3_ROPE,
            num_attention_heads=8,
        ),
        "apertus-tied-biases": _case(
            "ApertusForCausalLM",
            "ApertusConfig",
            rope_parameters=_rope("default"),
            num_key_value_heads=1,
            intermediate_size=100,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        "step": _step(
            num_hidden_layers=4,
            head_dim=16,
            num_sliding_attention_heads=8,
            layer_types=[FULL, SLIDING, SLIDING, FULL],
            sliding_window=24,
            moe_layers_enum="1,2,3",
            moe_router_scaling_factor=3.0,
            swiglu_limits=[0.0, 0.05, None, 0.1],
            swiglu_limits_shared=[0.1, 0.0, 0.05, 0.0],
            rope_theta=[50_000.0, 10_000.0, 10_000.0, 50_000.0],
            partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
            rope_scaling={key: LLAMA3_ROPE[key] for key in LLAMA3_ROPE if key != "rope_theta"},
        ),
        "step-dense-last": _step(
            head_dim=24,
            num_key_value_heads=1,
            layer_types=LAYERS_2_1,
            num_sliding_attention_heads=8,
            sliding_window=40,
            mlp_layer_types=["sparse", "sparse", "dense"],
            swiglu_limits_shared=[0.0, 0.05, 0.1],
            attention_bias=True,
            query_pre_attn_scalar=20,
        ),
        "gemma": _case("GemmaForCausalLM", "GemmaConfig", head_dim=24, num_key_value_heads=1),
        "arcee": _case("ArceeForCausalLM", "ArceeConfig", attention_bias=True, mlp_bias=True),
        "cwm": _case(
            "CwmForCausalLM",
            "CwmConfig",
            num_hidden_layers=5,
            head_dim=16,
            sliding_window=24,
            rope_parameters=LLAMA3_ROPE,
        ),
        "helium": _case("HeliumForCausalLM", "HeliumConfig", head_dim=16, attention_bias=True),
        "hyperclovax": _case(
            "HyperCLOVAXForCausalLM",
            "HyperCLOVAXConfig",
            attention_multiplier=0.2,
            embedding_multiplier=6.0,
            residual_multiplier=0.4,
            logits_scaling=0.5,
        ),
        "mellum": _case(
            "MellumForCausalLM",
            "MellumConfig",
            head_dim=16,
            num_local_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            sliding_window=24,
            layer_types=LAYERS_2_1,
            mlp_layer_types=["sparse", "dense", "sparse"],
            rope_parameters={
                "full_attention": _rope("yarn", factor=4.0, original_max_position_embeddings=64),
                "sliding_attention": _rope("default"),
            },
        ),
        "gemma4-moe-key-is-value": _gemma4(
            hidden_size_per_layer_input=0,
            attention_k_eq_v=True,
            num_key_value_heads=4,
            num_global_key_value_heads=1,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=24,
            tie_word_embeddings=False,
        ),
    }
    | moe_cases(_case, _rope, LAYERS_2_1)
    | latent_cases(_case, _rope)
    | {"granite-hybrid-attention": _case(*GRANITE, **GRANITE_ATTENTION)}
)
LATENT = latent_cases(_case, _rope)  # those whose layers all have latent attention
RECURRENT = hybrid_cases(_case, _rope) | state_cases(_case, _rope)
ATTENTIVE = CASES  # those without recurrent layers
CASES = CASES | RECURRENT


FAMILY_CASES = {  # the first one of each family
    row.name: case
    for row in FAMILIES.values()
    for case in reversed(CASES)
    if CASES[case].architecture == row.architecture
}


def randomise(model: nn.Module, seed: int) -> None:
    """Give every parameter and stored buffer values that matter: also norms, biases, scalars."""
    draw = torch.Generator().manual_seed(seed)
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=draw)
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(noise * 0.1)  # as large as weights that it chooses between
        elif tensor.ndim >= 2 and "embed_tokens" not in name:
            tensor.copy_(noise * 1.3 / tensor.shape[-1] ** 0.5)
        elif tensor.ndim >= 2:
            tensor.copy_(noise * 0.4)
        else:
            tensor.add_(noise * 0.25)
        if "gemma4" in model.config.model_type and name.endswith("q_norm.weight"):
            tensor.mul_(0.3)  # its scores are not scaled by the head size
        if name.endswith(".sinks"):
            tensor.mul_(8.0)  # as large as scores
        if name.endswith(("A_log", "mixer.dt_bias", "forget_gate.dt_bias")):
            tensor.copy_(noise)  # which begins as other numbers each time
        behind_norm = name.replace("o_proj.weight", "o_norm.weight")  # of KDA
        kda = behind_norm != name and behind_norm in tensors
        if kda or name.endswith("linear_attn.out_proj.weight"):
            tensor.mul_(0.1)  # the norm before it enlarges rounding, also that of transformers


def build(name: str, seed: int = 0) -> Any:
    """Return the random reference model of a case, float32, eager attention."""
    case = CASES[name]
    config = case.config()
    config._attn_implementation = "eager"
    model = case.model(config)
    randomise(model, seed)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a reference model as a checkpoint folder."""
    model.save_pretrained(folder, **options)
    if hasattr(model, "saved_as"):
        edit_config(folder, architectures=[model.saved_as])
    return folder


def saved_once(factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what gives the folder of a reference model by its name, and makes each only once."""
    return cache(lambda name: save(build(name), factory.mktemp(name)))


def save_with_tokenizer(model: Any, folder: Path) -> Path:
    """The same with the tokenizer of the built-in model."""
    shutil.copy(resolve_model("builtin") / "tokenizer.json", save(model, folder))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json; the value ``...`` removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not ...:
            config[key] = value
    path.write_text(json.dumps(config))


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """Return the reference's float32 logits [n, V] of one prompt, computed in one piece."""
    return model(torch.tensor([tokens]), use_cache=True).logits[0].float()


def likeliest_by_reference(model: Any, tokens: list[int], found: list[int]) -> list[int]:
    """Return the reference's likeliest token after a prompt and after each token found.

    ``found`` is the reference's own greedy answer exactly if it is equal to that: one pass over all
    of it says so, where making the answer takes a pass for each token.
    """
    logits = reference_logits(model, tokens + found[:-1])
    return logits[len(tokens) - 1 :].argmax(-1).tolist()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    draw = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, VOCAB, (length,), generator=draw).tolist()
