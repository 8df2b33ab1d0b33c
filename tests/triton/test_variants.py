"""What an engine on a GPU compiles at its start and launches in a step: no more than it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import transformers

SCRIPT = Path(__file__).parent / "variants.py"
COMMON = {"kv_memory": "64MiB", "max_model_len": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def of(**sizes: Any) -> dict[str, Any]:
    return sizes


# Models of common sizes, with fewer layers, and what a start with them compiles at the most: each
# variant takes a second or more.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], int]] = {
    "Qwen2.5-7B in FP8, KV in int8": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        of(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=3,
            num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768,
        ),
        {"quantize": "fp8", "kv_dtype": "int8", "max_num_seqs": 600},
        36,
    ),
    "Llama-3.1-8B": (
        "LlamaForCausalLM",
        "LlamaConfig",
        of(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=3,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
            rope_parameters=LLAMA3,
        ),
        {},
        36,
    ),
    "Qwen3-30B-A3B in FP8": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        of(
            vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=3,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960,
        ),
        {"quantize": "fp8"},
        44,
    ),
    "DeepSeek-V2-Lite, KV in FP8": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        of(
            vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_hidden_layers=3,
            moe_intermediate_size=1408, num_attention_heads=16, num_key_value_heads=16,
            q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
            first_k_dense_replace=1, topk_method="greedy", max_position_embeddings=32768,
        ),
        {"kv_dtype": "fp8"},
        62,
    ),
    "GLM-4.7-Flash in FP8": (
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        of(
            vocab_size=154880, hidden_size=2048, intermediate_size=10240, num_hidden_layers=3,
            moe_intermediate_size=1536, num_attention_heads=20, num_key_value_heads=20,
            q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
            v_head_dim=256, n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4,
            max_position_embeddings=65536,
        ),
        {"quantize": "fp8", "max_num_batched_tokens": 300},
        66,
    ),
    "Gemma-3-4B": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        of(
            vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_hidden_layers=6,
            num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024,
            max_position_embeddings=131072,
        ),
        {"max_num_batched_tokens": 300},
        36,
    ),
    "Qwen3.5 of 2B": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        of(
            vocab_size=248320, hidden_size=2048, intermediate_size=6144, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
            linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
            max_position_embeddings=32768,
        ),
        {"kv_memory": "256MiB"},
        57,
    ),
}  # fmt: skip


def printed(model: str, settings: dict[str, Any], gpu: str, *sizes: int) -> list[Any]:
    """What the script says, line by line."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), model, json.dumps(COMMON | settings), gpu]
    command += map(str, sizes)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def config_of(name: str, folder: Path) -> str:
    """A folder that has the config of a model, and no weights."""
    architecture, kind, sizes, _, _ = MODELS[name]
    config = getattr(transformers, kind)(**sizes, dtype="bfloat16")
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return str(folder)


def check_variants(lines: list[Any], most: int) -> None:
    """No two variants differ by an address or a number of one launch, and there are few."""
    found = defaultdict(list)
    for kernel, types, constants, facts, options in lines:
        found[kernel, str(types), str(constants), str(options)].append(facts)
    assert {"gemm", "coded_gemm"} & {key[0] for key in found}
    assert {"decode_kernel", "prefill_kernel", "_sample"} <= {key[0] for key in found}
    twice = {key: facts for key, facts in found.items() if len(facts) > 1}
    assert not twice
    assert len(found) <= most, Counter(key[0] for key in found)


@pytest.mark.parametrize("name", MODELS)
def test_a_start_compiles_few_variants(name, tmp_path):
    *_, settings, most = MODELS[name]
    check_variants(printed(config_of(name, tmp_path), settings, "h100"), most)


LAYERS = 6  # of the built-in model
FORWARD = {"_enter": 1, "_angles": 1, "list_kernel": 1}
SAMPLING = {"_process_logits": 1, "_largest": 1, "_candidates": 1, "_sample": 1}
SAMPLING |= {"_verify_drafts": 1}
TORCH = 2  # the hashes, and the hidden states that are sampled
A_LAYER = {"_add_norm": 2, "_rotate": 1, "decode_kernel": 1}
FEW = {"gemm": 3, "gated_gemm": 1}
CODED = {"coded_gemm": 4, "_act_mul": 1}
IN_FP8 = {"_round_rows": 1, "_act_mul_round": 1}


@pytest.mark.parametrize(
    ("quantize", "steps"),
    [
        ("none", {1: FEW, 64: FEW, 128: {"library": 4, "_act_mul": 1}}),
        ("fp8", {1: FEW, 64: {**FEW, "_round_rows": 1}, 512: {"library": 4, **IN_FP8}}),
        ("int4", {1: CODED}),
    ],
)
def test_a_decode_step_launches_what_it_has_to(quantize, steps):
    """Each launch costs microseconds of a step: whoever adds one says so here."""
    settings = {"quantize": quantize, "max_num_seqs": 512}
    lines = printed("builtin", settings, "sm_90", *steps)
    check_variants(lines[: -len(steps)], 34)
    for (rows, more), found in zip(steps.items(), lines[-len(steps) :], strict=True):
        head = "library" if rows > 64 else "gemm"
        layers = Counter({name: LAYERS * times for name, times in (A_LAYER | more).items()})
        whole = layers + Counter(FORWARD | SAMPLING | {"torch": TORCH})
        if quantize == "int4":  # the head as well, to which the embedding is tied
            whole += Counter({"coded_gemm": 1, "_gather_rows": 1, "_add_norm": 1, "torch": 5})
            del whole["_enter"]
        else:
            whole[head] += 1
        assert Counter(found) == whole, rows
