"""config.json: real checkpoints are understood; anything else is an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_configs import HUB, PARAMETERS

from weft.core.errors import UnsupportedModelError
from weft.models.generation import GenerationDefaults, read_generation_defaults
from weft.models.layers import inverse_frequencies
from weft.models.layout import num_parameters
from weft.models.spec_reader import spec_from_config

PAGES = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", HUB)
def test_hub_configs_and_their_parameter_counts(name) -> None:
    assert num_parameters(spec_from_config(HUB[name])) == PARAMETERS[name]


def test_llama_groups_and_ids() -> None:
    spec = spec_from_config(HUB["llama-3.1-8b"])
    (group,) = spec.kv_groups
    assert (group.name, group.window, group.num_kv_heads, group.head_dim) == ("full", None, 8, 128)
    assert group.layers == tuple(range(32))
    assert group.bytes_per_token(2) == 131072
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.dtype == "bfloat16"


def test_gemma3_groups() -> None:
    spec = spec_from_config(HUB["gemma-3-4b-it"])
    full, sliding = spec.kv_groups
    assert (full.name, full.layers, full.window) == ("full", (5, 11, 17, 23, 29), None)
    assert (sliding.name, len(sliding.layers), sliding.window) == ("sliding", 29, 1024)
    assert spec.attention(6).group == 1
    assert spec.attention(6).index == 5
    assert spec.attention(11).group == 0
    assert spec.attention(11).index == 1
    assert spec.ropes[0].theta == 1_000_000.0
    assert spec.ropes[0].factor == 8.0
    assert spec.ropes[1].theta == 10_000.0
    assert spec.ropes[1].kind == "default"
    assert [spec.layers[i].rope for i in (4, 5, 6)] == [1, 0, 1]


def test_gemma4_shared_layers_own_no_cache() -> None:
    spec = spec_from_config(
        {
            "architectures": ["Gemma4ForCausalLM"],
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "head_dim": 16,
            "global_head_dim": 32,
        }
    )
    assert [layer.kv_source for layer in spec.layers] == [None, None, None, 1, 2, 1]
    assert [group.layers for group in spec.kv_groups] == [(1,), (0, 2)]
    assert [group.head_dim for group in spec.kv_groups] == [32, 16]
    assert spec.attention(3) == spec.attention(1)


def test_gemma4_old_and_new_keys_agree() -> None:
    shared = {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 6, "head_dim": 64}
    old = shared | {
        "global_head_dim": 128,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
    }
    new = shared | {
        "per_layer_config": {"5": {"head_dim": 128, "num_key_value_heads": 2}},
        "attention_k_eq_v": True,
    }
    assert spec_from_config(old) == spec_from_config(new)
    assert spec_from_config(old).layers[5].num_kv_heads == 2
    assert spec_from_config(old).layers[4].num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"per_layer_config": {"5": {"skip": ["mlp"]}}}, r"per_layer_config, 5.*skip"),
        ({"per_layer_config": {"2": {"head_dim": 32}}}, "one head_dim a layer type"),
        ({"per_layer_config": {"5": {"num_key_value_heads": 3}}}, "must divide 8"),
        ({"use_bidirectional_attention": "all"}, "causally"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"layer_types": ["sliding_attention"] * 6}, "last layer"),
        ({"rope_parameters": {"full_attention": {"rope_type": "wavy"}}}, "'wavy'"),
        ({"rope_parameters": {"chunked_attention": {"rope_theta": 1e4}}}, "chunked_attention"),
    ],
)
def test_gemma4_refusals(changes, words) -> None:
    config = {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 6}
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config(config | changes)


def test_old_and_new_rope_keys_agree() -> None:
    old = HUB["llama-3.1-8b"]
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": 500000.0}
    assert spec_from_config(old) == spec_from_config(new)
    short = {**old, "rope_theta": 10000.0}
    assert spec_from_config(old) != spec_from_config(short)


def test_longrope_is_fixed_by_the_longest_sequence() -> None:
    config = HUB["phi-4-mini"]
    assert spec_from_config(config, 4096).ropes[0].dim_factors == (1.0,) * 48
    long = spec_from_config(config, 4097).ropes[0]
    assert long.dim_factors[1] == 2.0
    assert spec_from_config(config).ropes[0] == long
    assert long.attention_factor == pytest.approx(1.1902380714238083)


def test_idle_windows_are_dropped() -> None:
    (group,) = spec_from_config(HUB["phi-4-mini"]).kv_groups
    assert group.window is None
    (group,) = spec_from_config(HUB["mistral-7b-v0.1"]).kv_groups
    assert (group.name, group.window) == ("sliding", 4096)


def test_yarn_extends_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = spec_from_config(HUB["qwen2.5-7b-instruct"] | {"rope_scaling": scaling})
    assert spec.max_position_embeddings == 131072
    assert spec.ropes[0].attention_factor == pytest.approx(1.1386294361)


def test_odd_rotary_dimensions_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="even number"):
        spec_from_config(HUB["phi-4-mini"] | {"partial_rotary_factor": 0.51, "rope_scaling": None})


def test_proportional_rope_leaves_the_slow_part_still() -> None:
    spec = spec_from_config({"architectures": ["Gemma4ForCausalLM"], "global_head_dim": 32})
    frequencies = inverse_frequencies(spec.ropes[0])
    assert frequencies.shape == (16,)
    assert np.count_nonzero(frequencies) == 4


REFUSED = {
    "rope type": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'", "llama3"),
    "unknown rope type": ({"rope_scaling": {"type": "spiral"}}, "rope_type", "'spiral'"),
    "rope key": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
        "mrope_section",
        "[1]",
    ),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling", "'factor'"),
    "activation": ({"hidden_act": "relu"}, "hidden_act", "'relu'", "silu"),
    "quantised": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "quant_method",
        "bitsandbytes",
        "awq",
    ),
    "quantised by an unknown key": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "spin": 1}},
        "quantization_config",
        "'spin'",
    ),
    "bits": (
        {"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 128}},
        "bits",
        "3",
        "4, 8",
    ),
    "group size": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 48}},
        "group_size",
        "48",
    ),
    "awq version": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
        "version",
        "gemv",
    ),
    "unknown key": ({"residual_multiplier": 0.22}, "residual_multiplier", "0.22"),
    "unheard-of key": ({"warp_factor": 9}, "warp_factor", "9"),
    "window where none is read": ({"sliding_window": 100}, "sliding_window", "100"),
    "head count": ({"num_key_value_heads": 5}, "num_key_value_heads", "5", "32"),
    "size of the wrong type": ({"hidden_size": "4096"}, "hidden_size", "'4096'"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers", "-1"),
    "flag of the wrong type": ({"attention_bias": "no"}, "attention_bias", "'no'"),
    "missing": ({"vocab_size": None}, "vocab_size"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id", "'</s>'"),
    "activation of the wrong type": ({"hidden_act": ["silu"]}, "hidden_act"),
    "rope type of the wrong type": ({"rope_scaling": {"type": ["linear"]}}, "rope_type"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    "architecture": ({"architectures": ["LlamaForCausalLn"]}, "LlamaForCausalLM"),
    "no architecture": ({"architectures": [], "model_type": "opt"}, "'opt'", "docs/models.md"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name) -> None:
    change, *words = REFUSED[name]
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config(HUB["llama-3.1-8b"] | change)
    assert "\n" not in caught.value.message
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("architecture", "mechanism"),
    [
        ("LongcatFlashForCausalLM", "MLA"),
        ("JambaForCausalLM", "recurrent layers"),
        ("DebertaV2Model", "this kind of encoder"),
        ("NewModel", "this kind of encoder"),
        ("XLMRobertaForTokenClassification", "heads of encoders"),
        ("T5ForConditionalGeneration", "encoder-decoder"),
        ("GPT2LMHeadModel", "MLPs without a gate"),
        ("LlavaForConditionalGeneration", "images"),
        ("LlamaForTokenClassification", "head"),
    ],
)
def test_an_architecture_that_is_known_is_refused_with_what_it_lacks(architecture, mechanism):
    with pytest.raises(UnsupportedModelError, match=mechanism) as caught:
        spec_from_config({"architectures": [architecture]})
    assert architecture in caught.value.message


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("Qwen9ForCausalLM", "Qwen2ForCausalLM"),
        ("Llama4ForConditionalGeneration", "LlamaForCausalLM"),  # also says what it lacks
        ("DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM"),
        ("LlamaForTokenClassification", "LlamaForCausalLM"),
        ("JambaForCausalLM", None),
        ("WarpDriveForCausalLM", None),
    ],
)
def test_a_refused_architecture_is_answered_with_the_nearest_and_the_page(architecture, nearest):
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config({"architectures": [architecture]})
    message = caught.value.message
    assert "docs/models.md" in message
    assert (PAGES / "models.md").is_file()
    named = message.partition("The nearest supported: ")[2].partition(".")[0].split(", ")
    assert len(named) <= 3
    assert named == [""] if nearest is None else nearest in named


QWEN_REFUSED = {
    "layer type": ({"layer_types": ["full_attention"] * 27 + ["linear_attention"]}, "layer_types"),
    "layer type of the wrong type": ({"layer_types": [{}] * 28}, "layer_types"),
    "layer count": ({"layer_types": ["full_attention"] * 27}, "28"),
    "sliding without window": ({"layer_types": ["sliding_attention"] * 28}, "use_sliding_window"),
}


@pytest.mark.parametrize("name", QWEN_REFUSED)
def test_qwen_layer_types_are_checked(name) -> None:
    change, word = QWEN_REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=word):
        spec_from_config(HUB["qwen2.5-7b-instruct"] | change)


def test_unknown_key_inside_text_config_is_refused() -> None:
    config = HUB["gemma-3-4b-it"]
    text = config["text_config"] | {"attn_logit_softcapping": 50.0}
    with pytest.raises(UnsupportedModelError, match=r"text_config.*attn_logit_softcapping"):
        spec_from_config(config | {"text_config": text})


def test_model_type_stands_in_for_missing_architectures() -> None:
    config = {k: v for k, v in HUB["gemma-2-2b"].items() if k != "architectures"}
    assert spec_from_config(config) == spec_from_config(HUB["gemma-2-2b"])


def generation(folder: Path, **values) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_generation_defaults(folder)


def test_generation_defaults(tmp_path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()
    sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    sampling["repetition_penalty"] = 1.05
    found = generation(
        tmp_path,
        **sampling,
        do_sample=True,
        max_new_tokens=2048,
        eos_token_id=[1, 106],
        num_beams=1,
        transformers_version="4.51.0",
    )
    sampling["max_tokens"] = 2048
    assert found == GenerationDefaults(sampling, (1, 106))
    greedy = generation(tmp_path, do_sample=False, temperature=0.6, eos_token_id=2)
    assert greedy.sampling == {"temperature": 0.0}
    assert greedy.eos_token_ids == (2,)
    odd = generation(tmp_path, num_beams=4, no_repeat_ngram_size=3)
    assert odd.unhonoured == ("no_repeat_ngram_size", "num_beams")


@pytest.mark.parametrize(
    "values", [{"temperature": -1}, {"top_p": 1.5}, {"top_k": 0.5}, {"min_p": 2}]
)
def test_generation_defaults_out_of_range(tmp_path, values) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(values))):
        generation(tmp_path, **values)


def test_reading_a_config_needs_no_torch() -> None:
    modules = ["spec", "spec_reader", "layout", "generation", "hub"]
    imports = "; ".join(f"import weft.models.{name}" for name in modules)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
