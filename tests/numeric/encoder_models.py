"""Small random encoders of transformers, and checkpoints of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import VOCAB
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SETTINGS = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB", "max_num_seqs": 8}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
_MODERN = {"num_hidden_layers": 4, "local_attention": 18, "pad_token_id": 0, "bos_token_id": 2}
_MODERN |= {"eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
_ROBERTA = {"pad_token_id": 1, "layer_norm_eps": 1e-5}
_GEMMA = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 18}
_GEMMA |= {"sliding_window_pattern": 3, "use_bidirectional_attention": True}
CASES = {
    "bert": ("BertModel", "BertConfig", {}),
    "bert-masked": ("BertForMaskedLM", "BertConfig", {"type_vocab_size": 3}),
    "roberta": ("RobertaModel", "RobertaConfig", _ROBERTA),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", {"type_vocab_size": 1}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", _MODERN),
    "modernbert-masked": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        _MODERN | {"attention_bias": True, "mlp_bias": True, "global_attn_every_n_layers": 2},
    ),
    "embedding-gemma": ("Gemma3TextModel", "Gemma3TextConfig", _GEMMA),
}
CROSS = {
    "bert": ("BertForSequenceClassification", "BertConfig", {}),
    "bert-one-type": ("BertForSequenceClassification", "BertConfig", {"type_vocab_size": 1}),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _ROBERTA),
    "xlm-roberta": (
        "XLMRobertaForSequenceClassification",
        "XLMRobertaConfig",
        {"type_vocab_size": 1},
    ),
    "modernbert": ("ModernBertForSequenceClassification", "ModernBertConfig", _MODERN),
    "modernbert-mean": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        _MODERN | {"classifier_pooling": "mean", "classifier_bias": True},
    ),
}
WORDS = ["what", "is", "the", "capital", "of", "china", "?", "beijing", "gravity", "attracts"]
WORDS += ["two", "bodies", "."]
MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def build(case: tuple[str, str, dict[str, Any]], **more: Any) -> Any:
    architecture, config, values = case
    torch.manual_seed(0)
    made = getattr(transformers, config)(**(SIZES | values | more), attn_implementation="eager")
    model = getattr(transformers, architecture)(made).eval().requires_grad_(False)
    for parameter in model.parameters():
        wide = parameter.ndim > 1
        parameter.copy_(torch.randn_like(parameter) * (0.2 if wide else 0.1) + (not wide))
    return model


def tokenizer(*, doubled: bool = False) -> Tokenizer:
    """A WordPiece tokeniser with BERT's marks around texts, two of them as RoBERTa has it."""
    words = [*MARKS, *dict.fromkeys(WORDS), *"abcdefghij"]
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    kind = processors.RobertaProcessing if doubled else processors.BertProcessing
    made.post_processor = kind(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens([*MARKS])
    return made


def save(model: Any, folder: Path, *, doubled: bool = False, **changes: Any) -> Path:
    """Write a checkpoint with its tokeniser; ``changes`` of its config."""
    model.save_pretrained(folder)
    tokenizer(doubled=doubled).save(str(folder / "tokenizer.json"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def add_modules(
    folder: Path,
    mode: str,
    *,
    unit: bool = True,
    dense: tuple[torch.nn.Linear, ...] = (),
    activation: str = "torch.nn.modules.linear.Identity",
    **config: Any,
) -> Path:
    """Write the modules of sentence-transformers beside a checkpoint.

    Args:
        mode: of pooling.
        config: of the repository: prompts.
    """
    kinds = ["Transformer", "Pooling", *(["Dense"] * len(dense)), *(["Normalize"] * unit)]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"st.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {"word_embedding_dimension": 64, f"pooling_mode_{mode}": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    for number, linear in enumerate(dense, 2):
        home = folder / f"{number}_Dense"
        home.mkdir()
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        sizes |= {"bias": linear.bias is not None, "activation_function": activation}
        (home / "config.json").write_text(json.dumps(sizes))
        weights = {f"linear.{name}": value for name, value in linear.state_dict().items()}
        save_file(weights, home / "model.safetensors")
    if config:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    return folder


def expected(model: Any, tokens: list[int], mode: str, unit: bool = True) -> np.ndarray:
    """The vector of a text as transformers' states make it."""
    base = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        states = base(torch.tensor([tokens])).last_hidden_state[0].double()
    state = states[0] if mode == "cls_token" else states.mean(0)
    return (state / state.norm() if unit else state).numpy()
