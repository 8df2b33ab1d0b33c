"""Small embedding models and rerankers of Qwen 3, as their checkpoints lie on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>")  # which are added tokens, but not special ones
TEXTS = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no". Given a web search query, retrieve '
    "relevant passages that answer the query. system user assistant <Query>: <Document>: yes no",
    "What is the capital of China? The capital of China is Beijing. Gravity attracts two bodies.",
)
PROMPTS = {"query": "Instruct: find\nQuery:", "document": ""}


def tokenizer(*, ends: bool = False) -> Tokenizer:
    """A byte-level tokeniser; of embedding models one whose template ends texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(("yes no " * 50, *TEXTS, "no yes\nyes\nno"), trainer)
    made.add_tokens(["yes", "no"])
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    if ends:
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {SPECIAL[0]}", special_tokens=[(SPECIAL[0], made.token_to_id(SPECIAL[0]))]
        )
    return made


def model(architecture: str = "Qwen3ForCausalLM", *, seed: int = 0, **values: Any) -> Any:
    """A random reference model, float32."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 448,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }
    config = transformers.Qwen3Config(**(sizes | values))
    made = getattr(transformers, architecture)(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
        if parameter.ndim == 1:
            parameter.add_(1.0)
    return made


def save(made: Any, folder: Path, *, ends: bool = False, **changes: Any) -> Path:
    """Write a checkpoint with its tokeniser; ``changes`` of its config."""
    made.save_pretrained(folder)
    tokenizer(ends=ends).save(str(folder / "tokenizer.json"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def save_embedding(
    made: Any,
    folder: Path,
    *,
    pooling: dict[str, Any] | None = None,
    unit: bool = True,
    default_prompt: str | None = None,
    architecture: str = "Qwen3ForCausalLM",
) -> Path:
    """Write what sentence-transformers saves: tensors without a prefix or an output head."""
    save(made, folder, ends=True, architectures=[architecture])
    weights = load_file(folder / "model.safetensors")
    bare = {n.removeprefix("model."): t for n, t in weights.items() if n != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | (
        {"2_Normalize": "Normalize"} if unit else {}
    )
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or modes))
    prompts = {"prompts": PROMPTS, "default_prompt_name": default_prompt}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder
