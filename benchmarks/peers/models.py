"""Makes the checkpoints that peers are compared on: real shapes, random weights.

    python benchmarks/peers/models.py A|B|conv|delta|moe FOLDER

A is a Llama of 100 million parameters (200 MB in bfloat16), B has the shape of Qwen3-0.6B with a
vocabulary of 32000 (473 million, 946 MB). For benchmarks/gguf_peers.py: ``conv`` has the shape of
LFM2-1.2B, ``delta`` that of Qwen3.5-0.8B, and ``moe`` is a Qwen3-MoE of a billion parameters, of
which a token takes 4 of 32 experts.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 32000
CONTEXT = 32768
# the pattern of Llama 3, which every peer's converter knows
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
COMMON = {
    "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "A": (
        LlamaForCausalLM,
        LlamaConfig,
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048},
    ),
    "B": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072},
    ),
    "conv": (
        Lfm2ForCausalLM,
        Lfm2Config,
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 8192, "block_auto_adjust_ff_dim": False,
         "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv"
                         for i in range(16)]},
    ),
    "delta": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 3584,
         "linear_num_key_heads": 16, "linear_num_value_heads": 16,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    "moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4,
         "moe_intermediate_size": 512, "norm_topk_prob": True, "mlp_only_layers": []},
    ),
}  # fmt: skip


def make_model(name: str, folder: Path) -> None:
    """Write checkpoint ``name`` into ``folder``."""
    model_class, config_class, shape = SHAPES[name]
    torch.manual_seed(1234)
    model = model_class(config_class(**shape, **COMMON))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # wide, so that the likeliest token is clear, whatever the order of summation
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.05 if "embed" in key else 0.06)
            else:
                parameter.normal_(1, 0.1)
    model.to(torch.bfloat16).eval().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 32000 tokens, trained on the source of the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        model_max_length=CONTEXT,
    )  # fmt: skip


def _texts() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="ignore")


if __name__ == "__main__":
    make_model(sys.argv[1], Path(sys.argv[2]))
